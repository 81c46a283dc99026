"""Requests from the bytes of one connection, without sockets: a head, then its whole body, one at a time."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.http.http1 import MAX_SMALL_CHUNKS, ChunkedDecoder, GateError, head_end

#: Bytes of a chunked body decoded at once.
TURN_BYTES: Final = 64 << 10
#: Maximum number of empty lines before a request: RFC 9112, 2.2 asks to ignore at least one.
MAX_BLANK_LINES: Final = 8


class RequestReader:
    """Reads the requests of one connection.

    `buffer` holds what came and is to be read, from `at` on; its first `searched` bytes are part of a head.
    `held` bytes of a body that is not whole are kept here.
    """

    __slots__ = (
        "_begun", "_blank_lines", "_decoder", "_left", "_limit", "_whole", "at", "buffer", "held", "searched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.buffer = b""
        self.at = 0
        self.searched = 0
        self._blank_lines = 0
        self._decoder: ChunkedDecoder | None = None
        #: Bytes of the body that are to come; of a chunked one, bytes that came.
        self._left = 0
        self._limit = 0
        #: A body that came in one piece; the pieces so far of another.
        self._whole = b""
        self._begun = bytearray()
        self.held = 0

    def feed(self, data: bytes) -> None:
        self.buffer = self.buffer[self.at :] + data if self.at < len(self.buffer) else data
        self.at = 0

    @property
    def unread(self) -> bool:
        """True if something is there that can be read on."""
        return len(self.buffer) - self.at > self.searched

    @property
    def begun(self) -> bool:
        """True if part of a head, or an empty line before one, is there."""
        return self.searched > 0 or self._blank_lines > 0

    @property
    def whole(self) -> bool:
        """True if no more of a body is to come."""
        return self._decoder.done if self._decoder is not None else not self._left

    def find_head(self) -> bytes:
        """Return the next head, b"" if it is not whole. Raises `GateError` (400, 431)."""
        buffer, at = self.buffer, self.at
        while buffer[at : at + 2] == b"\r\n":
            self._blank_lines += 1
            if self._blank_lines > MAX_BLANK_LINES:
                raise GateError(400, f"More than {MAX_BLANK_LINES} empty lines stand before the request.")
            at += 2
            self.searched = 0
        self.at = at
        if at >= len(buffer):
            return b""
        if not 65 <= buffer[at] <= 90 and buffer[at:] != b"\r":
            raise GateError(400, "This is not the beginning of an HTTP request.")  # TLS, say
        end = head_end(buffer, begin=at, seen=self.searched)
        if not end:
            self.searched = len(buffer) - at
            self.buffer, self.at = buffer[at:], 0  # read bytes are not kept
            return b""
        self.at = end
        self.searched = self._blank_lines = 0
        return buffer[at:end]

    def begin_body(self, length: int | None, chunked: bool, limit: int) -> None:
        """Expect a body of at most `limit` bytes. Raises `GateError` (413)."""
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

    def body(self) -> bytes:
        """Return the whole body, which is not kept here."""
        body = bytes(self._begun) if self._begun else self._whole
        self.drop_body()
        return body

    def drop_body(self) -> None:
        self.held = 0
        self._whole = b""
        self._begun.clear()

    def _take(self, piece: bytes, *, last: bool) -> None:
        """Keep a piece of the body; until the `last` one they count as held."""
        if last and not self._begun:
            self._whole = piece
        else:
            self._begun += piece
        if not last:
            self.held += len(piece)
