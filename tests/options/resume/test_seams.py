"""Seams: wherever an answer is cut, what the second engine is asked for is the rest of it, and no more."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.exchange.exchange import EngineRequest
from hetlb.balancer.exchange.streamed_answer import StreamedAnswer
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ChunkedDecoder, RequestHead
from hetlb.options.resume.continuation import Continuation, KeptStream
from hetlb.options.resume.progress import Kept, Progress

PROMPT = [3, 1, 4]
#: Texts of tokens; "" is the first part of a character, which comes whole with the next token.
TEXTS = st.sampled_from(["a", " b", "", 'q"', "\\", "é", "\n", "ccc", "data: x", '":"', "  "])


def engine(tokens: list[str], body: dict[str, Any], name: str) -> list[bytes]:
    """The events of vLLM for an answer of these tokens, with what it holds back for stop strings."""
    said = body["prompt"][len(PROMPT) :]
    assert said == list(range(len(said)))
    held = max(map(len, body.get("stop", ["x"]))) - 1
    limit = min(len(tokens), len(said) + body["max_tokens"])
    text, sent, events = "", 0, []
    for number in range(len(said), limit):
        text += tokens[number]
        last = number == limit - 1
        until = len(text) if last else max(sent, len(text) - held)
        choice = {
            "index": 0, "text": text[sent:until], "logprobs": None,
            "finish_reason": "length" if last else None,
            "stop_reason": None, "prompt_token_ids": body["prompt"] if number == len(said) else None,
            "token_ids": [number],
        }  # fmt: skip
        event = {"id": name, "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
        events.append(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
        sent = until
    return events


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def passed(stream: StreamedAnswer, event: bytes) -> bytes:
    """What the client gets of an event, as an exchange passes it on."""
    if text := stream.pass_text(chunk(event)):
        return ChunkedDecoder().feed(text)
    out = stream.read(event, 0.0)
    stream.learn_shape()
    return out


@given(
    st.lists(TEXTS, min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.sampled_from([None, ["STOP"], ["no", "never!"]]),
    st.booleans(),
)
def test_wherever_it_is_cut_the_answer_is_the_same(
    tokens: list[str], cuts: list[int], stop: list[str] | None, hides: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "m", "prompt": PROMPT, "max_tokens": len(tokens), "stream": True, "temperature": 0,
    }  # fmt: skip
    if stop:
        asked["stop"] = stop
    if not hides:
        asked["return_token_ids"] = True
    outgoing = EngineRequest(RequestHead(), json.dumps(asked).encode(), "label")
    rest = Continuation(Kind.COMPLETION, outgoing, Kept(), streamed=True, asks_ids=hides, hides_usage=True)
    assert rest.dispatched(gives_ids=True, max_model_len=0)
    stream = rest.stream(False)
    assert rest.progress is not None
    body, got, name = asked, [], "first"
    for cut in [*cuts, 1000]:
        events = engine(tokens, body, name)
        got += [passed(stream, event) for event in events[:cut]]
        got.append(stream.release())
        rest.progress.read()
        if rest.progress.finish is not None:
            break
        draft = rest.draft()
        assert draft is not None, rest.why
        rest.take(draft)
        assert rest.second is not None
        body, name = json.loads(rest.second), "next"
        stream = rest.stream(False)
    seen = [json.loads(event[6:]) for event in b"".join(got).split(b"\n\n")[:-1]]
    whole = [json.loads(event[6:]) for event in engine(tokens, asked, "first")]
    assert "".join(each["choices"][0]["text"] for each in seen) == "".join(tokens)
    assert len({(each["id"], each["created"]) for each in seen}) == 1
    assert [each["choices"][0]["finish_reason"] for each in seen if each["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert {tuple(each["choices"][0]) for each in seen} == {tuple(each["choices"][0]) for each in whole}
    assert [bool(each["choices"][0]["token_ids"]) for each in seen] == [not hides] * len(seen)
    assert all(each["choices"][0]["prompt_token_ids"] is None for each in seen) or not hides


def test_an_engine_that_was_asked_for_ids_and_gives_none_is_passed_on_unchanged() -> None:
    stream = KeptStream(True, 0, Progress(Kept()), hides_ids=True)
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    event = b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    assert [passed(stream, event) for _ in range(5)] == [event] * 5
