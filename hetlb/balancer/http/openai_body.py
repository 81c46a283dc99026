"""JSON bodies of the OpenAI API: a few fields, decoded once; everything else passes unread, as it came."""

from __future__ import annotations

import random
import re
from itertools import islice
from typing import Any, Final

import msgspec
from mypy_extensions import mypyc_attr

from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.openai_fields import NumberFields, RequestFields
from hetlb.balancer.http.transfer_fields import may_hold_fields, without_transfer_fields
from hetlb.errors import NOT_JSON

#: Maximum bytes of a body that `stream_options` is put into.
MAX_INJECT_BYTES: Final = 256 << 10
#: Maximum number of prompts in one request.
MAX_PROMPTS: Final = 16_384

#: JSON is read in one turn of the event loop. Bodies of more bytes are looked at first: a mark (quotation
#: mark, bracket, comma, colon, backslash) costs as much as four blanks or sixteen other bytes.
LEAST_DENSE_BYTES: Final = 8 << 20
MAX_DENSITY: Final = 45_000_000
_MARKS: Final = b'",:[]{}\\'
#: Blanks that stand in no string, as two in a row seldom do.
_BLANKS: Final = b"\t\r\n"
#: Inspected bytes of each `_STRIDE_BYTES`, at a place that no client knows.
_STRIDE_BYTES: Final = 64 << 10
_LOOK_BYTES: Final = 2 << 10

#: First byte of a list.
_FIRST = re.compile(rb"\[[ \t\r\n]*(.)", re.S)
#: Parts of a content: all requests with media have them.
_PARTS: Final = re.compile(rb"\[\s*\{")
#: Media counted in one prompt: engines take far fewer.
MOST_MEDIA: Final = 4096
#: Begin of a string that is a data URL, or base64 of an Anthropic image source or of `input_audio`. No prompt
#: looks like it: in text the quotes would be escaped. The expression begins with bytes that are found fast.
_INLINE: Final = re.compile(rb'"data(?:(?<!\\"data):[^"]{0,100};base64,|":\s*"(?=[A-Za-z0-9+/=\\]{64}))')
#: A string that may be a URL, and the bytes before the URL of an image, a sound or a video.
_URL: Final = re.compile(rb'"https?:')
_BEFORE_URL: Final = re.compile(
    rb'(?:"(?:image|video|audio)_url":\s*(?:\{[^{}"]{0,40}(?:"detail":\s*"[a-z]{0,10}",\s*)?"url":\s*)?'
    rb'|"type":\s*"url",\s*"url":\s*)\Z'
)
_BEFORE_URL_BYTES: Final = 160
_decoder = msgspec.json.Decoder(RequestFields)
_BOM: Final = b"\xef\xbb\xbf"
#: Largest size of a priority: beyond, it counts as this.
MOST_PRIORITY: Final = 1 << 31
#: Types of a field that vLLM reads in other forms too, as msgspec names them.
_ANY_FORM: Final = "bool | int | float | str | null"
_NO_OUTPUT: Final = Kind.NO_OUTPUT
_COMPLETION: Final = Kind.COMPLETION
_RESPONSES: Final = Kind.RESPONSES
_WITH_USAGE: Final = (Kind.COMPLETION, Kind.CHAT)


@mypyc_attr(acyclic=True)
class Call:
    """The facts of one request body, and `body` itself as engines get it.

    `prompt_tokens_total` is of all prompts: counted where they are token ids, else None until the router has
    estimated it from `text_bytes` (without encoded media) and the number of `media`. `prompts` is how many
    prompts are prefilled, `n` how often each is decoded; `priority` is vLLM's, lower goes first. `text`,
    `tools` and `ids` are raw JSON: the prompts, the tools of a chat, and prompts of token ids (`ids_nested`:
    a list for each); `cache_salt` keeps its prefixes apart from others.
    """

    __slots__ = (
        "asked", "body", "cache_salt", "hold_usage", "ids", "ids_nested", "longest_tokens",
        "max_tokens", "media", "model", "model_at", "n", "previous", "priority",
        "prompt_tokens_total", "prompts", "renamed", "stream", "subset", "text", "text_bytes", "tools",
    )  # fmt: skip

    def __init__(self, body: bytes = b"") -> None:
        self.body = body
        self.model: str | None = None
        self.stream = False
        self.hold_usage = False
        self.max_tokens: int | None = None
        self.n = self.prompts = 1
        self.priority = 0
        self.prompt_tokens_total: int | None = None
        self.longest_tokens: int | None = None
        self.text_bytes = 0
        self.media = 0
        self.text: bytes = b""
        self.tools: bytes = b""
        self.ids: bytes = b""
        self.ids_nested = False
        self.cache_salt: str | None = None
        #: Id of the response that a request goes on from, and the instances that may have the request.
        self.previous: str | None = None
        self.subset: tuple[str, ...] | None = None
        #: True if it asked for an alias, or for a model that another stands in for: for `asked`.
        self.renamed = False
        #: Place of the model in the body of a form, 0 of JSON.
        self.model_at = 0
        self.asked = ""


