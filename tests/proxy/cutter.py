"""A wire to an engine that is cut, or goes silent, after a given number of bytes of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import NamedTuple

#: End of an answer of a head alone.
AFTER_HEAD = -1


class Cut(NamedTuple):
    """End of an answer, in bytes with its head or `AFTER_HEAD`, and its kind: `fin`, `rst` or `hang`.

    With `in_events` it comes behind this number of events.
    """

    after: int
    how: str
    in_events: bool = False


def _before(cut: Cut, data: bytes, left: int) -> tuple[int, int]:
    """Return the bytes of a read that come before a cut, and what is left until it."""
    if not cut.in_events:
        return left, left - len(data)
    ends = [found.end() for found in re.finditer(b"\n\n", data)]
    return (ends[left - 1], 0) if left <= len(ends) else (len(data), left - len(ends))


class Cutter:
    """Passes on what an engine at `port` says; answers to POST are cut in the order of `cuts`."""

    def __init__(self, port: int, cuts: list[Cut]) -> None:
        self._port = port
        self._cuts = cuts
        self.bodies: list[bytes] = []
        #: Answers that were cut.
        self.cut = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        engine_writer: asyncio.StreamWriter | None = None
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._port)
            posted = asyncio.Event()
            asked = asyncio.create_task(self._ask(reader, engine_writer, posted))
            self._tasks.add(asked)
            left, cut = -1, None
            while data := await engine_reader.read(65536):
                if left < 0 and posted.is_set() and self._cuts:
                    cut = self._cuts.pop(0)
                    left = data.index(b"\r\n\r\n") + 4 if cut.after == AFTER_HEAD else cut.after
                if cut is not None:
                    size, left = _before(cut, data, left)
                    writer.write(data[:size])
                    if left <= 0:
                        self.cut += 1
                        await self._end(reader, writer, cut.how)
                        return
                else:
                    writer.write(data)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            for each in (writer, engine_writer):
                if each is not None:
                    each.close()

    async def _end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if how == "rst":
            writer.transport.abort()
        elif how == "hang":
            await asyncio.Event().wait()

    async def _ask(
        self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, posted: asyncio.Event
    ) -> None:
        """Pass on what is asked; `posted`: a POST was, and no probe, which has a connection of its own."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [each for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                if head.startswith(b"POST"):
                    self.bodies.append(head + body)
                    posted.set()
                engine.write(head + body)
        engine.close()
