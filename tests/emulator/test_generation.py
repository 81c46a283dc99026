"""Shows that every answer is complete, in order and counted, streamed or not, and ends where it should."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from emulator.conftest import Start, make_profile
from emulator.wire import Client, ask

from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.emulator.counting import answer_length, count_text, text_seed, token_ids
from hetlb.tools.emulator.replies import words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def expected_words(count: int) -> str:
    return "".join(f" t{number}" for number in range(count))


def chat(content: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


def test_words() -> None:
    """The text of any length, also after a shorter and a longer one were made."""
    for count in (0, 1, 9, 10, 11, 99, 100, 101, 999, 1000, 1001, 1025, 5000, 12345, 3):
        assert words(count) == expected_words(count)


def test_tokens_of_a_text() -> None:
    assert [count_text(text) for text in ("", "a", "abcd", "abcde", "é" * 4)] == [1, 1, 1, 2, 2]
    assert all(len(token_ids(text)) == count_text(text) for text in ("", "a", "abcd", "abcde", "é" * 4))


def test_answers_without_a_limit() -> None:
    """Deterministic lengths with a mean of about 220."""
    lengths = [answer_length(text_seed(f"prompt {number}"), 0) for number in range(5000)]
    assert 200 < sum(lengths) / len(lengths) < 240
    assert min(lengths) >= 1
    assert lengths[:9] == [answer_length(text_seed(f"prompt {number}"), 0) for number in range(9)]


async def test_plain_completion(engine: EmulatedEngine) -> None:
    body = {"model": "tiny", "prompt": "Hello, tell me a story.", "max_tokens": 12}
    answer = (await ask(engine.url, "POST", COMPLETIONS, body)).json
    assert answer["choices"][0]["text"] == expected_words(12)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 12)


async def test_streamed_completion_is_one_event_per_token(engine: EmulatedEngine) -> None:
    """More than ten and more than a hundred tokens: the chunks change their size with the digits."""
    response = await ask(
        engine.url, "POST", COMPLETIONS, {"prompt": [5] * 7, "max_tokens": 120, "stream": True}
    )
    *events, done = response.events
    assert done == "[DONE]"
    assert len(events) == 120
    assert len(response.chunks) == 121
    assert [event["choices"][0]["text"] for event in events] == [f" t{number}" for number in range(120)]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 119 + ["length"]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_streamed_usage(engine: EmulatedEngine, path: str, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {**chat(), "prompt": "Hello", "max_tokens": 11, "stream": True, "stream_options": options}
    *events, last, done = (await ask(engine.url, "POST", path, body)).events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 11
    prompt = last["usage"]["prompt_tokens"]
    assert last["usage"]["total_tokens"] == prompt + 11
    if continuous:
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [*([0] if path == CHAT else []), *range(1, 12)]
    else:
        assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_and_many_answers(engine: EmulatedEngine, stream: bool) -> None:
    """Three prompts of two answers each: six choices, every one whole."""
    body = {
        "prompt": ["one", [1, 2, 3, 4, 5], "three"],
        "n": 2,
        "max_tokens": 15,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    response = await ask(engine.url, "POST", COMPLETIONS, body)
    texts = dict.fromkeys(range(6), "")
    reasons: dict[int, str] = {}
    answers = response.events[:-1] if stream else [response.json]
    for choice in itertools.chain.from_iterable(answer["choices"] for answer in answers):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == dict.fromkeys(range(6), expected_words(15))
    assert reasons == dict.fromkeys(range(6), "length")
    assert answers[-1]["usage"]["prompt_tokens"] == 1 + 5 + 2
    assert answers[-1]["usage"]["completion_tokens"] == 90


async def test_streamed_chat(engine: EmulatedEngine) -> None:
    """The role first, for every choice; then the words."""
    body = chat(max_completion_tokens=3, n=2, stream=True)
    *events, _ = (await ask(engine.url, "POST", CHAT, body)).events
    deltas = [(event["choices"][0]["index"], event["choices"][0]["delta"]) for event in events]
    assert deltas[:2] == [(index, {"role": "assistant", "content": ""}) for index in (0, 1)]
    for index in (0, 1):
        assert [delta["content"] for at, delta in deltas[2:] if at == index] == [" t0", " t1", " t2"]


@pytest.mark.parametrize(
    ("more", "tokens", "reason"),
    [
        ({}, 16, "length"),
        ({"max_tokens": None}, 16, "length"),
        ({"max_tokens": 40, "vllm_xargs": {"output_tokens": 7}}, 7, "stop"),
        ({"max_tokens": 40, "vllm_xargs": {"output_tokens": 40}}, 40, "length"),
        ({"max_tokens": 40, "vllm_xargs": {"output_tokens": 90}}, 40, "length"),
        ({"max_tokens": 40, "vllm_xargs": {"output_tokens": 7}, "min_tokens": 9}, 9, "stop"),
        ({"max_tokens": 40, "vllm_xargs": {"output_tokens": 7}, "ignore_eos": True}, 40, "length"),
        ({"prompt": [7] * 8150, "max_tokens": 100}, 42, "length"),
    ],
)
async def test_where_completions_end(
    engine: EmulatedEngine, more: dict[str, Any], tokens: int, reason: str
) -> None:
    """vLLM's default of 16, the client's cap, the stand-in for EOS, the room that is left."""
    answer = (await ask(engine.url, "POST", COMPLETIONS, {"prompt": "Hello", **more})).json
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == reason


async def test_where_chats_end(start: Start) -> None:
    """Without a cap an answer ends by itself, the same way every time; `ignore_eos` fills the room."""
    engine = await start(max_model_len=600)
    own = [(await ask(engine.url, "POST", CHAT, chat("story"))).json for _ in range(2)]
    length = answer_length(text_seed("story"), 0)
    assert [answer["usage"]["completion_tokens"] for answer in own] == [length] * 2
    assert own[0]["choices"][0]["finish_reason"] == "stop"
    body = chat("story", ignore_eos=True)
    answer = (await ask(engine.url, "POST", CHAT, body)).json
    assert answer["usage"]["total_tokens"] == 600
    assert answer["choices"][0]["finish_reason"] == "length"
    body = chat("story", vllm_xargs={"output_tokens": 3})
    answer = (await ask(engine.url, "POST", CHAT, body)).json
    assert answer["usage"]["completion_tokens"] == 3


async def test_echo(engine: EmulatedEngine) -> None:
    body = {"prompt": 'say "é"', "max_tokens": 3, "echo": True}
    answer = (await ask(engine.url, "POST", COMPLETIONS, body)).json
    assert answer["choices"][0]["text"] == 'say "é" t0 t1 t2'
    *events, _ = (await ask(engine.url, "POST", COMPLETIONS, {**body, "stream": True})).events
    assert "".join(event["choices"][0]["text"] for event in events) == 'say "é" t0 t1 t2'


async def test_embeddings_have_no_output(engine: EmulatedEngine) -> None:
    response = await ask(engine.url, "POST", "/v1/embeddings", {"input": ["Hello", "Hello", "there"]})
    first, second, third = (row["embedding"] for row in response.json["data"])
    assert first == second != third
    assert response.json["usage"]["completion_tokens"] == 0
    assert engine.model.generated_tokens == 0


async def test_the_openai_client(engine: EmulatedEngine) -> None:
    """The official client reads streams and whole answers, and knows the errors."""
    import openai  # a second, which every process would spend on finding the tests

    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for event in stream:
            text += (event.choices[0].delta.content or "") if event.choices else ""
            usage = event.usage or usage
        assert text == expected_words(20)
        assert usage is not None
        assert usage.completion_tokens == 20
        completion = await client.completions.create(model="tiny", prompt="Hello", max_tokens=5, n=2)
        assert [choice.text for choice in completion.choices] == [expected_words(5)] * 2
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="Hello")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="tiny", prompt=[5] * 9000)


async def test_a_small_cache_preempts_and_loses_nothing(start: Start) -> None:
    """Twenty answers that together need four times the cache: all whole, some preempted."""
    # So slow that all have come before the first one ends.
    engine = await start(make_profile(kv_cache_tokens=1024, max_num_seqs=16), time_scale=0.3)
    body = {"prompt": [3] * 50, "max_tokens": 150, "stream": True}
    answers = await asyncio.gather(*(ask(engine.url, "POST", COMPLETIONS, body) for _ in range(20)))
    for answer in answers:
        *events, done = answer.events
        assert done == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == expected_words(150)
    assert engine.model.preemptions > 0
    assert engine.finished == {"stop": 0, "length": 20, "abort": 0}
    assert engine.model.generated_tokens == 20 * 150


async def test_no_token_is_early(start: Start) -> None:
    """Each token comes no sooner than the profile says, and lateness does not add up on the way."""
    engine = await start(time_scale=0.1)

    latency = engine.model.latency
    async with await Client.connect(engine.url) as client:
        begun = time.monotonic()
        client.send("POST", COMPLETIONS, {"prompt": [1] * 100, "max_tokens": 30, "stream": True})
        await client.head()
        due_s = 0.1 * latency.prefill_s(100)
        for number in range(30):
            assert f'" t{number}"'.encode() in await client.chunk()
            assert time.monotonic() - begun >= due_s
            due_s += 0.1 * latency.step_s(1, 101 + number)
        assert b"[DONE]" in await client.chunk()
        assert await client.chunk() == b""


async def test_engines_side_by_side(start: Start) -> None:
    """Several engines in one process have nothing in common."""
    engines = [await start(served_model_names=[f"model-{number}"]) for number in range(3)]
    bodies = [{"model": f"model-{number}", "prompt": "x", "max_tokens": 5} for number in range(3)]
    for engine in engines:
        statuses = [(await ask(engine.url, "POST", COMPLETIONS, body)).status for body in bodies]
        assert sorted(statuses) == [200, 404, 404]
        assert engine.finished["length"] == 1