def read_json(kind: Kind, body: bytes) -> Call:
    if len(body) > LEAST_DENSE_BYTES and _density(body) > MAX_DENSITY:
        raise GateError(413, "The body has too many values: it would take too long to be read.")
    try:
        if not body.isascii():
            body = body.removeprefix(_BOM)  # Python's reader, and so vLLM, takes one
            body.decode()  # msgspec does not look into the strings that it skips
        decoded = _decoder.decode(body)
        stream, counts = decoded.stream, _counts(decoded)
        if not _are_plain(stream, counts):
            from hetlb.balancer.http.lax_numbers import plain_numbers

            plain = plain_numbers(decoded)
            stream, counts = plain.stream, _counts(plain)
    except msgspec.ValidationError as error:
        raise GateError(400, _plain(str(error))) from error
    except NOT_JSON as error:
        raise GateError(400, "The body is not valid JSON.") from error
    call = Call(body)
    call.model = decoded.model
    call.stream = bool(stream)
    for cap in counts[:3]:
        if cap is not None:
            call.max_tokens = cap or 1
            break
    call.n = max(counts[3] or 1, counts[4] or 1)
    call.priority = min(max(counts[5] or 0, -MOST_PRIORITY), MOST_PRIORITY)
    call.cache_salt = decoded.cache_salt
    own = decoded.kv_transfer_params or decoded.ec_transfer_params
    if own or ((decoded.vllm_xargs or decoded.sampling_params) and may_hold_fields(body)):
        call.body = without_transfer_fields(body, _prompt_bytes(decoded))
    if call.stream and not decoded.stream_options:
        _ask_for_usage(kind, call)
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
            raise GateError(400, "request_id: expected none here, the instance names its answers.")
        _read_prompt(call, decoded.input)
        call.prompts = 1
        call.previous = decoded.previous_response_id
    else:
        _read_text(call, bytes(decoded.messages))
        call.tools = bytes(decoded.tools)
        call.text_bytes += len(call.tools)
        if not call.text:
            _read_prompt(call, decoded.prompt or decoded.input)
    return call


def _density(body: bytes) -> int:
    """Return an estimate of the time to parse JSON, in nanoseconds, from a part of it."""
    look, last = _LOOK_BYTES, _STRIDE_BYTES - _LOOK_BYTES
    starts = [at + random.randrange(last) for at in range(0, len(body) - _STRIDE_BYTES, _STRIDE_BYTES)]
    seen = b"".join([body[at : at + look] for at in starts])
    plain = len(seen.translate(None, _MARKS))
    marks = len(seen) - plain
    blanks = 2 * seen.count(b"  ") + len(seen) - len(seen.translate(None, _BLANKS))
    return (16 * marks + 4 * blanks + len(seen)) * len(body) // (4 * len(seen))


def _ask_for_usage(kind: Kind, call: Call) -> None:
    """Put `stream_options` into a body without any: before its last brace, so that nothing else changes."""
    body = call.body
    if kind in _WITH_USAGE and len(body) <= MAX_INJECT_BYTES and b'"stream_options"' not in body:
        call.hold_usage = True
        call.body = with_field(body, b"stream_options", b'{"include_usage":true}')


def with_field(body: bytes, name: bytes, value: bytes) -> bytes:
    """Return a JSON object with one more field at its end."""
    end = body.rfind(b"}")
    return b'%b,"%b":%b%b' % (body[:end], name, value, body[end:])


def _plain(text: str) -> str:
    message, _, where = text.partition(" - at `$.")
    message = message.replace(_ANY_FORM, "bool | null" if where == "stream`" else "int | null")
    return f"{where.rstrip('`')}: {message.replace('`', '')}" if where else message.replace("`", "")


def _counts(fields: RequestFields | NumberFields) -> Any:
    """Return the limit of the output (the first one stated), `n`, `best_of` and `priority`."""
    return (
        fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens,
        fields.n, fields.best_of, fields.priority,
    )  # fmt: skip


def _are_plain(stream: object, counts: Any) -> bool:
    """Return True if a truth value and counts are what JSON has for them."""
    for count in counts:
        if count is not None and type(count) is not int:
            return False
    return stream is None or stream is True or stream is False


def _prompt_bytes(fields: RequestFields) -> int:
    """Return the bytes of the values that may be large."""
    large = (fields.prompt, fields.messages, fields.input, fields.tools)
    return sum([len(memoryview(each)) for each in large])


def _read_prompt(call: Call, raw: msgspec.Raw) -> None:
    """Read a string, a list of strings, of token ids, or of lists of token ids."""
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
        raise GateError(400, f"prompt: expected at most {MAX_PROMPTS} prompts in one request, got {count}.")


def _quotes(data: bytes) -> int:
    """Return the number of quotation marks in valid JSON that begin or end a string."""
    if b"\\" not in data:
        return data.count(b'"')
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")
    return data.count(b'"') - data.count(b'\\"')


def _read_text(call: Call, raw: bytes) -> None:
    """Take raw JSON for the prompt. Encoded images, sounds and videos in it do not count as text."""
    call.text = raw
    call.text_bytes = len(raw)
    if raw.find(b"[", 1) < 0 or (raw.find(b'"data') < 0 and raw.find(b'"http') < 0):
        return
    if _PARTS.search(raw, 1) is None:
        return
    found = _INLINE.search(raw)
    while found is not None and call.media < MOST_MEDIA:
        end = raw.find(b'"', found.end()) + 1  # far faster than to look at each byte of an image
        call.text_bytes -= end - found.start()
        call.media += 1
        found = _INLINE.search(raw, end)
    for url in islice(_URL.finditer(raw), MOST_MEDIA):
        at = url.start()
        call.media += _BEFORE_URL.search(raw, max(0, at - _BEFORE_URL_BYTES), at) is not None
