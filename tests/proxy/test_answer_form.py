"""What an answer is: wrong ones count as lost, odd ones if others answer the same traffic otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.test_proxying import Start, ask, post
from proxy.upstreams import Upstream, plain

from hetlb.balancer.http.answer_form import (
    GOOD,
    ODD,
    WRONG,
    form_of_body,
    form_of_stream,
    is_usual,
    model_of,
)
from hetlb.balancer.http.sse import is_answer, read_answer, usage_in_tail


def event(text: str | None, finish: str | None = None, **delta: Any) -> bytes:
    own = {} if text is None else {"content": text}
    return json.dumps(
        {"model": "m", "choices": [{"delta": {**own, **delta}, "finish_reason": finish}]}
    ).encode()


def whole(text: str | None, finish: str | None = "stop", **message: Any) -> bytes:
    message = {"role": "assistant", "content": text, **message}
    return json.dumps({"model": "m", "choices": [{"message": message, "finish_reason": finish}]}).encode()


ROLE = event("", role="assistant")
TOOLS = [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
STREAMS: list[tuple[int, list[bytes], bytes]] = [
    (GOOD, [ROLE, *[event(f"w{i} ") for i in range(9)]], b"stop"),
    (GOOD, [ROLE, event("x")], b"length"),
    (GOOD, [ROLE, event(None, tool_calls=TOOLS)], b"tool_calls"),
    (GOOD, [ROLE, event(None, tool_calls=TOOLS)], b"stop"),
    (GOOD, [event(None, reasoning_content="I think that it is so, and so it is")], b"stop"),
    (ODD, [ROLE, event("x")], b"stop"),
    (ODD, [ROLE, event("")], b"stop"),
    (ODD, [ROLE, event("x")], b""),
    (ODD, [ROLE, event("Internal Server Error")], b"stop"),
    (ODD, [ROLE, event("Err"), event("or: no GPU")], b"stop"),
    (GOOD, [ROLE, event("Error: "), *[event("no GPU")] * 3, *[event(f"w{i} ") for i in range(20)]], b"stop"),
    (ODD, [ROLE, *[event("!")] * 20], b"length"),
    (ODD, [ROLE, event("")], b"length"),
    (ODD, [ROLE, event("")], b"content_filter"),
    (ODD, [ROLE, *[event("\x00")] * 20], b"stop"),
    (WRONG, [ROLE, event("x")], b"error"),
    (WRONG, [ROLE, event("x")], b"abort"),
    (WRONG, [b'{"model":"m","choices":[]}'], b""),
    (WRONG, [ROLE], b""),
]
BODIES: list[tuple[int, bytes, int | None]] = [
    (GOOD, whole("a few words"), 9),
    (GOOD, whole("x", "length"), 1),
    (GOOD, whole(None, "tool_calls", tool_calls=TOOLS), 9),
    (GOOD, whole(None, "stop", tool_calls=TOOLS), 1),
    (ODD, whole("x"), 1),
    (ODD, whole("Internal Server Error"), 4),
    (ODD, whole(" error: out of memory\n"), 6),
    (GOOD, whole("Error: " + "this text explains what the message means " * 3), 9),
    (ODD, whole(""), 0),
    (ODD, whole("", "length"), 0),
    (ODD, whole("", "content_filter"), 0),
    (GOOD, whole("", "length"), 9),
    (ODD, whole("!" * 20), 20),
    (ODD, whole("\x00" * 20), 20),
    (ODD, whole("a few words", None), 9),
    (WRONG, whole("x", "error"), 1),
    (WRONG, whole("x", "abort"), 1),
    (WRONG, b'{"choices":[]}', None),
]


@pytest.mark.parametrize(("form", "events", "finish"), STREAMS)
def test_the_form_of_a_stream(form: int, events: list[bytes], finish: bytes) -> None:
    sample = b"\n\n".join(events[:5])
    assert form_of_stream(sample, events[-1], len(events) + 1, None, finish, False) == form


@pytest.mark.parametrize(("form", "body", "tokens"), BODIES)
@pytest.mark.parametrize("compact", [True, False])
def test_the_form_of_a_body(form: int, body: bytes, tokens: int | None, compact: bool) -> None:
    if compact:
        body = json.dumps(json.loads(body), separators=(",", ":")).encode()
    assert form_of_body(body, tokens, False) == form


def test_an_answer_that_was_asked_to_be_short_is_not_odd() -> None:
    assert form_of_body(whole("x"), 1, True) == GOOD
    assert form_of_stream(ROLE + event("x"), b"", 3, None, b"stop", True) == GOOD


def counted(body: bytes, tokens: int | None, cached: int | None, compact: bool) -> bytes:
    """Return an answer with its usage, spelled as engines do."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": 9, "total_tokens": 29, "completion_tokens": tokens, **details}
    answer = {**json.loads(body), "usage": usage}
    separators, ascii_only = ((",", ":"), False) if compact else ((", ", ": "), True)
    return json.dumps(answer, separators=separators, ensure_ascii=ascii_only).encode()


