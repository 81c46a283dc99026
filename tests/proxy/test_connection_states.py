"""Every transition of connections of clients and engines happens on real sockets; the docs show them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
from helpers import HANG_S, turns_until
from proxy.conftest import Proxy
from proxy.upstreams import PLAIN_BODY, SSE_HEAD, plain

from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.http import connection_states
from hetlb.balancer.http.connection_states import (
    ANSWER_BEGUN,
    ANSWERED,
    BEGUN,
    BODY_READ,
    CLIENT_GONE,
    CLOSED,
    HEAD_BEGUN,
    HEAD_PASSED,
    HEAD_READ,
    HELD_BACK,
    KEPT,
    LAST_ANSWERED,
    READ,
    READ_ON,
    REFUSED,
    REUSED,
    SUBMITTED,
    TURN_TAKEN,
    UNREAD,
    UNUSED,
    UPGRADED,
    ClientState,
    EngineState,
    Reading,
)

ROWS: list[Transition[Any]] = [
    each for each in vars(connection_states).values() if isinstance(each, Transition)
]
ASK = b'{"model":"m","prompt":"hello","max_tokens":5}'
LARGE = ASK[:-1] + b',"user":"' + b"x" * (300 << 10) + b'"}'
#: More than the kernel takes of a request that its engine does not read.
HUGE = ASK[:-1] + b',"user":"' + b"x" * (12 << 20) + b'"}'
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: p\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n" % KEY
)
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"  # of KEY, by RFC 6455
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(PLAIN_BODY)


def post(body: bytes, *, path: bytes = b"/v1/completions", close: bool = False) -> bytes:
    last = b"connection: close\r\n" if close else b""
    lines = b"POST %b HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n%b\r\n"
    return lines % (path, len(body), last) + body


def ping(body: bytes) -> bytes:
    """The last request of a connection, which the proxy answers itself."""
    return b"GET" + post(body, path=b"/health", close=True).removeprefix(b"POST")


class Rig:
    """A proxy, one client of it, one engine that reads and answers by hand; and each change of a state."""

    def __init__(self, proxy: Proxy, engines: asyncio.Queue[Any], reader: Any, writer: Any) -> None:
        self.proxy, self._engines, self.reader, self.writer = proxy, engines, reader, writer
        self.changes: set[tuple[object, object]] = set()
        self._last: dict[Any, list[object]] = {}

    async def watch(self) -> None:
        """Look at all connections in every turn of the loop: no state that others can see lasts for less."""
        while True:
            self._look()
            await asyncio.sleep(0)

    async def until(self, *states: object) -> Any:
        """The first connection that is in these states."""
        async with asyncio.timeout(HANG_S):
            while True:
                self._look()
                for each in self._last:
                    if {*states} <= {each.state, each.reading}:
                        return each
                await asyncio.sleep(0)

    def _look(self) -> None:
        pools = self.proxy.driver.pools.all()
        engines = [each for pool in pools for each in (*pool.busy, *pool._idle)]
        for connection in (*self.proxy.server.connections, *engines):
            first = EngineState.FRESH if isinstance(connection, EngineConnection) else ClientState.IDLE
            self._last.setdefault(connection, [first, Reading.OPEN])
        for connection, last in self._last.items():
            now = [connection.state, connection.reading]
            self.changes.update(zip(last, now, strict=True))
            last[:] = now

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def engine(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The next connection that the proxy makes to its engine."""
        async with asyncio.timeout(HANG_S):
            return await self._engines.get()

    async def asked(self, body: bytes = ASK, **how: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine's connection when it has read a whole request."""
        self.send(post(body, **how))
        reader, writer = await self.engine()
        await self.read(reader)
        return reader, writer

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read one request at the engine."""
        async with asyncio.timeout(HANG_S):
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [each for each in head.lower().split(b"\r\n") if each.startswith(b"content-length")]
            await reader.readexactly(int(length.split(b":")[1]))

    async def session(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine's connection of a WebSocket."""
        self.send(UPGRADE)
        reader, writer = await self.engine()
        await reader.readuntil(b"\r\n\r\n")
        await self.until(ClientState.ANSWERING)
        writer.write(AGREED)
        await self.until(ClientState.UPGRADED)
        return reader, writer

    async def kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine's connection after a first answer."""
        reader, writer = await self.asked()
        writer.write(plain())
        await self.until(EngineState.IDLE)
        await self.until(ClientState.IDLE)
        return reader, writer

    async def again(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The same, when it has read a second request."""
        reader, writer = await self.kept()
        self.send(post(ASK))
        await self.read(reader)
        await self.until(EngineState.RESENT)
        return reader, writer

    async def unread(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine's connection with a request of which it does not read all."""
        self.send(post(HUGE))
        reader, writer = await self.engine()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await self.until(EngineState.SENDING)
        return reader, writer

    async def streaming(self) -> asyncio.StreamWriter:
        """The engine's connection in the middle of a plain answer without end; the client does not read."""
        _, writer = await self.asked()
        self.writer.transport.pause_reading()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        return writer


@pytest_asyncio.fixture
async def rig(start: Callable[..., Any]) -> AsyncIterator[Rig]:
    engines: asyncio.Queue[Any] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        engines.put_nowait((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = await start(f"http://127.0.0.1:{port}", max_body_bytes=16 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=1 << 24)
    rig = Rig(proxy, engines, reader, writer)
    watch = asyncio.create_task(rig.watch())
    await rig.until(ClientState.IDLE)
    yield rig
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    server.close()
    for each in (writer, *writers):
        each.transport.abort()
    for each in (writer, *writers):
        with contextlib.suppress(ConnectionError):
            await each.wait_closed()
    await turns_until(lambda: not proxy.driver.exchanges and not proxy.server.connections)


Scenario: TypeAlias = Callable[[Rig], Awaitable[None]]
#: Each row of a table, from each of the states in which it may happen.
SCENARIOS: dict[tuple[Transition[Any], object], Scenario] = {}


def drives(row: Transition[Any], *before: object) -> Callable[[Scenario], Scenario]:
    def keep(scenario: Scenario) -> Scenario:
        for each in before or row.before:
            assert (row, each) not in SCENARIOS
            SCENARIOS[row, each] = scenario
        return scenario

    return keep


# --- a client's connection ---


@drives(HEAD_BEGUN)
async def part_of_a_head(rig: Rig) -> None:
    rig.send(b"GET /")
    await rig.until(ClientState.HEAD)


@drives(HEAD_PASSED, ClientState.IDLE)
async def a_head_at_once(rig: Rig) -> None:
    rig.send(post(ASK)[:-1])
    await rig.until(ClientState.BODY)


@drives(HEAD_PASSED, ClientState.HEAD)
async def a_head_in_two_parts(rig: Rig) -> None:
    await part_of_a_head(rig)
    rig.send(b"health HTTP/1.1\r\nhost: p\r\ncontent-length: 1\r\n\r\n")
    await rig.until(ClientState.BODY)


@drives(BODY_READ)
@drives(SUBMITTED, ClientState.READ)
async def a_large_body(rig: Rig) -> None:
    await _all_but_the_end(rig, post(LARGE))
    await rig.until(ClientState.ANSWERING)


@drives(SUBMITTED, ClientState.BODY)
async def the_end_of_a_small_body(rig: Rig) -> None:
    await _all_but_the_end(rig, post(ASK))
    await rig.until(ClientState.ANSWERING)


@drives(ANSWERED, ClientState.BODY)
async def an_unknown_path(rig: Rig) -> None:
    await _all_but_the_end(rig, post(ASK, path=b"/nothing"))
    await rig.until(ClientState.IDLE)


@drives(ANSWERED, ClientState.READ)
async def an_unknown_path_with_a_large_body(rig: Rig) -> None:
    await _all_but_the_end(rig, post(LARGE, path=b"/nothing"))
    await rig.until(ClientState.IDLE)


@drives(LAST_ANSWERED, ClientState.BODY)
async def the_last_of_the_proxys_own_answers(rig: Rig) -> None:
    await _all_but_the_end(rig, ping(ASK))
    await rig.until(ClientState.CLOSED)


@drives(LAST_ANSWERED, ClientState.READ)
async def the_last_with_a_large_body(rig: Rig) -> None:
    await _all_but_the_end(rig, ping(LARGE))
    await rig.until(ClientState.CLOSED)


@drives(REFUSED, ClientState.IDLE)
async def no_http(rig: Rig) -> None:
    rig.send(b"\x16\x03\x01")
    await rig.until(ClientState.CLOSING)


@drives(REFUSED, ClientState.HEAD)
async def a_head_that_is_none(rig: Rig) -> None:
    await part_of_a_head(rig)
    rig.send(b" nothing\r\n\r\n")
    await rig.until(ClientState.CLOSING)


@drives(REFUSED, ClientState.BODY)
@drives(CLIENT_GONE, ClientState.CLOSING)
async def a_chunk_that_is_none(rig: Rig) -> None:
    rig.send(b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n")
    await rig.until(ClientState.BODY)
    rig.send(b"zz\r\n")
    await rig.until(ClientState.CLOSING)
    rig.writer.transport.abort()
    await rig.until(ClientState.CLOSED)


@drives(REFUSED, ClientState.READ)
async def a_large_body_that_is_none(rig: Rig) -> None:
    await _all_but_the_end(rig, post(b"{" * (300 << 10), close=True))
    await rig.until(ClientState.CLOSING)


@drives(ANSWERED, ClientState.ANSWERING)
async def an_answer(rig: Rig) -> None:
    await rig.kept()


@drives(UPGRADED)
@drives(LAST_ANSWERED, ClientState.UPGRADED)
async def a_session_that_its_engine_ends(rig: Rig) -> None:
    _, writer = await rig.session()
    writer.close()
    await rig.until(ClientState.CLOSING)


@drives(CLIENT_GONE, ClientState.UPGRADED)
async def a_session_that_its_client_leaves(rig: Rig) -> None:
    await rig.session()
    await gone_without_a_request(rig)


@drives(LAST_ANSWERED, ClientState.ANSWERING)
async def the_last_answer(rig: Rig) -> None:
    _, writer = await rig.asked(close=True)
    writer.write(plain())
    await rig.until(ClientState.CLOSED)


@drives(UNUSED)
async def the_proxy_stops(rig: Rig) -> None:
    rig.proxy.server.stop_accepting()
    await rig.until(ClientState.CLOSED)


@drives(CLIENT_GONE, ClientState.IDLE)
async def gone_without_a_request(rig: Rig) -> None:
    rig.writer.transport.abort()
    await rig.until(ClientState.CLOSED)


@drives(CLIENT_GONE, ClientState.HEAD)
async def gone_in_its_head(rig: Rig) -> None:
    await part_of_a_head(rig)
    await gone_without_a_request(rig)


@drives(CLIENT_GONE, ClientState.BODY)
async def gone_in_its_body(rig: Rig) -> None:
    await a_head_at_once(rig)
    await gone_without_a_request(rig)


@drives(CLIENT_GONE, ClientState.READ)
async def gone_before_its_turn(rig: Rig) -> None:
    await _all_but_the_end(rig, post(LARGE))
    connection = await rig.until(ClientState.READ)
    transport = connection._transport
    connection.connection_lost(None)  # its turn is the next: no socket could be as quick
    transport.abort()
    await gone_without_a_request(rig)
    assert not rig.proxy.driver.exchanges


@drives(CLIENT_GONE, ClientState.ANSWERING)
@drives(CLOSED, EngineState.SENT)
async def gone_before_its_answer(rig: Rig) -> None:
    await rig.asked()
    await rig.until(EngineState.SENT)
    await gone_without_a_request(rig)
    await rig.until(EngineState.CLOSED)


# --- a connection to an engine ---


@drives(BEGUN)
async def a_first_request(rig: Rig) -> None:
    await rig.asked()
    await rig.until(EngineState.SENT)


@drives(UNREAD)
@drives(READ)
async def a_request_read_late(rig: Rig) -> None:
    reader, _ = await rig.unread()
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    await rig.read(reader)
    await rig.until(EngineState.SENT)
    # The kernel says so while the request is being written: it was sent for less than a turn.
    assert (EngineState.FRESH, EngineState.SENDING) in rig.changes
    rig.changes.add((EngineState.SENT, EngineState.SENDING))


@drives(HEAD_READ, EngineState.SENT)
async def a_head_before_its_body(rig: Rig) -> None:
    _, writer = await rig.asked()
    await rig.until(EngineState.SENT)
    writer.write(HEAD)
    await rig.until(EngineState.BODY)


@drives(REUSED)
@drives(KEPT)
@drives(HEAD_READ, EngineState.RESENT)
async def two_requests(rig: Rig) -> None:
    _, writer = await rig.again()
    writer.write(HEAD)
    await rig.until(EngineState.BODY)
    writer.write(PLAIN_BODY)
    await rig.until(EngineState.IDLE)
    assert (EngineState.BODY, EngineState.IDLE) in rig.changes


@drives(ANSWER_BEGUN, EngineState.SENT)
@drives(HEAD_READ, EngineState.HEAD)
async def an_interim_answer(rig: Rig) -> None:
    _, writer = await rig.asked()
    await rig.until(EngineState.SENT)
    writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
    await rig.until(EngineState.HEAD)
    writer.write(HEAD)
    await rig.until(EngineState.BODY)


@drives(ANSWER_BEGUN, EngineState.RESENT)
async def part_of_a_second_answer(rig: Rig) -> None:
    _, writer = await rig.again()
    writer.write(HEAD[:9])
    await rig.until(EngineState.HEAD)


@drives(ANSWER_BEGUN, EngineState.SENDING)
async def part_of_an_early_answer(rig: Rig) -> None:
    _, writer = await rig.unread()
    writer.write(HEAD[:9])
    await rig.until(EngineState.HEAD)


@drives(HEAD_READ, EngineState.SENDING)
async def an_early_answer(rig: Rig) -> None:
    _, writer = await rig.unread()
    writer.write(HEAD)
    await rig.until(EngineState.BODY)


@drives(CLOSED, EngineState.FRESH)
async def closed_before_its_first_request(rig: Rig) -> None:
    await rig.kept()
    [pool] = rig.proxy.driver.pools.all()
    _, fresh = await asyncio.get_running_loop().create_connection(
        lambda: EngineConnection(pool), pool._address, pool._port
    )
    assert fresh.state is EngineState.FRESH
    fresh.close()
    assert fresh.state is EngineState.CLOSED
    rig.changes.add((EngineState.FRESH, fresh.state))


@drives(CLOSED, EngineState.SENDING)
async def closed_with_a_request_unread(rig: Rig) -> None:
    _, writer = await rig.unread()
    writer.transport.abort()
    await rig.until(EngineState.CLOSED)


@drives(CLOSED, EngineState.RESENT)
async def closed_while_it_was_idle(rig: Rig) -> None:
    _, writer = await rig.again()
    writer.transport.abort()
    await rig.until(EngineState.CLOSED)
    await rig.engine()  # the request goes out again, on a new connection


@drives(CLOSED, EngineState.HEAD)
async def closed_in_a_head(rig: Rig) -> None:
    _, writer = await rig.asked()
    writer.write(HEAD[:9])
    await rig.until(EngineState.HEAD)
    writer.transport.abort()
    await rig.until(EngineState.CLOSED)


@drives(CLOSED, EngineState.BODY)
async def closed_in_an_answer(rig: Rig) -> None:
    _, writer = await rig.asked()
    writer.write(HEAD)
    await rig.until(EngineState.BODY)
    writer.transport.abort()
    await rig.until(EngineState.CLOSED)


@drives(CLOSED, EngineState.IDLE)
async def closed_between_requests(rig: Rig) -> None:
    _, writer = await rig.kept()
    writer.close()
    await rig.until(EngineState.CLOSED)


# --- reading from either ---


@drives(HELD_BACK, Reading.OPEN)
@drives(TURN_TAKEN, Reading.HELD)
@drives(HELD_BACK, Reading.TURN)
async def requests_behind_an_answer(rig: Rig) -> None:
    reader, writer = await rig.asked()
    rig.send(post(ASK[:-1] + b',"user":"' + b"x" * 20_000 + b'"}') * 6)
    await rig.until(ClientState.ANSWERING, Reading.HELD)
    for _ in range(6):
        writer.write(plain())
        await rig.read(reader)
    writer.write(plain())
    await rig.until(ClientState.IDLE, Reading.OPEN)
    assert {(Reading.HELD, Reading.TURN), (Reading.TURN, Reading.HELD)} <= rig.changes


@drives(TURN_TAKEN, Reading.OPEN)
@drives(READ_ON, Reading.TURN)
async def an_answer_in_large_reads(rig: Rig) -> None:
    _, writer = await rig.asked(ASK[:-1] + b',"stream":true}')
    chunk = b"%x\r\n%b\r\n" % (1 << 19, b"data: " + b"x" * ((1 << 19) - 8) + b"\n\n")
    writer.write(SSE_HEAD + chunk)
    await turns_until(lambda: (Reading.TURN, Reading.OPEN) in rig.changes)


@drives(READ_ON, Reading.HELD)
async def a_slow_client(rig: Rig) -> None:
    writer = await rig.streaming()
    while not any(each.reading is Reading.HELD for each in rig._last):
        writer.write(b"x" * 16_000)
        await asyncio.sleep(0)
    rig.writer.transport.resume_reading()
    await turns_until(lambda: (Reading.HELD, Reading.OPEN) in rig.changes)


@pytest.mark.parametrize(
    ("row", "before"),
    [*SCENARIOS],
    ids=lambda each: each.event if isinstance(each, Transition) else str(each),
)
async def test_a_transition(rig: Rig, row: Transition[Any], before: object) -> None:
    await SCENARIOS[row, before](rig)
    assert (before, row.after) in rig.changes


def test_every_row_is_driven_from_each_of_its_states() -> None:
    assert set(SCENARIOS) == {(row, before) for row in ROWS for before in row.before}


def test_every_state_is_reached_and_left() -> None:
    for first in (ClientState.IDLE, EngineState.FRESH, Reading.OPEN):
        table = [row for row in ROWS if isinstance(row.after, type(first))]
        assert {row.after for row in table} | {first} == set(type(first))
        assert {state for row in table for state in row.before} >= {
            state for state in type(first) if state.name != "CLOSED"
        }


async def _all_but_the_end(rig: Rig, data: bytes) -> None:
    """Send a request of which the last byte comes when the rest has been read."""
    rig.send(data[:-1])
    connection = await rig.until(ClientState.BODY)
    await turns_until(lambda: not connection._reader._decoder and connection._reader._left == 1)
    rig.send(data[-1:])
