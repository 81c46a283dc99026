"""Prompt and output tokens of a request are the same number wherever they are read.

Method: requests of every shape go through a real proxy to a scripted engine; the counter, both forms of the
access log and the dashboard are compared with the engine's `usage`, or, without one, with what the
body holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from proxy.test_proxying import ask, post
from proxy.upstreams import DONE, LAST, SSE_HEAD, TOKEN, Upstream, chunk, plain

from hetlb.balancer.telemetry.access_log import json_line, keyvalue_line
from hetlb.balancer.telemetry.recent import Recent
from hetlb.balancer.telemetry.request_record import RequestRecord

Start = Callable[..., Any]
RECORDED = Path(__file__).parents[1] / "vllm" / "data"

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hello"}]


@dataclass
class Shape:
    """A body, and what it holds: prompts, sequences, tokens of all prompts where they are counted."""

    path: str
    body: dict[str, Any]
    prompts: int = 1
    sequences: int = 1
    tokens: int | None = None


SHAPES = {
    "completion": Shape(COMPLETIONS, {"prompt": "hello"}),
    "4 prompts": Shape(COMPLETIONS, {"prompt": ["a b c d"] * 4}, prompts=4, sequences=4),
    "n=4": Shape(COMPLETIONS, {"prompt": "hello", "n": 4}, sequences=4),
    "best_of": Shape(COMPLETIONS, {"prompt": "hello", "best_of": 3}, sequences=3),
    "4 prompts, n=2": Shape(COMPLETIONS, {"prompt": ["a"] * 4, "n": 2}, prompts=4, sequences=8),
    "token ids": Shape(COMPLETIONS, {"prompt": [1, 2, 3, 4, 5]}, tokens=5),
    "token ids of 3 prompts": Shape(
        COMPLETIONS, {"prompt": [[1, 2, 3], [4], [5, 6, 7, 8]]}, prompts=3, sequences=3, tokens=8
    ),
    "chat": Shape(CHAT, {"messages": MESSAGES}),
    "chat n=2": Shape(CHAT, {"messages": MESSAGES, "n": 2}, sequences=2),
    "responses": Shape(RESPONSES, {"input": "hello"}),
    "64 embeddings": Shape(EMBEDDINGS, {"input": ["one two"] * 64}, prompts=64, sequences=64),
    "64 embeddings of ids": Shape(
        EMBEDDINGS, {"input": [[1, 2, 3]] * 64}, prompts=64, sequences=64, tokens=192
    ),
}
STREAMED = [name for name, shape in SHAPES.items() if shape.path in (COMPLETIONS, CHAT)]

#: As vLLM writes it with and without `--enable-prompt-tokens-details`.
PLAIN = {"prompt_tokens": 500, "total_tokens": 540, "completion_tokens": 40, "prompt_tokens_details": None}
CACHED = {**PLAIN, "prompt_tokens_details": {"cached_tokens": 384}}
NEWER = {
    "input_tokens": 500, "input_tokens_details": {"cached_tokens": 384, "cache_write_tokens": 0},
    "output_tokens": 40, "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def answered(usage: dict[str, Any] | None) -> bytes:
    body: dict[str, Any] = {"choices": [{"text": "hi"}], "usage": usage}
    return plain(json.dumps(body, separators=(",", ":")).encode())


def streamed(usage: dict[str, Any] | None) -> bytes:
    last = json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
    told = b"" if usage is None else chunk(b"data: " + last + b"\n\n")
    return SSE_HEAD + chunk(TOKEN) + chunk(TOKEN) + told + chunk(DONE) + LAST


def words(record: RequestRecord) -> dict[str, str]:
    return dict(word.split("=") for word in keyvalue_line(record).split())


async def check(proxy: Any, shape: Shape, tokens: int, cached: int | None, output: int) -> None:
    """One ended request of this shape: every reader gives these numbers."""
    [record] = proxy.exchanges
    assert record.request.sequences == shape.sequences
    assert (record.prompt_tokens_total, record.cached_tokens, record.output_tokens) == (
        tokens,
        cached,
        output,
    )
    counted = proxy.driver.totals.instances["i0"]
    assert (counted.prompt_tokens, counted.cached_prompt_tokens) == (tokens, cached or 0)
    assert counted.output_tokens == output
    line = words(record)
    assert (line["prompt_tokens"], line["output_tokens"]) == (str(tokens), str(output))
    assert line["cached_tokens"] == ("-" if cached is None else str(cached))
    document = json.loads(json_line(record, 0.0))
    assert (document["prompt_tokens"], document["cached_tokens"]) == (tokens, cached)
    recent = Recent()
    recent.finished(record)
    [stretch] = recent.stretches.values()
    share = stretch.share("i0")
    assert (share.prompt_tokens, share.output_tokens) == (tokens, output)
    assert [point[3] for point in recent.points] == ([output / shape.sequences] if output else [])


@pytest.mark.parametrize("usage", [PLAIN, CACHED], ids=["usage", "usage with details"])
@pytest.mark.parametrize("name", SHAPES)
async def test_the_engine_s_count_is_every_reader_s(start: Start, name: str, usage: dict[str, Any]) -> None:
    shape = SHAPES[name]
    cached = None if usage is PLAIN else 384
    if shape.path == RESPONSES:
        usage, cached = NEWER, 384
    async with Upstream(answered(usage)) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(json.dumps({"model": "m", **shape.body}).encode(), path=shape.path))
    await check(proxy, shape, 500, cached, 40)


@pytest.mark.parametrize("usage", [PLAIN, CACHED], ids=["usage", "usage with details"])
@pytest.mark.parametrize("name", STREAMED)
async def test_the_same_for_a_stream(start: Start, name: str, usage: dict[str, Any]) -> None:
    shape = SHAPES[name]
    async with Upstream(streamed(usage)) as engine:
        proxy = await start(engine.url)
        body = json.dumps({"model": "m", **shape.body, "stream": True}).encode()
        await ask(proxy, post(body, path=shape.path))
    await check(proxy, shape, 500, None if usage is PLAIN else 384, 40)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", SHAPES)
async def test_without_usage_every_reader_has_one_estimate(start: Start, name: str, stream: bool) -> None:
    shape = SHAPES[name]
    if stream and name not in STREAMED:
        pytest.skip("not streamed")
    async with Upstream(streamed(None) if stream else answered(None)) as engine:
        proxy = await start(engine.url)
        body = json.dumps({"model": "m", **shape.body, "stream": stream}).encode()
        await ask(proxy, post(body, path=shape.path))
    [record] = proxy.exchanges
    if shape.tokens is not None:
        assert record.prompt_tokens_total == shape.tokens
    # Four bytes a token before anything is learnt: the text of all prompts, once.
    text = json.dumps(shape.body.get("prompt") or shape.body.get("input") or shape.body.get("messages"))
    assert shape.tokens is not None or record.prompt_tokens_total == pytest.approx(len(text) / 4, abs=1)
    await check(proxy, shape, record.prompt_tokens_total, None, 2 if stream else 0)


@pytest.mark.parametrize(
    ("recording", "body", "tokens", "output"),
    [
        ("completion-plain-list-n2", {"prompt": ["a", "b"], "n": 2}, 3, 12),
        ("completion-plain-n2", {"prompt": "hello", "n": 2}, 8, 6),
        ("completion-plain-token-id-lists", {"prompt": [[1, 2], [3, 4, 5]]}, 5, 6),
        ("completion-stream-list-n2", {"prompt": ["a", "b"], "n": 2, "stream": True}, 3, 8),
    ],
)
async def test_answers_of_vllm_0_32(
    start: Start, recording: str, body: dict[str, Any], tokens: int, output: int
) -> None:
    async with Upstream((RECORDED / f"{recording}.http").read_bytes()) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(json.dumps({"model": "m", **body}).encode()))
    assert answer.status == 200
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    shape = Shape(COMPLETIONS, body, prompts, prompts * body.get("n", 1))
    await check(proxy, shape, tokens, None, output)


async def test_a_request_without_a_prompt_has_no_prompt_tokens(start: Start) -> None:
    async with Upstream(plain(b'{"tokens":[1]}')) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(b'{"model":"m","prompt":"hello"}', path="/tokenize"))
    await check(proxy, Shape("/tokenize", {}, sequences=0), 0, None, 0)


async def test_more_cached_tokens_than_there_are_is_not_believed(start: Start) -> None:
    wrong = {**PLAIN, "prompt_tokens_details": {"cached_tokens": 501}}
    async with Upstream(answered(wrong)) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post())
    await check(proxy, SHAPES["completion"], 500, None, 40)


async def test_a_request_of_more_sequences_than_an_instance_has_places(start: Start) -> None:
    """On an idle instance of 64 places: the expected time is a number, and the request is answered."""
    async with Upstream(answered(PLAIN)) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(b'{"model":"m","prompt":"hello","n":200}'))
    [record] = proxy.exchanges
    assert (record.request.sequences, record.status) == (200, 200)
    assert record.lease is not None
    assert record.lease.forecast_end_s > 0
