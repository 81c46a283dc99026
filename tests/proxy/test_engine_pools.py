"""Connections to bootstrap servers are counted, swept and closed like connections to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from helpers import HANG_S, turns_until
from proxy.memory import End, Loop

from hetlb.balancer.clients.access import PLAIN_ACCESS
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.engines.engine_pools import EnginePool, EnginePools
from hetlb.balancer.engines.upstream import SideCall
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.ends import End as LeaseEnd
from hetlb.balancer.http.http1 import ResponseHead

PORT = 8998
URL = f"http://127.0.0.1:{PORT}"
IDLE_S = 10.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Bootstrap(End):
    """A bootstrap server that answers every request."""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        self.send(ANSWER)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.listeners[PORT] = Bootstrap
    yield loop
    loop.close()


def asked(loop: Loop, pools: EnginePools) -> None:
    """Ask the server beside the engines once, and have its answer."""
    answers: list[bytes] = []

    def done(head: ResponseHead, body: bytes) -> None:
        answers.append(body)

    def failed(end: LeaseEnd | None, detail: str) -> None:
        raise AssertionError(detail)

    pool = pools.beside(URL)
    SideCall(pool, pool.head(b"GET /query"), b"", done, failed).send()
    loop.rest()
    assert answers == [b"{}"]


def test_a_connection_to_a_bootstrap_server_is_counted_and_swept(loop: Loop) -> None:
    pools = EnginePools(loop, ProxyTable(upstream_idle_s=IDLE_S), {}, lambda then: False)
    asked(loop, pools)
    assert pools.open_connections == 1
    pools.sweep(loop.time() + IDLE_S / 2)
    assert pools.open_connections == 1
    pools.sweep(loop.time() + 2 * IDLE_S)
    loop.rest()
    assert pools.open_connections == 0


def test_a_server_beside_the_engines_is_forgotten_once_no_connection_is_left(loop: Loop) -> None:
    pools = EnginePools(loop, ProxyTable(upstream_idle_s=IDLE_S), {}, lambda then: False)
    asked(loop, pools)
    before = pools.beside(URL)
    pools.drop_unused(set())
    assert pools.open_connections == 1  # it may be in use, and ends by itself
    pools.sweep(loop.time() + 2 * IDLE_S)
    pools.drop_unused(set())
    assert pools.beside(URL) is not before


class ClosedFirst:
    """A loop whose connections were closed by the engine by the time that they are made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.time, self.call_soon, self.create_task = loop.time, loop.call_soon, loop.create_task
        self.create_future = loop.create_future

    async def create_connection(self, make: Any, host: str, port: int) -> Any:
        transport, connection = await self._loop.create_connection(make, host, port)
        await turns_until(lambda: connection._transport is None)
        return transport, connection


async def test_a_connection_that_was_closed_before_it_was_used_is_not_accepted() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    loop = cast(asyncio.AbstractEventLoop, ClosedFirst(asyncio.get_running_loop()))
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    table = ProxyTable(connect_timeout_s=HANG_S, upstream_idle_s=1.0)
    pool = EnginePool(url, loop, PLAIN_ACCESS, table, on_reconnect=lambda _: None)
    failed: list[LeaseEnd | None] = []
    for _ in range(2):  # the second time it would be asked what it serves
        call = SideCall(pool, pool.head(b"GET /"), b"", lambda *_: None, lambda end, _: failed.append(end))
        call.send()
        await turns_until(lambda: bool(failed))
        assert failed.pop() is ends.NOT_ACCEPTED
    assert not pool.busy
    server.close()


class WellUntilAsked(End):
    """An engine that lists its models and closes the connection at every other request."""

    asked = 0

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        if data.startswith(b"GET /v1/models"):
            self.send(ANSWER)
        else:
            WellUntilAsked.asked += 1
            self.leave()


