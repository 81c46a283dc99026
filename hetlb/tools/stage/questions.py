"""Requests as a coordinator takes them: prompts as tokens, ends of an answer, choice of tokens.

An unsupported field that would change the answer is refused with a sentence, never ignored.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from typing import Any, Final, TypeAlias

import msgspec

from hetlb.tools.openai.requests import (
    ChatRequest,
    CompletionRequest,
    SampledRequest,
    bad,
    check_tokens,
    prompts_of,
    read,
)
from hetlb.tools.stage.stage_messages import Sampling, pack
from hetlb.tools.stage.text import Ending, TemplateError, TextModel

#: Answers to one request, most likely tokens, stop strings and their characters.
_MOST_SEQUENCES: Final = 128
_MOST_LOGPROBS: Final = 20
_MOST_STOPS: Final = 128
_MOST_STOP_CHARACTERS: Final = 4096
#: Largest bias. Larger ones are cut to it, as in vLLM and OpenAI's description.
_MOST_BIAS: Final = 100.0
#: Least characters of a text tokenized in a thread.
_LONG_TEXT_CHARACTERS: Final = 20_000

#: Fields that would change the answer and are not supported, with the values that ask for nothing.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": ((), []),
    "functions": ((), []),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "bad_words": ((), []),
    "kv_transfer_params": (),
    "prompt_embeds": (),
}

Fields: TypeAlias = CompletionRequest | ChatRequest


class Question(msgspec.Struct):
    """One requested sequence."""

    prompt: list[int]
    sampling: Sampling
    ending: Ending


class Questions(msgspec.Struct):
    """All sequences of one request, by index. `logprobs` is -1 for none."""

    fields: Fields
    asked: list[Question]
    prompt_tokens: int
    logprobs: int


class QuestionReader:
    """Reads requests for one model."""

    def __init__(self, text: TextModel, vocabulary: int) -> None:
        self._text = text
        self._vocabulary = vocabulary

    async def completion(self, body: bytes, longest: int) -> Questions:
        """Read a completion; `longest` is the most tokens of prompt and answer. Raises `ApiError`."""
        fields = _read(body, CompletionRequest)
        prompts = [
            await self._encode(each, fields.add_special_tokens) if isinstance(each, str) else each
            for each in prompts_of(fields.prompt, self._vocabulary)
        ]
        return self._questions(fields, prompts, -1 if fields.logprobs is None else fields.logprobs, longest)

    async def chat(self, body: bytes, longest: int) -> Questions:
        """Read a chat; `longest` is the most tokens of prompt and answer. Raises `ApiError`."""
        fields = _read(body, ChatRequest)
        messages = [_flattened(message) for message in fields.messages]
        if not messages:
            raise bad("Expected at least one message.", "messages")
        prompt_ends = fields.add_generation_prompt and not fields.continue_final_message
        variables = fields.chat_template_kwargs or {}
        try:
            text = self._text.chat(messages, add_generation_prompt=prompt_ends, **variables)
        except (TemplateError, TypeError) as error:
            raise bad(str(error), "messages") from error
        if fields.continue_final_message:
            last = str(messages[-1].get("content", "")).strip()
            text = text[: text.rindex(last) + len(last)] if last and last in text else text
        tokens = await self._encode(text, fields.add_special_tokens)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else -1
        return self._questions(fields, [tokens], logprobs, longest)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT_CHARACTERS:
            return self._text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._text.encode, text, add_special_tokens=add_special_tokens)

    def _questions(self, fields: Fields, prompts: list[list[int]], logprobs: int, longest: int) -> Questions:
        count = len(prompts) * (fields.n or 1)
        if count > _MOST_SEQUENCES:
            raise bad(f"Expected 1 to {_MOST_SEQUENCES} answers to one request, got {count}.", "n")
        if not -1 <= logprobs <= _MOST_LOGPROBS:
            raise bad(f"Expected at most {_MOST_LOGPROBS} logprobs, got {logprobs}.", "logprobs")
        prompts = [_truncated(fields, tokens, longest) for tokens in prompts]
        if not all(prompts):
            raise bad("Expected a prompt of at least one token.", "prompt")
        stop = _stop_strings(fields)
        asked = []
        for prompt in prompts:
            ending = self._ending(fields, len(prompt), stop, longest)
            common = self._sampling(fields, len(prompt), ending, logprobs)
            for index in range(fields.n or 1):
                seed = secrets.randbits(63) if fields.seed is None else (fields.seed + index) % (1 << 63)
                asked.append(Question(prompt, msgspec.structs.replace(common, seed=seed), ending))
        return Questions(fields, asked, sum(map(len, prompts)), logprobs)

    def _ending(self, fields: Fields, prompt: int, stop: tuple[str, ...], longest: int) -> Ending:
        """Build the stopping rules after `prompt` tokens. Raises `ApiError` when no room is left."""
        wanted = fields.cap
        if wanted is None:
            wanted = max(1, longest - prompt) if isinstance(fields, ChatRequest) else 16
        if wanted < 1:
            raise bad(f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
        if prompt + wanted > longest:
            raise bad(
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains {prompt} input tokens.",
                "max_tokens",
            )
        return Ending(
            max_tokens=wanted,
            min_tokens=fields.min_tokens or 0,
            eos=frozenset() if fields.ignore_eos else self._text.eos,
            stop_tokens=frozenset(fields.stop_token_ids or ()),
            stop=stop,
            keeps_stop=bool(fields.include_stop_str_in_output),
        )

    def _sampling(self, fields: Fields, prompt: int, ending: Ending, logprobs: int) -> Sampling:
        usual = self._text.defaults

        def chosen(key: str) -> float:
            value = getattr(fields, key)
            return float(usual[key] if value is None else value)

        bias = {_token_id(key): value for key, value in (fields.logit_bias or {}).items()}
        biases = [min(_MOST_BIAS, max(-_MOST_BIAS, value)) for value in bias.values()]
        check_tokens(list(bias), self._vocabulary, "logit_bias")
        banned = ending.eos | ending.stop_tokens
        check_tokens(list(banned), self._vocabulary, "stop_token_ids")
        self._check_allowed(fields, banned if ending.min_tokens else frozenset())
        return Sampling(
            prompt_tokens=prompt,
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=max(0, int(chosen("top_k"))),
            min_p=chosen("min_p"),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty"),
            min_tokens=ending.min_tokens,
            stop=pack(sorted(banned)) if ending.min_tokens else b"",
            bias_tokens=pack(bias),
            bias_values=struct.pack(f"<{len(biases)}f", *biases),
            allowed=pack(sorted(set(fields.allowed_token_ids or ()))),
            logprobs=logprobs,
        )

    def _check_allowed(self, fields: Fields, banned: frozenset[int]) -> None:
        """Raise `ApiError` if every allowed token is banned."""
        allowed = fields.allowed_token_ids
        if allowed is not None:
            check_tokens(allowed, self._vocabulary, "allowed_token_ids")
            if not allowed:
                raise bad("allowed_token_ids must not be empty.", "allowed_token_ids")
        left = len(set(allowed) - banned) if allowed else self._vocabulary - len(banned)
        if not left:
            raise bad("stop_token_ids with min_tokens leave no token that may come.", "stop_token_ids")


def _read(body: bytes, kind: type[Any]) -> Any:
    """Decode a body; refuse unsupported fields. Raises `ApiError`."""
    raw = read(body, dict[str, Any])
    for key, harmless in _REFUSED.items():
        if raw.get(key) is not None and raw[key] not in harmless:
            raise bad(f"{key} is not supported by a model served through stages.", key)
    return read(raw, kind)


def _truncated(fields: SampledRequest, tokens: list[int], longest: int) -> list[int]:
    """Return the tokens of a prompt that `truncate_prompt_tokens` leaves, the last ones by default."""
    count, room = fields.truncate_prompt_tokens, longest - (fields.cap or 0)
    if count is None:
        return tokens
    if count > room:
        raise bad(f"truncate_prompt_tokens must be in [-1, {room}], got {count}.", "truncate_prompt_tokens")
    count = max(0, room) if count < 0 else count
    return tokens[:count] if fields.truncation_side == "right" else tokens[max(0, len(tokens) - count) :]


def _stop_strings(fields: SampledRequest) -> tuple[str, ...]:
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if not all(stop):
        raise bad("stop cannot contain an empty string.", "stop")
    if len(stop) > _MOST_STOPS or sum(map(len, stop)) > _MOST_STOP_CHARACTERS:
        limits = f"at most {_MOST_STOPS} strings of {_MOST_STOP_CHARACTERS} characters in all"
        raise bad(f"stop must be {limits}.", "stop")
    return tuple(stop)


def _flattened(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined. Raises `ApiError` for other parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad("Expected parts of text: the model takes nothing else.", "messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise bad(f"Expected token ids, got {text[:40]!r}.", "logit_bias") from None
