"""Rows W: WebSocket sessions on `/v1/realtime`, and either side's ways to end them badly."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from faults.cases import PATIENCE_S, case
from faults.client_cases import gone_in
from faults.engine import Visit, mode
from faults.rig import Rig
from faults.upstream_cases import QUIET
from helpers import HANG_S
from proxy.frames import frame
from proxy.upstreams import plain
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hetlb.options.tunnel.realtime import accept_of


async def agree(visit: Visit) -> None:
    key = visit.headers["sec-websocket-key"].encode()
    await visit.send(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % accept_of(key) + frame(1, b'{"type":"session.created"}')
    )
    await visit.passed()


@mode("session")
async def _session(visit: Visit) -> None:
    """Agree, and wait for the client to leave."""
    await agree(visit)
    await visit.until_left()
    visit.close()


@mode("session-reset")
async def _session_reset(visit: Visit) -> None:
    await agree(visit)
    visit.reset()


@mode("session-cut")
async def _session_cut(visit: Visit) -> None:
    """Close in the middle of a frame."""
    await agree(visit)
    await visit.send(frame(1, b"half a frame")[:6])
    await visit.passed()
    visit.close()


@mode("session-flood")
async def _session_flood(visit: Visit) -> None:
    await agree(visit)
    while not visit.left.is_set():
        await visit.send(frame(1, b"x" * 60_000))
    visit.close()


@mode("no-session")
async def _no_session(visit: Visit) -> None:
    await visit.send(plain(b'{"detail":"Forbidden"}', b"403 Forbidden"))


@mode("session-unproven")
async def _session_unproven(visit: Visit) -> None:
    """A 101 that does not answer the client's key."""
    await visit.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n")
    await visit.until_left()


def session(rig: Rig) -> connect:
    return connect(
        f"ws://127.0.0.1:{rig.port}/v1/realtime?model=m",
        additional_headers={"x-request-id": "q"}, ping_interval=None, close_timeout=0.1,
        open_timeout=HANG_S,
    )  # fmt: skip


async def until_closed(client: ClientConnection) -> None:
    while True:
        await client.recv()


async def closed_with(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        await until_closed(client)
    return 1006 if closed.value.rcvd is None else closed.value.rcvd.code


@case("W1", "in-the-queue", outcomes={"client_gone": 1}, modes=("session",))
async def in_the_queue(rig: Rig) -> None:
    await rig.set_state("i0", "drain")
    asking = asyncio.create_task(session(rig).__aenter__())
    await rig.queued(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await rig.queued(0)
    await gone_in(rig, "queue")
    assert not rig.engine.visits
    await rig.set_state("i0", "ready")


@case("W1", "while-it-talks", outcomes={"client_gone": 1}, modes=("session",))
async def while_it_talks(rig: Rig) -> None:
    client = await session(rig)
    await client.recv()
    visit = await rig.engine.visit()
    client.transport.abort()
    await rig.engine.until(visit.left.is_set)
    await gone_in(rig, "answer")


@case("W2", "reset", outcomes={"broken_stream": 1}, modes=("session-reset",), scrape=QUIET)
async def resets(rig: Rig) -> None:
    async with session(rig) as client:
        assert await closed_with(client) == 1006


@case("W2", "inside-a-frame", outcomes={"ok": 1}, modes=("session-cut",), scrape=QUIET)
async def cut_inside_a_frame(rig: Rig) -> None:
    async with session(rig) as client:
        assert await closed_with(client) == 1006


@case("W2", "silent", outcomes={"client_gone": 1}, modes=("session",), proxy={"idle_timeout_s": PATIENCE_S})
async def silent(rig: Rig) -> None:
    async with session(rig) as client:
        assert await closed_with(client) == 1006
    visit = await rig.engine.visit()
    await rig.engine.until(visit.left.is_set)


@case("W3", "answers-403", outcomes={"upstream_refused": 1}, modes=("no-session",))
async def refuses(rig: Rig) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await session(rig)
    assert refused.value.response.status_code == 403
    assert await rig.health("i0") == "up"


@case("W3", "unproven-101", outcomes={"no_response": 1}, modes=("session-unproven",))
async def unproven(rig: Rig) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await session(rig)
    assert refused.value.response.status_code == 502


@case(
    "W4", "client-does-not-read", outcomes={"client_gone": 1}, modes=("session-flood",),
    proxy={"write_timeout_s": PATIENCE_S},
)  # fmt: skip
async def client_does_not_read(rig: Rig) -> None:
    client = await session(rig)
    client.transport.pause_reading()
    visit = await rig.engine.visit()
    await rig.engine.until(visit.left.is_set)
    await gone_in(rig, "answer")
    client.transport.abort()
    with contextlib.suppress(ConnectionClosed):
        await client.recv()
