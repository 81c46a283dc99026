"""An engine that does what a test tells it: scripted bytes on real sockets, and a record of what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from helpers import HANG_S

Script: TypeAlias = Callable[["Visit"], Awaitable[None]]

PLAIN_BODY = (
    b'{"id":"cmpl-1","choices":[{"text":"hi","finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":2}}'
)
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
TOKEN = b'data: {"choices":[{"index":0,"text":"tok"}]}\n\n'
#: The last token of an answer; one that never has a finish reason is odd.
LAST_TOKEN = b'data: {"choices":[{"index":0,"text":"tok","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def plain(body: bytes = PLAIN_BODY, status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
    return head % (status, len(body), extra) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"
STREAM = SSE_HEAD + chunk(TOKEN) + chunk(TOKEN) + chunk(USAGE) + chunk(DONE) + LAST


class Visit:
    """One request at the upstream: what it sent, and the means to answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes):
        self.reader, self.writer, self.head, self.body = reader, writer, head, body
        #: Set when the proxy closed the connection while the request was being answered.
        self.left = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until_left(self) -> None:
        """Wait for the proxy to close."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b""
        self.left.set()

    def reset(self) -> None:
        self.writer.transport.abort()


class Upstream:
    """Answers the n-th request with the n-th script, and further ones with the last; with `tls`, over TLS."""

    def __init__(self, *scripts: Script | bytes, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.scripts = list(scripts) or [plain()]
        self.visits: list[Visit] = []
        self.connections = 0
        self.open = 0
        self.arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def visit(self, number: int = 1) -> Visit:
        """The n-th request, when it has come."""
        async with asyncio.timeout(HANG_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.visits) >= number)
        return self.visits[number - 1]

    async def closed(self) -> None:
        """Wait until the proxy holds no connection here."""
        async with asyncio.timeout(HANG_S), self.arrived:
            await self.arrived.wait_for(lambda: self.open == 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        try:
            while True:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                visit = Visit(reader, writer, head, body)
                script = self.scripts[min(len(self.visits), len(self.scripts) - 1)]
                self.visits.append(visit)
                async with self.arrived:
                    self.arrived.notify_all()
                if isinstance(script, bytes):
                    visit.send(script)
                else:
                    await script(visit)
                if writer.is_closing():
                    return
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            self.open -= 1
            with contextlib.suppress(asyncio.CancelledError):
                async with self.arrived:
                    self.arrived.notify_all()


def closing(data: bytes) -> Script:
    """Send this, then close."""

    async def script(visit: Visit) -> None:
        visit.send(data)
        visit.writer.close()

    return script


def holding(data: bytes = b"") -> Script:
    """Send this, then stay until the proxy leaves."""

    async def script(visit: Visit) -> None:
        visit.send(data)
        await visit.until_left()
        visit.writer.close()

    return script


def resetting(data: bytes = b"") -> Script:
    """Send this, then reset the connection."""

    async def script(visit: Visit) -> None:
        visit.send(data)
        await visit.writer.drain()
        visit.reset()

    return script