def test_an_engine_that_closes_at_each_request_is_asked_at_most_twice_for_one(loop: Loop) -> None:
    """Its models are read before a request on a new connection, which is then a reused one."""
    loop.listeners[PORT] = WellUntilAsked
    pool = EnginePool(URL, loop, PLAIN_ACCESS, ProxyTable(), on_reconnect=lambda _: None)
    pool.lost()
    failed: list[LeaseEnd] = []
    for number in range(1, 4):
        WellUntilAsked.asked = 0
        head = pool.head(b"POST /v1/completions")
        SideCall(pool, head, b"{}", lambda *_: None, lambda end, _: failed.append(end)).send()
        loop.rest()
        assert failed == [ends.DROPPED] * number
        assert WellUntilAsked.asked <= 2


@pytest.mark.parametrize(("host", "connections"), [("127.0.0.1", 1), ("localhost", 2)])
async def test_a_name_is_resolved_again_once_its_connection_is_a_minute_old(
    host: str, connections: int
) -> None:
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        while await reader.readline():
            if (await reader.readuntil(b"\r\n\r\n")).endswith(b"\r\n\r\n"):
                writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
    pool = EnginePool(url, asyncio.get_running_loop(), PLAIN_ACCESS, ProxyTable(upstream_idle_s=HANG_S))
    answers: list[bytes] = []
    for number in range(1, 4):
        head = pool.head(b"GET /")
        SideCall(pool, head, b"", lambda _, body: answers.append(body), lambda *_: None).send()
        await turns_until(lambda number=number: len(answers) == number)  # type: ignore[misc]
        for connection in pool._idle:
            connection.made_at -= 61.0
    assert made == connections
    pool.close()
    server.close()


@pytest.mark.parametrize(("host", "moves"), [("gpu-a.example", True), ("127.0.0.1", False)])
def test_a_name_is_resolved_again_each_minute_while_its_old_address_answers(
    loop: Loop, host: str, moves: bool
) -> None:
    made: list[Bootstrap] = []

    def accepted() -> Bootstrap:
        made.append(Bootstrap())
        return made[-1]

    loop.listeners[PORT] = accepted
    pool = EnginePool(f"http://{host}:{PORT}", loop, PLAIN_ACCESS, ProxyTable(upstream_idle_s=3.0))
    for _ in range(63):  # seconds, by the loop's own clock
        answers: list[bytes] = []
        SideCall(pool, pool.head(b"GET /"), b"", lambda _, body, to=answers: to.append(body), _none).send()  # type: ignore[misc]
        loop.turn(1.0)
        assert answers == [b"{}"]
        if loop.time() < 55.0:
            assert len(made) == 1  # one connection serves them all
    assert len(made) == (2 if moves else 1)
    pool.close()


def _none(end: LeaseEnd, detail: str) -> None:
    raise AssertionError(detail)


class Slow(End):
    """An engine that answers when it is told to."""


def test_no_connection_is_kept_while_another_engine_may_listen_there(loop: Loop) -> None:
    """Without that a reused connection would go to an engine of which the models are not known."""
    ends_of: list[Slow] = []

    def listen() -> Slow:
        ends_of.append(Slow())
        return ends_of[-1]

    loop.listeners[PORT] = listen
    looks: list[bytes] = []
    pool = EnginePool(URL, loop, PLAIN_ACCESS, ProxyTable(), on_reconnect=looks.append)
    bodies: list[bytes] = []
    for refused in (False, True):
        failures: list[str] = []
        SideCall(
            pool,
            pool.head(b"GET /x"),
            b"",
            lambda head, body: bodies.append(body),
            lambda end, detail, failures=failures: failures.append(detail),  # type: ignore[misc]
        ).send()
        loop.rest()
        assert bool(failures) is refused
        loop.listeners[PORT] = None
    [first] = ends_of
    first.send(ANSWER)
    loop.rest()
    assert bodies == [b"{}"]
    assert pool.open_connections == 0
