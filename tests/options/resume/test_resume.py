"""An answer whose engine is lost goes on at another one, and its client sees one answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from emulator.conftest import make_profile
from helpers import HANG_S, turns_until
from proxy.cutter import AFTER_HEAD, Cut, Cutter
from proxy.test_proxying import Start

from hetlb.balancer.core.facts import AdminStateSet, EngineSample, InstanceAdded
from hetlb.balancer.core.types import AdminState, Capacity, Outcome
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.options.resume.continuation import MAX_FRUITLESS_LEASES
from hetlb.tools.emulator import EmulatedEngine

HOWS = ("fin", "rst")
#: Bytes of the head of an answer: what ends in it is no answer (502), as before.
HEAD_BYTES = 260
#: Bytes until text has come: a request that is dropped twice before that is tried no more.
TEXT_BYTES = 1100


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[EmulatedEngine]:
    async with EmulatedEngine(make_profile(), time_scale=0.01, served_model_names=("m",)) as running:
        yield running


def body(kind: str, stream: bool, **more: Any) -> dict[str, Any]:
    asked = (
        {"prompt": "Tell me something"} if kind == "completions" else
        {"messages": [{"role": "user", "content": "Tell me something"}]}
    )  # fmt: skip
    return {"model": "m", **asked, "stream": stream, "max_tokens": 40, "temperature": 0, **more}


class Answer:
    """What a client got: the text, the reasons of its end, ids, usage, the rest as it came."""

    def __init__(self, status: int, headers: Any, raw: bytes, stream: bool) -> None:
        self.status, self.headers, self.raw = status, headers, raw
        self.events = []
        self.done = False
        if not stream:
            self.events = [json.loads(raw)]
        else:
            blocks = raw.split(b"\n\n")
            assert blocks.pop() == b""
            for block in blocks:
                if block == b": waiting":  # a heartbeat
                    continue
                assert block.startswith(b"data: "), block
                assert b"\n" not in block, block
                assert not self.done
                if block == b"data: [DONE]":
                    self.done = True
                else:
                    self.events.append(json.loads(block[6:]))
        choices = [each["choices"][0] for each in self.events if each.get("choices")]
        self.said = [
            (each.get("message") or each.get("delta") or {}).get("content") or each.get("text") or ""
            for each in choices
        ]
        self.text = "".join(self.said)
        self.finish = [each["finish_reason"] for each in choices if each.get("finish_reason")]
        self.roles = sum("role" in each.get("delta", {}) for each in choices)
        self.names = {(each.get("id"), each.get("created")) for each in self.events}
        self.usage = [each["usage"] for each in self.events if each.get("usage")]
        self.failed = any("error" in each for each in self.events)
        self.keys = {tuple(each) for each in choices}


def unchunked(data: bytes) -> bytes:
    """The body of a chunked answer, as far as it came."""
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return out


async def ask(url: str, kind: str, asked: dict[str, Any]) -> Answer:
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    sent = json.dumps(asked).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(sent)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    async with asyncio.timeout(HANG_S):
        raw = await reader.read()
    writer.close()
    head_lines, _, raw = raw.partition(b"\r\n\r\n")
    status, *lines = head_lines.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    if "transfer-encoding" in headers:
        raw = unchunked(raw)
    return Answer(int(status.split()[1]), headers, raw, asked["stream"] and status.startswith("HTTP/1.1 200"))


async def proxied(start: Start, *urls: str, vllm: bool = True, **table: Any) -> Any:
    proxy = await start(*urls, **{"resume": "ids", **table})
    if vllm:
        for each in proxy.scheduler.instances:
            proxy.scheduling.sample(each.name, EngineSample(engine="vllm"))
    return proxy


def same(got: Answer, whole: Answer) -> None:
    """One whole answer, as from an engine that was not lost."""
    assert (got.status, got.text, got.finish, got.done) == (200, whole.text, whole.finish, whole.done), (
        got.raw[-330:].decode() + str(got.headers)
    )
    assert (got.usage, got.roles) == (whole.usage, whole.roles)
    assert len(got.names) == 1
    assert not got.failed
    assert got.keys == whole.keys
    assert b'"prompt_token_ids":[' not in got.raw


@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_stream_that_is_cut_anywhere_is_whole(
    start: Start, engine: EmulatedEngine, kind: str, usage: bool
) -> None:
    rng = random.Random(f"{kind} {usage}")
    cuts: list[Cut] = []
    asked = body(kind, True, **({"stream_options": {"include_usage": True}} if usage else {}))
    whole = await ask(engine.url, kind, asked)
    told = (await ask(engine.url, kind, {**asked, "stream_options": {"include_usage": True}})).usage[-1]
    size = len(whole.raw) * 11 // 10
    async with contextlib.AsyncExitStack() as stack:
        cutters = [await stack.enter_async_context(Cutter(engine.port, cuts)) for _ in range(3)]
        resumed = 0
        for _ in range(8):
            # A fresh fleet each time: instances that fail as often as these do would be ejected.
            proxy = await proxied(start, *[each.url for each in cutters])
            for _ in range(4):
                first = Cut(rng.randrange(HEAD_BYTES, size), rng.choice(HOWS))
                again = [
                    Cut(rng.randrange(TEXT_BYTES, size), rng.choice(HOWS))
                    for _ in range(rng.choice((0, 0, 2)))
                ]
                cuts[:] = [first, *again]
                same(await ask(f"http://127.0.0.1:{proxy.port}", kind, asked), whole)
            resumed += sum(proxy.driver.totals.resumptions.values())
            for record in proxy.exchanges:
                counts = record.prompt_tokens_total, record.output_tokens
                assert counts == (told["prompt_tokens"], told["completion_tokens"]), record.resumed
        assert resumed > 20


@pytest.mark.parametrize("after", [0, 1, AFTER_HEAD])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_an_engine_that_is_lost_before_it_goes_on_is_one_more(
    start: Start, engine: EmulatedEngine, kind: str, after: int
) -> None:
    asked = body(kind, True)
    whole = await ask(engine.url, kind, asked)
    cuts = [Cut(3000, "rst"), Cut(after, "fin"), Cut(after, "rst")]
    got, bodies, _ = await resumed(start, engine, kind, asked, cuts)
    same(got, whole)
    assert len(bodies) == 4


async def wire_bytes(url: str, kind: str, asked: dict[str, Any]) -> int:
    """Bytes of a chunked answer with its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    sent = json.dumps(asked).encode()
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    lines = (
        f"POST {path} HTTP/1.1",
        "host: h",
        "content-type: application/json",
        f"content-length: {len(sent)}",
    )
    writer.write("\r\n".join([*lines, "", ""]).encode() + sent)
    raw = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    return len(raw)


