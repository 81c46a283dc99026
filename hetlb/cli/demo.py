"""`hetlb demo`: the whole loop on this machine without a GPU, in a minute.

Promise: real processes and sockets (two emulated engines, the proxy, a load generator), real waiting, no
figure that was not measured in this run; nothing is left running, whatever happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars

from hetlb.config import load_profile
from hetlb.core.arrivals import PlannedRequest, make_plan
from hetlb.errors import HetlbError
from hetlb.loadtest.generator import LoadResult, Progress, run_load
from hetlb.loadtest.processes import Helpers, helper_processes
from hetlb.loadtest.prompts import CompletionBodies
from hetlb.loadtest.report import runs_table
from hetlb.traces import read_trace

MODEL = "demo-model"
ENGINES = ("fast", "slow")
POLICIES = ("rr", "hetlb")
#: `max_tokens` of every request: far above every answer, so that no length can be read from it.
ANSWER_CAP = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb demo`."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=800, metavar="N", help="requests (default 800)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    # SIGTERM ends like Ctrl-C: through every `finally`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return uvloop.run(_demo(args))


async def _demo(args: argparse.Namespace) -> int:
    started = time.monotonic()
    say = Console(stderr=True, highlight=False)
    data = resources.files("hetlb.demo")
    with (
        resources.as_file(data) as folder,
        tempfile.TemporaryDirectory(prefix="hetlb-demo-") as scratch,
        helper_processes() as helpers,
    ):
        say.print(f"Starting {len(ENGINES)} emulated vLLM servers of unequal speed, without a GPU …")
        engines = {
            name: helpers.start(
                "engine", "--profile", str(folder / f"{name}.yaml"), "--port", "0",
                "--served-model-name", MODEL,
            )
            for name in ENGINES
        }  # fmt: skip
        for engine in engines.values():
            await engine.ready()
        urls = {name: engine.urls[0] for name, engine in engines.items()}
        for name, url in urls.items():
            engine_info = load_profile(folder / f"{name}.yaml").engine
            say.print(
                f"  {name}: {url}, KV cache {engine_info.kv_cache_tokens} tokens, "
                f"at most {engine_info.max_num_seqs} requests at once"
            )
        rows = read_trace(folder / "trace.csv")
        plan = make_plan(rows, args.num_prompts, float("inf"), random.Random(args.seed))
        say.print(
            f"The work: {len(plan)} requests of a real trace (Azure 2023, scaled down), all at once.\n"
            "Measuring what each server reaches alone on all of it (both at the same time) …"
        )
        alone = await _standalone(plan, urls, args.seed, say)
        total_tok_s = sum(each["total_token_throughput"] for each in alone)
        proxy_url, admin_url = await _start_proxy(helpers, Path(scratch), folder, urls)
        say.print(
            f"Starting hetlb in front of both: {proxy_url} (admin {admin_url}).\n"
            "  Its latency profiles are those the servers are emulated from; real servers are profiled."
        )
        runs = []
        for policy in POLICIES:
            await _set_policy(admin_url, policy)
            say.print(f"The same work through hetlb, policy {policy} …")
            result = (await _load(plan, {policy: proxy_url}, args.seed, say))[policy]
            await _expect_empty(admin_url)
            summary = _summary(result, policy, args.seed)
            runs.append(summary)
            for reason in summary["client"]["reasons"]:
                say.print(f"  note: {reason}")
    elapsed = time.monotonic() - started
    if args.json:
        document = {
            "runs": runs,
            "standalone": alone,
            "standalone_sum": {"total_token_throughput": total_tok_s},
            "elapsed_s": elapsed,
        }
        print(json.dumps(document))
    else:
        _print(runs, alone, total_tok_s, elapsed)
    return 0 if all(each["failed"] == 0 for each in runs) else 1


async def _standalone(
    plan: list[PlannedRequest], urls: dict[str, str], seed: int, say: Console
) -> list[dict[str, Any]]:
    results = await _load(plan, urls, seed, say)
    for name, result in results.items():
        if result.errors:
            raise HetlbError(f"the emulated server {name} failed: {result.errors} {result.examples}")
    return [{"name": name, **_summary(result, "single", seed)} for name, result in results.items()]


def _summary(result: LoadResult, policy: str, seed: int) -> dict[str, Any]:
    return {"policy": policy, "seed": seed, **result.summary(), "request_rate": "inf"}


async def _load(
    plan: list[PlannedRequest], targets: dict[str, str], seed: int, say: Console
) -> dict[str, LoadResult]:
    """The plan against every target at the same time, with a progress bar where somebody looks."""
    columns = (
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    tasks: dict[str, asyncio.Task[LoadResult]] = {}
    with ProgressBars(*columns, console=say, transient=True, disable=not say.is_terminal) as bars:
        counts = {name: (bars.add_task(name, total=len(plan)), Progress()) for name in targets}
        async with asyncio.TaskGroup() as group:
            for name, url in targets.items():
                bodies = CompletionBodies(MODEL, plan, random.Random(seed), eos_max_tokens=ANSWER_CAP)
                tasks[name] = group.create_task(run_load(plan, bodies, url, progress=counts[name][1]))
            while not all(task.done() for task in tasks.values()):
                for bar, count in counts.values():
                    bars.update(bar, completed=count.ended)
                await asyncio.wait(tasks.values(), timeout=0.2)
    return {name: task.result() for name, task in tasks.items()}


async def _start_proxy(
    helpers: Helpers, scratch: Path, profiles: Path, urls: dict[str, str]
) -> tuple[str, str]:
    fleet = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "proxy": {"request_log": False},
        "models": [
            {
                "name": MODEL,
                "instances": [
                    {"name": name, "url": url, "profile": str(profiles / f"{name}.yaml")}
                    for name, url in urls.items()
                ],
            }
        ],
    }
    path = scratch / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    proxy = helpers.start("serve", "--config", str(path))
    await proxy.ready()
    return proxy.urls[0], proxy.urls[1]


async def _set_policy(admin_url: str, policy: str) -> None:
    async with (
        aiohttp.ClientSession(admin_url) as session,
        session.put("/v1/policy", json={"name": policy}) as reply,
    ):
        if reply.status != 200:
            raise HetlbError(f"the proxy did not take the policy {policy}: {await reply.text()}")


async def _expect_empty(admin_url: str) -> None:
    """Nothing is in flight: every figure of the fleet must be zero again."""
    async with aiohttp.ClientSession(admin_url) as session, session.get("/v1/fleet") as reply:
        fleet = await reply.json()
    figures = ("in_flight", "queued", "workload", "kv_reserved_tokens")
    for pool in fleet["models"]:
        for instance in pool["instances"]:
            left = {figure: instance[figure] for figure in figures if instance[figure] != 0}
            if left:
                raise HetlbError(f"{instance['name']} is not empty after the run: {left}")


def _print(
    runs: list[dict[str, Any]], alone: list[dict[str, Any]], total_tok_s: float, elapsed: float
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print("\nWhat each server reaches alone:")
    for each in alone:
        console.print(
            f"  {each['name']}: {each['total_token_throughput']:.0f} tokens/s, "
            f"done after {each['duration']:.1f} s"
        )
    console.print(f"  sum: {total_tok_s:.0f} tokens/s\n")
    console.print(runs_table(runs, reference_tok_s=total_tok_s))
    by_policy = {each["policy"]: each["total_token_throughput"] for each in runs}
    gain = by_policy["hetlb"] / by_policy["rr"]
    console.print(
        f"\nhetlb: {by_policy['hetlb'] / total_tok_s:.2f} of what both reach alone together, "
        f"{gain:.2f} times round robin. ({elapsed:.0f} s)\n"
        "Next: `hetlb serve --instance http://HOST:8000 --instance http://HOST:8001` in front of your own "
        "servers,\nor `hetlb explain --config configs/two-servers.yaml` for one decision in numbers."
    )
    sys.stdout.flush()