@given(
    st.text(max_size=12) | st.sampled_from('! \\"x\n\x00').map(lambda each: each * 20),
    st.sampled_from(["stop", "length", "error", "abort", "tool_calls", None]),
    st.integers(0, 30),
    st.none() | st.integers(0, 9),
    st.sampled_from(["m", "other"]),
    st.booleans(),
)
def test_an_answer_that_is_usual_at_one_look_is_good_at_a_second(
    text: str, finish: str | None, tokens: int, cached: int | None, model: str, compact: bool
) -> None:
    body = counted(whole(text, finish), tokens, cached, compact)
    fields = read_answer(body)
    assert is_answer(body)
    assert usage_in_tail(body) == (tokens, 9, cached)
    assert (fields is None) is (cached is not None)
    if fields is None:
        return
    assert (fields.usage.completion_tokens, fields.usage.prompt_tokens) == (tokens, 9)
    if is_usual(fields, model):
        assert form_of_body(body, tokens, False) == GOOD
        assert model_of(body) == model


@pytest.mark.parametrize("compact", [True, False])
def test_most_answers_are_usual(compact: bool) -> None:
    for text, tokens, model, usual in (
        ("a few words", 20, "m", True), ("a few words", 20, "other", False), ("a few words", 1, "m", False),
        ("Internal Server Error", 4, "m", False), ("Internal Server Error", 40, "m", True),
    ):  # fmt: skip
        fields = read_answer(counted(whole(text), tokens, None, compact))
        assert fields is not None
        assert is_usual(fields, model) is usual


@pytest.mark.parametrize(
    "body",
    [
        whole("a few words"), counted(whole("a few words"), None, None, True), b"{}", b"", b'{"choices":[',
        counted(b'{"choices":[]}', 9, None, True), counted(b'{"choices":null}', 9, None, True),
        counted(b'{"choices":[{}],"error":{"message":"no"}}', 9, None, True),
        counted(whole("a few words"), -1, None, True), counted(whole("a few words"), 10**20, None, True),
        *(
            json.dumps(json.loads(whole("a few words")) | {"usage": usage}).encode()
            for usage in (
                {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 8},
                {"prompt_tokens": 10, "completion_tokens": 5, "input_tokens_details": {"cached_tokens": 8}},
                {"input_tokens": 10, "completion_tokens": 5},
            )
        ),
    ],
)  # fmt: skip
def test_another_form_is_not_read_at_one_look(body: bytes) -> None:
    assert read_answer(body) is None


@given(st.binary(max_size=200), st.binary(max_size=60), st.integers(0, 99))
def test_any_bytes_have_a_form(sample: bytes, last: bytes, events: int) -> None:
    assert form_of_stream(sample, last, events, None, b"stop", False) in (GOOD, ODD, WRONG)
    assert form_of_body(sample, None, False) in (GOOD, ODD, WRONG)
    assert read_answer(sample) is None
    assert isinstance(model_of(sample), str)


FULL = whole("a few words of an answer")
#: Bodies of one server while the other answers well.
BAD = {
    "another model": FULL.replace(b'"model": "m"', b'"model": "other"'),
    "no words": whole(""),
    "gave up": whole("x", "abort"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_server_that_answers_otherwise_gets_trials_alone(start: Start, bad: bytes) -> None:
    async with Upstream(plain(bad)) as one, Upstream(plain(FULL)) as two:
        proxy = await start(one.url, two.url)
        for each in proxy.scheduler.instances:
            each.served = ("m",)
        path = "/v1/chat/completions"
        body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":90}'
        for _ in range(30):
            assert (await ask(proxy, post(body, path=path))).status == 200
        assert len(one.visits) <= 5


@pytest.mark.parametrize("alike", BAD.values(), ids=BAD)
async def test_answers_that_are_odd_at_all_change_nothing(start: Start, alike: bytes) -> None:
    async with Upstream(plain(alike)) as one, Upstream(plain(alike)) as two:
        proxy = await start(one.url, two.url, policy="rr")
        path = "/v1/chat/completions"
        body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":90}'
        for _ in range(30):
            assert (await ask(proxy, post(body, path=path))).status == 200
        assert not any(each.evidence.answers.doubted for each in proxy.scheduler.instances)


async def test_a_chat_without_a_body_is_asked_elsewhere(start: Start) -> None:
    async with Upstream(plain(b"")) as one, Upstream(plain(FULL)) as two:
        proxy = await start(one.url, two.url, policy="rr")
        body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":90}'
        for _ in range(4):
            answer = await ask(proxy, post(body, path="/v1/chat/completions"))
            assert (answer.status, answer.body) == (200, FULL)
        assert one.visits
