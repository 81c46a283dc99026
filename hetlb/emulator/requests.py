"""Request bodies as vLLM 0.32 reads them: JSON in, a `Generation` or the error vLLM would answer out.

Whatever the body is, the outcome is a checked object or an `ApiError` with vLLM's status, type
and message (its own wording for the fields that this emulator knows; other fields are accepted unread).
An id of a token-id prompt counts as one token.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import msgspec

from hetlb.emulator.anthropic import chat_request
from hetlb.emulator.fields import (
    BYTES_PER_TOKEN,
    TOKENS_PER_MESSAGE,
    VOCABULARY,
    answer_length,
    bad_type,
    bad_value,
    chat_text,
    count_text,
    read_bool,
    read_float,
    read_int,
    text_seed,
    unknown_model,
)
from hetlb.emulator.tools import REASONING_BEFORE_CALL, ToolCall, reasoning_share, tool_call
from hetlb.sim.prefix import TokenSpan

#: vLLM's own limit (VLLM_MAX_N_SEQUENCES).
MAX_N = 16_384
#: vLLM's own limit (VLLM_MAX_COMPLETION_PROMPTS).
MAX_PROMPTS = 1024


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt: its tokens, its text ("" for token ids), and a seed that stands for it.

    `pieces` name its whole KV blocks, where the server caches prefixes.
    """

    tokens: int
    text: str
    seed: int
    pieces: tuple[TokenSpan, ...] = ()


class Generation(msgspec.Struct, kw_only=True):
    """One checked request for text: `n` answers to each of `prompts`.

    `tool` is the call that the model answers with, `reasoning` the share of an answer that is reasoning.
    `max_tokens` is the client's cap on each answer, None if it gave none. The model would stop by itself
    after `stops_after` tokens or, if it `draws`, after a length that the prompt decides, but not before
    `min_tokens`; else never. `length` puts this together with the room left.
    """

    model: str
    prompts: list[Prompt]
    n: int = 1
    max_tokens: int | None
    stops_after: int | None
    draws: bool
    min_tokens: int
    temperature: float
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    tool: ToolCall | None = None
    reasoning: float = 0.0

    def reasoning_tokens(self, output_tokens: int) -> int:
        """Count of the first output tokens that are reasoning."""
        if self.tool is not None:
            return min(output_tokens, REASONING_BEFORE_CALL if self.reasoning else 0)
        return int(output_tokens * self.reasoning)

    def length(self, prompt: Prompt, index: int, max_model_len: int) -> tuple[int, str]:
        """Output tokens of answer `index` to `prompt`, and its finish_reason."""
        room = max_model_len - prompt.tokens
        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        stops = self.stops_after
        if self.tool is not None:
            stops = self.tool.tokens + (REASONING_BEFORE_CALL if self.reasoning else 0)
            return (stops, "stop") if stops <= limit else (limit, "length")
        if stops is None:
            if not self.draws:
                return limit, "length"
            stops = answer_length(prompt.seed, index)
        if stops < self.min_tokens:
            stops = self.min_tokens
        return (stops, "stop") if stops < limit else (limit, "length")


