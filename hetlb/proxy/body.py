"""What a request body tells the scheduler: a few fields, decoded once; everything else passes unread.

Promise: bytes are never re-serialised; wrong types and absurd numbers are one OpenAI-style 400; no input
costs more than a pass over its bytes.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from hetlb.core.types import MAX_TOKENS_LIMIT
from hetlb.proxy.http1 import GateError

#: `stream_options` is asked for on the client's behalf in bodies up to this size.
MAX_INJECT_BYTES = 256 << 10
_INJECTION = b',"stream_options":{"include_usage":true}'
#: vLLM's own limit on `n`.
MAX_SEQUENCES = 16_384
#: A model's name is echoed and logged, so it is bounded.
MAX_MODEL_BYTES = 512
#: A base64 image or sound is no text: it counts as this many bytes of prompt (about 600 tokens).
_MEDIA_BYTES = 2400

_DATA_URL = re.compile(rb'"data:[^"]{0,100};base64,[A-Za-z0-9+/=\\]*"')


class Kind(Enum):
    """What an endpoint does, as far as scheduling goes."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    NO_OUTPUT = "no_output"
    AUDIO = "audio"
    PINNED = "pinned"
    PLAIN = "plain"

    @property
    def generates(self) -> bool:
        """Whether the engine decodes for it."""
        return self in _GENERATING


_GENERATING = frozenset({Kind.COMPLETION, Kind.CHAT, Kind.RESPONSES, Kind.MESSAGES, Kind.AUDIO})


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Body)


class Call:
    """The facts of one request body.

    `prompt_tokens` is the total where it was counted (token ids), else None and `text_bytes` is what to
    estimate from; `prompts` is how many sequences are prefilled, `n` how often each is decoded.
    """

    __slots__ = (
        "asks_options", "hold_usage", "longest_tokens", "max_tokens", "model", "n", "prompt_tokens",
        "prompts", "stream", "text", "text_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.model: str | None = None
        self.stream = False
        self.asks_options = False
        self.hold_usage = False
        self.max_tokens: int | None = None
        self.n = 1
        self.prompts = 1
        self.prompt_tokens: int | None = None
        self.longest_tokens: int | None = None
        self.text_bytes = 0
        self.text: bytes = b""


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
    if kind is Kind.NO_OUTPUT:
        call.text_bytes = len(body)
        _read_prompt(call, decoded.input or decoded.prompt)
    elif kind is Kind.COMPLETION:
        _read_prompt(call, decoded.prompt)
    elif kind is Kind.RESPONSES:
        _read_prompt(call, decoded.input)
        call.prompts = 1
    else:
        call.text = bytes(decoded.messages)
        call.text_bytes = _text_bytes(call.text) + len(bytes(decoded.tools))
        if not call.text:
            _read_prompt(call, decoded.prompt or decoded.input)
    return call


def inject_usage(kind: Kind, call: Call, body: bytes) -> bytes:
    """The body to send: with `stream_options` put in before its last brace where usage is not asked for."""
    if (
        not call.stream
        or kind not in (Kind.COMPLETION, Kind.CHAT)
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


def _output_cap(body: _Body) -> int | None:
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is None:
            continue
        if not 0 <= value <= MAX_TOKENS_LIMIT:
            raise _invalid(f"{name}: expected a number from 0 to {MAX_TOKENS_LIMIT}, got {value}.")
        return max(1, value)
    return None


def _sequences(body: _Body) -> int:
    n = max(body.n if body.n is not None else 1, body.best_of if body.best_of is not None else 1)
    if (body.n is not None and body.n < 1) or n > MAX_SEQUENCES:
        raise _invalid(f"n: expected a number from 1 to {MAX_SEQUENCES}, got {body.n}.")
    return n


def _read_prompt(call: Call, raw: msgspec.Raw) -> None:
    """A string, a list of strings, of token ids, or of lists of token ids."""
    data = bytes(raw).strip()
    if not data.startswith(b"["):
        if data:
            call.text = data
            call.text_bytes = _text_bytes(data)
        return
    first = data[1:].lstrip()[:1]
    if first.isdigit() or first == b"-":
        call.prompt_tokens = call.longest_tokens = data.count(b",") + 1
    elif first == b"[":
        lists = data.split(b"]")[:-2]
        counts = [part.count(b",") + 1 - (index > 0) for index, part in enumerate(lists)]
        call.prompts = max(1, len(lists))
        call.prompt_tokens = max(1, sum(counts))
        call.longest_tokens = max(counts, default=1)
    else:
        call.text = data
        call.text_bytes = _text_bytes(data)
        if first == b'"':
            # Between two strings of a list stands `","` (or with blanks); inside one it would be escaped.
            call.prompts = len(re.findall(rb'"\s*,\s*"', data)) + 1


def _text_bytes(raw: bytes) -> int:
    if b";base64," not in raw:
        return len(raw)
    media = _DATA_URL.findall(raw)
    return len(raw) - sum(map(len, media)) + _MEDIA_BYTES * len(media)


_BOUNDARY = re.compile(rb'boundary="?([!-~][ -~]{0,68}[!-~]|[!-~])"?\s*(?:;|$)')
_MODEL_FIELD = re.compile(rb'^content-disposition:\s*form-data\s*;\s*name="model"\s*$', re.I | re.M)


def read_multipart(content_type: bytes, body: bytes) -> Call:
    """Read the form fields that matter of a multipart body (audio). Raises `GateError` (400)."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise _invalid("The multipart body has no boundary.")
    call = Call()
    call.text_bytes = _MEDIA_BYTES
    delimiter = b"--" + match[1]
    position = body.find(delimiter)
    while position >= 0:
        start = position + len(delimiter)
        position = body.find(delimiter, start)
        head_end = body.find(b"\r\n\r\n", start, start + 4096)
        if head_end < 0:
            continue
        head = body[start:head_end].replace(b"\r\n", b"\n").strip()
        value = body[head_end + 4 : position if position >= 0 else len(body)]
        if _MODEL_FIELD.search(head) and len(value) <= 514:
            call.model = value.rstrip(b"\r\n").decode("utf-8", "replace")
        elif b'name="stream"' in head and len(value) <= 16:
            call.stream = value.strip().lower() in (b"true", b"1")
    return call
