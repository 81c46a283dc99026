"""The watcher of event streams: any split of the same bytes gives the same output and the same facts."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.http.http1 import ChunkedDecoder
from hetlb.balancer.http.sse import MAX_HELD_BYTES, SseWatcher, is_answer, usage_in_tail
from hetlb.balancer.http.text_shape import TextShape, pass_events, text_shape

DATA = Path(__file__).parents[1] / "vllm" / "data"
USAGE = '"usage":{"prompt_tokens":21,"total_tokens":26,"completion_tokens":5}'
USAGE_EVENT = 'data: {"id":"a","choices":[],' + USAGE + "}\n\n"
DONE = "data: [DONE]\n\n"


def token(text: str) -> str:
    delta = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return "data: " + json.dumps(delta, separators=(",", ":")) + "\n\n"


def watch(pieces: list[bytes], hold: bool) -> tuple[bytes, tuple[object, ...]]:
    watcher = SseWatcher(hold)
    out = b"".join([watcher.feed(piece) for piece in pieces]) + watcher.flush()
    facts = (watcher.events, watcher.done, watcher.failed, watcher.completion_tokens, watcher.prompt_tokens)
    return out, facts


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(a % (len(data) + 1) for a in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


EVENTS = st.one_of(
    st.text(max_size=8).map(token),
    st.sampled_from(
        [
            token("data: "),
            token('"usage":{'),
            token("[DONE] error"),
            USAGE_EVENT,
            DONE,
            ": a comment\n\n",
            "event: message_stop\ndata: {}\n\n",
            'data: {"error":{"message":"x"}}\n\n',
            'data: {"choices":[{"text":"x"}],' + USAGE + "}\n\n",
            "id: 7\n" + USAGE_EVENT,
            'data: not json "usage":{\n\n',
            "\n\n",
            "data: unfinished",
        ]
    ),
)


@given(st.lists(EVENTS, max_size=8), st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_any_split_gives_the_same(events: list[str], at: list[int], hold: bool) -> None:
    stream = "".join(events).encode()
    whole = watch([stream], hold)
    assert watch(cut(stream, at), hold) == whole
    assert watch([bytes([b]) for b in stream], hold) == whole
    if not hold:
        assert whole[0] == stream


@pytest.mark.parametrize("size", range(MAX_HELD_BYTES - 4, MAX_HELD_BYTES + 5))
@pytest.mark.parametrize("hold", [False, True])
def test_an_event_around_the_limit_is_counted_once_however_it_is_cut(size: int, hold: bool) -> None:
    # Cut where it hurts: just before, in and behind the end of the long event.
    event = b"data: " + b"x" * (size - 6) + b"\n\n"
    stream = token("a").encode() + event + token("b").encode() + USAGE_EVENT.encode() + DONE.encode()
    first = len(token("a"))
    whole = watch([stream], hold)
    assert whole[1] == (3, True, False, 5, 21)
    for delta in range(-4, 4):
        edge = first + len(event) + delta
        assert watch([stream[:edge], stream[edge:]], hold) == whole
        assert watch([stream[:edge], stream[edge : edge + 1], stream[edge + 1 :]], hold) == whole


def test_only_the_usage_event_is_taken_out() -> None:
    stream = (token("a") + token("b") + USAGE_EVENT + DONE).encode()
    out, facts = watch([stream], True)
    assert out == (token("a") + token("b") + DONE).encode()
    assert facts == (2, True, False, 5, 21)


def test_usage_again_and_again_adds_to_the_end_of_a_choice_once() -> None:
    finish = b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}'
    usage = b'data: {"choices":[],"fingerprint":"f",' + USAGE.encode() + b"}\n\n"
    watcher = SseWatcher(True)
    assert watcher.feed(finish + b"\n\n") == b""
    assert watcher.feed(usage) == finish[:-1] + b',"fingerprint":"f"}\n\n'
    for _ in range(3):
        assert watcher.feed(usage) == b'data: {"choices":[],"fingerprint":"f"}\n\n'
    assert watcher.between
    assert watcher.feed(finish + b"\n\n" + usage) == finish[:-1] + b',"fingerprint":"f"}\n\n'


def test_text_cannot_forge_tokens_usage_or_the_end() -> None:
    out, facts = watch([token('data: [DONE] "usage":{"completion_tokens":9} \n\ndata: x').encode()], True)
    assert out == token('data: [DONE] "usage":{"completion_tokens":9} \n\ndata: x').encode()
    assert facts == (1, False, False, None, None)


@pytest.mark.parametrize("hold", [False, True])
def test_the_beginning_of_an_event_waits_for_its_end(hold: bool) -> None:
    watcher = SseWatcher(hold)
    for piece in (b'data: {"id":"a",', b'"choices":[{', b'"text":"x"}]}\n'):
        assert watcher.feed(piece) == b""
    assert watcher.feed(b"\ndata: ") == b'data: {"id":"a","choices":[{"text":"x"}]}\n\n'
    assert watcher.events == 1
    assert watcher.cut() == b""  # an event of which no part was sent is dropped
    assert watcher.flush() == b""


def test_an_event_of_which_a_part_is_out_is_ended() -> None:
    watcher = SseWatcher(False)
    assert watcher.feed(b'data: {"' + b"x" * (MAX_HELD_BYTES + 10))
    assert watcher.cut() == b"\n\n"
    assert watcher.cut() == b""


def test_no_more_than_the_limit_is_held() -> None:
    watcher = SseWatcher(True)
    fed = passed = 0
    for _ in range(100):
        passed += len(watcher.feed(b'data: {"' + b"x" * 5000 if not fed else b"x" * 5000))
        fed += 5000
        assert fed + 8 - passed <= MAX_HELD_BYTES + 5008


@pytest.mark.parametrize("name", ["chat-stream-usage", "completion-stream-usage", "chat-stream-n2"])
@pytest.mark.parametrize("hold", [False, True])
def test_recorded_streams_of_vllm(name: str, hold: bool) -> None:
    raw = (DATA / f"{name}.http").read_bytes()
    decoder = ChunkedDecoder()
    body = decoder.feed(raw[raw.index(b"\r\n\r\n") + 4 :])
    assert decoder.done
    whole = watch([body], hold)
    assert whole[1][1:3] == (True, False)
    assert (b'"choices":[]' in whole[0]) == (not hold and b'"choices":[]' in body)
    for edge in range(1, len(body), 7):
        assert watch([body[:edge], body[edge:]], hold) == whole


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"choices":[],' + USAGE.encode() + b"}", (5, 21, None)),
        (
            b'"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,'
            b'"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":null}}',
            (2, 9, 8),
        ),
        (
            b'"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,'
            b'"prompt_tokens_details":null,"completion_tokens_details":null}}',
            (2, 9, None),
        ),
        (
            b'"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0},"output_tokens":2}',
            (2, 9, 0),
        ),
        (b'..."usage": {"input_tokens": 3, "output_tokens": 4}}', (4, 3, None)),
        (b'{"text":"\\"usage\\":{\\"completion_tokens\\":9}"}', (None, None, None)),
        (b'"usage":{"completion_tokens":5', (None, None, None)),
        (b'"usage":{"completion_tokens":"5"}', (None, None, None)),
        (b"", (None, None, None)),
    ],
)
def test_usage_of_a_plain_answer(tail: bytes, expected: tuple[int | None, ...]) -> None:
    assert usage_in_tail(tail) == expected


@given(
    st.permutations(["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"]),
    st.integers(0, 4),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.booleans(),
    st.none() | st.integers(0, 10**9),
)
def test_usage_is_found_in_whatever_order_it_is_written(
    names: list[str], kept: int, prompt: int, completion: int, blanks: bool, cached: int | None
) -> None:
    figures = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    usage: dict[str, Any] = {name: figures.get(name) for name in names[:kept]}
    if cached is not None and "prompt_tokens_details" in usage:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    separators = (", ", ": ") if blanks else (",", ":")
    tail = json.dumps({"choices": [], "usage": usage}, separators=separators).encode()
    assert usage_in_tail(tail) == (
        usage.get("completion_tokens"),
        usage.get("prompt_tokens"),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def spelt(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)


BEGINNING = b'data: {"id":"chatcmpl-1","model":"m","choices":[{'
TEXT = BEGINNING + b'"delta":{"content":" a"},"finish_reason":null}]}\n\n'
LONGER = TEXT.replace(b" a", rb" \"finish_reason\":null bc")
WITH_IDS = TEXT[:-5] + b',"token_ids":[12,345]}]}\n\n'
MORE_IDS = TEXT[:-5] + b',"token_ids":[6]}]}\n\n'
TEXT_NO_USAGE = TEXT[:-3] + b',"usage":null}\n\n'
ABORTED = TEXT.replace(b"null", b'"abort"')


def shape_of(event: bytes) -> TextShape:
    shape = text_shape(event)
    assert shape is not None
    return shape


def test_the_shape_of_the_events_of_a_stream() -> None:
    for event in (TEXT, LONGER, b"data: [DONE]\n\n" + TEXT):
        shape = shape_of(event)
        assert shape.beginning == BEGINNING
        assert (shape.ending, shape.after_ids) == (b'"finish_reason":null}]}\n\n\r\n', b"")
    shape = shape_of(WITH_IDS)
    assert (shape.ending, shape.after_ids) == (b'"finish_reason":null,"token_ids":[', b"]}]}\n\n\r\n")
    for other in (
        b"",
        TEXT[:-1],
        b"data: [DONE]\n\n",
        b'data: {"error":{"choices":[{}]}}\n\n',
        b'data: {"usage":{"a":1},"choices":[{}]}\n\n',
        b'data: {"id":"1","choices":[]}\n\n',
        ABORTED,
        TEXT[:-3] + b',"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"id":1}\n\nevent: {"choices":[{}]}\n\n',
        b'data: {"id":"' + b"x" * 2000 + b'","choices":[{}]}\n\n',
        TEXT[:-2] + b"\nid: 7\n\n",
    ):
        assert text_shape(other) is None


@pytest.mark.parametrize(
    ("chunks", "events"),
    [
        (spelt(TEXT), 1),
        (spelt(LONGER), 1),
        (spelt(TEXT, LONGER, TEXT), 3),
        (b"", 0),
        (spelt(TEXT)[:-1], 0),
        (spelt(TEXT) + b"5", 0),
        (spelt(TEXT + TEXT), 0),
        (spelt(TEXT_NO_USAGE), 0),
        (spelt(TEXT, ABORTED), 0),
        (spelt(WITH_IDS), 0),
        (spelt(TEXT[:20], TEXT[20:]), 0),
        (spelt(TEXT[:-1]), 0),
        (spelt(TEXT, b"data: [DONE]\n\n"), 0),
        (spelt(b'data: {"id":"chatcmpl-1","model":"m","choices":[],"usage":{"prompt_tokens":1}}\n\n'), 0),
        (spelt(TEXT[:-3] + b',"usage":{"prompt_tokens":1}}\n\n'), 0),
        (spelt(b'data: {"error":{"message":"no"}}\n\n'), 0),
        (spelt(TEXT).replace(b"\r\n", b"\n", 1), 0),
        (b"0" + spelt(TEXT), 0),
        (b"+" + spelt(TEXT), 0),
        (spelt(TEXT).replace(b"\r\n", b";a=b\r\n", 1), 0),
        (b"0\r\n\r\n", 0),
    ],
)
def test_events_of_text_that_may_pass_as_they_stand(chunks: bytes, events: int) -> None:
    assert pass_events(chunks, shape_of(TEXT)) == (events, chunks if events else b"")


@pytest.mark.parametrize("hide_ids", [False, True])
def test_events_of_text_with_token_ids_may_pass_by_their_shape(hide_ids: bool) -> None:
    shape = text_shape(WITH_IDS, hide_ids=hide_ids)
    assert shape is not None
    without = TEXT[:-5] + b',"token_ids":null}]}\n\n'
    passed = spelt(without, without) if hide_ids else spelt(WITH_IDS, MORE_IDS)
    assert pass_events(spelt(WITH_IDS, MORE_IDS), shape) == (2, passed)
    for other in (
        spelt(WITH_IDS, TEXT),
        spelt(MORE_IDS.replace(b"[6]", b"null")),
        spelt(MORE_IDS.replace(b"[6]", b'"6"]')),
        spelt(MORE_IDS[:-1] + b" \n"),
    ):
        assert pass_events(other, shape) == (0, b"")
    assert pass_events(spelt(TEXT_NO_USAGE, TEXT_NO_USAGE), shape_of(TEXT_NO_USAGE))[0] == 2


def test_events_without_token_ids_have_no_shape_that_hides_some() -> None:
    before = TEXT.replace(b'"finish_reason"', b'"token_ids":[1],"finish_reason"')
    for event in (TEXT, before, WITH_IDS.replace(b"[12,345]", b"null")):
        assert text_shape(event, hide_ids=True) is None


@given(st.lists(st.sampled_from([WITH_IDS, MORE_IDS]), min_size=1, max_size=3), st.data())
def test_what_passes_as_it_stands_is_what_a_closer_look_would_find(payloads: list[bytes], data: Any) -> None:
    raw = bytearray(spelt(*payloads))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["change", "cut", "add"])):
            case "change":
                raw[at] = data.draw(st.sampled_from(b'0123456789abcdefABCDEF+ _x;}]"\r\n\0'))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 9))]
            case "add":
                raw[at:at] = data.draw(st.sampled_from([b"\n\n", b"\r\n", b"0", b"x", b"\r\n\r\n", WITH_IDS]))
        if not raw:
            return
    events, passed = pass_events(bytes(raw), shape_of(WITH_IDS))
    if not events:
        return
    assert passed == bytes(raw)
    hiding = text_shape(WITH_IDS, hide_ids=True)
    assert hiding is not None
    count, without = pass_events(passed, hiding)
    hidden = re.sub(rb'"token_ids":\[[0-9,]*\]', b'"token_ids":null', ChunkedDecoder().feed(passed))
    assert (count, ChunkedDecoder().feed(without)) == (events, hidden)
    decoder = ChunkedDecoder()
    payload = decoder.feed(bytes(raw))  # nothing that the gate refuses
    watcher = SseWatcher(True)
    assert decoder.between
    assert not decoder.done
    assert watcher.feed(payload) == payload
    assert watcher.between
    assert (watcher.events, watcher.done, watcher.failed) == (events, False, False)
    assert watcher.completion_tokens is None


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        (rb'{"choices":[{"message":{"content":"\ud83d"}}]}', True),
        (b'{"choices":[{"logprobs":{"top":[NaN, -Infinity]}}]}\n', True),
        (b'{"choices":[{"message":{"content":"a part', False),
        (b"<html>}", False),
        (b'{"error":{"code":1},"choices":[]}', False),
    ],
)
def test_what_a_strict_reader_refuses_may_be_an_answer_and_a_part_is_none(body: bytes, answers: bool) -> None:
    assert is_answer(body) is answers