class Reader:
    """Reads bodies on behalf of one server: it knows the names it serves and its longest context.

    `cached_block_size` is the size of the KV blocks that a prefix cache keeps, in tokens; 0 without one.
    """

    __slots__ = ("cached_block_size", "max_model_len", "served")

    def __init__(self, served: tuple[str, ...], max_model_len: int, cached_block_size: int = 0) -> None:
        self.served = served
        self.max_model_len = max_model_len
        self.cached_block_size = cached_block_size

    def model(self, data: dict[str, Any]) -> str:
        """The model asked for, the first served if none. Raises `ApiError`."""
        name = data.get("model")
        if name is None or name == "":
            return self.served[0]
        if not isinstance(name, str):
            raise bad_type("string_type", "body.model", "Input should be a valid string", name)
        if name not in self.served:
            raise unknown_model(name, self.served)
        return name

    def completion(self, data: dict[str, Any]) -> Generation:
        """`POST /v1/completions`. Raises `ApiError`."""
        self._check_stream_options(data)
        prompt = data.get("prompt")
        if prompt is None or prompt == "":
            raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        prompts = self._prompts(prompt)
        return self._generation(data, prompts, read_int(data, "max_tokens", 16), draws=False)

    def chat(self, data: dict[str, Any], *, draws_below_cap: bool = False) -> Generation:
        """`POST /v1/chat/completions`. Raises `ApiError`.

        `draws_below_cap`: the answer may end before `max_tokens`, where that is mandatory and says nothing.
        """
        self._check_stream_options(data)
        if "messages" not in data:
            raise bad_type("missing", "body.messages", "Field required", data)
        messages = data["messages"]
        if not isinstance(messages, list):
            raise bad_type("list_type", "body.messages", "Input should be a valid list", messages)
        text, tokens = chat_text(messages)
        tool = tool_call(data, messages)
        if tools := data.get("tools"):
            tokens += count_text(msgspec.json.encode(tools).decode())
        prompt = self._text_prompt(tokens, text)
        max_tokens = read_int(data, "max_completion_tokens", None)
        if max_tokens is None:
            max_tokens = read_int(data, "max_tokens", None)
        generation = self._generation(data, [prompt], max_tokens, draws=True, messages=len(messages))
        generation.tool = tool
        generation.reasoning = reasoning_share(data)
        if draws_below_cap and generation.stops_after is None:
            generation.draws = True
        return generation

    def message(self, data: dict[str, Any]) -> Generation:
        """`POST /v1/messages`: as a chat request, which is how vLLM serves it. Raises `ApiError`."""
        return self.chat(chat_request(data), draws_below_cap=True)

    def message_tokens(self, data: dict[str, Any]) -> int:
        """`POST /v1/messages/count_tokens`: tokens of the prompt. Raises `ApiError`."""
        [prompt] = self.message({"max_tokens": 1, **data}).prompts
        return prompt.tokens

    def response(self, data: dict[str, Any]) -> Generation:
        """`POST /v1/responses`. Raises `ApiError`."""
        given = data.get("input")
        if "input" not in data:
            raise bad_type("missing", "body.input", "Field required", data)
        if isinstance(given, str):
            text, tokens = given, TOKENS_PER_MESSAGE + count_text(given)
        elif isinstance(given, list):
            text, tokens = chat_text([{"role": "user", **item} for item in given if isinstance(item, dict)])
        else:
            raise bad_type("string_type", "body.input", "Input should be a valid string", given)
        if isinstance(instructions := data.get("instructions"), str):
            text, tokens = f"{instructions}\n{text}", tokens + TOKENS_PER_MESSAGE + count_text(instructions)
        max_tokens = read_int(data, "max_output_tokens", None)
        prompt = self._text_prompt(max(1, tokens), text)
        return self._generation(data, [prompt], max_tokens, draws=True)

    def embedding(self, data: dict[str, Any]) -> tuple[str, list[Prompt]]:
        """`POST /v1/embeddings`: the model and the prompts. Raises `ApiError`."""
        if "input" not in data:
            raise bad_type("missing", "body.input", "Field required", data)
        prompts = self._prompts(data["input"], "input")
        model = self.model(data)
        self._check_lengths(prompts)
        return model, prompts

    # --- parts ---

    def _generation(
        self,
        data: dict[str, Any],
        prompts: list[Prompt],
        max_tokens: int | None,
        *,
        draws: bool,
        messages: int = 1,
    ) -> Generation:
        """The checks in vLLM's order: types, model, lengths, sampling parameters."""
        n = read_int(data, "n", 1) or 0
        stream = read_bool(data, "stream")
        ignore_eos = read_bool(data, "ignore_eos")
        temperature = read_float(data, "temperature", 1.0)
        min_tokens = read_int(data, "min_tokens", 0) or 0
        options = data.get("stream_options")
        include_usage = continuous = False
        if isinstance(options, dict):
            include_usage = read_bool(options, "include_usage", "body.stream_options")
            continuous = read_bool(options, "continuous_usage_stats", "body.stream_options")
        elif options is not None:
            message = "Input should be a valid dictionary or instance of StreamOptions"
            raise bad_type("model_type", "body.stream_options", message, options)
        model = self.model(data)
        if n > MAX_N:
            raise bad_value(
                f"n must be at most {MAX_N}, got {n}. To increase this limit, set the "
                f"VLLM_MAX_N_SEQUENCES environment variable."
            )
        if not messages:
            raise bad_value(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        if max_tokens is not None and max_tokens > self.max_model_len:
            raise bad_value(
                f"max_tokens={max_tokens} cannot be greater than max_model_len={self.max_model_len}. "
                f"Please request fewer output tokens.",
                "max_tokens",
                max_tokens,
            )
        room = self._check_lengths(prompts)
        limit = room if max_tokens is None else min(max_tokens, room)
        if n < 1:
            raise bad_value(f"n must be at least 1, got {n}.")
        if not math.isfinite(temperature):
            raise bad_value(
                f"temperature must be a finite number, got {temperature}.", "temperature", temperature
            )
        if temperature < 0:
            raise bad_value(
                f"temperature must be non-negative, got {temperature}.", "temperature", temperature
            )
        if temperature > 2:
            raise bad_value(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
        if limit < 1:
            raise bad_value(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        if min_tokens < 0:
            raise bad_value(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
        if min_tokens > limit:
            raise bad_value(f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.")
        if n > 1 and temperature < 1e-5:
            raise bad_value(f"n must be 1 when using greedy sampling, got {n}.")
        params = data.get("kv_transfer_params")
        return Generation(
            model=model,
            kv_transfer_params=params if isinstance(params, dict) else None,
            prompts=prompts,
            n=n,
            max_tokens=max_tokens,
            stops_after=None if ignore_eos else self._stops_after(data),
            draws=draws and max_tokens is None and not ignore_eos,
            min_tokens=min_tokens,
            temperature=temperature,
            stream=stream,
            include_usage=include_usage,
            continuous_usage=include_usage and continuous,
            echo=read_bool(data, "echo"),
        )

    def _stops_after(self, data: dict[str, Any]) -> int | None:
        """Tokens after which `vllm_xargs.output_tokens` says that the model stops: the stand-in for EOS."""
        extra = data.get("vllm_xargs")
        if not isinstance(extra, dict) or (stops := extra.get("output_tokens")) is None:
            return None
        if isinstance(stops, bool) or not isinstance(stops, int) or stops < 1:
            raise bad_value(
                f"vllm_xargs.output_tokens must be an integer of at least 1, got {stops}.", "vllm_xargs"
            )
        return stops

    def _check_lengths(self, prompts: list[Prompt]) -> int:
        """The room that the longest prompt leaves. Raises `ApiError` where one is too long."""
        longest = max(prompt.tokens for prompt in prompts)
        if longest > self.max_model_len:
            # vLLM's tokenizer stops one token past the limit, so of text it knows only "at least".
            text = any(prompt.text and prompt.tokens == longest for prompt in prompts)
            tokens = self.max_model_len + 1 if text else longest
            qualifier = "at least " if tokens == self.max_model_len + 1 else ""
            raise bad_value(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your "
                f"prompt contains {qualifier}{tokens} input tokens, which exceeds this limit even without "
                f"any output tokens. Please reduce the length of the input prompt.",
                "input_tokens",
                tokens,
            )
        return self.max_model_len - longest

    def _check_stream_options(self, data: dict[str, Any]) -> None:
        if data.get("stream_options") and not data.get("stream"):
            raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")

    def _prompts(self, prompt: object, key: str = "prompt") -> list[Prompt]:
        """A text, token ids, or a list of either."""
        if isinstance(prompt, str):
            return [self._text_prompt(count_text(prompt), prompt)]
        if not isinstance(prompt, list):
            raise bad_type("list_type", f"body.{key}", "Input should be a valid list", prompt)
        if not prompt:
            raise bad_value("You must pass at least one prompt")
        if type(prompt[0]) is int:
            return [self._token_prompt(prompt, f"body.{key}")]
        if len(prompt) > MAX_PROMPTS:
            raise bad_value(
                f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MAX_PROMPTS}. To "
                f"increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                key,
            )
        prompts = []
        for number, item in enumerate(prompt):
            if isinstance(item, str):
                prompts.append(self._text_prompt(count_text(item), item))
            elif isinstance(item, list) and item:
                prompts.append(self._token_prompt(item, f"body.{key}.{number}"))
            else:
                raise bad_type("string_type", f"body.{key}.{number}", "Input should be a valid string", item)
        return prompts

    def _token_prompt(self, ids: list[Any], where: str) -> Prompt:
        if set(map(type, ids)) != {int}:
            number = next(number for number, item in enumerate(ids) if type(item) is not int)
            raise bad_type("int_type", f"{where}.{number}", "Input should be a valid integer", ids[number])
        for extreme in (max(ids), min(ids)):
            if not 0 <= extreme < VOCABULARY:
                raise bad_value(f"Token id {extreme} is out of vocabulary")
        size = self.cached_block_size
        whole = range(size, len(ids) + 1, size) if size else ()
        pieces = tuple([(hash(tuple(ids[end - size : end])), size) for end in whole])
        return Prompt(len(ids), "", zlib.crc32(b"%d,%d,%d" % (len(ids), ids[0], sum(ids))), pieces)

    def _text_prompt(self, tokens: int, text: str) -> Prompt:
        """A prompt of this text; a chat template may make it longer than the text alone."""
        size = self.cached_block_size
        pieces: tuple[TokenSpan, ...] = ()
        if size:
            data, width = text.encode("utf-8", "surrogatepass"), size * BYTES_PER_TOKEN
            ends = range(width, len(data) + 1, width)
            pieces = tuple([(hash(data[end - width : end]), size) for end in ends])
        return Prompt(tokens, text, text_seed(text), pieces)
