"""Clients that wait: heartbeats, the time that a client says it has, and when refused clients come again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from typing import Any

import pytest
from helpers import HANG_S, no_more_descriptors, turns_until
from proxy.test_proxying import ASK_STREAM, Client, Start, ask, post
from proxy.upstreams import (
    DONE,
    LAST,
    PLAIN_BODY,
    SSE_HEAD,
    STREAM,
    TOKEN,
    Upstream,
    Visit,
    chunk,
    closing,
    holding,
    plain,
)  # fmt: skip

from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.rate import MEMORY_S
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.exchange.driver_timers import DrainRate

BEAT = b": waiting\n\n"
#: Shorter than anything: every sweep sends one.
BEATS = {"heartbeat_s": 1e-9}


def events(body: bytes) -> list[bytes]:
    """The events of a stream without its comments."""
    return [event for event in body.split(b"\n\n") if event and not event.startswith(b":")]


def sweep(proxy: Any) -> None:
    """What the driver does twice a second, now."""
    proxy.driver.swept(0.0)


async def waiting(proxy: Any) -> None:
    """Wait until a request is in the queue."""
    await turns_until(lambda: len(proxy.scheduler.queue))


async def begun(proxy: Any, client: Client) -> dict[str, str]:
    """The head that comes with the first heartbeat."""
    await turns_until(lambda: proxy.driver.exchanges)
    # Within the millisecond in which it came, by the loop's clock, no heartbeat is due.
    loop = asyncio.get_running_loop()
    came_at = loop.time()
    await turns_until(lambda: loop.time() > came_at)
    sweep(proxy)
    raw = (await client.reader.readuntil(b"\r\n\r\n")).decode()
    assert raw.startswith("HTTP/1.1 200 OK\r\n")
    assert await client.reader.readuntil(BEAT + b"\r\n") == chunk(BEAT)
    return dict(line.split(": ", 1) for line in raw.strip().split("\r\n")[1:])


async def rest(client: Client) -> tuple[bytes, bool]:
    """What comes behind the head, and whether it ended as a whole answer does."""
    body = b""
    while size := int((await client.reader.readline()) or b"0", 16):
        body += (await client.reader.readexactly(size + 2))[:-2]
    return body, await client.reader.read(2) == b"\r\n"


def drain(proxy: Any) -> None:
    proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))


def ready(proxy: Any) -> None:
    proxy.scheduling.change(AdminStateSet("i0", AdminState.READY))


# --- heartbeats ---


async def test_a_stream_that_waits_in_the_queue_hears_of_it_and_is_whole(start: Start) -> None:
    async with Upstream(STREAM, plain()) as engine:
        proxy = await start(engine.url, **BEATS)
        drain(proxy)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM, "X-Request-Id: mine"))
            headers = await begun(proxy, client)
            assert headers == {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-request-id": "mine",
                "transfer-encoding": "chunked",
            }
            ready(proxy)
            body, clean = await rest(client)
            assert clean
            assert events(body) == [TOKEN[:-2], TOKEN[:-2], DONE[:-2]]
            # The connection goes on.
            client.send(post())
            assert (await client.answer()).body == PLAIN_BODY
        await proxy.settled()
    assert proxy.ended == [("ok", "answer", 200), ("ok", "answer", 200)]


async def test_a_stream_that_waits_for_its_engine_hears_of_it(start: Start) -> None:
    async def slow(visit: Any) -> None:
        await beaten.wait()
        visit.send(STREAM)

    beaten = asyncio.Event()
    async with Upstream(slow) as engine, Client(proxy := await start(engine.url, **BEATS)) as client:
        client.send(post(ASK_STREAM, "Connection: close"))
        assert (await begun(proxy, client))["connection"] == "close"
        beaten.set()
        body, clean = await rest(client)
        assert (events(body), clean) == ([TOKEN[:-2], TOKEN[:-2], DONE[:-2]], True)
        assert await client.eof() == b""
    await proxy.settled()


@pytest.mark.parametrize(
    ("table", "data"),
    [
        ({}, post(ASK_STREAM)),
        (BEATS, post()),
        (BEATS, post(ASK_STREAM, version="1.0")),
        (BEATS, post(b'{"model":"m","input":"x","stream":true}', path="/v1/audio/speech")),
    ],
    ids=["off", "plain", "http10", "sound"],
)
async def test_requests_without_heartbeats(start: Start, table: dict[str, float], data: bytes) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url, **table)) as client:
        drain(proxy)
        client.send(data)
        await waiting(proxy)
        sweep(proxy)
        ready(proxy)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
        assert answer.headers["content-type"] == "application/json"
    await proxy.settled()


ERROR = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'


@pytest.mark.parametrize(
    ("answer", "message", "outcome"),
    [
        (plain(ERROR, b"400 Bad Request"), "too long", "upstream_refused"),
        (plain(ERROR.replace(b":{", b": {\n"), b"400 X"), "too long", "upstream_refused"),
        (plain(b"<html>", b"503 Busy"), "The instance answered with status 503.", "upstream_error"),
        (plain(b"", b"429 Busy"), "The instance answered with status 429.", "upstream_busy"),
        (plain(b"[" * 20_000, b"500 X"), "The instance answered with status 500.", "upstream_error"),
        (plain(), "The instance did not answer with a stream.", "upstream_refused"),
        (closing(b""), "The instance closed the connection without answering.", "no_response"),
        (closing(plain()[:-4]), "The instance gave no valid answer: the engine's answer broke off.",
         "no_response"),
        (b"nonsense\r\n\r\n", "The instance gave no valid answer: The engine does not speak HTTP/1.",
         "no_response"),
        (closing(SSE_HEAD + chunk(TOKEN)), "The answer broke off: the engine's answer broke off.",
         "broken_stream"),
        (SSE_HEAD + LAST, "The answer broke off: the stream ended without [DONE].", "broken_stream"),
    ],
)  # fmt: skip
async def test_what_fails_after_a_heartbeat_is_an_event_and_no_whole_stream(
    start: Start, answer: Any, message: str, outcome: str
) -> None:
    async with Upstream(answer) as engine:
        proxy = await start(engine.url, **BEATS)
        drain(proxy)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM))
            await begun(proxy, client)
            ready(proxy)
            body, clean = await rest(client)
        assert not clean
        *_, last = events(body)
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == message
        await proxy.settled()
    assert [(each[0], each[2]) for each in proxy.ended] == [(outcome, 200)]


async def test_silence_after_a_heartbeat_ends_in_an_event(start: Start) -> None:
    for script, message in (
        (holding(), "did not begin to answer in time"),
        (holding(plain()[:-4]), "stopped in the middle of its answer"),
    ):
        async with Upstream(script) as engine:
            proxy = await start(engine.url, first_byte_timeout_s=60.0, idle_timeout_s=60.0, **BEATS)
            drain(proxy)
            async with Client(proxy) as client:
                client.send(post(ASK_STREAM))
                await begun(proxy, client)
                ready(proxy)
                await engine.visit()
                [exchange] = proxy.driver.exchanges.values()
                if "middle" in message:
                    await turns_until(lambda e=exchange: e.record.first_byte_at is not None)
                exchange.since -= 61.0
                sweep(proxy)
                body, clean = await rest(client)
            assert not clean
            assert message in json.loads(events(body)[-1].removeprefix(b"data: "))["error"]["message"]
            await proxy.settled()
            await engine.closed()


async def test_a_dropped_request_is_tried_elsewhere_after_a_heartbeat_too(start: Start) -> None:
    async def dies(visit: Any) -> None:
        await other_is_ready.wait()
        visit.writer.close()

    other_is_ready = asyncio.Event()
    async with Upstream(dies) as bad, Upstream(STREAM) as good:
        proxy = await start(bad.url, good.url, **BEATS)
        for name in ("i0", "i1"):
            proxy.scheduling.change(AdminStateSet(name, AdminState.DRAIN))
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM))
            await begun(proxy, client)
            ready(proxy)
            await bad.visit()
            proxy.scheduling.change(AdminStateSet("i1", AdminState.READY))
            other_is_ready.set()
            body, clean = await rest(client)
        await proxy.settled()
        assert (events(body), clean) == ([TOKEN[:-2], TOKEN[:-2], DONE[:-2]], True)
        assert (len(bad.visits), len(good.visits)) == (1, 1)


async def test_the_end_of_the_proxy_after_a_heartbeat_is_an_event(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, **BEATS)
        drain(proxy)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM))
            await begun(proxy, client)
            await proxy.driver.drain(0.0)
            body, clean = await rest(client)
        assert not clean
        assert json.loads(events(body)[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert proxy.ended == [("shutdown", "queue", 200)]


async def test_a_client_that_leaves_between_heartbeats(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, **BEATS)
        drain(proxy)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM))
            await begun(proxy, client)
        await proxy.settled()
    assert proxy.ended == [("client_gone", "queue", 200)]


async def test_openais_client_reads_through_heartbeats(start: Start) -> None:
    import openai  # a second, which every process would spend on finding the tests

    async with Upstream(STREAM, plain(ERROR, b"400 Bad Request")) as engine:
        proxy = await start(engine.url, **BEATS)
        url = f"http://127.0.0.1:{proxy.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for whole in (True, False):
                drain(proxy)
                asking = asyncio.create_task(
                    client.completions.create(model="m", prompt="hello", stream=True)
                )
                await waiting(proxy)
                sweep(proxy)
                stream = await asking
                sweep(proxy)
                ready(proxy)
                if whole:
                    assert [each.choices[0].text async for each in stream] == ["tok", "tok"]
                    continue
                with pytest.raises(openai.APIError, match="too long"):
                    _ = [each async for each in stream]
        await proxy.settled()


# --- deadlines ---


@pytest.mark.parametrize(
    "header", ["x-stainless-read-timeout: 1.0", "X-Envoy-Expected-Rq-Timeout-Ms: 900"], ids=["sdk", "envoy"]
)
async def test_a_client_is_answered_before_it_gives_up(start: Start, header: str) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url)) as client:
        drain(proxy)
        client.send(post(b'{"model":"m","prompt":"x"}', header))
        await turns_until(lambda: len(proxy.scheduler.queue) or proxy.ended)  # its own sweep may be first
        sweep(proxy)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "queue_expired")
        assert answer.headers["x-should-retry"] == "true"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert not engine.visits
        await proxy.settled()
    assert proxy.ended == [("expired_queue", "queue", 503)]


@pytest.mark.parametrize("value", ["0", "-1", "none", "1e-9", "99999999999", "", "600.5", "600"])
async def test_a_time_that_is_none_or_not_over_is_no_deadline(start: Start, value: str) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url)) as client:
        drain(proxy)
        client.send(post(b'{"model":"m","prompt":"x"}', f"x-stainless-read-timeout: {value}"))
        await waiting(proxy)
        sweep(proxy)
        ready(proxy)
        assert (await client.answer()).body == PLAIN_BODY
    await proxy.settled()


async def test_a_client_with_heartbeats_does_not_give_up(start: Start) -> None:
    async with Upstream(STREAM) as engine, Client(proxy := await start(engine.url, **BEATS)) as client:
        drain(proxy)
        client.send(post(ASK_STREAM, "x-stainless-read-timeout: 600"))
        await begun(proxy, client)
        [exchange] = proxy.driver.exchanges.values()
        exchange.response._patience_s = 0.0
        sweep(proxy)
        ready(proxy)
        body, clean = await rest(client)
        assert (events(body), clean) == ([TOKEN[:-2], TOKEN[:-2], DONE[:-2]], True)
    await proxy.settled()


async def test_a_deadline_is_for_waiting_in_the_queue_alone(start: Start) -> None:
    async def slow(visit: Any) -> None:
        await released.wait()
        visit.send(plain())

    released = asyncio.Event()
    async with Upstream(slow) as engine, Client(proxy := await start(engine.url)) as client:
        client.send(post(b'{"model":"m","prompt":"x"}', "x-stainless-read-timeout: 1.0"))
        await engine.visit()
        sweep(proxy)
        released.set()
        assert (await client.answer()).body == PLAIN_BODY
    await proxy.settled()


# --- coming again ---


async def test_what_an_engine_may_have_run_is_not_to_be_sent_again(start: Start) -> None:
    async with Upstream(holding()) as engine:
        for held, retry in ((False, "true"), (True, "false")):
            proxy = await start(engine.url)
            if not held:
                drain(proxy)
            async with Client(proxy) as client:
                client.send(post())
                await (engine.visit() if held else waiting(proxy))
                await proxy.driver.drain(0.0)
                answer = await client.answer()
                assert (answer.status, answer.headers["x-should-retry"]) == (503, retry)


async def test_nor_what_an_engine_dropped_before_this_machine_failed(start: Start) -> None:
    with contextlib.ExitStack() as descriptors:

        async def closing_last(visit: Visit) -> None:
            descriptors.enter_context(no_more_descriptors())
            visit.writer.close()

        async with Upstream(closing_last) as one, Upstream(closing_last) as two:
            proxy = await start(one.url, two.url)
            answer = await ask(proxy, post())
            assert (answer.status, answer.headers["x-should-retry"]) == (503, "false")
            assert len(one.visits) + len(two.visits) == 1
            descriptors.close()
            async with Client(proxy) as client:
                await turns_until(lambda: proxy.server.connections)
                with no_more_descriptors():  # nothing was sent
                    client.send(post())
                    answer = await client.answer()
                assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")


async def test_a_rejected_request_gets_retry_after(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, limits=QueueLimits(max_requests=0))
        drain(proxy)
        waits = set()
        for _ in range(8):
            answer = await ask(proxy, post())
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            exact_ms = int(answer.headers["retry-after-ms"])
            assert 1000 <= exact_ms <= 60_000
            assert abs(int(answer.headers["retry-after"]) * 1000 - exact_ms) <= 501
            waits.add(exact_ms)
    assert len(waits) > 1  # not all at once


# --- connections ---


async def test_the_oldest_connection_without_a_request_makes_room(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, max_connections=3)
        async with Client(proxy) as busy, Client(proxy) as begun, Client(proxy) as quiet:
            drain(proxy)
            busy.send(post())
            await waiting(proxy)
            begun.send(b"POST /v1/comp")  # the beginning of a head is no request
            await begun.writer.drain()
            await turns_until(lambda: len(proxy.server.connections) == 3)
            # A first request on its way has a second.
            await turns_until(lambda: sum(each.makes_room() for each in proxy.server.connections) == 2)
            async with Client(proxy) as first, Client(proxy) as second:
                for client in (begun, quiet):
                    with contextlib.suppress(ConnectionError):
                        assert await client.eof() == b""
                ready(proxy)
                for client in (busy, first, second):
                    if client is not busy:
                        client.send(post())
                    assert (await client.answer()).body == PLAIN_BODY
        await proxy.settled()
        assert len(proxy.ended) == 3


async def test_a_connection_on_which_an_answer_is_still_going_out_is_not_idle(start: Start) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url, max_connections=1)) as slow:
        slow.writer.transport.pause_reading()
        await turns_until(lambda: proxy.server.connections)
        [connection] = proxy.server.connections
        left = b"x" * (64 << 20)  # more than the kernel takes
        connection.write(left)
        async with Client(proxy) as client:
            assert (await client.answer()).status == 429
        slow.writer.transport.resume_reading()
        async with asyncio.timeout(HANG_S):
            assert await slow.reader.readexactly(len(left)) == left
        await turns_until(lambda: [each.makes_room() for each in proxy.server.connections] == [True])
        async with Client(proxy) as client:
            client.send(post())
            assert (await client.answer()).status == 200
    await proxy.settled()


async def test_each_of_many_clients_without_room_is_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, max_connections=1)
        drain(proxy)
        async with Client(proxy) as busy, contextlib.AsyncExitStack() as stack:
            busy.send(post())
            await waiting(proxy)
            for _ in range(30):
                client = await stack.enter_async_context(Client(proxy))
                assert (await client.answer()).status == 429
            ready(proxy)
            assert (await busy.answer()).status == 200
        await proxy.settled()
    assert caplog.text.count("a client is refused") == 1


async def test_where_every_connection_is_busy_the_next_is_told(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, max_connections=1)
        drain(proxy)
        async with Client(proxy) as busy:
            busy.send(post())
            await waiting(proxy)
            for _ in range(3):
                async with Client(proxy) as client:
                    answer = await client.answer()
                    assert (answer.status, answer.error["code"]) == (429, "too_many_connections")
                    assert answer.headers["x-should-retry"] == "true"
                    assert int(answer.headers["retry-after"]) >= 1
                    assert await client.eof() == b""
            ready(proxy)
            assert (await busy.answer()).status == 200
        await proxy.settled()
        # A client that stays without room is not answered for ever.
        drain(proxy)
        async with Client(proxy) as busy, contextlib.AsyncExitStack() as stack:
            busy.send(post())
            await waiting(proxy)
            for _ in range(20):
                await stack.enter_async_context(Client(proxy))
            await turns_until(lambda: len(proxy.server.connections) >= 9)
            assert len(proxy.server.connections) <= 10
            ready(proxy)
            assert (await busy.answer()).status == 200
        await proxy.settled()


class Least(random.Random):
    def random(self) -> float:
        return 0.0


def test_the_wait_is_what_the_queue_takes_to_drain() -> None:
    rate = DrainRate(Least())
    assert rate.retry_after_s(0, 100.0) == 1.0
    assert rate.retry_after_s(3, 100.0) == 30.0  # nothing ended lately
    assert rate.retry_after_s(10_000, 100.0) == 40.0
    for number in range(10_000):
        rate.ended(100.0 + number / 100)  # 100 a second
    assert rate.retry_after_s(500, 200.0) == pytest.approx(5.0, rel=0.01)
    assert rate.retry_after_s(10, 200.0) == 1.0
    assert rate.retry_after_s(500, 200.0 + MEMORY_S) == pytest.approx(5.0 * math.e, rel=0.01)
    assert rate.retry_after_s(500, 200.0 + 20 * MEMORY_S) == 40.0


def test_waits_are_spread_within_their_bounds() -> None:
    rate = DrainRate(random.Random(7))
    for wait_s, least, most in ((0.0, 1.0, 1.5), (10.0, 10.0, 15.0), (1e9, 40.0, 60.0)):
        drawn = [rate.spread(wait_s) for _ in range(200)]
        assert least <= min(drawn) <= max(drawn) <= most
        assert len(set(drawn)) == 200
