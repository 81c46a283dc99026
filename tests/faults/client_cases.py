"""Rows C: faults of clients, which no other client may notice."""

from __future__ import annotations

import asyncio
import contextlib

from faults.cases import PATIENCE_S, case
from faults.checker import until
from faults.client import Client, body_of, request
from faults.engine import Visit
from faults.rig import Rig
from faults.upstream_cases import QUIET, whole
from faults.wire import BlackHole

from hetlb.balancer.clients.connection import FRESH_S


async def gone_in(rig: Rig, phase: str, count: int = 1) -> None:
    """Wait for that many clients to have been counted as gone in a phase."""
    seen = 0.0

    async def holds() -> bool:
        nonlocal seen
        seen = await rig.metric("hetlb_requests_total", f'outcome="client_gone",phase="{phase}"')
        return seen == count

    await until(holds, lambda: f"expected {count} gone in phase {phase}, got {seen}")


def leaves(how: str, stream: bool) -> None:
    """A client that leaves in every phase, by closing or by closing its sending side alone."""
    kind = "stream" if stream else "plain"
    row = "C1" if how == "gone" else "C3"

    def leave(client: Client) -> None:
        if how == "gone":
            client.leave()
        else:
            client.writer.write_eof()

    @case(row, f"{kind}-queue", outcomes={"client_gone": 1})
    async def in_the_queue(rig: Rig) -> None:
        await rig.set_state("i0", "drain")
        async with rig.client() as client:
            client.send(request("q", body_of("q", stream=stream)))
            await rig.queued(1)
            leave(client)
            await rig.queued(0)
        await gone_in(rig, "queue")
        assert not rig.engine.visits
        await rig.set_state("i0", "ready")

    @case(row, f"{kind}-connect", outcomes={"client_gone": 1}, scrape=QUIET, proxy={"connect_timeout_s": 30})
    async def while_connecting(rig: Rig) -> None:
        await rig.engine.stop()
        with BlackHole(rig.engine.port):
            async with rig.client() as client:
                client.send(request("q", body_of("q", stream=stream)))
                await rig.becomes("i0", in_flight=1)
                leave(client)
                await gone_in(rig, "connect")

    @case(row, f"{kind}-wait", outcomes={"client_gone": 1}, modes=("stall",))
    async def before_the_first_byte(rig: Rig) -> None:
        async with rig.client() as client:
            client.send(request("q", body_of("q", stream=stream)))
            visit = await rig.engine.visit()
            leave(client)
            await rig.engine.until(visit.left.is_set)
        await gone_in(rig, "wait")


for way in ("gone", "half-closed"):
    for streamed in (True, False):
        leaves(way, streamed)


def leaves_stream(row: str, name: str, mode: str, how: str) -> None:
    @case(row, name, outcomes={"client_gone": 1}, modes=(mode,))
    async def in_the_middle(rig: Rig) -> None:
        rig.engine.pace_s = 0.5  # the engine's turns are no measure of a busy machine's
        async with rig.client() as client:
            client.send(request("q", body_of("q")))
            await client.first_token()
            visit = await rig.engine.visit()
            seen = visit.tokens
            client.leave() if how == "gone" else client.writer.write_eof()
            await rig.engine.until(visit.left.is_set)
            assert visit.tokens <= seen + 2
        await gone_in(rig, "answer")


for way in ("gone", "half-closed"):
    leaves_stream("C2" if way == "gone" else "C3", f"flowing-{way}", "endless", way)
    leaves_stream("C2" if way == "gone" else "C3", f"stalled-{way}", "stall-mid", way)


