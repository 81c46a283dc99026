"""WebSocket sessions on `/v1/realtime`: agreed on strictly, relayed whole, ended once, by whatever side."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
import yaml
from helpers import HANG_S, free_port, outcomes
from proxy.conftest import turns_until
from proxy.frames import frame
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import Visit, plain
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hetlb.options.tunnel.realtime import accept_of

HANDSHAKE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: here\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
TEXT, PING, CLOSE = 1, 9, 8


class Talker(Engine):
    """An engine whose `/v1/realtime` is a WebSocket that says what a test tells it."""

    def __init__(self, *, greets: bool = True, agrees: bytes | None = None) -> None:
        super().__init__()
        self.greets = greets
        #: The whole answer to a handshake, in place of a 101.
        self.agrees = agrees

    async def _route(self, visit: Visit) -> None:
        if not visit.head.startswith(b"GET /v1/realtime"):
            await super()._route(visit)
            return
        self.asked.append(visit)
        async with self.arrived:
            self.arrived.notify_all()
        await self.released.wait()
        if self.agrees is not None:
            visit.send(self.agrees)
            return
        [key] = [line[19:] for line in visit.head.split(b"\r\n") if line.startswith(b"sec-websocket-key: ")]
        visit.send(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-accept: %b\r\n\r\n" % accept_of(key)
        )
        if self.greets:
            visit.send(frame(TEXT, b'{"type":"session.created"}'))
        await visit.left.wait()  # the test reads and writes
        visit.writer.close()


@contextlib.asynccontextmanager
async def talking(tmp_path: Path, engine: Engine, *others: Engine, **tables: Any) -> AsyncIterator[Running]:
    async with serving(tmp_path, document(engine, *others, **tables)) as running:
        for number in range(1 + len(others)):
            await running.up(f"i{number}")
        yield running


def session(running: Running, query: str = "?model=m", **options: Any) -> Any:
    patience: dict[str, Any] = {"ping_interval": None, "open_timeout": HANG_S}
    return connect(f"ws://127.0.0.1:{running.port}/v1/realtime{query}", **patience, **options)


def ended(running: Running) -> list[str]:
    """Outcomes of the requests that ended."""
    return outcomes(running.service.totals)


async def refused(running: Running, query: str = "?model=m", **options: Any) -> int:
    """The status of a handshake that is turned down."""
    with pytest.raises(InvalidStatus) as answer:
        await session(running, query, **options)
    return answer.value.response.status_code


async def closed_with(client: ClientConnection) -> tuple[int, str]:
    """Code and reason of the Close frame that comes next; 1006 without one."""
    with pytest.raises(ConnectionClosed) as closed:
        await client.recv()
    told = closed.value.rcvd
    return (1006, "") if told is None else (told.code, told.reason)


async def raw(running: Running, request: bytes) -> tuple[bytes, bytes]:
    """The head and the body of what is answered to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request)
    async with asyncio.timeout(HANG_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
    writer.close()
    return head, body


async def test_both_sides_hear_each_other(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        async with session(running) as client:
            assert client.response is not None
            assert client.response.headers["x-hetlb-instance"] == "i0"
            assert client.response.headers["x-request-id"].startswith("hetlb-")
            assert "sec-websocket-extensions" not in client.response.headers
            visit = await engine.asked_for()
            assert b"sec-websocket-extensions" not in visit.head.lower()
            assert b"via: 1.1 hetlb-" in visit.head
            assert json.loads(await client.recv()) == {"type": "session.created"}
            assert running.instance("i0").in_flight == running.instance("i0").slotless == 1
            assert running.instance("i0").sequences == 0
            await client.send("hello")
            assert (await visit.reader.readexactly(6))[0] == 0x81
            visit.send(frame(PING, b"are you there"))
            # The client's pong is masked: two bytes of head, four of mask.
            pong = await visit.reader.readexactly(2 + 4 + 13 + 5)
            assert pong[5:7] == bytes((0x8A, 0x80 | 13))
            big = b"x" * 300_000
            visit.send(frame(TEXT, big))
            assert await client.recv() == big.decode()
            visit.send(frame(CLOSE, (1000).to_bytes(2)))
            visit.left.set()
            assert (await closed_with(client))[0] == 1000
        await running.settled()
        assert ended(running) == ["ok"]
        page = (await running.admin("GET", "/metrics")).body.decode()
        assert 'hetlb_websocket_session_seconds_count{model="m"} 1' in page
        assert 'hetlb_e2e_request_latency_seconds_count{model="m"} 0' in page


@pytest.mark.parametrize("query", ["", "?model=m", "?x=1&model=m"])
async def test_the_model_of_a_session(tmp_path: Path, query: str) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running, session(running, query) as client:
        await client.recv()
        (await engine.asked_for()).left.set()


async def test_models_that_are_not_there(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        for query, status in (("?model=other", 404), ("?model=m&model=n", 400), ("?model=%ff", 400)):
            assert await refused(running, query) == status
        assert not engine.asked


async def test_sessions_are_spread(tmp_path: Path) -> None:
    async with Talker() as one, Talker() as other:
        async with talking(tmp_path, one, other, policy={"name": "hetlb"}) as running:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(6):
                    client = await stack.enter_async_context(session(running))
                    await client.recv()
                # The spread depends on the time between them.
                assert min(running.instance(name).slotless for name in running.names) >= 1
                for visit in (*one.asked, *other.asked):
                    visit.left.set()


# --- the handshake ---


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HANDSHAKE.replace(b"upgrade: websocket\r\n", b"") + b"\r\n", b"426"),
        (HANDSHAKE.replace(b"websocket\r\n", b"h2c\r\n", 1) + b"\r\n", b"426"),
        (HANDSHAKE + b"upgrade: h2c\r\n\r\n", b"426"),
        (HANDSHAKE.replace(b"connection: Upgrade\r\n", b"") + b"\r\n", b"426"),
        (HANDSHAKE.replace(b"version: 13", b"version: 8") + b"\r\n", b"426"),
        (HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n", b"426"),
        (HANDSHAKE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"short") + b"\r\n", b"400"),
        (HANDSHAKE + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", b"400"),
        (HANDSHAKE + b"content-length: 5\r\n\r\nhello", b"400"),
        (HANDSHAKE + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HANDSHAKE + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (HANDSHAKE + b"origin: https://elsewhere\r\n\r\n", b"403"),
        (HANDSHAKE.replace(b"GET", b"POST") + b"content-length: 0\r\n\r\n", b"405"),
        (HANDSHAKE.replace(b"/v1/realtime", b"/v1/realtime/") + b"\r\n", b"404"),
    ],
)
async def test_what_is_no_handshake(tmp_path: Path, request_bytes: bytes, status: bytes) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        head, body = await raw(running, request_bytes)
        assert head.split()[1] == status, head
        assert set(json.loads(body)["error"]) == {"message", "type", "code", "param"}
        if status == b"426":
            assert b"\r\nupgrade: websocket\r\n" in head
            assert b"\r\nsec-websocket-version: 13\r\n" in head
        assert not engine.asked


async def test_other_paths_never_switch(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        lines = HANDSHAKE.partition(b"\r\n")[2]
        head, _ = await raw(running, b"GET /v1/models HTTP/1.1\r\n" + lines + b"\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        body = b'{"model":"m","prompt":"hello","max_tokens":5}'
        request = b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (
            lines,
            len(body),
            body,
        )
        head, _ = await raw(running, request)
        assert head.startswith(b"HTTP/1.1 200 ")
        [visit] = engine.asked
        assert b"upgrade" not in visit.head.lower()
        assert b"websocket" not in visit.head.lower()


async def test_a_page_of_the_same_origin(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        head, _ = await raw(running, HANDSHAKE + b"origin: http://here\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        visit = await engine.asked_for()
        assert b"origin" not in visit.head.lower()
        visit.left.set()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (plain(b"{}", b"403 Forbidden"), b"403"),
        (plain(b"{}", b"404 Not Found"), b"404"),
        (plain(b"{}", b"200 OK"), b"200"),
        (plain(b"{}", b"500 Internal Server Error"), b"500"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"502"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", b"502"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\n",
            b"502",
        ),
    ],
)
async def test_an_engine_that_does_not_agree(tmp_path: Path, answer: bytes, status: bytes) -> None:
    """It is an answer like any other; what the client sent too early is read as HTTP, and is none."""
    async with Talker(agrees=answer) as engine, talking(tmp_path, engine) as running:
        engine.hold()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HANDSHAKE + b"\r\n" + b"\x81\x85secretframe")
        visit = await engine.asked_for()
        engine.released.set()
        async with asyncio.timeout(HANG_S):
            answered = await reader.read()
        writer.close()
        assert answered.startswith(b"HTTP/1.1 " + status)
        assert answered.count(b"HTTP/1.1 400 Bad Request") == 1
        assert b"secret" not in visit.head
        await running.settled()


async def test_bytes_that_come_before_the_engine_agreed(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        engine.hold()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HANDSHAKE + b"\r\n" + b"\x81\x85maskhello")
        visit = await engine.asked_for()
        assert not visit.reader._buffer  # type: ignore[attr-defined]
        engine.released.set()
        assert await visit.reader.readexactly(11) == b"\x81\x85maskhello"
        writer.close()
        visit.left.set()


async def test_keys_models_and_limits(tmp_path: Path) -> None:
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}
        for name, more in (
            ("one", {"limits": {"in_flight": 1, "tokens_per_minute": 300}}),
            ("other", {"models": ["n"]}),
        )
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(rows))
    async with Talker() as engine:
        async with talking(tmp_path, engine, proxy={"api_keys_file": "keys.yaml"}) as running:
            for key, status in (("", 401), ("nobody", 401), ("other", 403)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                assert await refused(running, additional_headers=headers) == status
            headers = {"authorization": "Bearer one"}
            async with session(running, additional_headers=headers) as client:
                await client.recv()
                assert client.response is not None
                assert client.response.headers["x-ratelimit-limit-tokens"] == "300"
                visit = await engine.asked_for()
                assert b"authorization" not in visit.head.lower()
                assert await refused(running, additional_headers=headers) == 429
                visit.left.set()
            await running.settled()


async def test_an_alias_is_renamed_in_the_handshake(tmp_path: Path) -> None:
    async with Talker() as engine:
        fleet = document(engine)
        fleet["models"][0]["aliases"] = ["gpt realtime"]
        async with serving(tmp_path, fleet) as running:
            await running.up("i0")
            async with session(running, "?model=gpt%20realtime&intent=x") as client:
                await client.recv()
                visit = await engine.asked_for()
                assert visit.head.startswith(b"GET /v1/realtime?model=m&intent=x HTTP/1.1\r\n")
                visit.left.set()


@contextlib.asynccontextmanager
async def limited(tmp_path: Path, engine: Engine) -> AsyncIterator[Running]:
    """A service where the key `some` is for the model `m` alone, whose alias is `gpt-realtime`."""
    rows = [{"name": "some", "sha256": hashlib.sha256(b"some").hexdigest(), "models": ["m"]}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(rows))
    fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
    fleet["models"][0]["aliases"] = ["gpt-realtime"]
    async with serving(tmp_path, fleet) as running:
        await running.up("i0")
        yield running


LIMITED = {"authorization": "Bearer some"}


async def test_a_limited_key_states_its_model(tmp_path: Path) -> None:
    async with Talker() as engine, limited(tmp_path, engine) as running:
        assert await refused(running, "", additional_headers=LIMITED) == 403
        assert await refused(running, "?model=n", additional_headers=LIMITED) in (403, 404)
        async with session(running, "?model=m", additional_headers=LIMITED) as client:
            await client.recv()
            (await engine.asked_for()).left.set()


async def test_what_an_engine_said_before_it_left_comes_first(tmp_path: Path) -> None:
    async with Talker(greets=False) as engine, talking(tmp_path, engine) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HANDSHAKE + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        visit = await engine.asked_for()
        said = b"\x81\0" * 50_000 + frame(CLOSE, (1000).to_bytes(2))
        visit.send(said)
        visit.left.set()
        assert await reader.read(-1) == said
        writer.close()
        await running.settled()
        assert ended(running) == ["ok"]


# --- ends ---


async def test_the_client_leaves(tmp_path: Path) -> None:
    for how in ("close", "reset"):
        async with Talker() as engine, talking(tmp_path, engine) as running:
            client = await session(running)
            await client.recv()
            visit = await engine.asked_for()
            if how == "reset":
                client.transport.abort()
            else:
                closing = asyncio.create_task(client.close())
                told = await visit.reader.readexactly(8)
                assert told[0] == 0x88
                visit.send(frame(CLOSE, (1000).to_bytes(2)))
                visit.left.set()
                await closing
            assert await visit.reader.read() == b""
            visit.left.set()
            await running.settled()
            assert ended(running) in (["ok"], ["client_gone"])
            assert running.instance("i0").evidence.health.state == "up"


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (b"", 1006),
        (frame(CLOSE, (1011).to_bytes(2)), 1011),
        (frame(CLOSE, b""), 1005),
        (b"\x81\x05hel", 1006),
    ],
)
async def test_the_engine_leaves(tmp_path: Path, last: bytes, code: int) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        async with session(running) as client:
            await client.recv()
            visit = await engine.asked_for()
            visit.send(last)
            visit.left.set()
            assert (await closed_with(client))[0] == code
        await running.settled()
        assert ended(running) == ["ok"]


