"""A healthy engine drained and set ready again under load: how soon it answers as many requests as before.

Shows: answers per second of the drained engine before, during and after the drain. The load is open-loop and
more than the others carry alone, so that requests wait; the engines are the demo's, the fast one is
drained.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from importlib import resources

import aiohttp
from common import MODEL, Promise, report

from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.generator import run_load
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.workload.arrivals import make_plan
from hetlb.tools.workload.trace_formats import read_trace

ENGINES = {"fast": "fast.yaml", "slow-0": "slow.yaml", "slow-1": "slow.yaml"}
#: Seconds after the start: the share is looked at from, drained, ready again, the end.
FROM_S, DRAIN_S, READY_S, END_S = 5.0, 15.0, 21.0, 31.0
BACK_WITHIN_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=85.0, help="requests/s (default 85)")


async def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    with (
        resources.as_file(resources.files("hetlb.tools.demo")) as data,
        helper_processes() as helpers,
    ):
        urls = await helpers.engines({name: data / file for name, file in ENGINES.items()}, MODEL)
        instances = [{"name": name, "url": url} for name, url in urls.items()]
        url, admin = await helpers.proxy({"name": MODEL, "instances": instances})
        rng = random.Random(0)
        plan = make_plan(read_trace(data / "trace.csv"), round(args.rate * END_S), args.rate, rng)
        switching = asyncio.create_task(switch(admin))
        result = await run_load(plan, RequestBodies(MODEL, plan, "0", eos_max_tokens=256), url)
        await switching
    records = [each for each in result.records if each.ok]

    def rate(begin_s: float, end_s: float) -> float:
        ended = [each.end_s or 0.0 for each in records if each.instance == "fast"]
        return sum(begin_s <= each < end_s for each in ended) / (end_s - begin_s)

    before, drained = rate(FROM_S, DRAIN_S), rate(DRAIN_S + 3.0, READY_S)
    after = {str(second): rate(READY_S + second, READY_S + second + 1.0) for second in range(8)}
    back = rate(READY_S + BACK_WITHIN_S, READY_S + BACK_WITHIN_S + 3.0)
    failed = len(result.records) - len(records)
    what = f"the same, {BACK_WITHIN_S:g} s after it is ready"
    promises = [
        Promise("answers/s of a drained engine", "0", f"{drained:.3g}", drained == 0.0),
        Promise(what, f"at least 0.9 of {before:.3g}", f"{back:.3g}", back >= 0.9 * before),
        Promise("failed requests", "0", str(failed), failed == 0),
    ]
    return report("drain", promises, {"rate": args.rate, "before": before, "after_s": after}, args.recorded)


async def switch(admin: str) -> None:
    """Drain the fast engine, and set it ready again, each at its time."""
    begun = asyncio.get_running_loop().time()
    async with aiohttp.ClientSession() as session:
        for at, state in ((DRAIN_S, "drain"), (READY_S, "ready")):
            await asyncio.sleep(begun + at - asyncio.get_running_loop().time())
            url = f"{admin}/v1/fleet/instances/fast/state"
            async with session.put(url, json={"state": state}) as reply:
                reply.raise_for_status()
