"""An engine that dies between the head of a stream and its first byte has not answered: another one does.

vLLM sends the head of a stream as soon as it has taken the request, before the prompt is read.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import turns_until
from proxy.test_proxying import ASK_STREAM, Start, ask, post
from proxy.upstreams import LAST, SSE_HEAD, STREAM, TOKEN, Upstream, Visit, chunk, closing, plain, resetting

from hetlb.balancer.core.types import Health

DIES = pytest.mark.parametrize("dies", [closing(SSE_HEAD), resetting(SSE_HEAD)], ids=["fin", "rst"])


@DIES
async def test_a_stream_of_which_only_the_head_came_is_answered_by_another(start: Start, dies: Any) -> None:
    async with Upstream(dies) as bad, Upstream(STREAM) as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert (answer.status, answer.headers["x-hetlb-instance"]) == (200, "i1")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(TOKEN) == 2
        assert (len(bad.visits), len(good.visits)) == (1, 1)
        await bad.closed()
    assert proxy.ended == [("ok", "answer", 200)]
    assert proxy.driver.totals.retries == 1
    # It counts as a failure of the one that died, as a dropped request does.
    assert [each.evidence.health.state for each in proxy.scheduler.instances] == [Health.UP, Health.UP]


@DIES
async def test_what_comes_from_the_other_may_be_no_stream(start: Start, dies: Any) -> None:
    """Nothing of the first answer is left: neither its status nor that it was a stream."""
    error = b'{"error":{"message":"no"}}'
    async with Upstream(dies) as bad, Upstream(plain(error, b"400 Bad Request")) as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert (answer.status, answer.body) == (400, error)
        assert answer.headers["content-type"] == "application/json"
    assert proxy.ended == [("upstream_refused", "answer", 400)]


@DIES
async def test_such_a_request_runs_twice_at_most(start: Start, dies: Any) -> None:
    async with Upstream(dies) as one, Upstream(dies) as two, Upstream(STREAM) as three:
        proxy = await start(one.url, two.url, three.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert [len(each.visits) for each in (one, two, three)] == [1, 1, 0]
    assert [(outcome, status) for outcome, _, status in proxy.ended] == [("no_response", 502)]


async def test_a_stream_that_has_begun_is_not_run_again(start: Start) -> None:
    """Not even if what came is less than an event, so that nothing of it has reached the client."""
    for begun in (chunk(TOKEN), chunk(b"data: ")):
        async with Upstream(closing(SSE_HEAD + begun)) as one, Upstream(STREAM) as two:
            proxy = await start(one.url, two.url)
            answer = await ask(proxy, post(ASK_STREAM))
            assert b"[DONE]" not in answer.body
            assert b'"error"' in answer.body
            assert (len(one.visits), len(two.visits)) == (1, 0)
        assert proxy.ended[0][0] in ("broken_stream", "no_response")


async def test_the_head_of_an_answer_alone_is_none(start: Start) -> None:
    async with Upstream(closing(plain()[: plain().index(b"{")])) as one, Upstream() as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post())
        assert answer.status == 200
        assert (len(one.visits), len(two.visits)) == (1, 1)


@pytest.mark.parametrize("code", [b"500", b"400"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_stream_that_begins_with_an_error_event_is_answered_by_another(
    start: Start, code: bytes, at_once: bool
) -> None:
    """The end of the answer comes with the event, or later."""
    events = chunk(b'data: {"error":{"message":"no","code":%b}}\n\ndata: [DONE]\n\n' % code)
    script = SSE_HEAD + events + LAST if at_once else closing(SSE_HEAD + events)
    async with Upstream(script) as one, Upstream(STREAM) as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert b"[DONE]" in answer.body
        assert b'"error"' not in answer.body
        assert (len(one.visits), len(two.visits)) == (1, 1)


ERROR = chunk(b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n') + LAST


async def test_an_error_event_behind_tokens_of_the_same_read_is_answered_by_another(start: Start) -> None:
    """Nothing of these tokens has reached the client."""
    async with Upstream(SSE_HEAD + chunk(TOKEN) + ERROR) as one, Upstream(STREAM) as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert b'"error"' not in answer.body
        assert answer.body.count(TOKEN) == 2
        assert (len(one.visits), len(two.visits)) == (1, 1)


@pytest.mark.parametrize("trial", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_the_first_tokens_of_a_trial_are_kept_until_there_are_some(
    start: Start, trial: bool, fails: bool
) -> None:
    """A trial that fails after two tokens costs no client an answer."""
    seen = asyncio.Event()

    async def script(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(TOKEN))
        await seen.wait()
        visit.send(
            ERROR
            if fails
            else b"".join([chunk(TOKEN) for _ in range(20)]) + chunk(b"data: [DONE]\n\n") + LAST
        )

    async with Upstream(script) as one, Upstream(STREAM) as two:
        proxy = await start(one.url, two.url)
        if trial:
            proxy.scheduler.instances[0].evidence.answers.doubted = True
            proxy.scheduler.fleet.reindex(proxy.driver.now())
        asked = asyncio.create_task(ask(proxy, post(ASK_STREAM)))
        await one.visit()
        (exchange,) = proxy.driver.exchanges.values()
        attempt: Any = exchange.attempt
        begun = lambda: attempt.answer is not None and (attempt.answer.kept or exchange.record.first_byte_at)  # noqa: E731
        await turns_until(begun)
        assert bool(attempt.answer.kept) is trial
        seen.set()
        answer = await asked
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (b'"error"' in answer.body) is (fails and not trial)
        assert answer.body.count(TOKEN) == (21 if not fails else (2 if trial else 1))
        assert len(two.visits) == (fails and trial)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    "body",
    [b'{"error":{"message":"CUDA error","code":500}}', b'{"detail":"Not Found"}', b"<html>Welcome</html>"],
)
async def test_a_200_without_an_answer_is_answered_by_another(
    start: Start, body: bytes, streamed: bool
) -> None:
    whole = plain(b'{"choices":[{"index":0,"text":"one two","finish_reason":"stop"}]}')
    asked = ASK_STREAM if streamed else ASK_STREAM.replace(b"true", b"false")
    async with Upstream(plain(body)) as bad, Upstream(STREAM if streamed else whole) as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post(asked))
        assert (answer.status, answer.headers["x-hetlb-instance"]) == (200, "i1")
        assert body not in answer.body
        assert (len(bad.visits), len(good.visits)) == (1, 1)
    assert proxy.ended == [("ok", "answer", 200)]
