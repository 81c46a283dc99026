"""HTTP/1.1 framing and the strict gate, without sockets: bytes in, heads and payloads out.

Ambiguous messages are rejected, never repaired. Heads are split here by their empty line, checked as raw
bytes, then parsed by llhttp (httptools); bodies are framed here, so that the end of a message is known to the
byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import Any, Final, Generic, TypeVar

import httptools

MAX_HEAD_BYTES: Final = 32 << 10
MAX_LINE_BYTES: Final = 16 << 10
MAX_HEADERS: Final = 64
#: Maximum bytes of a chunk-size line.
_MAX_CHUNK_LINE_BYTES: Final = 18

Headers = list[tuple[bytes, bytes]]

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,15}")
_TARGET = re.compile(rb"/[!-~]*")
_REQUEST_LINE = re.compile(rb"[A-Z]+ [!-~]+ HTTP/1\.[01]\r\n")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_BAD_PATH = re.compile(rb"//|[\\;#%]|/\.{1,2}(?:/|$)")
#: The one path with a last part that may be percent-encoded: hetlb answers it, and no engine reads it.
_MODEL_PATH = re.compile(rb"/v1/models/(?:[!-$&-~]|%[0-9A-Fa-f]{2})+")
#: A header beyond ASCII: its value in UTF-8, or in Latin-1 as Node.js and Python write it, without control
#: characters and the filler of binary data (RFC 9110, 5.5: obs-text).
_TEXT_LINE = re.compile(
    rb"[!-9;-~]+:(?>[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    rb"|[\t -~\xa0-\xfe])*+"
)
#: Headers that may come once: two readers could take different ones.
_ONCE = frozenset({b"content-type", b"authorization", b"x-api-key", b"api-key", b"x-vllm-priority"})
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NUMBER = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"})


class GateError(Exception):
    """A message that is refused: `status` for the client, a sentence with the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def number(value: bytes | None) -> float | None:
    """Return the number in a value of a header, None unless it is plain digits."""
    return None if value is None or _NUMBER.fullmatch(value) is None else float(value)


