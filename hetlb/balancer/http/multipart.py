"""Forms (multipart/form-data): a few fields are read, the file passes unread.

Forms that parsers read in different ways are refused: the engine must see the same model as we do.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.http.openai_fields import MAX_MODEL_CHARACTERS
from hetlb.balancer.http.transfer_fields import FIELDS
from hetlb.errors import NOT_JSON

#: One parameter of the content type, or none; a boundary has bytes without quotes that are no token.
_OF_TYPE = re.compile(rb""";[ \t]*+(?:([^\s=;"]++)=(?:([^\s;"\\]++)|"([^"\\]*+)"))?[ \t]*+""")
#: A boundary of RFC 2046 without blanks: what every client makes.
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,70}")
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*+form-data[ \t]*+", re.I)
#: One parameter, or none: bare, a quoted string, or in the form of RFC 5987, which has no quotes.
_PARAMETER = re.compile(
    rb""";[ \t]*+
    (?:([!#$%&'+.^_`|~0-9A-Za-z-]++)[ \t]*+=[ \t]*+(?:([^\s;,="\\]++)|"((?:[^"\\\r\n]++|\\.)*+)")
    |([!#$%&'+.^_`|~0-9A-Za-z-]++\*)=[^"\\;\s]*+)?[ \t]*+""",
    re.X,
)
#: Maximum bytes of the line end behind a boundary, the headers of a part and the empty line.
MAX_PART_HEAD_BYTES: Final = 4096
#: Header lines of one part, and parts of one form: vLLM's largest has some thirty.
MAX_PART_LINES: Final = 16
MAX_PARTS: Final = 256
#: Maximum bytes of a value.
_MOST_BYTES: Final = MAX_MODEL_CHARACTERS
#: Fields read: each once, and no file.
_READ: Final = (b"model", b"stream", b"vllm_xargs")
#: Bytes of prompt that a sound counts as (about 600 tokens).
_MEDIUM_BYTES: Final = 2400
#: As vLLM's classes read a truth value.
_TRUE: Final = (b"true", b"1", b"t", b"yes", b"y", b"on")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BAD_PART: Final = "A part of the multipart body is malformed or has no end."


def read_form(content_type: bytes, body: bytes) -> Call:
    """Return the facts of a whole form. Raises `GateError` (400)."""
    delimiter = _delimiter(content_type)
    boundary = delimiter[2:]
    start = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(boundary, start):
        raise GateError(400, "The multipart body does not begin with its boundary.")
    call = Call(body)
    call.text_bytes = _MEDIUM_BYTES
    at, parts = start + len(boundary), 0
    seen: set[bytes] = set()
    while body[at : at + 2] != b"--":
        parts += 1
        if parts > MAX_PARTS:
            raise GateError(400, f"The multipart body has more than {MAX_PARTS} parts.")
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        value_at = head_end + 4
        # A part that begins with a boundary has no value for some, and that value for others.
        if head_end < 0 or body[at : at + 2] != b"\r\n" or body.startswith(boundary, value_at):
            raise GateError(400, _BAD_PART)
        name, is_file = _part_name(body[at + 2 : head_end] if head_end > at else b"")
        end = body.find(delimiter, value_at)
        if end < 0:
            raise GateError(400, _BAD_PART)
        if name in _READ:
            if is_file or name in seen:
                raise GateError(400, f"{name.decode()}: expected one value, and no file.")
            seen.add(name)
            _take_field(call, name, body[value_at : min(end, value_at + _MOST_BYTES + 1)])
            if name == b"model":
                call.model_at = value_at
        at = end + len(delimiter)
    return call


def _delimiter(content_type: bytes) -> bytes:
    """Return the line end and boundary between two parts."""
    values: dict[bytes, bytes] = {}
    at = content_type.find(b";")
    while 0 <= at < len(content_type):
        found = _OF_TYPE.match(content_type, at)
        if found is None:
            raise GateError(400, "The content type of the multipart body is malformed.")
        name = (found[1] or b"").lower()
        for known in (b"boundary", b"charset"):
            # One in parts, or of another name: `boundary*`, `x-boundary`.
            if known in name and (name != known or known in values):
                raise GateError(400, f"The multipart body has no {known.decode()}, or several.")
        values[name] = found[2] or found[3] or b""
        at = found.end()
    if _BOUNDARY.fullmatch(values.get(b"boundary", b"")) is None:
        raise GateError(400, "The multipart body has no boundary, or an odd one.")
    if values.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise GateError(400, "The multipart body is expected to be in UTF-8.")
    return b"\r\n--" + values[b"boundary"]


def _part_name(head: bytes) -> tuple[bytes, bool]:
    """Return the name in the headers of a part, and whether that is a file."""
    if head.count(b"\r\n") >= MAX_PART_LINES:
        raise GateError(400, f"A part of the multipart body has more than {MAX_PART_LINES} headers.")
    name, is_file = b"", False
    for line in head.split(b"\r\n"):
        if not line.lower().startswith(b"content-disposition"):
            if line[:1] in (b" ", b"\t", b"") or b"\n" in line or b"\r" in line:
                raise GateError(400, "A part of the multipart body has a malformed header.")
            continue
        found = _named(line)
        if found is None or name:
            raise GateError(
                400, 'A part of the multipart body needs one Content-Disposition: form-data; name="…".'
            )
        name, is_file = found
    if not name:
        raise GateError(400, "A part of the multipart body has no name.")
    return name, is_file


def _named(line: bytes) -> tuple[bytes, bool] | None:
    """Return the name in a Content-Disposition and whether it is of a file; None if it has more readings.

    An escaped quote is the end of a string to some readers: the text behind must not look like a name to
    them.
    """
    begun = _DISPOSITION.match(line)
    if begun is None:
        return None
    values: dict[bytes, bytes] = {}
    at = begun.end()
    while at < len(line):
        found = _PARAMETER.match(line, at)
        if found is None:
            return None
        key = (found[1] or found[4] or b"").lower()
        value = found[2] or found[3] or b""
        # A name in parts, or of another form.
        odd = b"name" in key and key not in (b"name", b"filename", b"filename*")
        if odd or key in values or (value.find(b"\\") >= 0 and (key == b"name" or b"name" in value.lower())):
            return None
        values[key] = value
        at = found.end()
    name = values.pop(b"name", b"")
    return (name, b"filename" in values or b"filename*" in values) if name else None


def _take_field(call: Call, name: bytes, value: bytes) -> None:
    """Take a field into the call; too long a `value` comes cut to one byte beyond the limit."""
    if name == b"model":
        try:
            call.model = value.decode() if len(value) <= _MOST_BYTES else None
        except UnicodeDecodeError:
            call.model = None
        if call.model is None:
            raise GateError(400, f"model: expected one name in UTF-8 of at most {_MOST_BYTES} bytes.")
    elif name == b"stream":
        call.stream = value.lower() in _TRUE
    elif len(value) > _MOST_BYTES or _has_transfer_fields(value):
        expected = f"a JSON object of at most {_MOST_BYTES} bytes without transfer parameters"
        raise GateError(400, f"vllm_xargs: expected {expected}.")


def _has_transfer_fields(value: bytes) -> bool:
    """Return True if a value, a JSON object, has a field that hetlb alone sets, or cannot be read."""
    try:
        return not _object.decode(value).keys().isdisjoint(FIELDS)
    except NOT_JSON:
        return True
