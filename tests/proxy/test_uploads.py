"""Large forms go on while they arrive: what engines get of them, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from proxy.conftest import turns_until
from proxy.test_proxying import Client, post
from proxy.upstreams import PLAIN_BODY, plain

from hetlb.core.admission import QueueLimits
from hetlb.core.types import AdminState, AdminStateSet
from hetlb.proxy.upload import LEAST_BYTES, REST_S

Start = Callable[..., Any]

PATH = "/v1/audio/transcriptions"
MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
SOUND = bytes(range(256)) * (2 * LEAST_BYTES // 256)
END = b"\r\n--b--\r\n"
FORM = MODEL % b"m" + FILE + SOUND + END
#: What is sent of a form at first: an instance is chosen at once when so much has come.
MOST = 9 * len(FORM) // 10


def upload(form: bytes = FORM, length: int | None = None) -> bytes:
    lines = [
        f"POST {PATH} HTTP/1.1", "Host: proxy", "Content-Type: multipart/form-data; boundary=b",
        f"Content-Length: {len(form) if length is None else length}",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + form


class Taken:
    """One connection to a `Listener`: the bytes that came, and whether it was closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.data = b""
        self.ended = False

    @property
    def body(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[2]

    async def read(self) -> None:
        try:
            while data := await self.reader.read(1 << 20):
                self.data += data
        except ConnectionError:
            pass
        self.ended = True


class Listener:
    """An engine that takes what comes, and answers when a test says so."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for each in self.taken:
            each.writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        each = Taken(reader, writer)
        self.taken.append(each)
        await each.read()

    async def got(self, length: int, number: int = 1) -> Taken:
        """The n-th connection, when so many bytes of a body have come."""
        await turns_until(lambda: len(self.taken) >= number and len(self.taken[number - 1].body) >= length)
        return self.taken[number - 1]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Listener]:
    async with Listener() as listener:
        yield listener


async def test_a_form_goes_on_while_it_arrives(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
        assert proxy.scheduler.in_flight == 1
        assert proxy.server.clients.held_bytes == MOST
        client.send(FORM[MOST:])
        await engine.got(len(FORM))
        assert proxy.server.clients.held_bytes == 0
        taken.writer.write(plain())
        answer = await client.answer()
        assert (answer.status, answer.body, taken.body) == (200, PLAIN_BODY, FORM)
        assert "connection" not in answer.headers
        assert b"content-length: %d\r\n" % len(FORM) in taken.data.lower()
        # Both connections are good for more.
        client.send(post())
        await engine.got(len(FORM) + 1)
        taken.writer.write(plain())
        assert (await client.answer()).status == 200
        assert len(engine.taken) == 1
    await proxy.settled()
    assert [each[0] for each in proxy.ended] == ["ok", "ok"]
    assert proxy.exchanges[0].request.body_bytes == len(FORM)


@pytest.mark.parametrize("size", [1, 7_001, LEAST_BYTES])
async def test_a_form_in_any_pieces_with_a_request_behind_it(
    start: Start, engine: Listener, size: int
) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        start_of = len(upload()) - 40_000 if size == 1 else 0
        client.send(upload()[:start_of])
        for at in range(start_of, len(upload()), size):
            client.send(upload()[at : at + size])
            if at % 100 == 0:
                await client.writer.drain()
        client.send(post())
        taken = await engine.got(len(FORM))
        assert taken.body == FORM
        taken.writer.write(plain())
        assert (await client.answer()).status == 200
        await engine.got(len(FORM) + 1)
        taken.writer.write(plain())
        assert (await client.answer()).status == 200
    await proxy.settled()


async def test_nobody_is_chosen_for_a_form_that_will_take_its_time(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    little = len(FORM) // 100
    async with Client(proxy) as client:
        client.send(upload(FORM[:little], len(FORM)))
        await turns_until(lambda: proxy.server.clients.held_bytes == little)
        assert not proxy.driver.exchanges
        client.send(FORM[little:])
        taken = await engine.got(len(FORM))
        taken.writer.write(plain())
        assert (await client.answer()).status == 200
    await proxy.settled()


async def test_a_form_whose_model_comes_last_waits_for_it(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    form = FILE + SOUND + b"\r\n" + MODEL % b"m" + b"--b--\r\n"
    async with Client(proxy) as client:
        client.send(upload(form[:-3], len(form)))
        # The model is known now, and has ended.
        taken = await engine.got(len(form) - 3)
        client.send(form[-3:])
        await engine.got(len(form))
        taken.writer.write(plain())
        assert (await client.answer()).status == 200
        client.send(upload(form[:-40], len(form)))
        await turns_until(lambda: proxy.server.clients.held_bytes == len(form) - 40)
        assert not proxy.driver.exchanges
    await turns_until(lambda: not proxy.server.clients.held_bytes)


@pytest.mark.parametrize(
    "rest",
    [
        b"x" * (len(FORM) - MOST),
        b"\r\n--b\r\n" + b"x" * (len(FORM) - MOST - 7),
        (b"\r\n" + MODEL % b"m" + END[2:]).ljust(len(FORM) - MOST, b"x"),
    ],
    ids=["no end", "malformed part", "a second model"],
)
async def test_no_engine_gets_all_of_a_form_that_is_refused(
    start: Start, engine: Listener, rest: bytes
) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
        client.send(rest)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.eof() == b""
        await turns_until(lambda: taken.ended)
        assert len(taken.body) < len(FORM)
    await proxy.settled()
    assert proxy.ended == [("bad_request", "wait", 400)]
    assert proxy.driver.totals.retries == 0


async def test_the_client_leaves(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
    await turns_until(lambda: taken.ended)
    await proxy.settled()
    assert proxy.ended == [("client_gone", "wait", 0)]
    assert proxy.server.clients.held_bytes == 0


async def test_a_client_that_stops_sending_is_told_so(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url, body_timeout_s=0.05, first_byte_timeout_s=0.01)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        answer = await client.answer()
        assert answer.status == 408
        assert await client.eof() == b""
        await turns_until(lambda: all(each.ended for each in engine.taken))
    await proxy.settled()
    assert [each[0] for each in proxy.ended] == ["bad_request"]


async def test_a_client_for_whom_an_instance_was_chosen_may_not_stop(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
        (connection,) = proxy.server.clients.open
        (exchange,) = proxy.driver.exchanges.values()
        connection.sweep(exchange.dispatched_at + REST_S - 0.1)
        assert exchange.phase == "wait"
        connection.sweep(exchange.dispatched_at + REST_S + 0.1)
        assert (await client.answer()).status == 408
        await turns_until(lambda: taken.ended)
    await proxy.settled()


async def test_an_engine_has_its_time_from_the_end_of_the_body(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
        (exchange,) = proxy.driver.exchanges.values()
        late = proxy.driver.now() + 1000.0
        exchange.sweep(late, 600.0, 600.0)
        assert exchange.phase == "wait"
        client.send(FORM[MOST:])
        await engine.got(len(FORM))
        exchange.sweep(exchange.since + 599.0, 600.0, 600.0)
        assert exchange.phase == "wait"
        exchange.sweep(exchange.since + 601.0, 600.0, 600.0)
        assert (await client.answer()).status == 504
        await turns_until(lambda: taken.ended)
    await proxy.settled()


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_answers_before_it_has_all(
    start: Start, engine: Listener, streamed: bool
) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        client.send(upload(FORM[:MOST], len(FORM)))
        taken = await engine.got(MOST)
        if streamed:
            taken.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            assert b"connection: close" in await client.reader.readuntil(b"\r\n\r\n")
            await client.reader.readuntil(b"x\r\n")
            client.send(FORM[MOST:])
            await engine.got(len(FORM))
            taken.writer.write(b"0\r\n\r\n")
            assert await client.eof() == b"0\r\n\r\n"
        else:
            taken.writer.write(plain(b"{}", b"413 Too Large"))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            assert not proxy.driver.engine_connections  # it still waits for the rest
            # The rest is dropped, and is no request.
            client.send(FORM[MOST:] + post())
            assert await client.eof() == b""
            await turns_until(lambda: taken.ended)
    await proxy.settled()
    assert [each[0] for each in proxy.ended] == ["ok" if streamed else "upstream_error"]
    assert len(engine.taken) == 1


@pytest.mark.parametrize("how", ["dropped", "busy"])
async def test_another_engine_gets_all_of_it(start: Start, engine: Listener, how: str) -> None:
    async with Listener() as other:
        proxy = await start(engine.url, other.url)
        async with Client(proxy) as client:
            client.send(upload(FORM[:MOST], len(FORM)))
            taken = await engine.got(MOST)
            if how == "dropped":
                taken.writer.transport.abort()
            else:
                taken.writer.write(plain(b"{}", b"503 Busy", b"retry-after: 1\r\n"))
            instead = await other.got(MOST)
            client.send(FORM[MOST:])
            await other.got(len(FORM))
            assert instead.body == FORM
            instead.writer.write(plain())
            assert (await client.answer()).status == 200
        await proxy.settled()
        assert [each[0] for each in proxy.ended] == ["ok"]


async def test_a_form_that_waits_in_the_queue(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url, limits=QueueLimits(max_requests=1))
    proxy.driver.change(AdminStateSet("i0", AdminState.DRAIN))
    async with Client(proxy) as one, Client(proxy) as two, Client(proxy) as three:
        one.send(upload(FORM[:MOST], len(FORM)))
        await turns_until(lambda: len(proxy.scheduler.queue) == 1)
        # There is no room for a second one, and that is said before all of it came.
        two.send(upload(FORM[:MOST], len(FORM)))
        answer = await two.answer()
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        one.send(b"x" * (len(FORM) - MOST))
        assert (await one.answer()).status == 400
        assert len(proxy.scheduler.queue) == 0
        three.send(upload(FORM[:MOST], len(FORM)))
        await turns_until(lambda: len(proxy.scheduler.queue) == 1)
        three.send(FORM[MOST:])
        await turns_until(lambda: proxy.server.clients.held_bytes == 0)
        proxy.driver.change(AdminStateSet("i0", AdminState.READY))
        taken = await engine.got(len(FORM))
        assert taken.body == FORM
        taken.writer.write(plain())
        assert (await three.answer()).status == 200
    await proxy.settled()


async def test_a_model_that_nobody_serves_is_refused_before_all_came(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url)
    form = MODEL % b"other" + FILE + SOUND + END
    async with Client(proxy) as client:
        client.send(upload(form[:MOST], len(form)))
        assert (await client.answer()).status == 404
    await proxy.settled()
    assert not engine.taken


@pytest.mark.parametrize("dispatched", [True, False])
async def test_shutting_down_while_a_form_arrives(start: Start, engine: Listener, dispatched: bool) -> None:
    proxy = await start(engine.url)
    async with Client(proxy) as client:
        there = MOST if dispatched else len(FORM) // 100
        client.send(upload(FORM[:there], len(FORM)))
        await turns_until(lambda: proxy.server.clients.held_bytes == there)
        proxy.server.stop_accepting()
        proxy.server.clients.stop()
        await proxy.driver.drain(0.01)
        if not dispatched:
            client.send(FORM[there:MOST])
        assert (await client.answer()).status == 503
        assert await client.eof() == b""
    await proxy.settled()


async def test_too_many_bytes_at_once(start: Start, engine: Listener) -> None:
    proxy = await start(engine.url, max_held_bytes=len(FORM) + MOST // 2)
    async with Client(proxy) as one, Client(proxy) as two:
        one.send(upload(FORM[:MOST], len(FORM)))
        await engine.got(MOST)
        two.send(upload(FORM[:MOST], len(FORM)))
        assert (await two.answer()).status == 429
        one.send(FORM[MOST:])
        taken = await engine.got(len(FORM))
        taken.writer.write(plain())
        assert (await one.answer()).status == 200
    await proxy.settled()
    assert proxy.server.clients.held_bytes == 0
