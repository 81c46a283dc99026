"""A client that takes nothing for granted: raw requests out, and an answer with the way in which it ended.

`end` tells a clean end from a cut one, as a client must be able to: `clean` (the framing was
finished), `closed` (delimited by the close alone, nothing told that it is whole), `cut` (the connection ended
inside), `reset`. Nothing is interpreted but the framing.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from helpers import HANG_S

PATH = "/v1/completions"


def body_of(label: str, *, stream: bool = True, **fields: Any) -> bytes:
    """A completion whose prompt is the request's own id."""
    fields = {"model": "m", "prompt": f"secret-{label}", "stream": stream, **fields}
    return json.dumps(fields, separators=(",", ":")).encode()


def request(
    label: str, body: bytes, *headers: str, path: str = PATH, method: str = "POST", version: str = "1.1"
) -> bytes:
    """One request with a Content-Length and an id."""
    lines = [f"{method} {path} HTTP/{version}", "Host: proxy", f"X-Request-Id: {label}",
             "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Answer:
    """What came back."""

    def __init__(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status = status
        self.headers = headers
        self.body = b""
        self.end = "cut"
        #: The loop's clock when the head came.
        self.first_byte_at = 0.0

    def header(self, name: str) -> str | None:
        """The value of a header that came at most once."""
        found = [value for key, value in self.headers if key == name]
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None

    @property
    def events(self) -> list[bytes]:
        """The whole events of a stream, without comments."""
        return [event for event in self.body.split(b"\n\n")[:-1] if not event.startswith(b":")]

    @property
    def error(self) -> dict[str, Any]:
        """The error document: of the body, or of the last event of a stream."""
        text = self.body if self.body.startswith(b"{") else self.events[-1].removeprefix(b"data: ")
        try:
            error: dict[str, Any] = json.loads(text)["error"]
        except (ValueError, KeyError) as missing:
            raise AssertionError(f"expected an error at the end, got {text!r}") from missing
        return error

    @property
    def done(self) -> bool:
        """Whether the stream said so."""
        return b"data: [DONE]" in self.events

    def tokens(self, label: str) -> int:
        """How many of this request's own tokens came, in order; anything else is a failure."""
        count = 0
        for event in self.events:
            document = event.removeprefix(b"data: ")
            if document == b"[DONE]" or b'"error"' in document:
                continue
            try:
                text = json.loads(document)["choices"][0]["text"]
            except ValueError:
                break  # half an event, where the engine was cut
            assert text == f"{label}/{count} ", f"expected token {count} of {label}, got {text!r}"
            count += 1
        return count

    @property
    def honest(self) -> bool:
        """Whether a broken stream cannot be taken for a complete one: an error event and no clean end."""
        return self.end in ("cut", "reset") and not self.done and "message" in self.error


class Client:
    """One connection to the proxy."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.leave()

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)

    def leave(self) -> None:
        """Go at once."""
        self.writer.transport.abort()

    async def answer(self, *, to_head: bool = False) -> Answer:
        """The next final answer, or an error where none comes."""
        async with asyncio.timeout(HANG_S):
            while True:
                raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = raw[:-4].split("\r\n")
                headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
                answer = Answer(int(first.split(" ")[1]), headers)
                if answer.status >= 200:
                    break
            answer.first_byte_at = asyncio.get_running_loop().time()
            if not to_head:
                await self._body(answer)
            return answer

    async def _body(self, answer: Answer) -> None:
        length = answer.header("content-length")
        chunked = answer.header("transfer-encoding") == "chunked"
        assert not (length and chunked), "both framings in one answer"
        try:
            if length is not None:
                await self._take(answer, int(length))
                answer.end = "clean"
            elif chunked:
                while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
                    await self._take(answer, size)
                    assert await self.reader.readexactly(2) == b"\r\n"
                assert await self.reader.readexactly(2) == b"\r\n"
                answer.end = "clean"
            else:
                answer.body = await self.reader.read()
                answer.end = "closed"
        except asyncio.IncompleteReadError:
            answer.end = "cut"
        except ConnectionError:
            answer.end = "reset"

    async def _take(self, answer: Answer, size: int) -> None:
        while size:
            piece = await self.reader.read(size)
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            answer.body += piece
            size -= len(piece)

    async def first_token(self) -> Answer:
        """The head and the first chunk of a stream; read on with `rest`."""
        answer = await self.answer(to_head=True)
        if answer.header("transfer-encoding") != "chunked":
            await self.rest(answer)
            raise AssertionError(f"expected a stream, got {answer.status} {answer.body!r}")
        async with asyncio.timeout(HANG_S):
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            answer.body = (await self.reader.readexactly(size + 2))[:-2]
        return answer

    async def rest(self, answer: Answer) -> Answer:
        """The rest of a stream of which some was read."""
        async with asyncio.timeout(HANG_S):
            await self._body(answer)
        return answer

    async def eof(self) -> bytes:
        """Whatever comes until the proxy closes."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


async def get(
    port: int, path: str, method: str = "GET", body: bytes = b"", host: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Ask an admin listener; a connection of its own, so that none is left."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 26)
    try:
        lines = [f"{method} {path} HTTP/1.0", f"Host: {host}", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        writer.write(head.encode() + body)
        async with asyncio.timeout(HANG_S):
            raw = await reader.read()
    finally:
        writer.close()
    head_bytes, _, content = raw.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), content
