"""The real pair for the tests and the bench: two unequal vLLM servers of one name, and hetlb in front.

Promises:
- `pair()` gives both servers, warmed up (first requests of every kind compile something); the models are
  made first where they are missing.
- `proxy()` starts `hetlb serve` in the session of the servers (engines.py says why) on free ports, over the
  profiles of tests/vllm/profiles, or over bare addresses; it is up when it sees both servers.
- waiting is polling for a state that can be read, with a deadline that says what it waited for.
- nothing of it outlives its block.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from engines import (
    REPO_ROOT,
    SERVED_MODEL_NAME,
    TINY_FAST,
    TINY_SLOW,
    VENV_PYTHON,
    Server,
    ServerFailed,
    vllm_servers,
)

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.engines.engine_metrics import parse
from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.generator import run_load
from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

HERE = Path(__file__).resolve().parent
MODELS = REPO_ROOT / ".cache" / "vllm-models"
FAST, SLOW = TINY_FAST.name, TINY_SLOW.name
#: What someone who knows that one is faster, but not by how much, would write.
HAND_SET_WEIGHTS = {FAST: 3, SLOW: 1}
#: Limits for what hangs: on a busy machine a server takes minutes to start.
READY_DEADLINE_S = 600.0
IDLE_DEADLINE_S = 120.0
_POLL_S = 0.05


def make_models() -> None:
    """Make the two models where they are not there yet."""
    if not all((MODELS / spec.model / "config.json").is_file() for spec in (TINY_FAST, TINY_SLOW)):
        if not VENV_PYTHON.is_file():
            raise ServerFailed("there is no .venv-vllm: run tests/vllm/install.sh first")
        subprocess.run([VENV_PYTHON, HERE / "make_models.py", MODELS], check=True, timeout=600)


@contextlib.contextmanager
def pair(log_dir: Path, *, forked: bool = False) -> Iterator[list[Server]]:
    """Both servers, the fast one first, warm."""
    make_models()
    specs = [TINY_FAST, TINY_SLOW]
    with vllm_servers(specs, MODELS, log_dir, deadline_s=READY_DEADLINE_S, forked=forked) as servers:
        asyncio.run(_warm_up(servers))
        yield servers


async def _warm_up(servers: Sequence[Server]) -> None:
    """Chat, sampling with `n`, and a batch as wide as it gets, prompts long and short, on both at once."""
    rows = [Row(None, 32 + 7 * (i % 32), 4 + i % 16) for i in range(64)]
    plan = make_plan(rows, None, math.inf, random.Random(0))
    results = await asyncio.gather(*(load(server.url, plan, "warm-up") for server in servers))
    async with aiohttp.ClientSession() as session:
        for server in servers:
            body = {
                "model": SERVED_MODEL_NAME,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 4,
                "n": 2,
                "temperature": 0.7,
            }
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as reply:
                await reply.read()
    for server, result in zip(servers, results, strict=True):
        if result.errors:
            raise ServerFailed(f"{server.name} does not serve: {result.examples}\n{server.log_tail()}")


async def load(url: str, plan: Sequence[PlannedRequest], seed: str, *, stream: bool = True) -> LoadResult:
    """Run the plan against a server with prompts drawn from `seed`: no two seeds share a cached prefix."""
    bodies = RequestBodies(SERVED_MODEL_NAME, plan, seed, stream=stream)
    async with asyncio.timeout(600.0):
        return await run_load(plan, bodies, url)


@dataclass(frozen=True)
class Proxy:
    """A running `hetlb serve`."""

    url: str
    admin: str
    event_log: Path

    async def admin_json(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the admin listener."""
        async with aiohttp.ClientSession() as session:
            async with session.request(method, self.admin + path, json=body) as reply:
                assert reply.status < 300, f"{method} {path}: {reply.status} {await reply.text()}"
                return await reply.json()

    async def fleet(self) -> Any:
        """`GET /v1/fleet`."""
        return await self.admin_json("GET", "/v1/fleet")

    async def instances(self) -> dict[str, Any]:
        """The instances of `/v1/fleet` by name."""
        fleet = await self.fleet()
        return {each["name"]: each for model in fleet["models"] for each in model["instances"]}

    @contextlib.asynccontextmanager
    async def policy(self, name: str) -> AsyncIterator[None]:
        """The policy for the length of the block."""
        before = (await self.fleet())["policy"]
        await self.admin_json("PUT", "/v1/policy", {"name": name})
        try:
            yield
        finally:
            await self.admin_json("PUT", "/v1/policy", {"name": before})

    async def idle(self, deadline_s: float = IDLE_DEADLINE_S) -> None:
        """Return once every figure that counts work is exactly 0 and every instance is up."""

        async def busy() -> list[str]:
            return busy_figures(await self.fleet())

        await until(busy, "an idle fleet", deadline_s)


def busy_figures(fleet: Any) -> list[str]:
    """The figures of `/v1/fleet` that are not what they are when nothing is in flight."""
    instances = [each for model in fleet["models"] for each in model["instances"]]
    return [
        *(
            f"{each['name']}.{key}={each[key]}"
            for each in instances
            for key in ("in_flight", "queued", "workload", "kv_reserved_tokens")
            if each[key] != 0
        ),
        *(f"queue.{key}={value}" for key, value in fleet["queue"].items() if value != 0),
        *(f"{each['name']} is {each['health']}" for each in instances if each["health"] != "up"),
    ]


async def until(
    missing: Callable[[], Awaitable[Any]], what: str, deadline_s: float = IDLE_DEADLINE_S
) -> None:
    """Poll until `missing` has nothing more to say (is falsy); fail with what it said last."""
    deadline = time.monotonic() + deadline_s
    while said := await missing():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {deadline_s:.0f} s: {said}")
        await asyncio.sleep(_POLL_S)


async def engine_sample(server: Server) -> EngineSample:
    """What the engine itself says on its metrics page."""
    status, page = await asyncio.to_thread(server.get, "/metrics")
    assert status == 200
    return parse(page.decode())


def fleet_file(servers: Sequence[Server]) -> dict[str, Any]:
    """The pair as a fleet with profiles, on free ports."""
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [
            {
                "name": SERVED_MODEL_NAME,
                "instances": [
                    {
                        "name": server.name,
                        "url": server.url,
                        "profile": str(HERE / "profiles" / f"{server.name}.yaml"),
                        "weight": HAND_SET_WEIGHTS[server.name],
                    }
                    for server in servers
                ],
            }
        ],
    }


@contextlib.contextmanager
def proxy(servers: Sequence[Server], folder: Path, *, profiles: bool = True) -> Iterator[Proxy]:
    """`hetlb serve` in front of the servers."""
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "events.jsonl"
    if profiles:
        config = folder / "fleet.yaml"
        config.write_text(yaml.safe_dump(fleet_file(servers), sort_keys=False))
        arguments = ["--config", str(config)]
    else:
        arguments = ["--port", "0", "--admin-port", "0"]
        for server in servers:
            arguments += ["--instance", server.url]
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", *arguments, "--event-log", str(events))
        asyncio.run(process.ready())
        url, admin = process.urls
        running = Proxy(url, admin, events)
        asyncio.run(running.idle())
        yield running
