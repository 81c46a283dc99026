"""A Valkey server, or a client that publishes there, sends no message: the connection ends within bounds."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from helpers import HANG_S

from hetlb.options.peers.redis_transport import RedisTransport

SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
MESSAGE = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n"
#: Bytes that a server sends at most, and that may be held of them.
SENT, HELD = 64 << 20, 12 << 20


def endless(unit: bytes) -> bytes:
    return unit * ((1 << 20) // len(unit))


#: Bytes after the subscription, and bytes that then come without end.
REPLIES = {
    "a long message": (MESSAGE + b"$99999999\r\n", endless(b"x")),
    "a length of many digits": (MESSAGE + b"$" + b"9" * 5000 + b"\r\n", endless(b"x")),
    "no length": (MESSAGE + b"$1_0\r\n", endless(b"x")),
    "a length below none": (MESSAGE + b"$-1\r\n", endless(b"x")),
    "fewer than no items": (b"*-5\r\n", endless(MESSAGE + b"$1\r\nx\r\n")),
    "a sign": (b"*+3\r\n", endless(b"x")),
    "digits of another script": (MESSAGE + "$\u0663\r\n".encode(), endless(b"x")),
    "a blank before a length": (MESSAGE + b"$ 1\r\n", endless(b"x")),
    "a number of 5,000 digits": (
        MESSAGE.replace(b"*3", b"*4") + b"$1\r\nx\r\n:" + b"7" * 5000 + b"\r\n",
        endless(b"x"),
    ),
    "a negative number": (MESSAGE.replace(b"*3", b"*4") + b"$1\r\nx\r\n:-7\r\n", endless(b"x")),
    "many items": (b"*99999999\r\n", endless(b":1\r\n")),
    "items in items": (b"", endless(b"*1\r\n")),
    "a line without end": (b"+", endless(b"x")),
    "no reply": (b"", endless(b"\0\r\n")),
    "a number without end": (b":", endless(b"7")),
}


class Server:
    """It answers a subscription, and goes on with a reply."""

    def __init__(self, before: bytes, unit: bytes) -> None:
        self._before, self._unit = before, unit
        self.sent = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await reader.read(1 << 16)
                if not asked:
                    return
                for _ in range(asked.count(b"*") - asked.count(b"SUBSCRIBE")):
                    writer.write(b"+OK\r\n")
                if b"SUBSCRIBE" in asked:
                    writer.write(SUBSCRIBED + self._before)
                    while self.sent < SENT:
                        writer.write(self._unit)
                        self.sent += len(self._unit)
                        await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("name", REPLIES)
async def test_a_reply_without_end_ends_the_connection(name: str) -> None:
    served = Server(*REPLIES[name])
    server = await asyncio.start_server(served, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = RedisTransport(f"redis://127.0.0.1:{port}", "c", 30.0)
    got: list[object] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(Exception, match=r".+"):
            async with asyncio.timeout(HANG_S):
                await transport.run(lambda: None, got.append)
        held = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        await transport.close()
        server.close()
        await server.wait_closed()
    assert not got
    assert served.sent < SENT
    assert held < HELD
