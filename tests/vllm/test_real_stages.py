"""`hetlb stage` with torch against transformers: four workers with overlapping layers, clients that leave, a
worker that is killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stages as real

from hetlb.tools.paths.path_scheduler import dispatches
from hetlb.tools.plan.check import check_path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Answers = list[tuple[list[int], list[int]]]

FAMILIES = ("llama", "llama-linear", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def models() -> Path:
    return real.make_models()


@pytest.fixture(scope="module")
def rig(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Rig]:
    """Four stages, two of them slowed; random paths, so that all are used whatever the load."""
    where = tmp_path_factory.mktemp("stages")
    slowed = ("--layer-times", str(real.write_times(where / "times.csv", "fast")))
    flags = {"b": slowed, "d": slowed}
    with real.rig(models / "llama", where, scheduler="random", flags=flags, forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def answers(models: Path) -> Answers:
    """Prompts and the 40 greedy tokens that transformers gives each."""
    prompts = prompts_of(30, 2, 48)
    return list(zip(prompts, real.reference([models / "llama"], prompts, 40)[0], strict=True))


@pytest.fixture(scope="module")
def family_answers(models: Path) -> dict[str, list[list[int]]]:
    """Greedy tokens of six prompts by every family, from transformers."""
    folders = [models / family for family in FAMILIES]
    return dict(zip(FAMILIES, real.reference(folders, prompts_of(6, 1), 12), strict=True))


def prompts_of(count: int, seed: int, most: int = 80) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 2048) for _ in range(rng.randint(1, most))] for _ in range(count)]


def body(prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    asked = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **more}


async def plain(http: httpx.AsyncClient, url: str, prompt: list[int], count: int) -> list[int]:
    reply = await http.post(f"{url}/v1/completions", json=body(prompt, count))
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


async def streamed(
    http: httpx.AsyncClient, url: str, prompt: list[int], count: int, leave_after: int | None = None
) -> tuple[list[int], dict[str, Any] | None]:
    """Return the tokens of a stream and its error event; leave after `leave_after` tokens."""
    tokens: list[int] = []
    request = body(prompt, count, stream=True)
    async with http.stream("POST", f"{url}/v1/completions", json=request) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return tokens, event["error"]
            tokens += event["choices"][0]["token_ids"]
            if leave_after is not None and len(tokens) >= leave_after:
                return tokens, None
    return tokens, None


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_gives_the_tokens_of_transformers(
    models: Path, family_answers: dict[str, list[list[int]]], tmp_path: Path, family: str
) -> None:
    flags = dict.fromkeys("ac", ("--max-num-batched-tokens", "48", "--block-size", "8"))
    with real.rig(models / family, tmp_path, names="ac", flags=flags, forked=True) as running:
        async with httpx.AsyncClient(timeout=600.0) as http:
            asked = (plain(http, running.url, prompt, 12) for prompt in prompts_of(6, 1))
            assert await asyncio.gather(*asked) == family_answers[family]
        running.wait_idle()


async def test_two_hundred_requests_with_clients_that_leave(rig: real.Rig, answers: Answers) -> None:
    rng = random.Random(3)
    gate = asyncio.Semaphore(48)
    async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=64)) as http:

        async def one(index: int) -> int:
            async with gate:
                prompt, right = answers[index % len(answers)]
                if index % 10 < 3:
                    found, error = await streamed(http, rig.url, prompt, 16, leave_after=rng.randint(1, 12))
                elif index % 2:
                    found, error = await streamed(http, rig.url, prompt, 16)
                    assert len(found) == 16
                else:
                    found, error = await plain(http, rig.url, prompt, 16), None
                assert error is None
                assert found == right[: len(found)]
                return len(found)

        lengths = await asyncio.gather(*map(one, range(200)))
    assert sum(length == 16 for length in lengths) >= 140
    rig.wait_idle()
    with rig.events.open() as lines:
        paths = [(network, hops) for _, network, hops in dispatches(lines)]
    for network, hops in paths:
        check_path(network, hops)
    assert {hop.stage for _, hops in paths for hop in hops} == set(real.RANGES)


async def test_a_worker_killed_under_fifty_streams(rig: real.Rig, answers: Answers) -> None:
    asked = [answers[index % len(answers)] for index in range(50)]
    async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=64)) as http:
        tasks = [asyncio.create_task(streamed(http, rig.url, prompt, 40)) for prompt, _ in asked]
        while not any(count > 8 for count in rig.seen("in_flight").values()):
            await asyncio.sleep(0.05)
        rig.stages["a"].stop()
        results = await asyncio.gather(*tasks)
        for (found, error), (_, right) in zip(results, asked, strict=True):
            assert found == right[: len(found)]
            assert error is not None or len(found) == 40
        assert any(error is None for _, error in results)
        rig.wait_idle()
        await asyncio.to_thread(rig.stages["a"].restart)
        for _ in range(1200):
            if len(rig.seen("up")) == 4 and all(rig.seen("up").values()):
                break
            await asyncio.sleep(0.1)
        more = await asyncio.gather(*(plain(http, rig.url, prompt, 10) for prompt, _ in answers[:20]))
        assert more == [right[:10] for _, right in answers[:20]]
    rig.wait_idle()
    with rig.events.open() as lines:
        last = [hops[0].stage for _, _, hops in dispatches(lines)][-20:]
    assert "a" in last, "the worker that came back is not used"
