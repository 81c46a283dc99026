"""Request and events of a chat or a completion as a continuation reads them: all fields of vLLM 0.32, 0.33.

A field of another type than expected, or an unknown field, is no mistake of the client: its answer is not
resumed. This module stays interpreted: msgspec looks at annotations.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from hetlb.errors import NOT_JSON

#: Bounds of a token id and of a number of tokens in a body.
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Number: TypeAlias = float | int
#: vLLM's limit of a completion that states none, or null.
_COMPLETION_TOKENS: Final = 16

_token_ids: Final = msgspec.json.Decoder(list[TokenId])
_token_lists: Final = msgspec.json.Decoder(list[list[TokenId]])
_texts: Final = msgspec.json.Decoder(list[str])
#: Errors of msgspec at bytes of another form.
NOT_READ: Final = (*NOT_JSON, ValueError)


class DeltaFields(msgspec.Struct):
    """Fields of an event that add to the message of a chat."""

    role: str | None = None
    content: str | None = None
    reasoning: msgspec.Raw = msgspec.Raw(b"")
    reasoning_content: msgspec.Raw = msgspec.Raw(b"")
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class ChoiceFields(msgspec.Struct):
    """One answer in an event, of a completion (`text`) or a chat (`delta`)."""

    text: str | None = None
    delta: DeltaFields | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")


class ChunkFields(msgspec.Struct):
    """Fields of an event of a completion or a chat, as needed to continue it."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChoiceFields] = []
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")