@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_stream_that_is_cut_near_its_end_says_nothing_twice(
    start: Start, engine: EmulatedEngine, kind: str, usage: bool
) -> None:
    cuts: list[Cut] = []
    asked = body(kind, True, **({"stream_options": {"include_usage": True}} if usage else {}))
    whole = await ask(engine.url, kind, asked)
    size = await wire_bytes(
        engine.url, kind, {**asked, "return_token_ids": True, "stream_options": {"include_usage": True}}
    )
    for after in range(size - 700, size, 20):
        async with Cutter(engine.port, cuts) as one, Cutter(engine.port, cuts) as two:
            proxy = await proxied(start, one.url, two.url)
            cuts[:] = [Cut(after, "fin")]
            same(await ask(f"http://127.0.0.1:{proxy.port}", kind, asked), whole)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_rest_waits_for_an_instance_that_accepts_it(
    start: Start, engine: EmulatedEngine, stream: bool
) -> None:
    asked = body("chat", stream)
    whole = await ask(engine.url, "chat", asked)
    async with Cutter(engine.port, [Cut(3000 if stream else 300, "hang")]) as one:
        proxy = await proxied(start, one.url)
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", "chat", asked))
        await turns_until(lambda: one.cut == 1)
        gone = Cutter(engine.port, [])
        async with gone:
            pass
        spec = proxy.scheduler.instances[0].spec
        for name in ("gone", "gone too"):
            proxy.scheduling.change(InstanceAdded(replace(spec, name=name, url=gone.url)))
            proxy.scheduling.sample(name, EngineSample(engine="vllm"))
    await turns_until(lambda: [each.routable for each in proxy.scheduler.instances].count(True) <= 1)
    assert not asking.done()
    proxy.scheduling.change(InstanceAdded(replace(spec, name="last", url=engine.url)))
    proxy.scheduling.sample("last", EngineSample(engine="vllm"))
    same(await asking, whole)


