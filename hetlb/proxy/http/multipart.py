"""Forms (multipart/form-data): a few fields are read while the body comes, the file passes unread.

What parsers of forms read in different ways is refused: the engine must see the same model as we
do. What is said of a form does not depend on where its reads were cut; no input costs more than a pass over
its bytes, and of these no more is kept here than a field's value may have.
"""

from __future__ import annotations

import re
from typing import Final

from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.http.openai_body import MAX_MODEL_BYTES, MEDIA_BYTES, Call
from hetlb.proxy.http.transfer_fields import has_transfer_fields

#: One boundary of RFC 2046 without blanks: what every client makes.
_BOUNDARY = re.compile(rb"""boundary=("?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;|$)""", re.I)
_PART_NAME = re.compile(
    rb"""content-disposition:[ \t]*form-data;[ \t]*name="([^"\\\r\n]*)"
    ([ \t]*;[ \t]*filename="[^"\\\r\n]*")?([ \t]*;[ \t]*filename\*=[^"\\;\s]*)?""",
    re.I | re.X,
)
_UTF8 = re.compile(rb"""^(?!.*charset.*charset).*;\s*charset="?utf-8"?\s*(?:;|$)""", re.I)
#: The line end behind a boundary, the headers of a part and the empty line.
_MAX_PART_HEAD: Final = 4096
#: Header lines of one part, and parts of one form: vLLM's largest has some thirty.
MAX_PART_LINES: Final = 16
MAX_PARTS: Final = 256
#: Bytes that are kept of a value: one more than it may have.
_KEPT_BYTES: Final = MAX_MODEL_BYTES + 1
_BAD_PART: Final = "A part of the multipart body is malformed or has no end."
_NO_BEGINNING: Final = "The multipart body does not begin with its boundary."

#: States of a reader: the part that it looks for.
_FIRST_BOUNDARY: Final = 0
_BOUNDARY_END: Final = 1
_PART_HEAD: Final = 2
_VALUE_BEGINNING: Final = 3
_VALUE: Final = 4
_NOTHING: Final = 5


class FormReader:
    """Reads one form: `feed` it with the body in any pieces, then `finish`. Both raise `GateError` (400).

    `call` holds what was read so far.
    """

    __slots__ = ("_delimiter", "_is_file", "_name", "_parts", "_rest", "_state", "_value", "call")

    def __init__(self, content_type: bytes) -> None:
        match = _BOUNDARY.search(content_type)
        if match is None or content_type.lower().count(b"boundary") != 1:
            raise GateError(400, "The multipart body has no boundary, or several.")
        if re.search(rb"charset", content_type, re.I) and not _UTF8.search(content_type):
            raise GateError(400, "The multipart body is expected to be in UTF-8.")
        self.call = Call()
        self.call.text_bytes = MEDIA_BYTES
        self._delimiter: bytes = b"\r\n--" + match[2]
        self._state = _FIRST_BOUNDARY
        #: Bytes that were fed and are still to be looked at.
        self._rest = b""
        self._name = self._value = b""
        self._is_file = False
        self._parts = 0

    def feed(self, data: bytes) -> None:
        """Read on."""
        if self._rest:
            data = self._rest + data
        delimiter, end, at = self._delimiter, len(data), 0
        boundary = delimiter[2:]
        while self._state != _NOTHING:
            if self._state == _VALUE:
                found = data.find(delimiter, at)
                # The end of what is there may be the beginning of a boundary.
                until = found if found >= 0 else max(at, end - len(delimiter) + 1)
                if len(self._value) < _KEPT_BYTES:
                    self._value += data[at : min(until, at + _KEPT_BYTES - len(self._value))]
                at = until
                if found < 0:
                    break
                self._take_field()
                at += len(delimiter)
                self._state = _BOUNDARY_END
            elif self._state == _PART_HEAD:
                head_end = data.find(b"\r\n\r\n", at, at + _MAX_PART_HEAD)
                if head_end < 0:
                    if end - at >= _MAX_PART_HEAD:
                        raise GateError(400, _BAD_PART)
                    break
                self._read_part_head(data[at + 2 : head_end] if head_end > at else b"")
                at = head_end + 4
                self._state = _VALUE_BEGINNING
            elif self._state == _BOUNDARY_END:
                if end - at < 2:
                    break
                if data.startswith(b"--", at):
                    self._state = _NOTHING
                elif data.startswith(b"\r\n", at):
                    self._state = _PART_HEAD
                else:
                    raise GateError(400, _BAD_PART)
            else:
                if end - at < len(boundary):
                    break
                begins = data.startswith(boundary, at)
                if self._state == _FIRST_BOUNDARY:
                    if not begins:
                        raise GateError(400, _NO_BEGINNING)
                    at += len(boundary)
                    self._state = _BOUNDARY_END
                elif begins:
                    # A part that begins with a boundary has no value for some, and that value for others.
                    raise GateError(400, _BAD_PART)
                else:
                    self._state = _VALUE
        self._rest = data[at:] if self._state != _NOTHING else b""

    def finish(self) -> Call:
        """The whole body was fed: what it says."""
        if self._state == _FIRST_BOUNDARY:
            raise GateError(400, _NO_BEGINNING)
        if self._state != _NOTHING:
            raise GateError(400, _BAD_PART)
        return self.call

    def _read_part_head(self, head: bytes) -> None:
        name, is_file = b"", False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise GateError(400, f"The multipart body has more than {MAX_PARTS} parts.")
        if head.count(b"\r\n") >= MAX_PART_LINES:
            raise GateError(400, f"A part of the multipart body has more than {MAX_PART_LINES} headers.")
        for line in head.split(b"\r\n"):
            if not line.lower().startswith(b"content-disposition"):
                if line[:1] in (b" ", b"\t", b"") or b"\n" in line or b"\r" in line:
                    raise GateError(400, "A part of the multipart body has a malformed header.")
                continue
            match = _PART_NAME.fullmatch(line)
            if match is None or name:
                raise GateError(
                    400,
                    'A part of the multipart body needs one Content-Disposition: form-data; name="…".',
                )
            name, is_file = match[1], bool(match[2] or match[3])
        if not name:
            raise GateError(400, "A part of the multipart body has no name.")
        self._name, self._is_file, self._value = name, is_file, b""

    def _take_field(self) -> None:
        """Take from a part that has ended what matters."""
        call, value = self.call, self._value
        if self._name == b"model":
            if call.model is not None or self._is_file or len(value) > MAX_MODEL_BYTES:
                raise GateError(400, f"model: expected one name of at most {MAX_MODEL_BYTES} bytes.")
            call.model = value.decode("utf-8", "replace")
        elif self._name == b"vllm_xargs":
            if len(value) > MAX_MODEL_BYTES or has_transfer_fields(value):
                expected = f"a JSON object of at most {MAX_MODEL_BYTES} bytes without transfer parameters"
                raise GateError(400, f"vllm_xargs: expected {expected}.")
        elif self._name == b"stream":
            call.stream = value.strip().lower() in (b"true", b"1")