async def test_an_engine_that_resets(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        async with session(running) as client:
            await client.recv()
            visit = await engine.asked_for()
            visit.reset()
            assert (await closed_with(client))[0] == 1006
            visit.left.set()
        await running.settled()
        assert ended(running) in (["broken_stream"], ["ok"])  # as the system tells it


async def test_an_engine_that_refuses_connections_is_replaced(tmp_path: Path) -> None:
    async with Talker() as engine:
        fleet = document(engine, scrape={"interval_s": 60.0})
        fleet["models"][0]["instances"].insert(0, {"name": "gone", "url": f"http://127.0.0.1:{free_port()}"})
        async with serving(tmp_path, fleet) as running:
            async with session(running) as client:
                await client.recv()
                assert client.response is not None
                assert client.response.headers["x-hetlb-instance"] == "i0"
                (await engine.asked_for()).left.set()


async def test_nothing_is_said_for_too_long(tmp_path: Path) -> None:
    async with Talker() as engine:
        async with talking(tmp_path, engine, proxy={"idle_timeout_s": 1.0}) as running:
            async with session(running) as client:
                await client.recv()
                visit = await engine.asked_for()
                assert (await closed_with(client))[0] == 1006
                assert await visit.reader.read() == b""
                visit.left.set()
            await running.settled()
            assert ended(running) == ["client_gone"]


async def test_a_client_that_does_not_read_holds_the_engine_back(tmp_path: Path) -> None:
    async with Talker() as engine:
        async with talking(tmp_path, engine, proxy={"write_timeout_s": 1.0}) as running:
            _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 10)
            writer.transport.pause_reading()
            writer.write(HANDSHAKE + b"\r\n")
            visit = await engine.asked_for()
            visit.writer.transport.set_write_buffer_limits(high=1)
            piece = frame(TEXT, b"x" * 65_000)
            sent = 0

            async def send() -> None:
                nonlocal sent
                while True:
                    visit.send(piece)
                    await visit.writer.drain()
                    sent += 1

            sending = asyncio.create_task(send())
            # Until the client is dropped: what was taken before stays within a few buffers.
            with contextlib.suppress(ConnectionError):
                assert await visit.reader.read() == b""
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert sent * len(piece) < 16 << 20
            visit.left.set()
            writer.transport.abort()
            await running.settled()
            assert ended(running) == ["client_gone"]


