"""Several engines behind one port: which one gets a sequence, and what `/metrics` says of each."""

from __future__ import annotations

import asyncio
import re

from emulator.conftest import Start, idle, make_profile
from emulator.wire import Client
from helpers import HANG_S

from hetlb.balancer.engines.engine_metrics import parse
from hetlb.tools.emulator import EmulatedEngine

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [1] * 16, "max_tokens": 400, "stream": True}


async def page(url: str) -> str:
    async with await Client.connect(url) as client:
        return (await client.ask("GET", "/metrics")).body.decode()


async def test_sequences_are_spread_and_each_engine_has_its_series(start: Start) -> None:
    """Ten sequences on three engines of two places: six run, four wait, every family has three series."""
    engine = await start(make_profile(max_num_seqs=2), time_scale=1.0, data_parallel_size=3)
    async with await Client.connect(engine.url) as client:
        client.send("POST", COMPLETIONS, {**LONG, "max_tokens": 4000, "n": 10})
        async with asyncio.timeout(HANG_S):
            while parse(text := await page(engine.url)).running != 6:
                pass
    sample = parse(text)
    assert (sample.running, sample.waiting, sample.capacity.engines) == (6, 4, 3)
    assert (sample.capacity.kv_cache_tokens, sample.capacity.kv_tokens_per_request) == (3 * 8192, 8192)
    per_engine = re.findall(r'^vllm:num_requests_running\{engine="(\d)".*\} (.*)$', text, re.MULTILINE)
    assert per_engine == [("0", "2.0"), ("1", "2.0"), ("2", "2.0")]
    families = set(re.findall(r"^(vllm:\w+)\{", text, re.MULTILINE))
    for name in families:
        assert set(re.findall(rf'^{name}\{{.*engine="(\d)"', text, re.MULTILINE)) == {"0", "1", "2"}, name
    # The client has left: nothing runs, nothing is held, on any of them.
    await idle(engine)
    assert all(model.running == model.kv.pool.used_blocks == 0 for model in engine.models)
    assert engine.finished == {"stop": 0, "length": 0, "abort": 10}


async def test_every_answer_comes_whole(start: Start) -> None:
    engine = await start(data_parallel_size=4)

    async def one(tokens: int) -> None:
        async with await Client.connect(engine.url) as client:
            client.send("POST", COMPLETIONS, {**LONG, "max_tokens": tokens, "n": 2})
            *events, done = (await client.receive()).events
            assert done == "[DONE]"
            assert len(events) == 2 * tokens

    await asyncio.gather(*(one(5 + number) for number in range(40)))
    assert engine.finished == {"stop": 0, "length": 80, "abort": 0}
    tokens = [model.generated_tokens for model in engine.models]
    assert sum(tokens) == sum(2 * (5 + number) for number in range(40))
    assert min(tokens) > 0


async def test_an_engine_without_data_parallelism_is_engine_0(engine: EmulatedEngine) -> None:
    text = await page(engine.url)
    assert set(re.findall(r'engine="(\d+)"', text)) == {"0"}
    assert parse(text).capacity.engines == 1
