"""Silence of an engine: a known standstill ends an answer, an unknown one waits for the client's own time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import turns_until
from proxy.test_proxying import ASK, ASK_STREAM, Client, Start, post
from proxy.test_waiting import sweep
from proxy.upstreams import DONE, LAST, PLAIN_BODY, SSE_HEAD, TOKEN, Upstream, Visit, chunk, plain

from hetlb.balancer.core.facts import EngineSample

PATIENT = "x-stainless-read-timeout: 600"
LONG_S = 100.0


def stalled(proxy: Any, *, counters: bool) -> None:
    """Let the clock see engines that have said nothing for long: their counters stand, or are not known."""
    now = proxy.driver.now()
    for each in proxy.scheduler.instances:
        if counters:
            for at in (now - 1.0, now):
                proxy.scheduler.on_scrape(each.name, EngineSample(1, 0, 0.1, generated=7), at)
        each.evidence.silence.stalled_since = now - LONG_S
    sweep(proxy)


async def silent_since(proxy: Any, seconds: float) -> None:
    """Wait until every exchange has been silent for so long."""
    exchanges = proxy.driver.exchanges.values()
    await turns_until(lambda: all(proxy.driver.now() - each.since > seconds for each in exchanges))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"], ids=["resumable", "not resumable"])
@pytest.mark.parametrize("own", [False, True], ids=["idle_timeout_s", "the client's time"])
@pytest.mark.parametrize("counters", [False, True], ids=["no counters", "counters that stand"])
async def test_a_silent_stream(start: Start, path: str, own: bool, counters: bool) -> None:
    goes_on = asyncio.Event()

    async def silent(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(TOKEN))
        leaves = asyncio.create_task(visit.until_left())
        await asyncio.wait([leaves, asyncio.create_task(goes_on.wait())], return_when="FIRST_COMPLETED")
        visit.send(chunk(TOKEN) + chunk(DONE) + LAST)
        await leaves

    table = {"first_byte_timeout_s": 0.01, "idle_timeout_s": 0.05 if own else 1e6}
    async with Upstream(silent) as one, Upstream(silent) as other:
        proxy = await start(one.url, other.url, **table)
        async with Client(proxy) as client:
            body = ASK_STREAM if path == "/v1/completions" else ASK_STREAM.replace(b"prompt", b"input")
            client.send(post(body, *([PATIENT] if own else []), path=path))
            await turns_until(lambda: [e.phase for e in proxy.driver.exchanges.values()] == ["answer"])
            await silent_since(proxy, 0.06)
            stalled(proxy, counters=counters)
            goes_on.set()
            answer = await client.answer()
        await proxy.settled()
    assert answer.status == 200
    if counters:
        assert not answer.clean
        assert proxy.exchanges[0].end.name == "stalled"
    else:
        assert answer.body.endswith(TOKEN + DONE)
        assert proxy.ended == [("ok", "answer", 200)]


@pytest.mark.parametrize("counters", [False, True], ids=["no counters", "counters that stand"])
@pytest.mark.parametrize("own", [True, False], ids=["the client's time", "none"])
async def test_a_plain_answer_that_takes_longer_than_the_first_byte_timeout(
    start: Start, own: bool, counters: bool
) -> None:
    goes_on = asyncio.Event()

    async def slow(visit: Visit) -> None:
        leaves = asyncio.create_task(visit.until_left())
        await asyncio.wait([leaves, asyncio.create_task(goes_on.wait())], return_when="FIRST_COMPLETED")
        visit.send(plain())
        await leaves

    async with Upstream(slow) as engine:
        proxy = await start(engine.url, first_byte_timeout_s=0.05)
        async with Client(proxy) as client:
            client.send(post(ASK, *([PATIENT] if own else [])))
            await engine.visit()
            await silent_since(proxy, 0.06)
            stalled(proxy, counters=counters)
            goes_on.set()
            answer = await client.answer()
        await proxy.settled()
    if own and not counters:
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
    else:
        assert answer.status == 504


async def test_counters_that_move_for_others_are_no_work_for_a_reply(start: Start) -> None:
    """`/tokenize` hangs beside requests that the engine computes: its own time is what counts."""

    async def hung(visit: Visit) -> None:
        await visit.until_left()

    async with Upstream(hung) as engine:
        proxy = await start(engine.url, first_byte_timeout_s=0.05)
        async with Client(proxy) as client:
            client.send(post(b'{"model":"m","prompt":"x"}', path="/tokenize"))
            await engine.visit()
            await silent_since(proxy, 0.06)
            now = proxy.driver.now()
            for at, generated in ((now - 1.0, 5), (now, 9)):
                proxy.scheduler.on_scrape("i0", EngineSample(1, 0, 0.1, generated=generated), at)
            sweep(proxy)
            assert (await client.answer()).status == 504
        await proxy.settled()


async def test_the_first_request_with_a_field_is_read_for_it_and_keeps_its_engine(start: Start) -> None:
    """The engine is silent for ten seconds, by the clock of the books: it may compile."""

    async def hung(visit: Visit) -> None:
        await visit.until_left()

    rare = b'{"model":"m","prompt":"x","stream":true,"logprobs":true}'
    async with Upstream(hung) as one, Upstream(hung) as other:
        proxy = await start(one.url, other.url)
        async with Client(proxy) as client:
            proxy.driver.scheduling.fleet.sampled = True  # no sample is due
            client.send(post(rare))
            await turns_until(lambda: bool(proxy.scheduler.in_flight))
            (lease,) = proxy.scheduler.ledger.leases()
            assert lease.request.features is None
            lease.dispatched_at -= 10.0
            for each in proxy.scheduler.instances:
                each.evidence.silence.token_at -= 10.0
            sweep(proxy)
            assert lease.request.features == ("logprobs",)
            assert not lease.ended
            assert all(each.evidence.silence.stalled_since is None for each in proxy.scheduler.instances)
        await proxy.settled()
