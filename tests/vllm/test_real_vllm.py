"""hetlb in front of two real vLLM 0.32 servers of unequal speed, as a user of OpenAI's client meets it.

Shows: the official client works unchanged for everything the servers offer; what they answer comes through
as they said it; 160 requests at once all complete with exactly their tokens; who leaves leaves nothing
behind, here or at an engine; capacity and speed are read from real servers; what this proxy decided can be
replayed. `make test-vllm` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pair as real
import pytest
from engines import SERVED_MODEL_NAME, Server
from pair import FAST, SLOW

# The first test of a run waits for both servers, so every one may take as long as that.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HELLO: Any = [{"role": "user", "content": "Hello, tell me a story."}]
EXACT = {"ignore_eos": True}
INSTANCES = {FAST, SLOW}


def tokens(count: int, seed: object) -> list[int]:
    """A prompt of this many tokens that no other seed shares."""
    return random.Random(f"{seed}").choices(range(1000, 2000), k=count)


# --- chat and completions ---------------------------------------------------------------------------------


async def test_chat_plain(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, extra_body=EXACT
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_completion_plain(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="Hello, tell me a story.", max_tokens=8, temperature=0, extra_body=EXACT
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == 8


async def test_a_client_that_did_not_ask_sees_no_usage_event(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, stream=True, extra_body=EXACT
    )
    chat_events = [event async for event in chat]
    assert [choice.finish_reason for event in chat_events for choice in event.choices][-1] == "length"
    completion = await client.completions.create(
        model="tiny", prompt="Hello", max_tokens=12, stream=True, extra_body=EXACT
    )
    completion_events = [event async for event in completion]
    assert completion_events[-1].choices[0].finish_reason == "length"
    for event in (*chat_events, *completion_events):
        assert event.usage is None
        assert event.choices, "the usage event came through"


async def test_the_bytes_of_a_stream_equal_a_plain_vllms(
    proxy: real.Proxy, servers: list[Server], http: httpx.AsyncClient
) -> None:
    body = {"model": "tiny", "prompt": tokens(9, "bytes"), "max_tokens": 6, "stream": True, **EXACT}
    through = await http.post(f"{proxy.url}/v1/completions", json=body)
    straight = await http.post(f"{servers[0].url}/v1/completions", json=body)
    assert through.headers["content-type"] == straight.headers["content-type"]
    assert _shape(through.text) == _shape(straight.text)
    assert b'"usage"' not in through.content
    assert through.text.endswith("data: [DONE]\n\n")


def _shape(stream: str) -> list[Any]:
    """The kinds of events; how many there are of each is up to the engine.

    Without `system_fingerprint`: vLLM puts it into the last event, which is the usage event where one was
    asked for, as hetlb asks on its own behalf; the client does not get that one.
    """
    kinds: list[Any] = []
    for event in stream.strip().split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            kinds.append(data)
        else:
            document = json.loads(data)
            kinds.append((set(document) - {"system_fingerprint"}, set(document["choices"][0])))
    return [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]


async def test_a_client_that_asked_sees_one_usage_event(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, stream=True,
        stream_options={"include_usage": True}, extra_body=EXACT,
    )  # fmt: skip
    completion = await client.completions.create(
        model="tiny", prompt=tokens(7, "usage"), max_tokens=12, stream=True,
        stream_options={"include_usage": True}, extra_body=EXACT,
    )  # fmt: skip
    for events in ([event async for event in chat], [event async for event in completion]):
        with_usage = [event for event in events if event.usage is not None]
        assert with_usage == events[-1:]
        assert not with_usage[0].choices
        assert with_usage[0].usage.completion_tokens == 12


async def test_token_ids_lists_and_n(client: openai.AsyncOpenAI) -> None:
    one = await client.completions.create(
        model="tiny", prompt=tokens(33, "ids"), max_tokens=3, extra_body=EXACT
    )
    assert one.usage is not None
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (33, 3)

    several = await client.completions.create(
        model="tiny", prompt=[[5, 6, 7], [8, 9]], n=2, max_tokens=4, temperature=0.8, extra_body=EXACT
    )
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (5, 16)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]

    texts = await client.completions.create(
        model="tiny", prompt=["Hello", "Tell me a story"], max_tokens=4, stream=True, extra_body=EXACT
    )
    assert {choice.index async for event in texts for choice in event.choices} == {0, 1}

    chat = await client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, max_tokens=4, temperature=0.8, extra_body=EXACT
    )
    assert chat.usage is not None
    assert (len(chat.choices), chat.usage.completion_tokens) == (3, 12)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_dump()["max_model_len"] == 2048


# --- what is said beside the answer -----------------------------------------------------------------------


async def test_headers(proxy: real.Proxy, http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, **EXACT}
    for stream in (False, True):
        named = await http.post(
            f"{proxy.url}/v1/completions",
            json=body | {"stream": stream},
            headers={"x-request-id": f"mine-{stream}"},
        )
        assert named.headers["x-request-id"] == f"mine-{stream}"
        assert named.headers["x-hetlb-instance"] in INSTANCES
        # vLLM makes its own id of the client's: it was handed on.
        assert f"cmpl-mine-{stream}" in named.text
    unnamed = [await http.post(f"{proxy.url}/v1/completions", json=body) for _ in range(2)]
    assert len({reply.headers["x-request-id"] for reply in unnamed}) == 2


async def test_other_endpoints(proxy: real.Proxy, servers: list[Server], http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "Hello, tell me a story."}
    through = await http.post(f"{proxy.url}/tokenize", json=body)
    straight = await http.post(f"{servers[0].url}/tokenize", json=body)
    assert through.content == straight.content
    assert through.headers["x-hetlb-instance"] in INSTANCES
    ids = through.json()["tokens"]
    back = await http.post(f"{proxy.url}/detokenize", json={"model": "tiny", "tokens": ids})
    assert back.json()["prompt"] == body["prompt"]
    assert (await http.get(f"{proxy.url}/health")).status_code == 200
    assert (await http.get(f"{proxy.url}/metrics")).status_code == 404
    message = {"model": "tiny", "max_tokens": 4, "messages": HELLO}
    assert (await http.post(f"{proxy.url}/v1/messages", json=message)).json()["usage"]["output_tokens"] <= 4


# --- errors -----------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_our_own_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="no-such-model", messages=HELLO)
    error: Any = caught.value.body
    assert error["code"] == "model_not_found"
    assert error["message"] == "The model `no-such-model` does not exist. Valid names: tiny."
    assert "x-hetlb-instance" not in caught.value.response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [tokens(2100, "long"), "story " * 2100], ids=["ids", "text"])
async def test_a_prompt_that_is_too_long_is_a_400(
    client: openai.AsyncOpenAI, prompt: Any, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=5, stream=stream)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": 0, "n": 2},
        {"max_tokens": 4000},
        {"stream": True, "temperature": -1},
        {"stream_options": {"include_usage": True}},
    ],
    ids=lambda wrong: ",".join(wrong),
)
async def test_an_engines_error_comes_through_as_it_was_said(
    proxy: real.Proxy, servers: list[Server], http: httpx.AsyncClient, wrong: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 5, **wrong}
    through = await http.post(f"{proxy.url}/v1/chat/completions", json=body)
    straight = await http.post(f"{servers[0].url}/v1/chat/completions", json=body)
    assert straight.status_code == 400
    assert (through.status_code, through.content) == (straight.status_code, straight.content)
    assert through.headers["content-type"] == straight.headers["content-type"]


async def test_what_is_not_json_is_a_400(proxy: real.Proxy, http: httpx.AsyncClient) -> None:
    reply = await http.post(
        f"{proxy.url}/v1/completions", content=b'{"model":', headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "BadRequestError"


# --- the fleet --------------------------------------------------------------------------------------------


async def test_capacity_is_what_each_engine_says(
    proxy: real.Proxy, servers: list[Server], tmp_path: Path
) -> None:
    instances = await proxy.instances()
    sizes = {}
    for server in servers:
        sample = await real.engine_sample(server)
        assert not sample.missing
        assert instances[server.name]["kv_cache_tokens"] == sample.capacity.kv_cache_tokens
        assert instances[server.name]["models"] == [SERVED_MODEL_NAME]
        sizes[server.name] = sample.capacity.kv_cache_tokens
    assert sizes[FAST] > 5 * sizes[SLOW]


async def test_both_instances_get_work(proxy: real.Proxy, client: openai.AsyncOpenAI) -> None:
    async def answered_by(number: int) -> str:
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt=tokens(8, number), max_tokens=2, extra_body=EXACT
        )
        return raw.headers["x-hetlb-instance"]

    async with proxy.policy("rr"), asyncio.timeout(60):
        # After several mistakes of clients in a row an instance gets one request at a time until one is well.
        while await answered_by(0) != FAST:
            pass
        seen = [await answered_by(number) for number in range(4)]
    assert seen == [SLOW, FAST] * 2


async def test_160_at_once_complete_with_exactly_their_tokens(
    proxy: real.Proxy, client: openai.AsyncOpenAI
) -> None:
    draw = random.Random(160)
    lengths = [(draw.randint(32, 256), draw.randint(8, 48)) for _ in range(160)]

    async def plain(_: int, prompt: list[int], output: int) -> tuple[int, int]:
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=output, extra_body=EXACT
        )
        assert answer.usage is not None
        assert answer.choices[0].finish_reason == "length"
        return answer.usage.prompt_tokens, answer.usage.completion_tokens

    async def streamed(number: int, prompt: list[int], output: int) -> tuple[int, int]:
        # Half of them ask for usage; of the others the token ids are counted (events are not tokens).
        asked = number % 4 == 0
        options: Any = {"stream_options": {"include_usage": True}} if asked else {}
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=output, stream=True, **options,
            extra_body={**EXACT, "return_token_ids": True},
        )  # fmt: skip
        count, usage = 0, None
        async for event in stream:
            usage = event.usage or usage
            count += sum(len(getattr(choice, "token_ids", None) or ()) for choice in event.choices)
        assert (usage is not None) == asked
        if usage is not None:
            assert usage.completion_tokens == count
        return len(prompt), count

    asked = (
        (plain if number % 2 else streamed)(number, tokens(prompt, f"burst {number}"), output)
        for number, (prompt, output) in enumerate(lengths)
    )
    got = await asyncio.gather(*asked)
    assert got == lengths
    await proxy.idle()
    fleet = await proxy.fleet()
    assert fleet["queue"] == {"requests": 0, "bytes": 0}
    for each in fleet["models"][0]["instances"]:
        figures = {key: each[key] for key in ("in_flight", "queued", "workload", "kv_reserved_tokens")}
        assert figures == {"in_flight": 0, "queued": 0, "workload": 0, "kv_reserved_tokens": 0}


# --- leaving ----------------------------------------------------------------------------------------------


def _generated(server: Server) -> float:
    """The tokens that the engine has made since it started."""
    _, page = server.get("/metrics")
    lines = (line for line in page.decode().splitlines() if line.startswith("vllm:generation_tokens_total"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextlib.asynccontextmanager
async def leaves_nothing(proxy: real.Proxy, servers: list[Server], asked: int) -> AsyncIterator[None]:
    """After the block both engines run and hold nothing and hetlb's ledger is 0, short of `asked` tokens."""
    before = sum(_generated(server) for server in servers)
    yield

    async def still_running() -> list[str]:
        samples = [(server.name, await real.engine_sample(server)) for server in servers]
        return [f"{name}: {each.running}" for name, each in samples if each.running or each.waiting]

    await real.until(still_running, "engine without requests")
    await proxy.idle()
    assert sum(_generated(server) for server in servers) - before < asked


