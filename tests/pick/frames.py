"""A connection of HTTP/2 in memory: calls that send back what they get, and frames written by hand."""

from __future__ import annotations

import functools

import hpack

from hetlb.pick.grpc_call import GrpcCall, Methods
from hetlb.pick.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Http2Connection,
)

PATH = b"/test.Echo/Echo"
LARGEST = 4 << 20


class Echo(GrpcCall):
    """Sends back each message."""

    def __init__(self, connection: Http2Connection, number: int, peer: Peer) -> None:
        super().__init__(connection, number, LARGEST)
        self.peer = peer
        self.resets = 0
        peer.calls.append(self)

    def on_message(self, data: bytes) -> None:
        self.peer.messages.append(data)
        self.send(data)

    def on_end(self) -> None:
        self.finish()

    def on_reset(self) -> None:
        self.resets += 1


class Peer:
    """A server in memory, and what it wrote."""

    def __init__(self, most_pending: int = 64 << 20) -> None:
        self.calls: list[Echo] = []
        self.messages: list[bytes] = []
        self.woken = 0
        methods = Methods({PATH: lambda connection, number: Echo(connection, number, self)})
        self.http2 = Http2Connection(methods.accept, self._wake, most_pending)
        self.written: list[tuple[int, int, int, bytes]] = frames(self.http2.take())

    def _wake(self) -> None:
        self.woken += 1

    def send(self, *pieces: bytes, now: float = 0.0) -> list[tuple[int, int, int, bytes]]:
        """Give these reads to the server; the frames that it wrote then."""
        found = []
        for piece in pieces:
            self.http2.receive(piece, now)
            found += frames(self.http2.take())
        self.written += found
        return found

    def greet(self) -> Peer:
        self.send(PREFACE + frame(SETTINGS))
        return self

    @property
    def goaway(self) -> int | None:
        """Error code of the server's GOAWAY, None where it sent none."""
        for kind, _, _, payload in self.written:
            if kind == GOAWAY:
                return int.from_bytes(payload[4:8], "big")
        return None

    @property
    def resets(self) -> dict[int, int]:
        """Error codes of the streams that the server reset."""
        return {n: int.from_bytes(body, "big") for kind, _, n, body in self.written if kind == RST_STREAM}


def frame(kind: int, flags: int = 0, number: int = 0, payload: bytes = b"") -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number.to_bytes(4, "big"), payload)


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each frame."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        number = int.from_bytes(data[at + 5 : at + 9], "big")
        found.append((data[at + 3], data[at + 4], number, data[at + 9 : at + 9 + size]))
        at += 9 + size
    assert at == len(data)
    return found


@functools.cache
def block(*more: tuple[bytes, bytes], **changed: bytes | None) -> bytes:
    """A header block of a call; `changed` by the names of pseudo-fields, None to leave one out."""
    pseudo: dict[str, bytes | None] = {"method": b"POST", "scheme": b"http", "path": PATH, **changed}
    fields = [(b":" + name.encode(), value) for name, value in pseudo.items() if value is not None]
    fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]
    return bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*each) for each in fields]))


def opened(number: int = 1, *, end: bool = False) -> bytes:
    """HEADERS of a call."""
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), number, block())


def message(data: bytes) -> bytes:
    """A message of gRPC."""
    return b"\0" + len(data).to_bytes(4, "big") + data


def data(number: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, number, payload)
