"""Limits of keys, and models that stand in for others, with several processes: one count for all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
from helpers import HANG_S
from options.peers.workers.processes import PROMPT, Serve, Serving, at_rest, in_flight, worker_of
from proxy.services import Engine, document
from proxy.test_key_limits import keys


def fleet_with_keys(engine: Engine, folder: Path, *tables: dict[str, Any]) -> dict[str, Any]:
    keys(folder, *tables)
    return document(engine, proxy={"api_keys_file": "keys.yaml"})


async def ask(proxy: Serving, number: int = 0) -> Any:
    return await proxy.ask(key=f"key-{number}")


async def test_requests_and_tokens_are_counted_for_all_workers(serve: Serve, tmp_path: Path) -> None:
    # Few enough that a busy machine is through with them within the minute.
    limits = {"requests_per_minute": 20}, {"tokens_per_minute": 200}
    async with Engine() as engine:
        proxy = await serve(fleet_with_keys(engine, tmp_path, *({"limits": each} for each in limits), {}))
        replies = []
        for _ in range(21):  # the use of a key reaches the other worker a moment after the answer
            replies.append(await ask(proxy))
            await proxy.everywhere(at_rest)
        assert [each.status for each in replies] == [200] * 20 + [429]
        left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in replies]
        assert left == [*range(19, -1, -1), 0]
        # The kernel deals connections out at random: twenty at one of two workers never happens.
        assert len({worker_of(each) for each in replies[:20]}) == 2
        assert replies[-1].json["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 61
        assert replies[-1].headers["x-should-retry"] == "true"
        assert len(engine.asked) == 20
        # 100 tokens of prompt and 50 of answer are reserved, 5 are used: what is settled in between counts.
        for n in range(8):
            await proxy.everywhere(at_rest)
            reply = await ask(proxy, 1)
            assert reply.status == 200, n
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 200 - 7 * 5 - 150
        assert "x-ratelimit-limit-requests" not in (await ask(proxy, 2)).headers
        # A reload raises the limit and forgets nothing.
        keys(tmp_path, {"limits": {"requests_per_minute": 21}}, {}, {})
        assert (await proxy.admin("/v1/reload", "POST")).status == 200
        assert (await ask(proxy)).status == 200
        await proxy.everywhere(at_rest)
        assert (await ask(proxy)).status == 429
        # Requests beyond the limit are of the key's account.
        requests: dict[str, int] = {}
        async with asyncio.timeout(HANG_S):
            while requests != {"t0": 23, "t1": 8, "t2": 1}:  # of each worker as far as it has told
                usage = (await proxy.admin("/v1/usage")).json["usage"]
                requests = {each["tenant"]: each["requests"] for each in usage}


async def test_requests_in_flight_are_given_back_however_they_end(serve: Serve, tmp_path: Path) -> None:
    async with Engine() as engine:
        proxy = await serve(fleet_with_keys(engine, tmp_path, {"limits": {"in_flight": 2}}))
        for how in ("answered", "left", "killed"):
            engine.hold()
            before = len(engine.asked)
            asking = [asyncio.create_task(ask(proxy)) for _ in range(2)]
            await engine.asked_for(before + 2)
            await proxy.fleet_until(lambda fleet: in_flight(fleet) == 2)
            assert (await ask(proxy)).status == 429, how
            if how == "left":
                for each in asking:
                    each.cancel()
            elif how == "killed":
                for pid in proxy.workers:
                    os.kill(pid, signal.SIGKILL)
            else:
                engine.released.set()
            await asyncio.gather(*asking, return_exceptions=True)
            await proxy.fleet_until(lambda fleet: fleet["models"][0]["instances"][0]["in_flight"] == 0)
            engine.released.set()
            served: set[str] = set()
            async with asyncio.timeout(HANG_S):
                while len(served) < 2:  # their successors may not be there yet
                    with contextlib.suppress(OSError, aiohttp.ClientError):
                        reply = await ask(proxy)
                        assert reply.status == 200, how
                        served.add(worker_of(reply))
                        await proxy.everywhere(at_rest)


async def test_another_model_stands_in(serve: Serve) -> None:
    async with Engine() as large, Engine() as small:
        large.served, small.served = "large", "small"
        fleet = document(large)
        fleet["models"] = [
            {"name": "large", "aliases": ["gpt-4o"], "fallback": "small",
             "instances": [{"name": "l", "url": large.url}]},
            {"name": "small", "instances": [{"name": "s", "url": small.url}]},
        ]  # fmt: skip
        proxy = await serve(fleet)

        async def served_by(model: str) -> str:
            reply = await proxy.ask(**{**PROMPT, "model": model})
            assert reply.status == 200, reply.body
            instance: str = reply.headers["x-hetlb-instance"]
            return instance

        assert [await served_by(model) for model in ("large", "gpt-4o", "small")] == ["l", "l", "s"]
        for state, instance in (("drain", "s"), ("ready", "l")):
            await proxy.admin("/v1/fleet/instances/l/state", "PUT", state=state)
            assert {await served_by("gpt-4o") for _ in range(8)} == {instance}


async def test_a_key_removed_from_the_file_is_refused_by_every_process(serve: Serve, tmp_path: Path) -> None:
    async with Engine() as engine:
        fleet = fleet_with_keys(engine, tmp_path, {}, {})
        proxy = await serve({**fleet, "watch": True, "discovery": {"poll_s": 0.05}})
        assert (await ask(proxy, 1)).status == 200
        keys(tmp_path, {})
        await proxy.said("reloaded: ")
        # Each process looks at the file by itself; the kernel deals connections out at random.
        refused = 0
        async with asyncio.timeout(HANG_S):
            while refused < 20:
                refused = refused + 1 if (await ask(proxy, 1)).status == 401 else 0
        assert (await ask(proxy, 0)).status == 200
