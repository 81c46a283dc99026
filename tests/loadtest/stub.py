"""A scripted OpenAI-compatible server on a real socket: the script decides every byte of every answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers import HANG_S

Script = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request that has arrived in full."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    first_of_connection: bool
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def head(self, status: int = 200, **headers: str) -> None:
        """Begin a chunked answer."""
        lines = [f"HTTP/1.1 {status} X", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        """One piece of the answer's body."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def event(self, text: str | None = None, **more: Any) -> None:
        """One event, with a choice of this text or none."""
        choices = [] if text is None else [{"index": 0, "text": text}]
        await self.chunk(b"data: %b\n\n" % json.dumps({"choices": choices, **more}).encode())

    async def end(self) -> None:
        """The end of a body."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def answer(self, instance: str = "") -> None:
        """A whole, good answer of as many tokens as were asked for."""
        await self.head(200, **({"x_hetlb_instance": instance} if instance else {}))
        tokens = self.body["max_tokens"]
        usage = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": tokens}
        if self.body["stream"]:
            for number in range(tokens):
                await self.event(f" t{number}")
            await self.event(usage=usage)
            await self.chunk(b"data: [DONE]\n\n")
        else:
            choices = [{"index": 0, "text": "words"}]
            await self.chunk(json.dumps({"choices": choices, "usage": usage}).encode())
        await self.end()

    def abort(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()

    async def client_gone(self) -> None:
        """Wait until the client closes the connection."""
        while await self._reader.read(1024):
            pass


@dataclass
class Stub:
    """The server: where it is and what it has seen."""

    script: Script
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    connections: int = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        first = True
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request_line, *lines = head.decode().split("\r\n")[:-2]
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                }
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                path = request_line.split()[1]
                call = Call(len(self.calls), path, headers, body, first, reader, writer)
                first = False
                self.calls.append(call)
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections -= 1
            writer.close()


@asynccontextmanager
async def stub(script: Script) -> AsyncIterator[Stub]:
    """A server that runs `script` for every request; afterwards no connection may be left."""
    made = Stub(script)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(made._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
        server.close()
        await asyncio.wait_for(asyncio.gather(*tasks), HANG_S)  # the client closes what it opened
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert made.connections == 0
