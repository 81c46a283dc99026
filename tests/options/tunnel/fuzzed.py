"""Either side of a tunnel, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

from fuzz.costs import KEPT, READ, Make, Reader, pieces

from hetlb.balancer.clients.model_names import ModelNames
from hetlb.options.tunnel.realtime import accept_of

UPGRADE = (
    b"GET /v1/realtime?model=alias HTTP/1.1\r\nhost: p\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-accept: %b\r\n\r\n" % accept_of(b"dGhlIHNhbXBsZSBub25jZQ==")
)


def tunnel(*, client: bool, size: int = READ) -> Reader:
    """Bytes of either side of a tunnel whose client asked for an alias, in reads of `size` bytes."""

    def read(data: bytes) -> None:
        KEPT.proxy.server.router.names = ModelNames({"alias": "m"})
        asker, end = KEPT.engine(UPGRADE)
        loop = KEPT.proxy.loop
        end.send(AGREED)
        loop.settle(4)
        for piece in pieces(data, size):
            (asker if client else end).send(piece)
            loop.settle(1)
        loop.rest()
        KEPT.done(asker, end)
        KEPT.proxy.server.router.names = None

    return read


PREFIXES: tuple[tuple[Reader, bytes], ...] = ((tunnel(client=True), b""), (tunnel(client=False), b""))
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "a tunnel's client, byte by byte": (tunnel(client=True, size=1), bytes, 2 << 10),
    "a tunnel's engine, byte by byte": (tunnel(client=False, size=1), bytes, 2 << 10),
}  # fmt: skip
