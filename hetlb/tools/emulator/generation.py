"""Requests as the emulated engine runs them: bodies in, a checked `Generation` or an `ApiError` out.

The checks are vLLM's, the sentences are not. An id of a token-id prompt counts as one token.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import msgspec

from hetlb.tools.emulator.counting import (
    BYTES_PER_TOKEN,
    FIRST_ANSWER_ID,
    REASONING_BEFORE_CALL,
    VOCABULARY_TOKENS,
    ToolCall,
    answer_length,
    chat_text,
    count_text,
    reasoning_share,
    text_seed,
    tool_call,
)
from hetlb.tools.openai.requests import (
    ChatRequest,
    CompletionRequest,
    SampledRequest,
    bad,
    prompts_of,
    read,
    unknown_model,
)
from hetlb.tools.sim.engine_sequence import TokenSpan


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/embeddings`."""

    input: str | list[Any]
    model: str | None = None


#: Words of an answer and the line end before them, of a text read from its end.
_ANSWER = re.compile(r"((?:[0-9]{1,9}+t )++)\n?")


def split_answer(text: str) -> tuple[str, int]:
    """Return a prompt without the first words of an answer at its end, and the number of these words."""
    found = _ANSWER.match(text[::-1])
    if found is None:
        return text, 0
    words = found[1][::-1].split()
    count = int(words[-1][1:]) + 1
    if count > len(words) or words[-count:] != [f"t{number}" for number in range(count)]:
        return text, 0
    return text[: len(text) - found.end()], count


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt: its tokens, its text ("" for token ids), and a seed that stands for it.

    `pieces` name its whole KV blocks, if the server caches prefixes. `said` of its tokens are the first of
    a continued answer. It ends by itself after `left` more, if known.
    """

    tokens: int
    text: str
    seed: int
    pieces: tuple[TokenSpan, ...] = ()
    said: int = 0
    left: int | None = None


class Generation(msgspec.Struct, kw_only=True):
    """One checked request: answers to each of `prompts`; an embedding `generates` none.

    `tool` is the call in the model's answer, `reasoning` the reasoning share of the answer. The
    model would stop by itself after `stops_after` tokens or, if it `draws`, after a length that the prompt
    decides, but not before `min_tokens` of `fields`; else never. `length` puts this together with the room
    left.
    """

    model: str
    prompts: list[Prompt]
    fields: SampledRequest
    stops_after: int | None = None
    draws: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    tool: ToolCall | None = None
    reasoning: float = 0.0
    generates: bool = True

    def reasoning_tokens(self, output_tokens: int) -> int:
        if self.tool is not None:
            return min(output_tokens, REASONING_BEFORE_CALL if self.reasoning else 0)
        return int(output_tokens * self.reasoning)

    def length(self, prompt: Prompt, index: int, max_model_len: int) -> tuple[int, str]:
        """Return the output tokens of answer `index` to `prompt`, and its finish_reason."""
        if not self.generates:
            return 0, "stop"
        room = max_model_len - prompt.tokens
        limit = room if self.fields.cap is None else min(self.fields.cap, room)
        stops = self.stops_after
        if self.tool is not None:
            stops = self.tool.tokens + (REASONING_BEFORE_CALL if self.reasoning else 0)
            return (stops, "stop") if stops <= limit else (limit, "length")
        if stops is not None:
            stops = max(1, stops - prompt.said)
        elif prompt.left is not None:
            stops = prompt.left
        elif not self.draws:
            return limit, "length"
        else:
            stops = max(1, answer_length(prompt.seed, index) - prompt.said)
        stops = max(stops, self.fields.min_tokens or 0)
        return (stops, "stop") if stops < limit else (limit, "length")


class Reader(msgspec.Struct, frozen=True):
    """Reads bodies on behalf of one server: it knows the names it serves and its longest context.

    `cached_block_size` is the size of the KV blocks that a prefix cache keeps, in tokens; 0 without one. All
    methods raise `ApiError`.
    """

    served: tuple[str, ...]
    max_model_len: int
    cached_block_size: int = 0

    def model(self, name: str | None) -> str:
        if not name:
            return self.served[0]
        if name not in self.served:
            raise unknown_model(name)
        return name

    def completion(self, body: bytes) -> Generation:
        fields = read(body, CompletionRequest)
        prompts = self._prompts(fields.prompt, "prompt")
        if fields.max_tokens is None:
            fields.max_tokens = 16
        return self._generation(fields, prompts, echo=bool(fields.echo))

    def chat(self, body: bytes) -> Generation:
        fields = read(body, ChatRequest)
        if not fields.messages:
            raise bad("Expected at least one message.", "messages")
        text, tokens = chat_text(fields.messages)
        if fields.tools:
            tokens += count_text(msgspec.json.encode(fields.tools).decode())
        tool = tool_call(fields)
        generation = self._generation(fields, [self._text_prompt(tokens, text)], draws=True)
        generation.tool, generation.reasoning = tool, reasoning_share(fields)
        return generation

    def embedding(self, body: bytes) -> Generation:
        fields = read(body, EmbeddingRequest)
        prompts, model = self._prompts(fields.input, "input"), self.model(fields.model)
        self._room(prompts)
        return Generation(model=model, prompts=prompts, fields=SampledRequest(), generates=False)

    # --- parts ---

    def _generation(
        self, fields: SampledRequest, prompts: list[Prompt], *, draws: bool = False, echo: bool = False
    ) -> Generation:
        n, min_tokens, include_usage = fields.n or 1, fields.min_tokens or 0, fields.include_usage
        model, room, cap = self.model(fields.model), self._room(prompts), fields.cap
        if cap is not None and cap > self.max_model_len:
            raise bad(f"max_tokens must be at most {self.max_model_len}, got {cap}.", "max_tokens")
        limit = room if cap is None else min(cap, room)
        if limit < 1:
            raise bad(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
        if min_tokens > limit:
            raise bad(f"min_tokens must be at most {limit}, got {min_tokens}.", "min_tokens")
        if n > 1 and fields.temperature is not None and fields.temperature < 1e-5:
            raise bad(f"n must be 1 when using greedy sampling, got {n}.", "n")
        options = fields.stream_options
        return Generation(
            model=model,
            prompts=prompts,
            fields=fields,
            stops_after=None if fields.ignore_eos else _stops_after(fields),
            draws=draws and cap is None and not fields.ignore_eos,
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
            echo=echo,
        )

    def _room(self, prompts: list[Prompt]) -> int:
        longest = max(prompt.tokens for prompt in prompts)
        if longest > self.max_model_len:
            raise bad(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
                f"contains {longest} input tokens.",
                "input_tokens",
            )
        return self.max_model_len - longest

    def _prompts(self, prompt: object, key: str) -> list[Prompt]:
        return [
            self._text_prompt(count_text(each), each) if isinstance(each, str) else self._token_prompt(each)
            for each in prompts_of(prompt, VOCABULARY_TOKENS, key)
        ]

    def _token_prompt(self, ids: list[int]) -> Prompt:
        pieces = self._pieces(tuple(ids), 1)
        said = 0
        while said < len(ids) and ids[-1 - said] >= FIRST_ANSWER_ID:
            said += 1
        left = ids[-1] - FIRST_ANSWER_ID if said and ids[-1] > FIRST_ANSWER_ID else None
        seed = zlib.crc32(b"%d,%d,%d" % (len(ids), ids[0], sum(ids)))
        return Prompt(len(ids), "", seed, pieces, said, left)

    def _text_prompt(self, tokens: int, text: str) -> Prompt:
        pieces = self._pieces(text.encode("utf-8", "surrogatepass"), BYTES_PER_TOKEN)
        asked, said = split_answer(text)
        return Prompt(tokens, text, text_seed(asked), pieces, said)

    def _pieces(self, data: bytes | tuple[int, ...], per_token: int) -> tuple[TokenSpan, ...]:
        size = self.cached_block_size
        width = size * per_token
        ends = range(width, len(data) + 1, width) if size else ()
        return tuple([(hash(data[end - width : end]), size) for end in ends])


def _stops_after(fields: SampledRequest) -> int | None:
    """Return `vllm_xargs.output_tokens`, the emulated EOS position; None without it."""
    stops = (fields.vllm_xargs or {}).get("output_tokens")
    if stops is None:
        return None
    if type(stops) is not int or stops < 1:
        raise bad(f"vllm_xargs.output_tokens must be an integer of at least 1, got {stops}.", "vllm_xargs")
    return stops