async def test_a_stream_that_waits_for_its_rest_gets_heartbeats(start: Start, engine: EmulatedEngine) -> None:
    asked = body("chat", True)
    whole = await ask(engine.url, "chat", asked)
    async with Cutter(engine.port, [Cut(3000, "fin")]) as one:
        proxy = await proxied(start, one.url, engine.url, heartbeat_s=1e-9)
        proxy.scheduling.change(AdminStateSet("i1", AdminState.MAINT))
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", "chat", asked))
        # Before the cut: after it the stream would go on there at once.
        await turns_until(lambda: len(proxy.scheduler.instances[0].leases) == 1)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.MAINT))
        await turns_until(lambda: one.cut == 1 and len(proxy.scheduler.queue) == 1)
        proxy.driver.swept(0.0)
        assert not asking.done()
        proxy.scheduling.change(AdminStateSet("i1", AdminState.READY))
        got = await asking
    assert b"\n\n: waiting\n\n" in got.raw
    same(got, whole)


@pytest.mark.parametrize("after", [0, 1, AFTER_HEAD])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_dropped_by_the_only_instance_a_request_waits_for_it(
    start: Start, engine: EmulatedEngine, stream: bool, after: int
) -> None:
    """It is run a second time, and not a third. An idle connection lost without a byte is no run."""
    asked = body("chat", stream)
    whole = await ask(engine.url, "chat", asked)
    cuts = [Cut(after, "fin")]
    runs = 2 if after else 3
    async with Cutter(engine.port, cuts) as only:
        proxy = await proxied(start, only.url)
        same(await ask(f"http://127.0.0.1:{proxy.port}", "chat", asked), whole)
        cuts += [Cut(after, "fin")] * runs
        got = await ask(f"http://127.0.0.1:{proxy.port}", "chat", asked)
    assert (got.status, len(only.bodies), cuts) == (502, 2 + runs, [])


async def resumed(
    start: Start, engine: EmulatedEngine, kind: str, asked: dict[str, Any], cuts: list[Cut], **table: Any
) -> tuple[Answer, list[bytes], Any]:
    """The answer to a request whose first engine is cut, the requests that the engines got, the proxy."""
    vllm = table.pop("vllm", True)
    async with Cutter(engine.port, cuts) as one, Cutter(engine.port, cuts) as two:
        proxy = await proxied(start, one.url, two.url, vllm=vllm, **table)
        got = await ask(f"http://127.0.0.1:{proxy.port}", kind, asked)
        return got, one.bodies + two.bodies, proxy


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("most", [40, 60])
async def test_limits_are_less_by_the_tokens_so_far(
    start: Start, engine: EmulatedEngine, kind: str, most: int
) -> None:
    """A model that would stop after 50 tokens, within the limits or not, and not before `min_tokens`."""
    asked = body(kind, True, max_tokens=most, min_tokens=35, vllm_xargs={"output_tokens": 50})
    whole = await ask(engine.url, kind, asked)
    got, bodies, _ = await resumed(start, engine, kind, asked, [Cut(5000, "rst")])
    same(got, whole)
    assert whole.finish == (["length"] if most == 40 else ["stop"])
    second = json.loads(bodies[1].partition(b"\r\n\r\n")[2])
    assert bodies[1].startswith(b"POST /v1/completions ")
    said = sum(each >= 196_608 for each in second["prompt"])
    assert 0 < said < 40
    assert (second["max_tokens"], second["min_tokens"]) == (most - said, 35 - said)


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_prompt_of_token_ids_goes_on(start: Start, engine: EmulatedEngine, kind: str) -> None:
    asked = body("completions", True, prompt=[5, 6, 7], stream_options={"include_usage": True})
    if kind == "chat":
        asked["prompt"] = [[5, 6, 7]]
    whole = await ask(engine.url, "completions", asked)
    got, _, _ = await resumed(start, engine, "completions", asked, [Cut(3000, "rst")])
    same(got, whole)
    assert got.usage[0]["prompt_tokens"] == 3


@pytest.mark.parametrize("said", [False, None])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_client_that_wants_no_token_ids_gets_none_and_is_resumed(
    start: Start, engine: EmulatedEngine, kind: str, said: bool | None
) -> None:
    asked = body(kind, True, return_token_ids=said)
    whole = await ask(engine.url, kind, asked)
    got, bodies, _ = await resumed(start, engine, kind, asked, [Cut(3000, "rst")])
    same(got, whole)
    assert len(bodies) == 2
    assert b'"token_ids":[' not in got.raw


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_without_token_ids_an_answer_is_not_resumed(
    start: Start, engine: EmulatedEngine, kind: str
) -> None:
    asked = body(kind, True)
    for table in ({"vllm": False}, {"vllm": False, "resume": False}, {"resume": False}):
        got, bodies, proxy = await resumed(start, engine, kind, asked, [Cut(3000, "rst")], **table)
        assert (got.failed, got.done, len(bodies)) == (True, False, 1)
        assert b"return_token_ids" not in bodies[0]
        assert not proxy.driver.totals.resumptions


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1}, {"echo": True}, {"best_of": 2}, {"presence_penalty": 0.5},
        {"guided_regex": "[a-z]+"}, {"structured_outputs": {"json": {}}}, {"truncate_prompt_tokens": 5},
        {"response_format": {"type": "json_object"}}, {"use_beam_search": True}, {"logprobs": 0},
        {"stop": ["x"], "include_stop_str_in_output": True},
    ],
    ids=str,
)  # fmt: skip
async def test_what_would_not_be_right_is_not_resumed(
    start: Start, engine: EmulatedEngine, more: dict[str, Any]
) -> None:
    got, bodies, proxy = await resumed(
        start, engine, "completions", body("completions", True, **more), [Cut(3000, "fin")]
    )
    assert (got.failed, got.done, len(bodies)) == (True, False, 1)
    assert [each[0] for each in proxy.ended] == ["broken_stream"]


