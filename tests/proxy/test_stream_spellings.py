"""Any legal spelling of one stream gives the client the same data, and the same tokens, usage and outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.stream_spellings import TEXTS, Speller, events_of, read, through_hetlb, without_usage

from hetlb.balancer.core.types import Outcome

APIS = ("chat", "completion", "responses", "messages")


def facts(record: Any) -> tuple[Any, ...]:
    return record.outcome, record.status, record.output_tokens, record.usage_prompt_tokens


def check(seed: int) -> None:
    """Draw a stream and a spelling of it, and compare it with vLLM's spelling of the same."""
    rng = random.Random(seed)
    api = rng.choice(APIS)
    texts = [rng.choice(TEXTS) for _ in range(rng.randrange(5))]
    usage = rng.choice(["alone", "null", "last", "each", "none"])
    events = events_of(api, texts, fingerprint=rng.random() < 0.5, usage=usage)
    asks_usage = api in ("chat", "completion") and rng.random() < 0.3
    usual = rng.random() < 0.1
    stream = Speller(rng).stream(events)
    if usual:
        stream = Speller(_Usual()).stream(events)
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 1, 3, 30])))
    if rng.random() < 0.4:  # an event in each read, as engines write them
        cuts = [
            at + 1 for at in range(1, len(stream)) if stream[at - 1 : at + 1] in (b"\n\n", b"\r\r", b"\n\r")
        ]
        cuts = [at + (stream[at : at + 1] == b"\n") for at in cuts]
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    body, record = through_hetlb(api, reads, asks_usage=asks_usage, chunked=rng.random() < 0.9)
    expected = events if asks_usage or api not in ("chat", "completion") else without_usage(events)
    assert read(body) == expected, (seed, stream, body)
    counted = usage != "none" or api in ("responses", "messages")
    tokens = 5 if counted else len(events) - 1
    assert facts(record) == (Outcome.OK, 200, tokens, 21 if counted else None), (seed, stream)


