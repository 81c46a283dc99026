"""Requests from the bytes of one connection, without sockets: a head, then its whole body, one at a time.

Nothing is parsed here: a head is found by its empty line, and a body is taken by its length or its chunks. No
call looks at more than `TURN_BYTES` of what is costly to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hetlb.proxy.http.http1 import MAX_SMALL_CHUNKS, ChunkedDecoder, GateError, head_end

if TYPE_CHECKING:
    from hetlb.proxy.http.multipart import FormReader

#: Bytes of a chunked body that are decoded at once.
TURN_BYTES: Final = 64 << 10
#: Maximum number of empty lines before a request: RFC 9112, 2.2 asks to ignore at least one.
MAX_BLANK_LINES: Final = 8
#: Smaller pieces of a body are kept in one buffer: an object for each would take more memory than they.
_SMALL_PIECE: Final = 4 << 10


class RequestReader:
    """Reads the requests of one connection.

    `buffer` is the read that is looked at, from `at` on. `backlog` came while something else was done; of it
    the first `searched` bytes are part of a head. `held` bytes of a body that is not whole are kept here;
    `form` reads it as it comes, if it is one.
    """

    __slots__ = (
        "_blank_lines", "_decoder", "_left", "_limit", "_pieces", "_small", "at", "backlog", "buffer", "form",
        "held", "searched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.buffer = b""
        self.at = 0
        self.backlog = bytearray()
        self.searched = 0
        self._blank_lines = 0
        self._decoder: ChunkedDecoder | None = None
        #: Bytes of the body that are to come; of a chunked one those that came.
        self._left = 0
        self._limit = 0
        #: The body so far: whole pieces, then what came in small ones.
        self._pieces: list[bytes] = []
        self._small = bytearray()
        self.held = 0
        self.form: FormReader | None = None

    @property
    def unread(self) -> bool:
        """True if something is there that can be read on."""
        return self.at < len(self.buffer) or len(self.backlog) > self.searched

    @property
    def begun(self) -> bool:
        """True if part of a head, or an empty line before one, is there."""
        return self.searched > 0 or self._blank_lines > 0

    @property
    def whole(self) -> bool:
        """True if no more of a body is to come."""
        return self._decoder.done if self._decoder is not None else not self._left

    def take_backlog(self) -> None:
        """Look at what came while something else was done."""
        self.buffer, self.at = bytes(self.backlog), 0
        self.backlog.clear()

    def rest(self) -> bytes:
        """All that came and is no request: nothing is left here."""
        rest = self.buffer[self.at :] + bytes(self.backlog)
        self.buffer, self.at = b"", 0
        self.backlog.clear()
        return rest

    def find_head(self) -> bytes:
        """The next head, b"" if it is not whole. Raises `GateError` (400, 431)."""
        if self.searched:
            backlog = self.backlog
            backlog += self.buffer[self.at :]
            self.buffer, self.at = b"", 0
            if backlog[0] != 13 and not head_end(backlog, seen=self.searched):
                self.searched = len(backlog)
                return b""
            self.take_backlog()
            self.searched = 0
        buffer, at = self.buffer, self.at
        while buffer[at : at + 2] == b"\r\n":
            self._blank_lines += 1
            if self._blank_lines > MAX_BLANK_LINES:
                raise GateError(400, f"More than {MAX_BLANK_LINES} empty lines stand before the request.")
            at += 2
        self.at = at
        if at >= len(buffer):
            return b""
        if not 65 <= buffer[at] <= 90 and buffer[at:] != b"\r":
            raise GateError(400, "This is not the beginning of an HTTP request.")  # TLS, say
        end = head_end(buffer, begin=at)
        if not end:
            self.backlog += buffer[at:]
            self.searched = len(self.backlog)
            self.buffer, self.at = b"", 0
            return b""
        self.at = end
        self._blank_lines = 0
        return buffer[at:end]

    def begin_body(self, length: int | None, chunked: bool, limit: int) -> None:
        """Expect a body of at most `limit` bytes. Raises `GateError` (413)."""
        self._pieces = []
        self._left = length or 0
        self._limit = limit
        self._decoder = ChunkedDecoder(MAX_SMALL_CHUNKS) if chunked else None
        if length is not None and length > limit:
            raise GateError(413, f"The request body is larger than {limit} bytes.")

    def read_body(self) -> bool:
        """Take the body out of the buffer; True when it is whole. Raises `GateError` (400, 413)."""
        buffer, at, decoder = self.buffer, self.at, self._decoder
        if decoder is None:
            left = self._left
            if not left:
                return True
            end = at + left
            piece = buffer if not at and len(buffer) <= left else buffer[at:end]
            self.at = at + len(piece)
            self._left = left - len(piece)
            if piece:
                self._take(piece, last=not self._left)
            return not self._left
        data = b"" if decoder.done else buffer[at : at + TURN_BYTES]
        if not data:
            return decoder.done
        payload = decoder.feed(data)
        self.at = at + len(data) - len(decoder.surplus)
        if payload:
            self._left += len(payload)
            if self._left > self._limit:
                raise GateError(413, "The request body is too large.")
            self._take(payload, last=decoder.done)
        return decoder.done

    def body(self) -> list[bytes]:
        """The pieces of the body that is whole; nothing of it is left here."""
        self._flush_small()
        pieces = self._pieces
        self.drop_body()
        return pieces

    def drop_body(self) -> None:
        """Drop a body that is of no use any more."""
        self.held = 0
        self._pieces = []
        self._small.clear()
        self.form = None

    def _take(self, piece: bytes, *, last: bool) -> None:
        """Keep a piece of the body; until the `last` one they count as held. Raises `GateError`."""
        if self.form is not None:
            self.form.feed(piece)
        if len(piece) < _SMALL_PIECE and (not last or self._small):
            self._small += piece
            if len(self._small) >= TURN_BYTES:
                self._flush_small()
        else:
            self._flush_small()
            self._pieces.append(piece)
        if not last:
            self.held += len(piece)

    def _flush_small(self) -> None:
        if self._small:
            self._pieces.append(bytes(self._small))
            self._small.clear()