class RequestHead:
    """The head of one request that passed the gate, but for its length. Not to be changed: it is shared.

    Header names are lower-case bytes; `fields` has the first of each name.
    """

    __slots__ = (
        "chunked", "content_type", "expects", "fields", "forward_rules", "forwarded", "headers", "http11",
        "keep_alive", "method", "path", "priority", "query",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = b""
        self.path = ""
        self.query = b""
        self.headers: Headers = []
        self.fields: dict[bytes, bytes] = {}
        self.content_type = b""
        #: Value of `X-Vllm-Priority`, None without one.
        self.priority: bytes | None = None
        self.http11 = True
        self.keep_alive = True
        self.chunked = False
        self.expects: bytes | None = None
        #: Header lines that go to an engine (see `forward_headers`), by whether the client's key goes along.
        self.forwarded: dict[bool, bytes] = {}
        self.forward_rules: object = None

    def closing(self) -> RequestHead:
        """Return the same head of a request after which the connection ends."""
        head = copy(self)
        head.keep_alive = False
        return head


class ResponseHead:
    """The head of one response of an engine, but for its length. Not to be changed: it is shared."""

    __slots__ = ("chunked", "fields", "forwarded", "headers", "keep_alive", "reason", "status")

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: Headers = []
        self.fields: dict[bytes, bytes] = {}
        self.chunked = False
        self.keep_alive = True
        #: Header lines that go to the client (see `forward_headers`).
        self.forwarded: bytes | None = None


class _Collector:
    """llhttp's callbacks."""

    __slots__ = ("headers", "reason", "url")

    def __init__(self) -> None:
        self.url = b""
        self.reason = b""
        self.headers: Headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def head_end(buffer: bytes | bytearray, limit: int = MAX_HEAD_BYTES, *, begin: int = 0, seen: int = 0) -> int:
    """Return the end (after its empty line) of the head that begins at `begin`, 0 if it is incomplete.

    `seen` bytes of it were looked at before: a head that comes byte by byte is searched once. Raises
    `GateError` (431) for a head beyond `limit` bytes.
    """
    end = buffer.find(b"\r\n\r\n", begin + max(0, seen - 3), begin + limit + 4)
    if end >= 0:
        return end + 4
    if len(buffer) - begin > limit:
        raise GateError(431, "The request head is too large.")
    return 0


def _check_raw(head: bytes) -> None:
    """Refuse bytes that llhttp would repair or overlook: bare line feeds, folded lines, controls, sizes."""
    if head.count(b"\n") != head.count(b"\r\n") or head.count(b"\r") != head.count(b"\n"):
        raise GateError(400, "The head has a line that does not end in CR LF.")
    if b"\n " in head or b"\n\t" in head:
        raise GateError(400, "Folded header lines are not accepted.")
    if b"\0" in head:
        raise GateError(400, "The head has a NUL byte.")
    if head.count(b"\n") > MAX_HEADERS + 2:
        raise GateError(431, f"More than {MAX_HEADERS} headers.")
    if len(head) > MAX_LINE_BYTES and max(map(len, head.split(b"\r\n"))) > MAX_LINE_BYTES:
        raise GateError(431, f"A line of the head is longer than {MAX_LINE_BYTES} bytes.")


def _feed(parser: Any, head: bytes, status: int, malformed: str) -> None:
    """Parse a head; an upgrade in it is no end of HTTP here. Raises `GateError` if llhttp refuses it."""
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # the connection stays ours; `EngineConnection` knows whether a 101 was asked for
    except httptools.HttpParserError as error:
        raise GateError(status, malformed) from error


def parse_request_head(head: bytes) -> tuple[RequestHead, int | None]:
    """Parse one whole request head and its Content-Length. Raises `GateError`."""
    _check_raw(head)
    if _REQUEST_LINE.match(head) is None:
        # llhttp lets several blanks and other versions pass.
        raise GateError(400, "The request line must be METHOD PATH HTTP/1.1 (or HTTP/1.0).")
    if not head.isascii() and not all(map(_TEXT_LINE.fullmatch, head.split(b"\r\n")[1:-2])):
        raise GateError(
            400, "The head has bytes that are not ASCII, or in a value neither UTF-8 nor Latin-1."
        )
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    _feed(parser, head, 400, "The request head is malformed.")
    result = RequestHead()
    result.method = parser.get_method()
    if result.method not in _METHODS:
        raise GateError(405 if result.method != b"CONNECT" else 400, "This method is not supported.")
    result.http11 = parser.get_http_version() == "1.1"
    target = collector.url
    if _TARGET.fullmatch(target) is None:
        raise GateError(400, "The request target must be a path.")
    path, _, result.query = target.partition(b"?")
    if _BAD_PATH.search(path if _MODEL_PATH.fullmatch(path) is None else path.replace(b"%", b"")):
        raise GateError(404, "There is nothing at this path.")
    result.path = path.decode("ascii")
    result.headers = collector.headers
    length = _take_fields(result)
    if result.chunked and length is not None:
        raise GateError(400, "Content-Length and Transfer-Encoding exclude each other.")
    return result, length


def _take_fields(head: RequestHead) -> int | None:
    """Check the headers of a request; return its Content-Length, if it has one."""
    length: int | None = None
    host: bytes | None = None
    connection = b""
    for name, value in head.headers:
        if name == b"host":
            if host is not None or _HOST.fullmatch(value) is None or not _port_fits(value):
                raise GateError(400, "Exactly one valid Host header is expected.")
            host = value
        elif name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                raise GateError(400, "Exactly one valid Content-Length header is expected.")
            length = int(value)
        elif name == b"transfer-encoding":
            if head.chunked or value.lower() != b"chunked" or not head.http11:
                raise GateError(400, "The only Transfer-Encoding accepted is chunked, in HTTP/1.1.")
            head.chunked = True
        elif name == b"connection":
            connection += b"," + value.lower()
        elif name in _ONCE and sum(other == name for other, _ in head.headers) > 1:
            raise GateError(400, f"More than one {name.decode()} header.")
        elif name == b"expect":
            head.expects = value.lower()
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise GateError(415, "Encoded request bodies are not accepted.")
    if host is None and head.http11:
        raise GateError(400, "A Host header is expected.")
    head.fields = dict(reversed(head.headers))
    head.content_type = head.fields.get(b"content-type", b"").lower()
    head.priority = head.fields.get(b"x-vllm-priority")
    options = {option.strip() for option in connection.split(b",")} if connection else set()
    head.keep_alive = b"close" not in options if head.http11 else b"keep-alive" in options
    return length


def _port_fits(host: bytes) -> bool:
    _, colon, port = host.rpartition(b":")
    return not colon or not port.isdigit() or int(port) <= 65535


def parse_response_head(head: bytes, method: bytes) -> tuple[ResponseHead, int | None]:
    """Parse one whole response head of an engine to a request of `method`: what it says, and the length of
    the body where that is known. Raises `GateError` (502) on anything ambiguous.
    """
    try:
        _check_raw(head)
    except GateError as error:
        raise GateError(502, error.message) from error
    if _CONTROL.search(head) is not None:
        raise GateError(502, "The head of the engine's answer has control characters.")
    if not head.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise GateError(502, "The engine does not speak HTTP/1.")
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    _feed(parser, head, 502, "The head of the engine's answer is malformed.")
    result = ResponseHead()
    result.status = parser.get_status_code()
    result.reason = collector.reason
    result.headers = collector.headers
    if not 100 <= result.status <= 599:
        raise GateError(502, "The engine's answer has no valid status.")
    http11 = head.startswith(b"HTTP/1.1")
    result.keep_alive = http11
    length: int | None = None
    for name, value in collector.headers:
        if name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                raise GateError(502, "The engine's Content-Length is ambiguous.")
            length = int(value)
        elif name == b"transfer-encoding":
            if result.chunked or value.lower() != b"chunked" or not http11:
                raise GateError(502, "The engine's Transfer-Encoding is not plain chunked.")
            result.chunked = True
        elif name == b"connection":
            lowered = value.lower()
            if b"close" in lowered:
                result.keep_alive = False
            elif b"keep-alive" in lowered:
                result.keep_alive = True
    if result.chunked and length is not None:
        raise GateError(502, "The engine sent both Content-Length and Transfer-Encoding.")
    if method == b"HEAD" or result.status in (204, 304) or result.status < 200:
        length, result.chunked = 0, False
    result.fields = dict(reversed(result.headers))
    return result, length


#: Content-Length as engines and most clients spell it. A head with another spelling is compared whole.
_LENGTH_FIELDS: Final = (b"\ncontent-length: ", b"\nContent-Length: ")
_LENGTH_FIELD_BYTES: Final = 17
#: Most digits of a length that is not compared as text.
_LENGTH_DIGITS: Final = 15
#: Maximum number of known heads of either kind, beyond which all are forgotten.
MAX_KNOWN_HEADS: Final = 256
#: Maximum bytes of a known head.
MAX_KNOWN_HEAD_BYTES: Final = 4 << 10

Head = TypeVar("Head", RequestHead, ResponseHead)


class KnownHeads(Generic[Head]):
    """Heads that were parsed lately, by their bytes without the digits of the Content-Length.

    All other bytes must be equal. So the checks of the gate would have the same result as for the known head.
    """

    __slots__ = ("_at", "_parse", "_sized", "_whole")

    def __init__(self, parse: Callable[[bytes], tuple[Head, int | None]]) -> None:
        self._parse: Callable[[bytes], tuple[Head, int | None]] = parse
        #: By their bytes without the length, and by all their bytes. They are apart, as a shortened head
        #: could equal a whole one.
        self._sized: dict[bytes, tuple[Head, int | None]] = {}
        self._whole: dict[bytes, tuple[Head, int | None]] = {}
        #: Place of the length in the last head with one: most have it there.
        self._at = _LENGTH_FIELD_BYTES

    def find(self, raw: bytes) -> tuple[Head, int | None]:
        """Return the parsed head and its length. Raises `GateError`."""
        said, known, key, at = 0, self._whole, raw, self._at
        if raw[at - _LENGTH_FIELD_BYTES : at] not in _LENGTH_FIELDS:
            at = max(raw.find(_LENGTH_FIELDS[0]), raw.find(_LENGTH_FIELDS[1])) + _LENGTH_FIELD_BYTES
            self._at = max(at, _LENGTH_FIELD_BYTES)
        if at >= _LENGTH_FIELD_BYTES:
            # Digit by digit: compiled, a third of what `find`, `isdigit` and `int` cost.
            end, digit, most = at, 0, min(len(raw), at + _LENGTH_DIGITS + 1)
            while end < most and 0x30 <= (digit := raw[end]) <= 0x39:
                said = said * 10 + digit - 0x30
                end += 1
            # A length in any other spelling is compared with the whole head.
            if digit == 0x0D and end > at and raw[at] != 0x30:
                known, key = self._sized, raw[:at] + raw[end:]
        found = known.get(key)
        if found is not None:
            return found if known is self._whole else (found[0], said)
        found = self._parse(raw)
        # If the lengths differ, the stated one is of no body that follows here (as in an answer to HEAD).
        if len(raw) <= MAX_KNOWN_HEAD_BYTES and (known is self._whole or found[1] == said):
            if len(known) >= MAX_KNOWN_HEADS:
                known.clear()
            known[key] = found
        return found


#: Chunks of any size that a request body may have, and mean bytes of each further chunk.
MAX_SMALL_CHUNKS: Final = 16 << 10
LEAST_CHUNK_BYTES: Final = 64
#: States of a decoder of chunks: the part that it reads next.
_SIZE: Final = 0
_DATA: Final = 1
_DATA_END: Final = 2
_LAST: Final = 3


class ChunkedDecoder:
    """Strict decoder of chunked bodies: no extensions, no trailers, nothing but CR LF.

    `feed` returns the payload in what it was given; `done` is True after the last chunk and `surplus`
    then holds the bytes behind it. Raises `GateError` (400) on anything else. With `most_small`, a body of
    more chunks than that must have `LEAST_CHUNK_BYTES` in each of the others on average.
    """

    __slots__ = (
        "_chunks", "_left", "_line", "_most_small", "_payload", "_state", "between", "done", "surplus",
    )  # fmt: skip

    def __init__(self, most_small: int = 0) -> None:
        self._most_small = most_small
        self._chunks = self._payload = 0
        self._state = _SIZE
        self._line = b""  # what is known of an unfinished size line or line end
        self._left = 0
        #: True if what was fed ended with a chunk: the next byte begins one.
        self.between = True
        self.done = False
        self.surplus = b""

    def feed(self, data: bytes) -> bytes:
        """Return the payload bytes among `data`."""
        pieces: list[bytes] = []
        position, length = 0, len(data)
        while position < length:
            if self._state == _SIZE and not self._line:
                # Nearly all chunks: a usual size, and whole.
                line_end = data.find(b"\r\n", position, position + 5)
                if line_end > 0:
                    size = _CHUNK_SIZES.get(data[position:line_end], 0)
                    end = line_end + 2 + size
                    if size and data[end : end + 2] == b"\r\n":
                        pieces.append(data[line_end + 2 : end])
                        self._chunks += 1
                        position = end + 2
                        continue
            if self._state == _DATA:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _DATA_END
                continue
            # All other states end with a line end, which may be cut anywhere.
            line_end = data.find(b"\n", position)
            piece = data[position:] if line_end < 0 else data[position : line_end + 1]
            position += len(piece)
            self._line += piece
            if self._state == _SIZE:
                if len(self._line) > _MAX_CHUNK_LINE_BYTES:
                    raise GateError(400, "A chunk size is malformed.")
                if line_end < 0:
                    continue
                line = self._take_line()
                if _CHUNK_SIZE.fullmatch(line) is None:
                    raise GateError(400, "A chunk size is malformed or has extensions.")
                self._left = int(line, 16)
                self._chunks += 1
                self._state = _DATA if self._left else _LAST
            else:
                # Behind a chunk's data, and behind the last chunk, nothing but CR LF may stand.
                if not b"\r\n".startswith(self._line):
                    raise GateError(400, "A chunk does not end where it should, or has trailers.")
                if line_end < 0:
                    continue
                self._take_line()
                if self._state == _LAST:
                    self.done = True
                    self.surplus = data[position:]
                    break
                self._state = _SIZE
        self.between = self._state == _SIZE and not self._line
        payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._payload += len(payload)
        if self._most_small and self._chunks > self._most_small + self._payload // LEAST_CHUNK_BYTES:
            raise GateError(400, "The body comes in too many small chunks.")
        return payload

    def _take_line(self) -> bytes:
        line, self._line = self._line, b""
        if not line.endswith(b"\r\n"):
            raise GateError(400, "A chunk line does not end in CR LF.")
        return line[:-2]


#: The usual spellings of the usual sizes of chunks.
_CHUNK_SIZES: Final = {b"%x" % size: size for size in range(1, 4096)}
#: The line before a chunk, by its size.
CHUNK_LINES: Final = [b"%x\r\n" % size for size in range(4100)]