#: A field that counts by its presence alone, however large it is; such values count as absent.
_UNREAD: Final = msgspec.Raw(b"")
_NONE: Final = (b"", b"null", b"false", b"0", b'""', b"[]", b"{}")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Format(msgspec.Struct):
    type: str


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds. Fields without effect on a continuation are kept as they came."""

    model: str | None = None
    frequency_penalty: _Number | None = None
    logit_bias: dict[str, _Number] | None = None
    max_tokens: _Count | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: _Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    user: str | None = None
    use_beam_search: bool | None = None
    top_k: int | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    watermarking: bool | None = None
    length_penalty: _Number | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: _Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    response_format: _Format | None = None
    structured_outputs: msgspec.Raw = _UNREAD
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: int | None = None
    return_token_offsets: bool | None = None
    return_weight_versions: bool | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: msgspec.Raw = _UNREAD
    ec_transfer_params: msgspec.Raw = _UNREAD
    vllm_xargs: msgspec.Raw = _UNREAD
    repetition_detection: msgspec.Raw = _UNREAD
    thinking_token_budget: int | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _CompletionBody(_Body, forbid_unknown_fields=True, kw_only=True):
    logprobs: int | None = None
    prompt: msgspec.Raw
    suffix: str | None = None
    prompt_embeds: msgspec.Raw = _UNREAD


class _Part(msgspec.Struct):
    type: str


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _ChatBody(_Body, forbid_unknown_fields=True, kw_only=True):
    messages: list[_Message]
    logprobs: bool | None = None
    max_completion_tokens: _Count | None = None
    top_logprobs: int | None = None
    tools: msgspec.Raw = _UNREAD
    tool_choice: msgspec.Raw = _UNREAD
    functions: msgspec.Raw = _UNREAD
    function_call: msgspec.Raw = _UNREAD
    reasoning_effort: str | None = None
    reasoning_effort_map: msgspec.Raw = _UNREAD
    include_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None
    documents: msgspec.Raw = _UNREAD
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw = _UNREAD
    media_io_kwargs: msgspec.Raw = _UNREAD
    mm_processor_kwargs: msgspec.Raw = _UNREAD
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None


#: Fields without a continuation known to be the same, unless they are null, false, 0 or empty.
_NEVER: Final = (
    "best_of", "frequency_penalty", "presence_penalty", "use_beam_search", "watermarking",
    "truncate_prompt_tokens", "logprob_token_ids", "bad_words",
    "echo", "structured_outputs", "routed_experts_prompt_start", "return_token_offsets",
    "return_weight_versions", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params",
    "repetition_detection", "thinking_token_budget",
)  # fmt: skip
_NEVER_OF_COMPLETIONS: Final = ("suffix", "prompt_embeds")
_NEVER_OF_CHATS: Final = (
    "tools", "functions", "function_call", "top_logprobs", "media_io_kwargs", "mm_processor_kwargs",
    "return_prompt_text",
)  # fmt: skip
#: Fields of a chat without a meaning once its prompt is token ids: they are in the prompt, or completions
#: lack them.
CHAT_ONLY: Final = (
    *sorted(set(_ChatBody.__struct_fields__) - set(_CompletionBody.__struct_fields__)),
    "logprobs", "add_special_tokens", "response_format",
)  # fmt: skip
_chat: Final = msgspec.json.Decoder(_ChatBody)
_completion: Final = msgspec.json.Decoder(_CompletionBody)


class Asked:
    """Facts of a body that a continuation needs.

    `most_tokens` is its stated limit, None without one. `prompt` is its own token ids, None if the engine
    makes them. `held_back` is the number of characters that an engine holds back for its stop strings.
    `wants_usage`, `wants_ids`: its body asks for them.
    """

    __slots__ = ("greedy", "held_back", "least_tokens", "most_tokens", "prompt", "wants_ids", "wants_usage")

    def __init__(self, body: _Body, most_tokens: int | None, prompt: list[int] | None) -> None:
        self.most_tokens = most_tokens
        self.prompt = prompt
        self.least_tokens = body.min_tokens or 0
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self.held_back = max(map(len, stops), default=1) - 1
        options = body.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.wants_ids = bool(body.return_token_ids)
        self.greedy = body.temperature == 0


def read_asked(body: bytes, *, chat: bool) -> Asked | str:
    """Return the facts of a body, or the field that keeps its answer from being resumed."""
    try:
        return _read_chat(_chat.decode(body)) if chat else _read_completion(_completion.decode(body))
    except NOT_READ as error:
        return str(error)


def _read_chat(body: _ChatBody) -> Asked | str:
    if (name := _first_set(body, (*_NEVER, *_NEVER_OF_CHATS))) is not None:
        return name
    if body.logprobs or body.include_reasoning is False:
        return "logprobs" if body.logprobs else "include_reasoning"
    for message in body.messages:
        if isinstance(message.content, list) and any(part.type != "text" for part in message.content):
            return "messages"  # ids stand in for an image
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _read_common(body) or Asked(body, most, None)


def _read_completion(body: _CompletionBody) -> Asked | str:
    if (name := _first_set(body, (*_NEVER, *_NEVER_OF_COMPLETIONS))) is not None:
        return name
    if body.logprobs is not None:  # 0 asks for the chosen tokens'
        return "logprobs"
    if (prompt := _read_prompt(bytes(body.prompt))) is None:
        return "prompt"
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _read_common(body) or Asked(body, most, prompt or None)


def _read_prompt(raw: bytes) -> list[int] | None:
    """Return the token ids of one prompt, [] if it is text, None if it is neither."""
    if raw.startswith(b'"'):
        return []
    if (ids := read_ids(raw)) is not None:
        return ids or None
    try:
        (one,) = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except NOT_READ:
        return None
    return [] if bytes(one).startswith(b'"') else read_ids(bytes(one)) or None


def _read_common(body: _Body) -> str | None:
    """Return the field, common to both kinds, that keeps an answer from being resumed; None without one."""
    if body.n not in (None, 1):
        return "n"
    if body.prompt_logprobs is not None:
        return "prompt_logprobs"
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    if body.include_stop_str_in_output and body.stop:
        return "include_stop_str_in_output"  # a stop string could lie across the seam
    if body.seed is not None and body.temperature != 0:
        return "seed"  # its draws would begin anew
    return None


def _first_set(body: _Body, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _is_set(getattr(body, name))), None)


def _is_set(value: object) -> bool:
    return bytes(value) not in _NONE if isinstance(value, msgspec.Raw) else bool(value)


def read_ids(raw: bytes) -> list[int] | None:
    """Return the token ids of a JSON list, None for any other value."""
    try:
        return _token_ids.decode(raw)
    except NOT_READ:
        return None


def read_answer(texts: bytes, ids: bytes) -> tuple[list[str], list[list[int]]] | None:
    """Return the texts and token ids of the events of an answer, None if they are no such values.

    Both are JSON values with a comma behind each.
    """
    try:
        return _texts.decode(b"[%b]" % texts[:-1]), _token_lists.decode(b"[%b]" % ids[:-1])
    except NOT_READ:
        return None