async def test_a_client_that_does_not_read_is_dropped_whatever_its_engine_took_since(tmp_path: Path) -> None:
    """A side that was full for a moment says nothing of the other one."""
    limits = {"write_timeout_s": 1.0, "idle_timeout_s": 10 * HANG_S}
    async with Talker() as engine:
        async with talking(tmp_path, engine, proxy=limits) as running:
            async with session(running) as client:
                await client.recv()
                visit = await engine.asked_for()
                [exchange] = running.service.driver.exchanges.values()
                for of_client, full in ((True, True), (False, True), (False, False)):
                    exchange.attempt.full(of_client=of_client, full=full)
                await turns_until(lambda: ended(running))
                visit.left.set()
            assert ended(running) == ["client_gone"]


async def test_an_engine_that_does_not_read_holds_the_client_back(tmp_path: Path) -> None:
    async with Talker() as engine:
        async with talking(tmp_path, engine, proxy={"idle_timeout_s": 1.0}) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(HANDSHAKE + b"\r\n")
            visit = await engine.asked_for()
            visit.writer.transport.pause_reading()
            writer.transport.set_write_buffer_limits(high=1)
            piece, sent = b"\x82\xfe\xff\x00mask" + b"x" * 0xFF00, 0
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(piece)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await writer.drain()
                    sent += not writer.transport.get_write_buffer_size()
            assert sent * len(piece) < 32 << 20
            writer.close()
            visit.left.set()
            await running.settled()
            assert ended(running) == ["broken_stream"]