async def test_a_call_of_which_a_part_was_sent_is_not_resumed(start: Start, engine: EmulatedEngine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = body("chat", True, tools=[tool], tool_choice="required")
    got, bodies, _ = await resumed(start, engine, "chat", asked, [Cut(900, "fin")])
    assert (got.failed, got.done, len(bodies)) == (True, False, 1)


async def test_an_engine_that_hangs_is_left(start: Start, engine: EmulatedEngine) -> None:
    asked = body("chat", True)
    whole = await ask(engine.url, "chat", asked)
    got, _, proxy = await resumed(start, engine, "chat", asked, [Cut(3000, "hang")], idle_timeout_s=0.3)
    same(got, whole)
    assert dict(proxy.driver.totals.resumptions) == {("m", "stalled"): 1}


async def test_where_all_but_one_are_lost_the_last_is_not_overrun(start: Start) -> None:
    """What went on at three goes on at one, which gets about as many at a time as it has slots."""
    slots, cuts = 4, [Cut(2500, "hang")] * 12
    most: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        served = EmulatedEngine(make_profile(max_num_seqs=slots), time_scale=0.01, served_model_names=("m",))
        engine = await stack.enter_async_context(served)
        asked = body("chat", True)
        whole = await ask(engine.url, "chat", asked)
        last = await stack.enter_async_context(Cutter(engine.port, []))
        lost = [Cutter(engine.port, cuts) for _ in range(3)]
        for each in lost:
            await each.__aenter__()
        proxy = await proxied(start, *[each.url for each in lost])
        for instance in proxy.scheduler.instances:
            instance.learn_capacity(Capacity(max_num_seqs=slots))
        asking = [
            asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", "chat", asked))
            for _ in range(3 * slots)
        ]
        await turns_until(lambda: sum(each.cut for each in lost) == 3 * slots)
        spec = replace(proxy.scheduler.instances[0].spec, name="last", url=last.url)
        proxy.scheduling.change(InstanceAdded(spec))
        [instance] = [each for each in proxy.scheduler.instances if each.name == "last"]
        proxy.scheduling.sample("last", EngineSample(engine="vllm"))
        instance.learn_capacity(Capacity(max_num_seqs=slots))
        for each in lost:
            await each.__aexit__()

        def over() -> bool:
            most.append(instance.sequences)
            return all(each.done() for each in asking)

        await turns_until(over)
        for each in asking:
            same(await each, whole)
    assert 1 < max(most) < 2 * slots  # some may wait at the engine, as at other times


@pytest.mark.filterwarnings("default")
async def test_the_sdk_of_openai_reads_a_resumed_stream_as_one(start: Start, engine: EmulatedEngine) -> None:
    openai = pytest.importorskip("openai")
    asked = body("chat", True, stream_options={"include_usage": True})
    whole = await ask(engine.url, "chat", asked)
    cuts = [Cut(3000, "rst"), Cut(4000, "fin")]
    async with contextlib.AsyncExitStack() as stack:
        cutters = [await stack.enter_async_context(Cutter(engine.port, cuts)) for _ in range(3)]
        proxy = await proxied(start, *[each.url for each in cutters])
        url = f"http://127.0.0.1:{proxy.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            chunks = [each async for each in await client.chat.completions.create(**asked)]
    choices = [each.choices[0] for each in chunks if each.choices]
    assert "".join(each.delta.content or "" for each in choices) == whole.text
    assert [each.finish_reason for each in choices if each.finish_reason] == whole.finish
    assert [each.usage.completion_tokens for each in chunks if each.usage] == [40]
    assert len({(each.id, each.created) for each in chunks}) == 1
    assert sum(proxy.driver.totals.resumptions.values()) == 2


async def test_curl_reads_a_resumed_stream_as_one(start: Start, engine: EmulatedEngine) -> None:
    asked = body("completions", True)
    whole = await ask(engine.url, "completions", asked)
    cuts = [Cut(3000, "rst"), Cut(4000, "fin")]
    async with contextlib.AsyncExitStack() as stack:
        cutters = [await stack.enter_async_context(Cutter(engine.port, cuts)) for _ in range(3)]
        proxy = await proxied(start, *[each.url for each in cutters])
        command = [
            "curl", "-sSN", "--fail", f"http://127.0.0.1:{proxy.port}/v1/completions", "-H",
            "content-type: application/json", "-d", json.dumps(asked),
        ]  # fmt: skip
        curl = await asyncio.to_thread(subprocess.run, command, capture_output=True)
    assert (curl.returncode, curl.stderr) == (0, b"")
    # vLLM puts the fingerprint on the event with usage, which hetlb asks for.
    varies = {"id", "created", "system_fingerprint"}
    got, expected = [
        [{key: event[key] for key in event.keys() - varies} for event in each.events]
        for each in (Answer(200, {}, curl.stdout, True), whole)
    ]
    assert got == expected
    assert sum(proxy.driver.totals.resumptions.values()) == 2


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("after", [0, 3000])
async def test_after_a_notice_what_cannot_end_goes_on_elsewhere(
    start: Start, engine: EmulatedEngine, kind: str, after: int
) -> None:
    asked = body(kind, True)
    whole = await ask(engine.url, kind, asked)
    cuts = [Cut(after, "hang")]
    async with Cutter(engine.port, cuts) as one, Cutter(engine.port, cuts) as two:
        proxy = await proxied(start, one.url, two.url)
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", kind, asked))
        await turns_until(lambda: one.cut + two.cut == 1)
        [exchange] = proxy.driver.exchanges.values()
        await turns_until(lambda: exchange.phase is (Phase.STREAMING if after else Phase.SENT))
        left = exchange.record.lease
        proxy.scheduling.change(AdminStateSet(left.instance, AdminState.DRAIN, 0.0))
        same(await asking, whole)
    assert dict(proxy.driver.totals.resumptions) == {("m", "notice"): 1}
    assert (left.outcome, exchange.record.lease.instance != left.instance) == (Outcome.CLIENT_GONE, True)


async def test_what_ends_in_time_stays_after_a_notice(start: Start, engine: EmulatedEngine) -> None:
    asked = body("chat", True)
    async with Cutter(engine.port, []) as one, Cutter(engine.port, []) as two:
        proxy = await proxied(start, one.url, two.url)
        for name in ("i0", "i1"):
            proxy.scheduling.change(AdminStateSet(name, AdminState.READY, 3600.0))
        got = await ask(f"http://127.0.0.1:{proxy.port}", "chat", asked)
    assert (got.done, proxy.driver.totals.resumptions) == (True, {})


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_plain_answer_that_is_cut_is_made_again(
    start: Start, engine: EmulatedEngine, kind: str
) -> None:
    asked = body(kind, False)
    whole = await ask(engine.url, kind, asked)
    for after in (1, 100, 300, 400):
        got, _, proxy = await resumed(start, engine, kind, asked, [Cut(after, "fin")])
        assert (got.status, got.text, got.finish, got.usage) == (200, whole.text, whole.finish, whole.usage)
        assert got.headers["x-hetlb-resumed"] == "1"
        assert proxy.ended == [("ok", "answer", 200)]


@pytest.mark.parametrize("tokens", [3, 40])
async def test_an_answer_is_resumed_as_long_as_it_gets_on(
    start: Start, engine: EmulatedEngine, tokens: int
) -> None:
    asked = body("completions", True, max_tokens=400)
    whole = await ask(engine.url, "completions", asked)
    cuts = [Cut(tokens, "rst", True) for _ in range(9)]
    async with contextlib.AsyncExitStack() as stack:
        cutters = [await stack.enter_async_context(Cutter(engine.port, cuts)) for _ in range(12)]
        proxy = await proxied(start, *[each.url for each in cutters])
        got = await ask(f"http://127.0.0.1:{proxy.port}", "completions", asked)
    if tokens == 40:
        same(got, whole)
        assert sum(proxy.driver.totals.resumptions.values()) == 9
        return
    assert (got.failed, got.done) == (True, False)
    assert sum(proxy.driver.totals.resumptions.values()) == MAX_FRUITLESS_LEASES
    [record] = proxy.exchanges
    assert record.output_tokens >= len(got.said) - 1
