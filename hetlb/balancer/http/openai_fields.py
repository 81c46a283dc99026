"""Fields of JSON read from requests and answers.

This module stays interpreted: msgspec looks at annotations, and compiled classes keep none.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from hetlb.balancer.core.types import MAX_TOKENS_LIMIT

#: Maximum characters of a model's name, which is echoed and logged.
MAX_MODEL_CHARACTERS: Final = 512
#: vLLM's own limit on `n`.
_MAX_SEQUENCES: Final = 16_384
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_LIMIT)]
_Sequences: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_MAX_SEQUENCES)]
_MostSequences: TypeAlias = Annotated[int, msgspec.Meta(le=_MAX_SEQUENCES)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: Numbers and truth values as vLLM's classes take them too (`lax_numbers.py`).
_Lax: TypeAlias = float | str | bool


class NumberFields(msgspec.Struct):
    """Numbers and truth values of a request body, as JSON has them."""

    stream: bool | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    max_output_tokens: _Tokens | None = None
    n: _Sequences | None = None
    best_of: _MostSequences | None = None
    priority: _Priority | None = None


class RequestFields(msgspec.Struct):
    """Fields of a request body that determine its work, read in one pass."""

    model: Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARACTERS)] | None = None
    stream: int | _Lax | None = None
    stream_options: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: _Tokens | _Lax | None = None
    max_completion_tokens: _Tokens | _Lax | None = None
    max_output_tokens: _Tokens | _Lax | None = None
    n: _Sequences | _Lax | None = None
    best_of: _MostSequences | _Lax | None = None
    priority: _Priority | _Lax | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: str | None = None
    request_id: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str | None = None
    #: Fields that hetlb alone sets, and fields that may hold one (`transfer_fields.py`).
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    ec_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    vllm_xargs: msgspec.Raw = msgspec.Raw(b"")
    sampling_params: msgspec.Raw = msgspec.Raw(b"")


class Usage(msgspec.Struct):
    """Token counts of an engine, in the names of either API. Prompt tokens are of all prompts, each once."""

    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(b"")
    input_tokens_details: msgspec.Raw = msgspec.Raw(b"")


class Holder(msgspec.Struct):
    """An object of an event, about the whole answer, that may have its usage or error."""

    usage: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


class EventFields(msgspec.Struct):
    """Fields of one server-sent event, as they came: `response`, `message` may hold usage and error too."""

    choices: msgspec.Raw = msgspec.Raw(b"")
    usage: msgspec.Raw = msgspec.Raw(b"")
    response: msgspec.Raw = msgspec.Raw(b"")
    message: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")
    object: msgspec.Raw = msgspec.Raw(b"")
    type: msgspec.Raw = msgspec.Raw(b"")


class FinishedChoice(msgspec.Struct):
    """Reason of the end of a choice, None while it goes on."""

    finish_reason: str | None = None


class FinishedFields(msgspec.Struct):
    """Fields of an event that may end a choice."""

    choices: list[FinishedChoice] | None = None


class MessageFields(msgspec.Struct):
    content: str | None = None


class WholeChoice(FinishedChoice):
    message: MessageFields | None = None
    text: str | None = None


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_LIMIT)]


class WholeUsage(msgspec.Struct):
    """Token counts of a whole answer by an engine, without details."""

    completion_tokens: _Count
    prompt_tokens: _Count
    cached_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(b"")
    input_tokens_details: msgspec.Raw = msgspec.Raw(b"")


class AnswerFields(msgspec.Struct):
    """Fields of a whole answer to a chat or a completion."""

    choices: list[WholeChoice]
    usage: WholeUsage
    model: str = ""
    error: msgspec.Raw = msgspec.Raw(b"")


class ErrorFields(msgspec.Struct):
    """Fields of an error; vLLM's code is an HTTP status, others are names."""

    code: int | str | None = None
    type: str | None = None
