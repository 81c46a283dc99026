"""A server that does nothing but answer: what a round trip costs on this machine at this moment.

A bare asyncio server in a process of its own, of the same priority as everything else in the bench;
a time of the proxy says little where this one's is no better.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from time import perf_counter

import uvloop


class _Answer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def round_trips(every_s: float = 0.1) -> AsyncIterator[list[float]]:
    """The times of round trips, seconds, each on a connection of its own, one after the other."""
    process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, __file__], stdout=subprocess.PIPE, text=True
    )
    took: list[float] = []
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))

        async def ask() -> None:
            while True:
                began = perf_counter()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"hello")
                await reader.readexactly(5)
                took.append(perf_counter() - began)
                writer.close()
                await asyncio.sleep(every_s)

        asking = asyncio.create_task(ask())
        yield took
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    uvloop.run(_serve())