async def test_the_grace_of_a_shutdown(tmp_path: Path) -> None:
    async with Talker() as engine, talking(tmp_path, engine) as running:
        async with session(running) as client:
            await client.recv()
            visit = await engine.asked_for()
            stopping = asyncio.create_task(running.service.stop(HANG_S))
            await turns_until(lambda: running.service.server.stopping)
            visit.send(frame(TEXT, b"still here"))  # within the grace
            assert await client.recv() == "still here"
            running.service.driver.shut_down()  # it is over
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await client.send("audio")
                    await asyncio.sleep(0)
            assert await closed_with(client) == (1006, "")
            visit.left.set()
            await stopping
        assert ended(running) == ["shutdown"]


async def test_many_sessions_that_end_in_all_ways(tmp_path: Path) -> None:
    """Afterwards nothing is left of them (checked by `serving`)."""
    async with Talker() as engine, talking(tmp_path, engine) as running:

        async def one(number: int) -> None:
            client: ClientConnection = await session(running)
            await client.recv()
            for turn in range(number % 5):
                await client.send(f"{turn}" * 100)
            if number % 3 == 0:
                client.transport.abort()
            elif number % 3 == 1:
                await client.close()
            else:
                with contextlib.suppress(websockets.exceptions.ConnectionClosed):
                    while True:
                        await client.recv()

        tasks = [asyncio.create_task(one(number)) for number in range(60)]
        await engine.asked_for(60)
        for number, visit in enumerate(list(engine.asked)):
            if number % 2:
                visit.send(frame(CLOSE, (1000).to_bytes(2)))
            visit.left.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await running.settled()
        assert len(ended(running)) == 60
        assert running.service.totals.account(None, "m").requests == 60
