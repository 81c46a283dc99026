"""Turns of chats at servers of two data-parallel engines each, beside as many servers of one: emulated."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from helpers import turns_until
from proxy.services import document, serving
from proxy.test_proxying import Start, ask, post
from proxy.upstreams import Upstream

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.types import Capacity
from hetlb.balancer.engines.scrape import reads_rank
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml"
CHATS, TURNS = 12, 4
#: Runs of each fleet.
RUNS = 12


async def hit_share(folder: Path, servers: int, ranks: int) -> float:
    """Return the share of prompt tokens that the caches of the engines held."""
    profile = load_profile(PROFILE)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                EmulatedEngine(
                    profile,
                    served_model_names=["m"],
                    time_scale=0.05,
                    data_parallel_size=ranks,
                    prefix_caching=True,
                )
            )
            for _ in range(servers)
        ]
        fleet = document(*engines, policy={"name": "hetlb"})
        running = await stack.enter_async_context(serving(folder, fleet))
        for number in range(servers):
            await running.up(f"i{number}")
        seen = running.scheduler.instances
        await turns_until(lambda: all((each.ranks is None) == (ranks == 1) for each in seen))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def chat(number: int) -> None:
            text = f"{number} " + "word " * 400
            for _ in range(TURNS):
                body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
                url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
                async with session.post(url, json=body) as reply:
                    assert reply.status == 200
                    await reply.read()
                text += " more" * 100

        await asyncio.gather(*[chat(number) for number in range(CHATS)])
        models = [model for engine in engines for model in engine.models]
        return sum(each.kv.hit_tokens for each in models) / sum(
            runner.prompt_tokens for engine in engines for runner in engine.runners
        )


async def test_chats_find_their_prefixes_as_at_as_many_servers_of_one_engine(tmp_path: Path) -> None:
    """The mean of several runs counts: the timing of one run decides some turns, by 7 % of its share."""
    alone: list[float] = []
    ranked: list[float] = []
    for run in range(RUNS):
        for shares, servers, ranks in ((alone, 4, 1), (ranked, 2, 2)):
            folder = tmp_path / f"{servers}-{run}"
            folder.mkdir()
            shares.append(await hit_share(folder, servers, ranks))
    assert statistics.fmean(alone) > 0.4
    assert statistics.fmean(ranked) >= 0.85 * statistics.fmean(alone)


async def test_the_choice_goes_out_where_vllm_reads_it(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, forward_headers=("x-other",))
        proxy.scheduling.change(CapacityLearned("i0", Capacity(engines=2, rank_header=True)))
        assert (
            await ask(proxy, post(b'{"model":"m","prompt":"x"}', "x-data-parallel-rank: 7"))
        ).status == 200
        assert b"\r\nx-data-parallel-rank: 0\r\n" in engine.visits[0].head.lower()
        assert engine.visits[0].head.lower().count(b"x-data-parallel-rank") == 1
        await ask(proxy, post(b'{"model":"m","input":"x"}', path="/v1/embeddings"))
        assert b"x-data-parallel-rank" not in engine.visits[1].head.lower()
        await proxy.settled()


async def test_an_operator_may_let_clients_choose(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, forward_headers=("x-data-parallel-rank",))
        proxy.scheduling.change(CapacityLearned("i0", Capacity(engines=2, rank_header=True)))
        await ask(proxy, post(b'{"model":"m","prompt":"x"}', "x-data-parallel-rank: 1"))
        assert engine.visits[0].head.lower().count(b"x-data-parallel-rank: 1") == 1
        await ask(proxy, post(b'{"model":"m","prompt":"x"}'))
        assert engine.visits[1].head.lower().count(b"x-data-parallel-rank: ") == 1
        await proxy.settled()


@pytest.mark.parametrize(
    ("version", "reads"),
    [("0.32.0", True), ("0.12.1", True), ("0.11.2", False), ("0.6.3.post1", False), ("", False), ("x", False),
     ("1.0", True), ("9" * 5000, True), ("0.32.0rc1+cu128", True)],
)  # fmt: skip
def test_which_versions_read_the_choice(version: str, reads: bool) -> None:
    assert reads_rank(version) is reads


@pytest.mark.parametrize(("stated", "status"), [("0", 200), ("1", 200), ("2", 400), ("-1", 400), ("x", 400)])
async def test_the_emulator_reads_it_as_vllm_does(stated: str, status: int) -> None:
    profile = load_profile(PROFILE)
    async with EmulatedEngine(
        profile, served_model_names=["m"], time_scale=0.05, data_parallel_size=2
    ) as engine:
        body = {"model": "m", "prompt": "x", "max_tokens": 3}
        headers = {"X-data-parallel-rank": stated}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine.url}/v1/completions", json=body, headers=headers) as reply,
        ):
            assert reply.status == status
        if status == 200:
            assert engine.models[int(stated)].generated_tokens == 3
