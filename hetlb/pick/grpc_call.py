"""Calls of gRPC over `http2`: messages with their length before them, and a status at the end.

A call is a stream whose subclass takes messages (`on_message`) and the end of the client's side (`on_end`).
Messages are not compressed: a client that compresses is told so (UNIMPLEMENTED).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from mypy_extensions import mypyc_attr

from hetlb.pick.http2 import Fields, Http2Connection, Http2Stream

#: Status codes of gRPC that are used here.
OK: Final = 0
INVALID_ARGUMENT: Final = 3
NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13


def _literal(name: bytes, value: bytes) -> bytes:
    """A field of HPACK that uses no table. Both are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_HEADERS: Final = b"\x88" + _literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
_OK: Final = _literal(b"grpc-status", b"0")
_NOT_GRPC: Final = _literal(b":status", b"415")


@mypyc_attr(allow_interpreted_subclasses=True)
class GrpcCall(Http2Stream):
    """A call. `largest`: bytes of a message, at most."""

    def __init__(self, connection: Http2Connection, number: int, largest: int) -> None:
        super().__init__(connection, number)
        self._largest = largest
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 5
        self._begun = False
        #: True once the status was given.
        self.finished = False

    @property
    def unread(self) -> int:
        """Bytes of a message that is not whole."""
        return self._have

    def on_message(self, data: bytes) -> None:
        """A message came."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The client sends nothing more."""
        raise NotImplementedError

    def on_data(self, piece: bytes, end: bool) -> None:
        if self.finished:
            return
        size = len(piece)
        self._have += size
        if self._parts or self._have < self._need:
            if size:
                self._parts.append(piece)
            if self._have >= self._need:
                piece = b"".join(self._parts)
                self._parts = []
                self._messages(piece)
        else:
            self._messages(piece)
        if end and not self.finished:
            if self._have:
                self.finish(INTERNAL, "the stream ends within a message")
            self.on_end()

    def _messages(self, data: bytes) -> None:
        """Take every whole message; the rest waits for more."""
        at = 0
        size = len(data)
        self._need = 5
        while size - at >= 5:
            length = data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4]
            if data[at]:
                self.finish(UNIMPLEMENTED, "compressed messages are not taken")
                self.on_end()
                return
            if length > self._largest:
                self.finish(RESOURCE_EXHAUSTED, f"a message is larger than {self._largest} bytes")
                self.on_end()
                return
            begin = at + 5
            end = begin + length
            if end > size:
                self._need = length + 5
                break
            at = end
            self.on_message(data[begin:end])
            if self.finished or self.over:
                return
        self._have = size - at
        if at < size:
            self._parts.append(data[at:])

    def send(self, message: bytes) -> None:
        """Send a message."""
        connection = self.connection
        if not self._begun:
            self._begun = True
            connection.send_headers(self, _HEADERS)
        connection.send_data(self, len(message).to_bytes(5, "big") + message)

    def finish(self, status: int = OK, detail: str = "") -> None:
        """End the call."""
        if self.finished:
            return
        self.finished = True
        trailers = _OK
        if status:
            said = quote(detail, safe=" ,:;/()").encode("ascii")[:100]
            trailers = _literal(b"grpc-status", b"%d" % status) + _literal(b"grpc-message", said)
        if not self._begun:
            self._begun = True
            trailers = _HEADERS + trailers  # a response of trailers alone
        self.connection.send_end(self, trailers)


class _Refused(Http2Stream):
    """A request that is no call: it was answered, and what else comes of it is not read."""

    def on_data(self, piece: bytes, end: bool) -> None:
        """Nothing to do."""

    def on_reset(self) -> None:
        """Nothing to do."""


class _Unknown(GrpcCall):
    """A call of a method that is not there."""

    def on_message(self, data: bytes) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Nothing to do."""

    def on_reset(self) -> None:
        """Nothing to do."""


class Methods:
    """Methods by path: each makes the call of a stream."""

    def __init__(self, methods: dict[bytes, Callable[[Http2Connection, int], GrpcCall]]) -> None:
        self._methods = methods

    def accept(self, connection: Http2Connection, number: int, fields: Fields) -> Http2Stream:
        """The call of a request."""
        path = kind = method = b""
        for name, value in fields:
            if name == b":path":
                path = value
            elif name == b"content-type":
                kind = value
            elif name == b":method":
                method = value
        if method != b"POST" or not kind.startswith(b"application/grpc"):
            refused = _Refused(connection, number)
            connection.send_end(refused, _NOT_GRPC)
            return refused
        make = self._methods.get(path)
        if make is None:
            unknown = _Unknown(connection, number, 0)
            unknown.finish(UNIMPLEMENTED, "unknown method")
            return unknown
        return make(connection, number)