async def runs_at_an_engine(servers: list[Server]) -> None:
    """Wait until some engine runs a request."""

    async def none_running() -> bool:
        return not any([(await real.engine_sample(server)).running for server in servers])

    await real.until(none_running, "request at an engine")


async def test_a_client_that_leaves_in_the_middle_of_a_stream(
    proxy: real.Proxy, servers: list[Server], http: httpx.AsyncClient
) -> None:
    body = {"model": "tiny", "prompt": tokens(16, "leave"), "max_tokens": 2000, "stream": True, **EXACT}
    async with leaves_nothing(proxy, servers, asked=2000):
        async with http.stream("POST", f"{proxy.url}/v1/completions", json=body) as reply:
            async for _ in reply.aiter_bytes():
                break


async def test_a_client_that_leaves_while_it_waits_for_a_plain_answer(
    proxy: real.Proxy, servers: list[Server], http: httpx.AsyncClient
) -> None:
    body = {"model": "tiny", "prompt": tokens(16, "leave plain"), "max_tokens": 2000, **EXACT}
    async with leaves_nothing(proxy, servers, asked=2000):
        waiting = asyncio.create_task(http.post(f"{proxy.url}/v1/completions", json=body))
        await runs_at_an_engine(servers)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_clients_that_leave_hetlbs_queue(
    proxy: real.Proxy, servers: list[Server], client: openai.AsyncOpenAI
) -> None:
    async with leaves_nothing(proxy, servers, asked=200 * 400):
        crowd = [
            asyncio.create_task(
                client.completions.create(
                    model="tiny", prompt=tokens(32, f"crowd {number}"), max_tokens=400, extra_body=EXACT
                )
            )
            for number in range(200)
        ]

        async def no_queue() -> bool:
            return not (await proxy.fleet())["queue"]["requests"]

        await real.until(no_queue, "request in the queue")
        await runs_at_an_engine(servers)
        for task in crowd:
            task.cancel()
        left = await asyncio.gather(*crowd, return_exceptions=True)
        assert any(isinstance(each, asyncio.CancelledError) for each in left)


