"""Forms (multipart/form-data): a few fields are read, the file passes unread.

What parsers of forms read in different ways is refused: the engine must see the same model as we do.
"""

from __future__ import annotations

import re
from typing import Final

from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.openai_body import MEDIA_BYTES, Call
from hetlb.balancer.http.openai_fields import MAX_MODEL_CHARACTERS
from hetlb.balancer.http.transfer_fields import has_transfer_fields

#: One boundary of RFC 2046 without blanks: what every client makes.
_BOUNDARY = re.compile(rb"""boundary=("?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;|$)""", re.I)
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data[ \t]*", re.I)
#: One parameter: a token or a quoted string. A file's name in the form of RFC 5987 has no quotes.
_PARAMETER = re.compile(
    rb""";[ \t]*(?:(name|filename)=(?:([!#$%&'*+.^_`|~0-9A-Za-z-]+)|"((?:[^"\\\r\n]|\\.)*)")
    |(filename\*)=[^"\\;\s]*)[ \t]*""",
    re.X,
)
_UTF8 = re.compile(rb"""^(?!.*charset.*charset).*;\s*charset="?utf-8"?\s*(?:;|$)""", re.I)
#: The line end behind a boundary, the headers of a part and the empty line.
_MAX_PART_HEAD: Final = 4096
#: Header lines of one part, and parts of one form: vLLM's largest has some thirty.
MAX_PART_LINES: Final = 16
MAX_PARTS: Final = 256
#: Maximum bytes of a value that is read.
_MOST_BYTES: Final = MAX_MODEL_CHARACTERS
#: As vLLM's classes read a truth value.
_TRUE: Final = (b"true", b"1", b"t", b"yes", b"y", b"on")
_BAD_PART: Final = "A part of the multipart body is malformed or has no end."


def read_form(content_type: bytes, body: bytes) -> Call:
    """The facts of a whole form. Raises `GateError` (400)."""
    delimiter = _delimiter(content_type)
    boundary = delimiter[2:]
    start = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(boundary, start):
        raise GateError(400, "The multipart body does not begin with its boundary.")
    call = Call(body)
    call.text_bytes = MEDIA_BYTES
    at, parts = start + len(boundary), 0
    while body[at : at + 2] != b"--":
        parts += 1
        if parts > MAX_PARTS:
            raise GateError(400, f"The multipart body has more than {MAX_PARTS} parts.")
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_PART_HEAD)
        value_at = head_end + 4
        # A part that begins with a boundary has no value for some, and that value for others.
        if head_end < 0 or body[at : at + 2] != b"\r\n" or body.startswith(boundary, value_at):
            raise GateError(400, _BAD_PART)
        name, is_file = _part_name(body[at + 2 : head_end] if head_end > at else b"")
        end = body.find(delimiter, value_at)
        if end < 0:
            raise GateError(400, _BAD_PART)
        _take_field(call, name, is_file, body[value_at : min(end, value_at + _MOST_BYTES + 1)])
        at = end + len(delimiter)
    return call


def _delimiter(content_type: bytes) -> bytes:
    """The line end and boundary between two parts."""
    match = _BOUNDARY.search(content_type)
    if match is None or content_type.lower().count(b"boundary") != 1:
        raise GateError(400, "The multipart body has no boundary, or several.")
    if re.search(rb"charset", content_type, re.I) and not _UTF8.search(content_type):
        raise GateError(400, "The multipart body is expected to be in UTF-8.")
    return b"\r\n--" + match[2]


def _part_name(head: bytes) -> tuple[bytes, bool]:
    """The name in the headers of a part, and whether that is a file."""
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
    """Return the name in a Content-Disposition and whether it is of a file; None where it has more readings.

    An escaped quote is the end of a string to some readers: what follows must not look like a name to these.
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
        key = found[1] or found[4]
        value = found[2] or found[3] or b""
        if key in values or (value.find(b"\\") >= 0 and (key == b"name" or b"name" in value.lower())):
            return None
        values[key] = value
        at = found.end()
    name = values.pop(b"name", b"")
    return (name, bool(values)) if name else None


def _take_field(call: Call, name: bytes, is_file: bool, value: bytes) -> None:
    """Take what matters; of a longer `value` than is read one byte more came."""
    if name == b"model":
        if call.model is not None or is_file or len(value) > _MOST_BYTES:
            raise GateError(400, f"model: expected one name of at most {_MOST_BYTES} bytes.")
        call.model = value.decode("utf-8", "replace")
    elif name == b"vllm_xargs":
        if len(value) > _MOST_BYTES or has_transfer_fields(value):
            expected = f"a JSON object of at most {_MOST_BYTES} bytes without transfer parameters"
            raise GateError(400, f"vllm_xargs: expected {expected}.")
    elif name == b"stream":
        call.stream = value.lower() in _TRUE
