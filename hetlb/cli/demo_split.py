"""`hetlb demo --split`: prompts read at one emulated engine and answered by another, beside the same unsplit.

Every figure is measured in this run, over real sockets between real processes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from hetlb.cli.signals import cancel_on_signals
from hetlb.loadtest.bodies import CompletionBodies
from hetlb.loadtest.fleet_admin import FleetAdmin
from hetlb.loadtest.generator import allow_open_files, run_load
from hetlb.loadtest.processes import Helpers
from hetlb.workload.arrivals import make_plan
from hetlb.workload.traces import Row

MODEL = "demo-model"
ENGINES = ("reads", "decodes")
#: Requests of each run, and how many come per second.
NUM_PROMPTS = 160
RATE = 7.0
#: Bytes per second between the engines, a 100 Gbit/s network at half of what it can.
BANDWIDTH = 6e9


async def run_split_demo(data: Path, helpers: Helpers, num_prompts: int | None, seed: int) -> dict[str, Any]:
    """Run the same load with and without splits. The document that `--json` prints."""
    cancel_on_signals()
    rng = random.Random(seed)
    rows = [
        Row(
            None,
            min(8000, round(rng.lognormvariate(6.6, 0.8))),
            min(250, round(rng.lognormvariate(3.9, 0.6))),
        )
        for _ in range(num_prompts or NUM_PROMPTS)
    ]
    plan = make_plan(rows, None, RATE, rng)
    allow_open_files(3 * len(plan))
    _say("starting two emulated engines: one prefills fast, one decodes fast")
    profiles = {name: data / f"{name}.yaml" for name in ENGINES}
    urls = await helpers.engines(profiles, MODEL, "--kv-transfer", "nixl", "--kv-bandwidth", str(BANDWIDTH))
    instances = [{"name": name, "url": urls[name], "profile": str(profiles[name])} for name in ENGINES]
    transfer = {"kv_transfer": {"connector": "nixl", "bandwidth_bytes_per_s": BANDWIDTH}}
    runs = []
    for label, more in (("whole", {}), ("split", transfer)):
        url, admin = await helpers.proxy(
            {"name": MODEL, "instances": instances, **more}, name=f"the proxy ({label})"
        )
        _say(f"{len(plan)} requests, {RATE:g} a second: {_MEANING[label]}")
        async with aiohttp.ClientSession() as session:
            await FleetAdmin(session, admin).idle()
            bodies = CompletionBodies(MODEL, plan, random.Random(f"{seed}/{label}"))
            result = await run_load(plan, bodies, url)
            helpers.check()
            async with session.get(admin + "/metrics") as reply:
                handed = _handed_over(await reply.text())
        runs.append({"run": label, "handed_over": handed, **result.summary(instances=ENGINES)})
    return {"runs": runs}


_MEANING = {
    "whole": "every one answered by one engine",
    "split": "prompt and answer at two engines where that is worth it",
}


def _handed_over(page: str) -> int:
    name = 'hetlb_kv_transfers_total{result="done"} '
    return sum(int(line[len(name) :]) for line in page.splitlines() if line.startswith(name))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_split_demo(result: Mapping[str, Any]) -> None:
    """The result as a table and a sentence."""
    console = Console(highlight=False, markup=False)
    table = Table(title=f"two engines, {RATE:g} requests a second")
    for column in ("", "split", "mean TTFT", "p90 TTFT", "mean TPOT", "p90 end to end"):
        table.add_column(column, justify="left" if not column else "right")
    for run in result["runs"]:
        table.add_row(
            _MEANING[run["run"]],
            f"{run['handed_over']} of {run['completed']}",
            *(
                f"{run[key]:,.0f} ms"
                for key in ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "p90_e2el_ms")
            ),
        )
    console.print(table)
    console.print(
        "The engines are emulated, and so is the time that KV blocks take between them. Requests, "
        "kv_transfer_params, leases and the choice per request are those of hetlb in front of vLLM: "
        "docs/disaggregation.md."
    )