# --- without a profile, and afterwards --------------------------------------------------------------------


async def test_two_addresses_are_a_fleet_that_learns(bare: real.Proxy, servers: list[Server]) -> None:
    names = [server.url.removeprefix("http://") for server in servers]
    instances = await bare.instances()
    assert list(instances) == names
    for name, server in zip(names, servers, strict=True):
        sample = await real.engine_sample(server)
        assert instances[name]["profiled"] is False
        assert instances[name]["kv_cache_tokens"] == sample.capacity.kv_cache_tokens

    async with openai.AsyncOpenAI(base_url=f"{bare.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            answer = await client.completions.with_raw_response.create(
                model="tiny",
                prompt=tokens(64, f"bare {number}"),
                max_tokens=32,
                stream=True,
                extra_body=EXACT,
            )
            assert [event async for event in answer.parse()][-1].choices[0].finish_reason == "length"
            return str(answer.headers["x-hetlb-instance"])

        async def expected_s() -> list[float]:
            """The seconds that the last decision expected of one request, at each instance."""
            decisions = (await bare.admin_json("GET", "/v1/decisions?last=1"))["decisions"]
            terms = {each["instance"]: each["processing_s"] for each in decisions[-1]["candidates"]}
            return [terms[name] for name in names]

        async with bare.policy("paper"):
            await ask(0)
            fast, slow = await expected_s()
            # Nothing is known of them, or what their own histories say of earlier tests.
            assert fast < 1.2 * slow
        async with bare.policy("rr"):
            assert set(await asyncio.gather(*map(ask, range(1, 17)))) == set(names)
        await bare.idle()  # both are up: beside other load a probe may have failed
        async with bare.policy("paper"):
            await ask(17)
            fast, slow = await expected_s()
            assert slow > 1.5 * fast
    await bare.idle()


async def test_what_it_decided_replays(proxy: real.Proxy, client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    await asyncio.gather(
        *(
            client.completions.create(model="tiny", prompt=tokens(9, f"log {n}"), max_tokens=4)
            for n in range(20)
        )
    )
    await proxy.idle()
    last = await client.completions.with_raw_response.create(
        model="tiny", prompt="Hello", max_tokens=1, extra_headers={"x-request-id": "the-last"}
    )
    assert last.headers["x-request-id"] == "the-last"
    count = proxy.event_log.read_text().count("\n")

    async def not_written() -> bool:
        # Lines are written a few times a second; scrapes go on, so more than now is everything until now.
        return proxy.event_log.read_text().count("\n") <= count

    await real.until(not_written, "further line in the event log")
    whole_lines = proxy.event_log.read_text()
    log = tmp_path / "events.jsonl"
    log.write_text(whole_lines[: whole_lines.rindex("\n") + 1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "simulate", "--event-log", str(log), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, process_group=0,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, (out, err)
    replayed = json.loads(out)
    assert replayed["differing_lines"] == []
    assert replayed["decisions"] >= 21
