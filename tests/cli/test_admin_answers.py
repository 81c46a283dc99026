"""Answers at the address of `--admin` that have no end: a command ends with one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hetlb.cli import adminclient
from hetlb.cli.adminclient import AdminClient
from hetlb.errors import InputError

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 9\r\n\r\n{}")


@pytest.mark.parametrize(
    ("answer", "why"), [(endless, "larger than 1 MiB"), (dripping, "timed out"), (cut, "more expected")]
)
async def test_an_answer_without_end_ends_the_command(
    answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adminclient, "MOST_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(adminclient, "TIMEOUT_S", 0.5 if answer is dripping else 60.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = AdminClient(f"http://127.0.0.1:{port}")
        with pytest.raises(InputError, match=why):
            await asyncio.to_thread(client.document, "/v1/fleet")
