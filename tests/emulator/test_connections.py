"""Shows how the server treats connections: order, ends, clients that leave, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct

import pytest
from emulator.conftest import Start, idle, make_profile
from emulator.wire import Client, ask, request_bytes

from hetlb.balancer.engines.engine_metrics import parse
from hetlb.tools.emulator import EmulatedEngine

COMPLETIONS = "/v1/completions"
#: Runs for 13 s and more unless it is aborted.
LONG = {"prompt": [1] * 20, "max_tokens": 1000}


async def test_keep_alive_and_order(engine: EmulatedEngine) -> None:
    """One connection, many requests; then three in one write, answered in order."""
    async with await Client.connect(engine.url) as client:
        for number in range(5):
            body = {"prompt": "x", "max_tokens": 1 + number, "stream": number % 2 == 0}
            assert (await client.ask("POST", COMPLETIONS, body)).status == 200
        client.writer.write(
            request_bytes("GET", "/version")
            + request_bytes("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 3, "stream": True})
            + request_bytes("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 2})
            + request_bytes("GET", "/health")
        )
        assert (await client.receive()).json == {"version": "0.32.0"}
        assert len((await client.receive()).events) == 4
        assert (await client.receive()).json["usage"]["completion_tokens"] == 2
        assert (await client.receive()).body == b""
        # The pause for pipelined requests is over.
        assert (await client.ask("GET", "/version")).status == 200
        assert engine.connections == 1


async def test_byte_by_byte(engine: EmulatedEngine) -> None:
    """A request may come in any pieces."""
    async with await Client.connect(engine.url) as client:
        for byte in request_bytes("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 2}):
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.receive()).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_close(engine: EmulatedEngine, stream: bool) -> None:
    async with await Client.connect(engine.url) as client:
        body = {"prompt": "x", "max_tokens": 3, "stream": stream}
        response = await client.ask("POST", COMPLETIONS, body, {"Connection": "close"})
        assert response.headers["connection"] == "close"
        assert await client.reader.read() == b""


async def test_http_1_0(engine: EmulatedEngine) -> None:
    async with await Client.connect(engine.url) as client:
        client.writer.write(b"GET /version HTTP/1.0\r\n\r\n")
        assert (await client.receive()).status == 200
        assert await client.reader.read() == b""


async def test_an_idle_connection_is_closed(start: Start) -> None:
    """After the pause that uvicorn allows (5 s; shorter here)."""
    engine = await start(keep_alive_s=0.05)
    async with await Client.connect(engine.url) as used:
        assert (await used.ask("GET", "/health")).status == 200
        assert await used.reader.read() == b""


async def test_expect_continue(engine: EmulatedEngine) -> None:
    raw = request_bytes("POST", COMPLETIONS, {"prompt": "x"}, {"Expect": "100-continue"})
    head, body = raw.split(b"\r\n\r\n")
    async with await Client.connect(engine.url) as client:
        client.writer.write(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(body)
        assert (await client.receive()).status == 200


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
async def test_what_is_no_http(engine: EmulatedEngine, junk: bytes) -> None:
    async with await Client.connect(engine.url) as client:
        client.writer.write(junk)
        response = await client.receive()
        assert response.status == 400
        assert await client.reader.read() == b""
    assert (await ask(engine.url, "GET", "/health")).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves(start: Start, stream: bool, how: str) -> None:
    """Running and waiting sequences go at once, long before their answers would end."""
    engine = await start(make_profile(max_num_seqs=2), time_scale=1.0)
    async with await Client.connect(engine.url) as client:
        client.send("POST", COMPLETIONS, {**LONG, "n": 3, "stream": stream})
        async with await Client.connect(engine.url) as watcher:
            while not (sample := parse((await watcher.ask("GET", "/metrics")).body.decode())).running:
                pass
        assert (sample.running, sample.waiting) == (2, 1)
        assert sample.kv_usage is not None
        assert sample.kv_usage > 0
        if how == "half-close":
            client.writer.write_eof()
        elif how == "reset":
            linger = struct.pack("ii", 1, 0)
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.writer.transport.abort()
        else:
            await client.close()
        await idle(engine)
    assert (engine.running, engine.waiting, engine.model.kv.pool.usage) == (0, 0, 0.0)
    assert engine.finished == {"stop": 0, "length": 0, "abort": 3}


async def test_many_clients_of_which_some_leave(start: Start) -> None:
    """30 of 100 clients leave after some bytes of their answer: nothing is left, the others are whole."""
    engine = await start(make_profile(kv_cache_tokens=2048))
    rng = random.Random(1)

    async def one(leaves: bool) -> int:
        async with await Client.connect(engine.url) as client:
            tokens = rng.randint(20, 200)
            client.send("POST", COMPLETIONS, {"prompt": [1] * 30, "max_tokens": tokens, "stream": True})
            if leaves:
                await client.reader.readexactly(rng.randint(1, 2000))
                return 0
            *events, done = (await client.receive()).events
            assert done == "[DONE]"
            assert len(events) == tokens
            return tokens

    counts = await asyncio.gather(*(one(number % 10 < 3) for number in range(100)))
    await idle(engine)
    finished = engine.finished
    assert sum(finished.values()) == 100
    assert finished["length"] >= 70
    assert engine.model.generated_tokens >= sum(counts)


async def test_close_is_like_a_killed_process(start: Start) -> None:
    """Streams break off without an end, and nothing runs on."""
    engine = await start(time_scale=1.0)
    async with await Client.connect(engine.url) as client:
        client.send("POST", COMPLETIONS, {**LONG, "stream": True})
        await client.head()
        await client.chunk()
        await engine.close()
        rest = b""
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(1 << 16):
                rest += part
        assert b"[DONE]" not in rest
    assert (engine.running, engine.connections) == (0, 0)
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(engine.url)


async def test_the_same_port_again(start: Start) -> None:
    """An engine can come back where another was; two at a time cannot."""
    first = await start()
    with pytest.raises(OSError, match="in use"):
        await start(port=first.port)
    await first.close()
    second = await start(port=first.port)
    assert second.url == first.url
    assert (await ask(second.url, "GET", "/health")).status == 200


async def test_metrics_are_what_the_scheduler_reads(engine: EmulatedEngine) -> None:
    """The names and labels of vLLM 0.32, through the reader that the proxy uses."""
    await ask(engine.url, "POST", COMPLETIONS, {"prompt": "abcd" * 10, "max_tokens": 5})
    page = (await ask(engine.url, "GET", "/metrics")).body.decode()
    sample = parse(page)
    assert sample.missing == ()
    assert (sample.running, sample.waiting, sample.kv_usage) == (0, 0, 0.0)
    assert (sample.capacity.kv_cache_tokens, sample.capacity.block_size) == (8192, 16)
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 10.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 5.0' in page
