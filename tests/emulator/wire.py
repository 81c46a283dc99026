"""A raw HTTP/1.1 client for the tests: what stands on the wire, unframed but not interpreted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Response:
    """One response. `chunks` are the parts of a chunked body; `body` is the whole."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the events of a stream; "[DONE]" as text."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """A request; `body` is bytes or becomes JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "localhost"}
    if body is not None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> Client:
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        self.writer.write(request_bytes(method, path, body, headers))

    async def head(self) -> Response:
        """Status and headers of the next response."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return Response(int(first.split(" ")[1]), headers)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" at its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def receive(self, *, to_head: bool = False) -> Response:
        """The next response, whole."""
        response = await self.head()
        if to_head:
            return response
        if response.headers.get("transfer-encoding") == "chunked":
            while data := await self.chunk():
                response.chunks.append(data)
            response.body = b"".join(response.chunks)
        else:
            response.body = await self.reader.readexactly(int(response.headers["content-length"]))
        return response

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        """Send one request and read its response."""
        self.send(method, path, body, headers)
        return await self.receive(to_head=method == "HEAD")


async def ask(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Response:
    """One request on a connection of its own."""
    async with await Client.connect(url) as client:
        return await client.ask(method, path, body, headers)