class _Usual(random.Random):
    """Draws the first of everything: the spelling of vLLM."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 1.0


@given(st.integers(0, 1 << 32))
def test_any_spelling_gives_the_same(seed: int) -> None:
    check(seed)


SPACED = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}'
ENDED = b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}'
COUNTS = b'"usage": {"prompt_tokens": 7, "completion_tokens": 3}'
USED = b'data: {"choices": [], ' + COUNTS + b"}"
DONE = b"data: [DONE]"


def lines(*events: bytes, end: bytes = b"\n") -> bytes:
    return b"".join(event + end + end for event in events)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(lines(SPACED, ENDED, USED, DONE), id="spaces in the JSON"),
        pytest.param(lines(SPACED, ENDED, USED, DONE, end=b"\r\n"), id="CRLF"),
        pytest.param(lines(SPACED, ENDED, USED, DONE, end=b"\r"), id="CR"),
        pytest.param(lines(SPACED, ENDED, end=b"\r\n") + lines(USED, DONE), id="mixed ends"),
        pytest.param(b"\xef\xbb\xbf" + lines(SPACED, ENDED, USED, DONE), id="byte order mark"),
        pytest.param(lines(SPACED, ENDED, USED, DONE).replace(b"data: ", b"data:"), id="no space"),
        pytest.param(lines(b": ping\n" + SPACED, b":", ENDED, b": x", USED, DONE), id="comments"),
        pytest.param(
            lines(*(b"id: 1\nevent: message\nretry: 5\n" + each for each in (SPACED, ENDED, USED, DONE))),
            id="other fields",
        ),
        pytest.param(
            lines(SPACED, ENDED, USED, DONE).replace(b'{"choices": ', b'{"choices":\ndata: '), id="two lines"
        ),
        pytest.param(lines(SPACED, ENDED, USED.replace(b"[]", b"null"), DONE), id="choices: null"),
        pytest.param(lines(SPACED, ENDED, USED.replace(b'"choices": [], ', b""), DONE), id="no choices"),
        pytest.param(lines(SPACED, ENDED[:-1] + b", " + COUNTS + b"}", DONE), id="usage at the end"),
        pytest.param(lines(SPACED, ENDED, USED.replace(b"usage", rb"u\u0073age"), DONE), id="escaped key"),
        pytest.param(
            lines(SPACED, ENDED, b'data: {"usage": null, "choices": []}', USED, DONE), id="null before"
        ),
        pytest.param(lines(SPACED, ENDED, USED.replace(b"7", b"7.0").replace(b"3", b'"3"'), DONE), id="7.0"),
        pytest.param(
            lines(
                SPACED,
                ENDED,
                USED.replace(b"3}", b'3, "prompt_tokens_details": {"cached_tokens": []}}'),
                DONE,
            ),
            id="odd details",
        ),
        pytest.param(lines(SPACED, ENDED, USED, DONE).replace(b"}\n", b', "error": ""}\n'), id="empty error"),
        pytest.param(
            lines(b"id: a\0b\ndata\n" + SPACED, b"\xef\xbb\xbf: c", ENDED, USED, DONE), id="NUL in id"
        ),
        pytest.param(lines(b": " + b"c" * 200_000 + b"\n" + SPACED, ENDED, USED, DONE), id="long comment"),
        pytest.param(lines(SPACED, ENDED, USED, DONE)[:-1], id="no empty line at the end"),
        pytest.param(lines(SPACED, ENDED, USED, DONE)[:-2], id="no line end at the end"),
        pytest.param(lines(SPACED, ENDED, USED, b"data:  [DONE] "), id="spaces around the end"),
    ],
)
def test_spellings(stream: bytes) -> None:
    for size in (1, 7, len(stream)) if len(stream) < 10_000 else (1000, len(stream)):
        reads = [stream[at : at + size] for at in range(0, len(stream), size)]
        for chunked in (True, False):
            body, record = through_hetlb("completion", reads, chunked=chunked)
            assert facts(record) == (Outcome.OK, 200, 3, 7)
            assert b"prompt_tokens" not in body
            assert b'"text": "a"' in body
            assert b'"text": "b"' in body
            assert b"[DONE]" in body


def test_other_fields_of_the_event_of_usage_go_out_with_the_end_of_the_choice() -> None:
    stream = lines(SPACED, ENDED, USED[:-1] + b', "system_fingerprint": "f"}', DONE)
    for size in (1, len(stream)):
        body, _ = through_hetlb("completion", [stream[at : at + size] for at in range(0, len(stream), size)])
        assert body == lines(SPACED, ENDED[:-1] + b',"system_fingerprint":"f"}', DONE)


def test_an_event_that_ends_a_choice_goes_out_if_the_stream_breaks_off_behind_it() -> None:
    from proxy.stream_spellings import HEAD, KEPT

    ask = b'{"model":"m","prompt":"x","stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n"
    asker, end = KEPT.engine(head % len(ask) + ask)
    end.send(HEAD + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (lines(SPACED), lines(ENDED))))
    KEPT.proxy.loop.settle(2)
    assert ENDED not in asker.got
    end.leave()
    KEPT.proxy.loop.rest()
    assert bytes(asker.got).index(ENDED) < asker.got.index(b'"error"')
    KEPT.done(end, asker)


@pytest.mark.parametrize("lines", [b"gzip", b"identity\r\ncontent-encoding: GZIP", b"identity, br"])
def test_nothing_is_put_into_a_stream_that_is_compressed(lines: bytes) -> None:
    from proxy.stream_spellings import HEAD, KEPT

    ask = b'{"model":"m","prompt":"x","stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n"
    asker, end = KEPT.engine(head % len(ask) + ask)
    end.send(HEAD[:-2] + b"content-encoding: " + lines + b"\r\n\r\n" + b"5\r\n\x1f\x8b\r\n\r\r\n")
    KEPT.proxy.loop.settle(2)
    end.leave()
    KEPT.proxy.loop.rest()
    assert bytes(asker.got).endswith(b"5\r\n\x1f\x8b\r\n\r\r\n"), asker.got
    KEPT.done(end, asker)


@pytest.mark.parametrize("comment", [b": waiting\n", b": waiting\r\n", b":\n\n", b"\n"])
def test_comments_are_never_held(comment: bytes) -> None:
    from hetlb.balancer.http.sse import SseWatcher

    watcher = SseWatcher(True)
    assert watcher.feed(comment).startswith(comment[:1])
    assert watcher.feed(lines(SPACED)) + watcher.feed(b"") == lines(SPACED)
    assert watcher.events == 1


@pytest.mark.parametrize(
    "body", [b"\x1f\x8b\x08\0abc\r\rdef", b'{"a":1}\n{"b":2}\n', b"data: plain words\n\n"]
)
def test_what_is_not_understood_passes_and_is_no_answer(body: bytes) -> None:
    got, record = through_hetlb("chat", [body])
    assert got == body.replace(b"\r", b"\n")
    assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("stream", [b": a\n\n: b\n\n", b"\n\n", b"\xef\xbb\xbf: a\r\n\r\n"])
def test_comments_alone_are_no_whole_stream(stream: bytes) -> None:
    from proxy import stream_spellings

    for size in (1, 3, 7, len(stream)):
        reads = [stream[at : at + size] for at in range(0, len(stream), size)]
        with pytest.raises(AssertionError, match=r"expected the last chunk.*broke off"):
            through_hetlb("chat", reads)
        driver = stream_spellings.KEPT.proxy
        driver.driver.settle()
        assert [each.outcome for each in driver.ended] == [Outcome.BROKEN_STREAM]
