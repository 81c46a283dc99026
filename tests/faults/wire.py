"""A TCP proxy that spoils a connection: the faults of a network between two processes that are well.

The toxics are toxiproxy's, by its names. `latency_s` holds every piece back, `bandwidth` is in bytes
a second, `slicer` cuts pieces to that many bytes, `limit_data` closes after that many bytes towards the
client, `slow_close_s` delays the close, `timeout` swallows everything and stays open, `reset_peer` answers
with RST. They hold for the direction from the server to the client but for `latency_s` and `timeout`, which
hold for both; they may be changed at any time and apply to what comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, replace


@dataclass
class Toxics:
    """What happens to the bytes; the default is nothing."""

    latency_s: float = 0.0
    bandwidth: float | None = None
    slicer: int | None = None
    limit_data: int | None = None
    slow_close_s: float = 0.0
    timeout: bool = False
    reset_peer: bool = False


class FaultWire:
    """A listener in front of one address."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self.toxics = Toxics()
        self.port = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def spoil(self, **toxics: object) -> None:
        """Change what happens to what comes next."""
        self.toxics = replace(self.toxics, **toxics)  # type: ignore[arg-type]

    async def __aenter__(self) -> FaultWire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        there: asyncio.StreamWriter | None = None
        try:
            if self.toxics.reset_peer:
                _reset(writer)
                return
            answers, there = await asyncio.open_connection(*self._to)
            forth = asyncio.create_task(self._pump(reader, there, whole=True))
            back = asyncio.create_task(self._pump(answers, writer, whole=False))
            try:
                # Either side's end is both sides' end: nothing here speaks with half of a connection.
                await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
            finally:
                forth.cancel()
                back.cancel()
                await asyncio.gather(forth, back, return_exceptions=True)
            if self.toxics.slow_close_s:
                await asyncio.sleep(self.toxics.slow_close_s)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            self._tasks.discard(task)
            if there is not None:
                there.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, whole: bool) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await source.read(64 << 10):
                toxics = self.toxics
                if toxics.timeout:
                    continue
                if toxics.latency_s:
                    await asyncio.sleep(toxics.latency_s)
                if whole:
                    to.write(data)
                    await to.drain()
                    continue
                if toxics.reset_peer:
                    _reset(to)
                    return
                step = toxics.slicer or len(data)
                for at in range(0, len(data), step):
                    piece = data[at : at + step]
                    if toxics.limit_data is not None:
                        piece = piece[: max(0, toxics.limit_data - passed)]
                    to.write(piece)
                    await to.drain()
                    passed += len(piece)
                    if toxics.limit_data is not None and passed >= toxics.limit_data:
                        return
                    await asyncio.sleep(len(piece) / toxics.bandwidth if toxics.bandwidth else 0)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


class BlackHole:
    """An address that answers no SYN: a listener whose backlog is full and that does not accept.

    Needs neither rights nor a network namespace: Linux drops a SYN for which there is no room.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._fillers: list[socket.socket] = []

    @property
    def url(self) -> str:
        """Address without an answer."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> BlackHole:
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)
        return self

    def __exit__(self, *exception: object) -> None:
        for filler in self._fillers:
            filler.close()
        self._listener.close()
