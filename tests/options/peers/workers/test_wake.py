"""Sleep and wake with several workers: one decides, the others know."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers import turns_until
from options.peers.workers.processes import Serve, Serving
from proxy.services import document

from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[4] / "hetlb" / "tools" / "demo" / "fast.yaml"


@asynccontextmanager
async def engines(names: str, wake_s: float) -> AsyncIterator[list[EmulatedEngine]]:
    made = [
        EmulatedEngine(load_profile(PROFILE), served_model_names=[name], time_scale=0.1, wake_s=wake_s * 10)
        for name in names
    ]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def fleet_of(made: list[EmulatedEngine], **wake: Any) -> dict[str, Any]:
    fleet = document()
    fleet["scrape"]["interval_s"] = 0.2
    fleet["models"] = [
        {"name": name, "instances": [{"name": f"i-{name}", "url": each.url, "wake": wake}]}
        for name, each in zip("ab", made, strict=False)
    ]
    return fleet


async def asked(serving: Serving, model: str) -> int:
    """Ask on a connection of its own; 0 if a process died with it."""
    body = {"model": model, "prompt": "hello", "max_tokens": 20}
    try:
        async with serving.session.post(f"{serving.url}/v1/completions", json=body) as reply:
            await reply.read()
            return reply.status
    except aiohttp.ClientError:
        return 0


def deciding(serving: Serving) -> int:
    """Return the worker that has the right to decide, 0 for none."""
    for pid in serving.workers:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = os.readlink(each)
            except FileNotFoundError:
                continue
            if found.endswith("wake.lock"):
                return pid
    return 0


def asleep(sleep: Any) -> bool:
    return bool(sleep.asleep)


async def test_two_models_that_share_a_gpu_take_turns_over_all_workers(serve: Serve) -> None:
    async with engines("ab", wake_s=0.1) as made:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{made[1].url}/sleep") as reply:
                assert reply.status == 200
        serving = await serve(fleet_of(made, group="gpu", stay_s=0.5), workers=3)
        most, ends = 0, asyncio.get_running_loop().time() + 5.0
        statuses: list[int] = []

        async def client(model: str) -> None:
            while asyncio.get_running_loop().time() < ends:
                statuses.append(await asked(serving, model))

        async def watch() -> None:
            nonlocal most
            while asyncio.get_running_loop().time() < ends:
                most = max(most, sum(not asleep(each.sleep) for each in made))
                await asyncio.sleep(0.02)

        await asyncio.gather(*[client(model) for model in "aabb"], watch())
        assert set(statuses) == {200}
        assert most == 1
        assert sum(each.sleep.wakes for each in made if each.sleep is not None) >= 2


async def test_the_one_that_decides_dies_while_a_server_wakes_up(serve: Serve) -> None:
    """Another worker goes on: what waits at it is answered."""
    async with engines("a", wake_s=1.0) as made:
        serving = await serve(fleet_of(made, sleep_after_s=1.0), workers=2)
        sleep = made[0].sleep
        await turns_until(lambda: asleep(sleep) and sleep is not None and sleep.sleeps == 1)
        await serving.everywhere(lambda fleet: fleet["models"][0]["instances"][0]["sleep"] == "asleep")
        requests = [asyncio.create_task(asked(serving, "a")) for _ in range(12)]
        await serving.everywhere(lambda fleet: fleet["models"][0]["instances"][0]["sleep"] == "waking up")
        decides = deciding(serving)
        assert decides
        os.kill(decides, signal.SIGKILL)
        statuses = await asyncio.gather(*requests)
        assert set(statuses) <= {0, 200}
        assert 200 in statuses
        assert await asked(serving, "a") == 200
        await turns_until(lambda: deciding(serving) not in (0, decides))


@pytest.mark.parametrize("workers", [2])
async def test_requests_of_every_worker_wake_an_instance(serve: Serve, workers: int) -> None:
    async with engines("a", wake_s=0.1) as made:
        serving = await serve(fleet_of(made, sleep_after_s=0.5), workers=workers)
        sleep = made[0].sleep
        assert sleep is not None
        for turn in range(1, 5):
            await turns_until(lambda turn=turn: sleep.sleeps == turn)  # type: ignore[misc]
            assert await asked(serving, "a") == 200
            assert sleep.wakes == turn
