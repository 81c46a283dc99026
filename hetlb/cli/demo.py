"""`hetlb demo`: the whole loop on this machine without a GPU, from unequal engines to a comparison."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp

from hetlb.cli.flags import COUNT, add_json, declare, print_document
from hetlb.cli.signals import run_until_signal
from hetlb.errors import HetlbError
from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.fleet_admin import FleetAdmin
from hetlb.tools.loadtest.generator import allow_open_files, run_load
from hetlb.tools.loadtest.processes import Helpers, helper_processes
from hetlb.tools.loadtest.result_tables import percent, runs_table
from hetlb.tools.tables import Console, LoadProgress, Screen
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.trace_formats import read_trace

MODEL = "demo-model"
ENGINES = ("fast", "slow")
POLICIES = ("rr", "hetlb")
#: One `max_tokens` for all, far above every answer: its length is the engine's secret, as in life.
MAX_TOKENS = 256

_PLAIN_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--num-prompts", "requests of each run (default: all 800 of the trace)", "N", COUNT)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    # The processes outlast the event loop, so that nothing the loop does can keep them from being killed.
    with resources.as_file(resources.files("hetlb.tools.demo")) as data, helper_processes() as helpers:
        result = run_until_signal(_Demo(data, helpers, args.num_prompts).run())
    result["elapsed_s"] = time.monotonic() - started
    print_document(args, result, lambda: _print(result))
    failed = sum(each["failed"] for each in (*result["standalone"]["instances"], *result["runs"]))
    if failed:
        raise HetlbError(f"{failed} requests failed, so the figures mean little")
    return 0


class _Demo:
    """One demo: the engines, each alone, the proxy, and the same load under each policy."""

    def __init__(self, data: Path, helpers: Helpers, num_prompts: int | None) -> None:
        self._profiles = {name: data / f"{name}.yaml" for name in ENGINES}
        self._plan = make_plan(read_trace(data / "trace.csv"), num_prompts, math.inf, random.Random(0))
        self._helpers = helpers
        self._screen = Screen()
        self._began_s = time.monotonic()

    def _say(self, text: str) -> None:
        """Print a line on stderr, with the time since the start."""
        self._screen.warn(f"[{time.monotonic() - self._began_s:4.1f} s] {text}")

    async def run(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        # Inherited by the processes: the proxy holds two connections for each request.
        allow_open_files(3 * len(self._plan))
        say = self._say

        say(f"starting {len(ENGINES)} emulated engines of unequal speed: {', '.join(ENGINES)}")
        urls = await self._helpers.engines(self._profiles, MODEL)
        say(f"each engine alone, both at the same time: all {len(self._plan)} requests at once")
        alone = await asyncio.gather(
            *(self._load(f"{name} alone", url, [name], direct=True) for name, url in urls.items())
        )
        say("starting the proxy with the addresses alone: it learns the speeds")
        instances = [{"name": name, "url": url} for name, url in urls.items()]
        url, admin = await self._helpers.proxy({"name": MODEL, "instances": instances})
        runs = []
        async with aiohttp.ClientSession() as session:
            fleet = FleetAdmin(session, admin)
            await fleet.idle()
            for policy in POLICIES:
                say(f"the same load through the proxy, policy {policy}")
                await fleet.set_policy(policy)
                runs.append(await self._load(policy, url, list(urls)))
                await fleet.idle()
        return {
            "runs": runs,
            "standalone": {
                "instances": alone,
                "output_throughput": sum(each["output_throughput"] for each in alone),
                "total_token_throughput": sum(each["total_token_throughput"] for each in alone),
            },
        }

    async def _load(
        self, label: str, url: str, names: Sequence[str], *, direct: bool = False
    ) -> dict[str, Any]:
        """Return one run of the plan, as `bench` reports it. `direct`: straight to the one engine named."""
        plan: list[PlannedRequest] = self._plan
        progress = LoadProgress()
        # Prompts of its own for every run: no engine may know them from the run before.
        bodies = RequestBodies(MODEL, plan, f"0/{label}", eos_max_tokens=MAX_TOKENS)
        async with self._screen.bar(label, progress, len(plan)):
            result = await run_load(plan, bodies, url, progress=progress)
        self._helpers.check()
        if direct:
            for record in result.records:
                record.instance = names[0]
        figures = result.summary(instances=names)
        summary = {"policy": label, "seed": 0, **figures, "request_rate": "inf"}
        self._say(
            f"  {label}: {summary['total_token_throughput']:,.0f} tokens/s, {summary['duration']:.1f} s"
        )
        for reason in summary["client"]["reasons"]:
            self._say(f"  {label}: careful: {reason}")
        return summary


# --- output ---------------------------------------------------------------------------------------------


def _print(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    runs, standalone = result["runs"], result["standalone"]
    total = standalone["total_token_throughput"]
    requests = runs[0]["completed"] + runs[0]["failed"]
    console.print()
    console.print(
        runs_table(
            runs,
            reference_tok_s=total,
            alone=standalone["instances"],
            title=f"{requests} requests, all at once",
        )
    )
    console.print()
    console.print(_meaning(runs, total))
    console.print()
    console.print(
        "The engines are emulated. Everything else is as in production: processes, sockets, streamed tokens, "
        "and speeds that the proxy learnt while it served."
    )
    console.print()
    console.print("Your own servers:  hetlb serve --instance URL --instance URL")
    console.print("A fleet on paper:  hetlb simulate --config FLEET.yaml --trace T.csv")
    console.print("One decision:      hetlb explain --config FLEET.yaml")
    console.print(f"\nTook {result['elapsed_s']:.0f} s.")


def _meaning(runs: Sequence[Mapping[str, Any]], total_tok_s: float) -> str:
    """Return the result in words."""
    rr, hetlb = (next(run for run in runs if run["policy"] == policy) for policy in ("rr", "hetlb"))
    speeds = rr["total_token_throughput"], hetlb["total_token_throughput"]
    if not all(speeds) or not total_tok_s:
        return "Nothing was completed."
    text = (
        f"hetlb delivers {percent(speeds[1] / total_tok_s)} of what the engines deliver alone, taken "
        f"together, and {speeds[1] / speeds[0]:.2f} times as much as round robin. "
    )
    (first_s, idle), (last_s, busy) = (
        pick((each["last_finish_s"], each["name"]) for each in rr["instances"]) for pick in (min, max)
    )
    ends = " and ".join(f"{each['last_finish_s']:.1f} s" for each in hetlb["instances"])
    return text + (
        f"Round robin gives both the same number of requests: {idle} is done after {first_s:.1f} s and idle "
        f"until {busy} is, after {last_s:.1f} s. Under hetlb they are done after {ends}."
    )