@case("C2", "after-the-end", outcomes={"ok": 1})
async def after_the_end(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(request("q", body_of("q")))
        assert (await client.answer()).done
        client.leave()


@case(
    "C4",
    "never-reads",
    engines=2,
    outcomes={"client_gone": 1, "ok": 4},
    proxy={"write_timeout_s": PATIENCE_S},
)
async def never_reads(rig: Rig) -> None:
    for engine in rig.engines:
        engine.modes["q"] = "flood"
    async with rig.client() as client:
        client.writer.transport.pause_reading()
        client.send(request("q", body_of("q")))
        visits: list[Visit] = []

        async def reached() -> bool:
            visits[:] = [visit for engine in rig.engines for visit in engine.visits if visit.id == "q"]
            return bool(visits)

        await until(reached, lambda: "the request came nowhere")
        for answer in await rig.ask_many(4):
            whole(answer)
        await visits[0].engine.until(visits[0].left.is_set)


@case("C4", "pauses", outcomes={"ok": 1})
async def reads_late(rig: Rig) -> None:
    rig.engine.length = 200
    async with rig.client() as client:
        client.writer.transport.pause_reading()
        client.send(request("q", body_of("q")))
        await rig.engine.visit()
        client.writer.transport.resume_reading()
        answer = await client.answer()
        assert (answer.done, answer.tokens("q")) == (True, 200)


SLOW = {f"{what}_timeout_s": PATIENCE_S for what in ("head", "body", "keepalive")}
#: Connections at once that mean no good.
SLOW_CLIENTS = 200


@case("C5", "slowloris", proxy=SLOW)
async def slow_clients(rig: Rig) -> None:
    """Connections that never finish a head or a body, or say nothing; the service goes on meanwhile."""
    shapes = (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nX-Slow: ",
        b'POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 99\r\n\r\n{"mo',
        b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    )

    async def slow(shape: bytes) -> bytes:
        async with rig.client() as client:
            client.send(shape)
            return await client.eof()

    tasks = [asyncio.create_task(slow(shapes[n % len(shapes)])) for n in range(SLOW_CLIENTS)]
    for _ in range(5):
        whole(await rig.ask())
    for task, shape in zip(tasks, shapes * (SLOW_CLIENTS // len(shapes)), strict=True):
        told = await task
        assert told == b"" if not shape else told.startswith(b"HTTP/1.1 408 "), (shape, told[:80])
    refusals = SLOW_CLIENTS * 4 // len(shapes)
    rig.first_bytes |= {f"slow{n}": 0.0 for n in range(refusals)}


def drips(name: str, begin: bytes, drop: bytes) -> None:
    @case("C5", name, outcomes={"bad_request": 1, "ok": 1}, proxy=SLOW)
    async def drips_for_ever(rig: Rig) -> None:
        async with rig.client() as client:
            client.send(begin)
            answer = asyncio.create_task(client.answer())
            while not answer.done():
                with contextlib.suppress(ConnectionError):
                    client.send(drop)
                    await client.writer.drain()
                await asyncio.sleep(0.02)
            assert (await answer).status == 408
        whole(await rig.ask())


drips("drip-head", b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nX-Slow: ", b"x")
drips("drip-body", b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 9999\r\n\r\n", b"{")


# No crowd: between two of its requests a connection in the background is idle, and may be the one that goes.
@case(
    "C6",
    "idle-connections",
    outcomes={"ok": 6},
    proxy={"max_connections": 120},
    crowd=False,
)
async def idle_connections(rig: Rig) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(rig.client())
        first.send(request("first", body_of("first")))
        assert (await first.answer()).done
        for more in (119, 110):
            for _ in range(more):
                await stack.enter_async_context(rig.client())
            # Each has some time for its first request, and gives way to no other client until then.
            await asyncio.sleep(FRESH_S + 0.1)
        for _ in range(5):
            whole(await rig.ask())
        assert await first.eof() == b""


@case("C7", "continue", outcomes={"ok": 1})
async def expects_to_be_told(rig: Rig) -> None:
    body = body_of("q")
    async with rig.client() as client:
        client.send(request("q", body, "Expect: 100-continue")[: -len(body)])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer()).done
    assert "expect" not in (await rig.engine.visit()).headers


@case("C7", "no-continue", outcomes={"bad_request": 3})
async def expects_what_is_refused(rig: Rig) -> None:
    for data, status in (
        (request("q", b"", "Expect: 200-ok", path="/v1/completions"), 417),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nExpect: 100-continue\r\n"
            b"Content-Length: 99999999\r\n\r\n",
            413,
        ),
        (b"POST /nothing HTTP/1.1\r\nHost: p\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n", 404),
    ):
        async with rig.client() as client:
            client.send(data)
            assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)
    assert not rig.engine.visits


def pipelines(count: int) -> None:
    @case("C8", f"pipelined-{count}", outcomes={"ok": count})
    async def one_at_a_time(rig: Rig) -> None:
        labels = [f"p{n}" for n in range(count)]
        async with rig.client() as client:
            client.send(b"".join(request(label, body_of(label)) for label in labels))
            for label in labels:
                answer = await client.answer()
                assert (answer.done, answer.tokens(label)) == (True, 4)
        assert [visit.id for visit in rig.engine.visits] == labels


pipelines(2)
pipelines(200)


@case("C8", "then-leaves", outcomes={"client_gone": 1}, modes=("stall",))
async def pipelines_and_leaves(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(b"".join(request(f"p{n}", body_of(f"p{n}")) for n in range(20)))
        await rig.engine.visit()
        client.leave()
        await gone_in(rig, "wait")
    assert len(rig.engine.visits) == 1
