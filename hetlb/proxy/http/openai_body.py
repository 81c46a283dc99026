"""JSON bodies of the OpenAI API: a few fields, decoded once; everything else passes unread.

Bytes are never re-serialised; wrong types and absurd numbers are one OpenAI-style 400; no input
costs more than a pass over its bytes.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from mypy_extensions import mypyc_attr

from hetlb.core.types import MAX_TOKENS_LIMIT
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.http.media import ImageSize, find_media
from hetlb.proxy.http.openai_fields import RequestFields

#: Maximum bytes of a body that `stream_options` is put into.
MAX_INJECT_BYTES: Final = 256 << 10
_INJECTION: Final = b',"stream_options":{"include_usage":true}'
#: Maximum absolute value of `priority`.
MAX_PRIORITY: Final = 1 << 31
#: vLLM's own limit on `n`.
MAX_SEQUENCES: Final = 16_384
#: Maximum number of prompts in one request.
MAX_PROMPTS: Final = 16_384
#: Maximum bytes of a model's name, which is echoed and logged.
MAX_MODEL_BYTES: Final = 512
#: Bytes of prompt that a sound in a form counts as (about 600 tokens).
MEDIA_BYTES: Final = 2400

#: First byte of a list.
_FIRST = re.compile(rb"\[[ \t\r\n]*(.)", re.S)


_decoder = msgspec.json.Decoder(RequestFields)
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_NO_OUTPUT: Final = Kind.NO_OUTPUT
_COMPLETION: Final = Kind.COMPLETION
_RESPONSES: Final = Kind.RESPONSES
_WITH_USAGE: Final = (Kind.COMPLETION, Kind.CHAT)


@mypyc_attr(acyclic=True)
class Call:
    """The facts of one request body.

    `prompt_tokens_total` is of all prompts: counted where they are token ids, else None until the router has
    estimated it from `text_bytes` (without encoded media) and the sizes of `images`. `prompts` is how many
    prompts are prefilled, `n` how often each is decoded; `continues` names the kept answer that this one goes
    on from; `priority` is vLLM's, lower goes first. `text`, `tools` and `ids` are raw JSON: the prompts, the
    tools of a chat, and prompts of token ids (`ids_nested`: a list for each); `cache_salt` keeps its prefixes
    apart from those of others.
    """

    __slots__ = (
        "asked", "asks_options", "cache_salt", "continues", "hold_usage", "ids", "ids_nested", "images",
        "longest_tokens", "max_tokens", "model", "n", "priority", "prompt_tokens_total", "prompts", "renamed",
        "stream", "text", "text_bytes", "tools", "transfers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.model: str | None = None
        self.continues: str | None = None
        self.stream = False
        self.asks_options = False
        self.hold_usage = False
        self.max_tokens: int | None = None
        self.n = self.prompts = 1
        self.priority = 0
        self.prompt_tokens_total: int | None = None
        self.longest_tokens: int | None = None
        self.text_bytes = 0
        self.images: list[ImageSize] = []
        self.text: bytes = b""
        self.tools: bytes = b""
        self.ids: bytes = b""
        self.ids_nested = False
        self.cache_salt: str | None = None
        #: True if it asked for an alias, or for a model that another stands in for: for `asked`.
        self.renamed = False
        self.asked = ""
        #: True if it has fields that hetlb alone sets (`transfer_fields.py`), or what may hold one.
        self.transfers = False


def _invalid(message: str) -> GateError:
    return GateError(400, message)


def read_json(kind: Kind, body: bytes) -> Call:
    """Read a JSON body. Raises `GateError` (400)."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look into the strings that it skips
        decoded = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(_plain(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid("The body is not valid JSON.") from error
    call = Call()
    call.model = decoded.model
    if call.model is not None and len(call.model) > MAX_MODEL_BYTES:
        raise _invalid(f"model: expected a name of at most {MAX_MODEL_BYTES} characters.")
    call.stream = bool(decoded.stream)
    call.asks_options = bool(decoded.stream_options)
    call.max_tokens = _output_cap(decoded)
    call.n = _sequences(decoded)
    call.priority = _priority(decoded)
    call.cache_salt = decoded.cache_salt
    own = decoded.kv_transfer_params or decoded.ec_transfer_params
    call.transfers = bool(own or decoded.vllm_xargs or decoded.sampling_params)
    if kind is _NO_OUTPUT:
        call.text_bytes = len(body)
        if decoded.messages:
            _read_text(call, bytes(decoded.messages))
        _read_prompt(call, decoded.input or decoded.prompt)
    elif kind is _COMPLETION:
        _read_prompt(call, decoded.prompt)
    elif kind is _RESPONSES:
        if bytes(decoded.request_id) not in (b"", b"null"):
            # vLLM would store the answer under that id, in place of one that is there.
            raise _invalid("request_id: expected none here, the instance names its answers.")
        _read_prompt(call, decoded.input)
        call.prompts = 1
        call.continues = decoded.previous_response_id
    else:
        _read_text(call, bytes(decoded.messages))
        call.tools = bytes(decoded.tools)
        call.text_bytes += len(call.tools)
        if not call.text:
            _read_prompt(call, decoded.prompt or decoded.input)
    return call


def inject_usage(kind: Kind, call: Call, body: bytes) -> bytes:
    """The body to send: with `stream_options` put in before its last brace where usage is not asked for."""
    if (
        not call.stream
        or kind not in _WITH_USAGE
        or len(body) > MAX_INJECT_BYTES
        or call.asks_options
        or b'"stream_options"' in body
    ):
        return body
    end = body.rfind(b"}")
    call.hold_usage = True
    return body[:end] + _INJECTION + body[end:]


def _plain(text: str) -> str:
    message, _, where = text.partition(" - at `$.")
    return f"{where.rstrip('`')}: {message.replace('`', '')}" if where else message.replace("`", "")


def _output_cap(body: RequestFields) -> int | None:
    name, value = "max_completion_tokens", body.max_completion_tokens
    if value is None:
        name, value = "max_output_tokens", body.max_output_tokens
    if value is None:
        name, value = "max_tokens", body.max_tokens
    if value is None:
        return None
    if not 0 <= value <= MAX_TOKENS_LIMIT:
        raise _invalid(f"{name}: expected a number from 0 to {MAX_TOKENS_LIMIT}, got {value}.")
    return value or 1


def _sequences(body: RequestFields) -> int:
    if body.n is None and body.best_of is None:
        return 1
    n = max(1 if body.n is None else body.n, 1 if body.best_of is None else body.best_of)
    if (body.n is not None and body.n < 1) or n > MAX_SEQUENCES:
        raise _invalid(f"n: expected a number from 1 to {MAX_SEQUENCES}, got {body.n}.")
    return n


def _priority(body: RequestFields) -> int:
    if body.priority is None:
        return 0
    if abs(body.priority) > MAX_PRIORITY:
        raise _invalid(f"priority: expected a number within {MAX_PRIORITY} of 0, got {body.priority}.")
    return body.priority


def _read_prompt(call: Call, raw: msgspec.Raw) -> None:
    """A string, a list of strings, of token ids, or of lists of token ids."""
    data = bytes(raw)  # of many megabytes another copy would take as long as reading it
    if not data.startswith(b"["):
        if data:
            _read_text(call, data)
        return
    found = _FIRST.match(data)
    first = b"" if found is None else found[1]
    if first.isdigit() or first == b"-":
        call.prompt_tokens_total = call.longest_tokens = data.count(b",") + 1
        call.ids = data
    elif first == b"[":
        _check_prompts(data.count(b"[") - 1)
        lists = data.split(b"]")[:-2]
        counts = [part.count(b",") + 1 - (index > 0) for index, part in enumerate(lists)]
        call.prompts = max(1, len(lists))
        call.prompt_tokens_total = max(1, sum(counts))
        call.longest_tokens = max(counts, default=1)
        call.ids, call.ids_nested = data, True
    else:
        _read_text(call, data)
        if first == b'"':
            call.prompts = max(1, _quotes(data) // 2)
            _check_prompts(call.prompts)


def _check_prompts(count: int) -> None:
    if count > MAX_PROMPTS:
        raise _invalid(f"prompt: expected at most {MAX_PROMPTS} prompts in one request, got {count}.")


def _quotes(data: bytes) -> int:
    """Quotes that begin or end a string, of valid JSON."""
    if b"\\" not in data:
        return data.count(b'"')
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")
    return data.count(b'"') - data.count(b'\\"')


def _read_text(call: Call, raw: bytes) -> None:
    """Take `raw`, JSON, for the prompt; encoded images and sounds in it are no text."""
    encoded, call.images = find_media(raw)
    call.text = raw
    call.text_bytes = len(raw) - encoded
