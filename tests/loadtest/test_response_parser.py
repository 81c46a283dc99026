"""What counts as a token, and when: answers cut at every byte, events without text, errors in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetlb.tools.loadtest.generator import StreamReader, read_plain
from hetlb.tools.openai.answers import AnswerError
from hetlb.tools.workload.records import RequestResult

RECORDINGS = Path(__file__).parents[1] / "vllm" / "data"


def event(text: str | None = None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def chat(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})


def read(*pieces: bytes) -> RequestResult:
    """The record of a stream whose pieces come at 1, 2, 3, ... seconds."""
    record = RequestResult(0.0, 100)
    reader = StreamReader(record)
    for number, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(number))
    reader.close(float(len(pieces) + 1))
    return record


def test_tokens_are_stamped_when_their_event_is_complete() -> None:
    first, second = event("a"), event("b")
    record = read(first[:20], first[20:] + second[:-3], second[-3:], USAGE + DONE)
    assert (record.first_token_s, record.last_token_s) == (2.0, 3.0)
    assert list(record.itl_s or []) == [1.0]


def test_the_servers_counts_win_over_counted_events() -> None:
    record = read(event("a"), event("bcd"), USAGE + DONE)
    assert (record.prompt_tokens, record.output_tokens) == (7, 3)
    assert read(event("a"), event("bcd"), DONE).output_tokens == 2


@pytest.mark.parametrize(
    "silent",
    [
        chat(role="assistant", content=""),
        chat(role="assistant"),
        chat(content=None, reasoning=None, tool_calls=[]),
        event(""),
        event(None),
        USAGE,
        b": keep-alive\n\n",
        b"event: ping\n\n",
        b"\n\n",
        b"data: {}\n\n",
    ],
)
def test_an_event_without_text_never_stops_the_ttft_clock(silent: bytes) -> None:
    record = read(silent, chat(content="x"), silent, DONE)
    assert (record.first_token_s, record.last_token_s) == (2.0, 2.0)


@pytest.mark.parametrize(
    "delta",
    [{"content": "x"}, {"reasoning": "x"}, {"reasoning_content": "x"}, {"tool_calls": [{"index": 0}]}],
)
def test_reasoning_and_tool_calls_are_text(delta: dict[str, Any]) -> None:
    assert read(chat(**delta), DONE).first_token_s == 1.0


def test_a_stream_cut_at_every_byte_gives_the_same_record() -> None:
    stream = event("a") + b": hi\r\n\r\n" + event("é").replace(b"\n", b"\r\n") + USAGE + DONE
    whole = RequestResult(0.0, 100)
    reader = StreamReader(whole)
    assert reader.feed(stream, 5.0) == 2
    reader.close(6.0)
    for cut in range(len(stream) + 1):
        record = RequestResult(0.0, 100)
        reader = StreamReader(record)
        reader.feed(stream[:cut], 5.0)
        reader.feed(stream[cut:], 5.0)
        reader.close(6.0)
        assert record == whole, f"cut at {cut}"


def test_an_answer_that_ends_at_once_has_no_first_token() -> None:
    stopped = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    record = read(stopped, event(usage={"prompt_tokens": 7, "completion_tokens": 1}), DONE)
    assert (record.first_token_s, record.last_token_s, record.output_tokens) == (None, 4.0, 1)


def finished(reason: str, text: str = "x") -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    "stream",
    [
        event("x") + finished("error", ""),
        event("x") + finished("abort", ""),
        chat(role="assistant", content=""),
        b'data: {"choices": []}\n\n',
        b'data: {"choices": null}\n\n',
        b"data: {}\n\n",
    ],
)
def test_what_the_proxy_takes_for_no_answer_is_none_here(stream: bytes) -> None:
    with pytest.raises(AnswerError) as caught:
        read(stream + DONE)
    assert caught.value.kind == "no answer"
    assert read(event("x") * 9 + finished("length"), DONE).output_tokens == 10


@pytest.mark.parametrize("reason", ["error", "abort", "stop"])
def test_a_whole_answer_whose_engine_gave_up_is_none(reason: str) -> None:
    body = {"choices": [{"index": 0, "text": "x", "finish_reason": reason}]}
    record = RequestResult(0.0, 1)
    if reason == "stop":
        read_plain(json.dumps(body).encode(), record, 1.0)
    else:
        with pytest.raises(AnswerError, match="no answer"):
            read_plain(json.dumps(body).encode(), record, 1.0)


def test_a_stream_without_its_end_is_broken_and_keeps_its_count() -> None:
    record = RequestResult(0.0, 100)
    reader = StreamReader(record)
    reader.feed(event("a") + event("b"), 1.0)
    with pytest.raises(AnswerError) as caught:
        reader.close(2.0)
    assert caught.value.kind == "broken stream"
    assert record.output_tokens == 2


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'data: {"error": {"message": "engine died", "code": 500}}\n\n', "error event"),
        (b"data: {oops}\n\n", "malformed answer"),
        (b'data: {"choices": 3}\n\n', "malformed answer"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "malformed answer"),
    ],
)
def test_what_is_no_answer_is_an_error_of_a_kind(data: bytes, kind: str) -> None:
    with pytest.raises(AnswerError) as caught:
        StreamReader(RequestResult(0.0, 1)).feed(data, 1.0)
    assert caught.value.kind == kind


def test_an_answer_that_came_whole() -> None:
    record = RequestResult(0.0, 100)
    read_plain(
        b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":4}}',
        record,
        3.0,
    )
    assert (record.prompt_tokens, record.output_tokens) == (9, 4)
    assert (record.first_token_s, record.last_token_s) == (None, 3.0)
    for body in (b"", b"[]", b"{}", b'{"error": "no"}', b'{"choices": []}'):
        with pytest.raises(AnswerError):
            read_plain(body, RequestResult(0.0, 1), 1.0)


@pytest.mark.parametrize(
    "name", ["completion-stream-usage", "chat-stream-usage", "completion-stream-eos-first"]
)
def test_recorded_streams_of_real_vllm(name: str) -> None:
    """Counts come from the usage event; an answer of EOS alone has no first token."""
    raw = (RECORDINGS / f"{name}.http").read_bytes()
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data:")]
    usage = next(json.loads(line[5:])["usage"] for line in lines if b'"choices":[]' in line)
    record = RequestResult(0.0, 1)
    reader = StreamReader(record)
    for line in lines:
        reader.feed(line + b"\n\n", 1.0)
    reader.close(2.0)
    assert (record.prompt_tokens, record.output_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (record.first_token_s is None) == name.endswith("eos-first")


def choice(index: int, text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": index, "text": text}]}).encode() + b"\n\n"


def test_gaps_are_between_the_tokens_of_one_choice() -> None:
    record = read(choice(0, "a"), choice(1, "b"), choice(0, "c"), choice(1, "d") + choice(1, "e"), DONE)
    assert (record.first_token_s, record.last_token_s, record.output_tokens) == (1.0, 4.0, 5)
    assert list(record.itl_s or []) == [2.0, 2.0, 0.0]


def test_vectors_are_an_answer() -> None:
    record = RequestResult(0.0, 100)
    read_plain(b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":9,"total_tokens":9}}', record, 3.0)
    assert (record.prompt_tokens, record.output_tokens, record.last_token_s) == (9, 0, 3.0)
