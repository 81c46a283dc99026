"""A whole 200 that is no answer counts against its engine, and goes to the client as it came."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.test_proxying import ASK, ASK_STREAM, Client, Start, ask, post
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
    plain,
)

from hetlb.balancer.exchange.relocations import tokens_at
from hetlb.balancer.http.sse import TAIL_BYTES, is_answer, is_comment

PAGE = b"<html><body>Welcome to nginx!</body></html>"
NO_ANSWERS = {
    "empty": b"",
    "page": PAGE,
    "long-page": PAGE.replace(b"!", b"!" * TAIL_BYTES),
    "text": b"OK",
    "cut": PLAIN_BODY[:-40],
    "cut-behind-a-brace": b'{"choices":[{"message":{"content":"x"}',
    "long-cut": b'{"choices":[{"text":"' + b"x" * TAIL_BYTES,
    "error": b'{"error":{"message":"no"}}',
    "error-as-text": b' {"error": "no", "choices": []}',
    "other": b'{"detail":"Not Found"}',
    "null": b"null",
    "list": b"[]",
    "no-choices": b'{"choices":null,"usage":{"prompt_tokens":3,"completion_tokens":2}}',
}
NO_STREAMS = {
    "done-alone": chunk(DONE),
    "text": chunk(b"data: Welcome\n\n"),
    "page": chunk(PAGE),
}


@pytest.mark.parametrize("body", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_a_body_that_is_no_answer_is_a_failure(start: Start, body: bytes) -> None:
    async with Upstream(plain(body)) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK))
        assert (answer.status, answer.body) == (200, body)
        [instance] = proxy.scheduler.instances
        assert (instance.evidence.answers.lost, instance.evidence.answers.well) == (1.0, 0.0)
    assert [outcome for outcome, _, _ in proxy.ended] == ["upstream_error"]


@pytest.mark.parametrize("events", NO_STREAMS.values(), ids=NO_STREAMS)
async def test_a_stream_without_a_token_is_a_failure(start: Start, events: bytes) -> None:
    async with Upstream(SSE_HEAD + events + LAST) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert (answer.status, answer.clean) == (200, True)
        [instance] = proxy.scheduler.instances
        assert (instance.evidence.answers.lost, instance.evidence.answers.well) == (1.0, 0.0)
    assert [outcome for outcome, _, _ in proxy.ended] == ["upstream_error"]


@pytest.mark.parametrize(
    "body",
    [
        PLAIN_BODY,
        b'{ "choices": [ {"text": "\\"error\\""} ] }\n',
        b'{"choices":[{"text":"the \\"error\\""}],"usage":{"prompt_tokens":3}}',
        b'{"type":"message","content":[]}',
        b'{"id":"r","error":null,"output":[{"type":"message"}]}',
        b'{"id":"c","message":{"role":"assistant","content":[]}}',
        b'{"choices":[{"text":"' + b"x" * TAIL_BYTES + b'"}]}\n',
    ],
)
async def test_an_answer_in_the_form_of_any_api_is_one(start: Start, body: bytes) -> None:
    async with Upstream(plain(body)) as engine:
        proxy = await start(engine.url)
        assert (await ask(proxy, post(ASK))).body == body
    assert [outcome for outcome, _, _ in proxy.ended] == ["ok"]


async def test_what_an_endpoint_without_tokens_says_is_not_judged(start: Start) -> None:
    async with Upstream(plain(b'{"embeddings":[]}'), plain(b"")) as engine:
        proxy = await start(engine.url)
        for path in ("/v1/embeddings", "/tokenize"):
            await ask(proxy, post(b'{"model":"m","input":"x"}', path=path))
    assert [outcome for outcome, _, _ in proxy.ended] == ["ok", "ok"]


async def test_pages_of_one_engine_do_not_draw_the_requests(start: Start) -> None:
    async with Upstream(plain(PAGE)) as bad, Upstream(STREAM, plain()) as good:
        proxy = await start(bad.url, good.url, policy="hetlb")
        answers = [await ask(proxy, post(ASK)) for _ in range(40)]
        assert not any(each.body == PAGE for each in answers), "another one is asked"
        assert len(bad.visits) <= 4


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        *[(ASK, plain(NO_ANSWERS[each])) for each in ("cut", "cut-behind-a-brace", "error-as-text")],
        (ASK_STREAM, SSE_HEAD + chunk(TOKEN) + chunk(TOKEN) + LAST),
        (ASK_STREAM, SSE_HEAD + LAST),
    ],
)
async def test_behind_a_part_of_an_answer_that_no_client_has_seen_another_answers(
    start: Start, asked: bytes, part: bytes
) -> None:
    """The part came at once, with an end as of a whole answer."""
    async with Upstream(part) as bad, Upstream(STREAM if asked is ASK_STREAM else plain()) as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post(asked))
        assert (answer.status, answer.headers["x-hetlb-instance"]) == (200, "i1")
        assert answer.body.endswith(DONE) if asked is ASK_STREAM else answer.body == PLAIN_BODY
        assert (len(bad.visits), len(good.visits)) == (1, 1)
    assert proxy.ended == [("ok", "answer", 200)]


@given(st.binary(max_size=60))
def test_bytes_are_judged_without_an_error(body: bytes) -> None:
    assert is_answer(b'{"choices":[{"text":"x"}]}' + body) is (not body.strip(b" \t\r\n"))


async def test_comments_alone_are_a_stream_that_broke_off(start: Start) -> None:
    async with Upstream(SSE_HEAD + chunk(b": ping\n\n: ping\n\n") + LAST) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert answer.body.startswith(b": ping\n\n: ping\n\n")
        assert b"without [DONE]" in answer.body
        [instance] = proxy.scheduler.instances
        assert (instance.evidence.answers.lost, instance.evidence.answers.well) == (1.0, 0.0)
    assert [outcome for outcome, _, _ in proxy.ended] == ["broken_stream"]


async def test_comments_are_no_tokens(start: Start) -> None:
    """A gateway sends them while its engine hangs: they go on to the client, and prove nothing."""
    more = asyncio.Event()

    async def script(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(b": ping\n\n"))
        await more.wait()
        visit.send(chunk(TOKEN) + chunk(b": ping\n\n"))

    async with Upstream(script) as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM))
            await client.reader.readuntil(b": ping\n\n")
            [instance] = proxy.scheduler.instances
            [lease] = instance.leases.values()
            assert (lease.first_token_at, tokens_at(proxy.driver)) == (None, {})
            more.set()
            await client.reader.readuntil(b": ping\n\n")
            assert lease.first_token_at is not None
            assert tokens_at(proxy.driver) == {"i0": lease.first_token_at}


@pytest.mark.parametrize("comment", [b": ping\n\n", b": ping - 2026\r\n\r\n", b":\n"])
async def test_behind_comments_another_engine_may_answer(start: Start, comment: bytes) -> None:
    async with Upstream(closing(SSE_HEAD + chunk(comment))) as bad, Upstream(STREAM) as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert answer.body.startswith(comment + TOKEN)
        assert answer.body.endswith(DONE)
        assert (len(bad.visits), len(good.visits)) == (1, 1)
    assert [outcome for outcome, _, _ in proxy.ended] == ["ok"]


@given(st.text(": pingx\r\n", max_size=40).map(str.encode))
def test_comments_are_told_from_events(lines: bytes) -> None:
    ended = lines.replace(b"\r", b"\n").endswith(b"\n")
    rows = lines.replace(b"\r", b"\n").split(b"\n")
    assert is_comment(lines) is (ended and all(not row or row.startswith(b":") for row in rows))


async def test_a_whole_answer_of_a_trial_is_kept_until_its_end(start: Start) -> None:
    """Its client has seen nothing of it, so another instance may answer."""
    cut = plain()[:-40]
    async with Upstream(closing(cut)) as bad, Upstream(plain()) as good:
        proxy = await start(bad.url, good.url)
        bad_one, _ = proxy.scheduler.instances
        bad_one.evidence.proven = False
        answer = await ask(proxy, post(ASK))
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
        assert (len(bad.visits), len(good.visits)) == (1, 1)
    assert proxy.ended == [("ok", "answer", 200)]
