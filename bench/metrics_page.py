"""What a scrape of the proxy's own metrics costs: time of a page of many instances, and how long it blocks.

Shows: for fleets of 20 to 1,000 instances, the size of the page, how long `GET /metrics` waits for it, the
longest time that the event loop did not get round meanwhile, and the most that it worked between two turns
(CPU time: what other processes take is not in it); quantiles over many scrapes.
The page is the proxy's (`MetricsPage`) over a scheduler with every instance up, reported and used,
some 20 outcomes and models counted; a task that asks for nothing but its turn sees how long it waits for it.
Exit status 1 if the median of 200 instances takes more than 50 ms or keeps the loop for more than 5 ms.

`.venv/bin/python bench/metrics_page.py [--scrapes N]`, seconds. Other work on the same core shows in the
largest figures, so the machine should be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any, cast

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from hetlb.balancer.admin.prometheus import MetricsPage
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec, Outcome, Request
from hetlb.balancer.fleet.service import FleetService
from hetlb.balancer.telemetry.counters import Totals

FLEETS = (20, 200, 1000)
JUDGED = 200
RENDER_MS = 50.0
BLOCK_MS = 5.0
MODELS = 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The proxy's metrics page: how long, and how long it blocks."
    )
    parser.add_argument("--scrapes", type=int, default=100, help="of each fleet (default 100)")
    args = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    headings = (
        "instances",
        "page, KB",
        "ready p50, ms",
        "p99",
        "loop blocked p50, ms",
        "p99",
        "worked p99, ms",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    good = True
    for count in FLEETS:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            size, ready_ms, blocked_ms, worked_ms = runner.run(scrapes(count, args.scrapes))
        figures = [quantile(values, share) for values in (ready_ms, blocked_ms) for share in (0.5, 0.99)]
        figures.append(quantile(worked_ms, 0.99))
        table.add_row(str(count), f"{size / 1e3:,.0f}", *(f"{figure:.2f}" for figure in figures))
        if count == JUDGED:
            good = figures[0] <= RENDER_MS and figures[2] <= BLOCK_MS
    console = Console(highlight=False, width=100)
    console.print(table)
    console.print(
        f"{JUDGED} instances within {RENDER_MS:g} ms and {BLOCK_MS:g} ms: {'good' if good else 'BAD'}"
    )
    return 0 if good else 1


async def scrapes(count: int, number: int) -> tuple[int, list[float], list[float], list[float]]:
    """Bytes of the page; of each scrape, in ms: when it was there, the longest that it blocked and worked."""
    page = MetricsPage(fleet(count))
    size = len(await page.render())
    gc.collect()
    gc.freeze()
    ready_ms, blocked_ms, worked_ms = [], [], []
    for _ in range(number):
        watch = Watch()
        watching = asyncio.create_task(watch.turns())
        await asyncio.sleep(0)
        started = perf_counter()
        await page.render()
        ready_ms.append(1e3 * (perf_counter() - started))
        await asyncio.sleep(0)  # the last slice counts too
        watching.cancel()
        blocked_ms.append(1e3 * watch.longest_s)
        worked_ms.append(1e3 * watch.most_s)
    return size, ready_ms, blocked_ms, worked_ms


class Watch:
    """How long a task waits for its turn, at most, and how much of the thread's CPU time that takes."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most_s = 0.0

    async def turns(self) -> None:
        last, used = perf_counter(), thread_time()
        while True:
            await asyncio.sleep(0)
            now, cpu = perf_counter(), thread_time()
            self.longest_s = max(self.longest_s, now - last)
            self.most_s = max(self.most_s, cpu - used)
            last, used = now, cpu


def fleet(count: int) -> FleetService:
    """A scheduler of `count` instances with reports and requests, and counters that were counted."""
    capacity = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=100_000, max_num_seqs=64)
    models = [f"org/model-{number}" for number in range(MODELS)]
    specs = tuple(
        InstanceSpec(
            name=f"node-{number:04}", model=models[number % MODELS], url="http://h:1", capacity=capacity
        )
        for number in range(count)
    )
    setup = SchedulerSetup(
        specs=specs,
        policy="rr",
        params=PolicyParams(),
        limits=QueueLimits(),
        predictor="online",
        seed=0,
        initial_health=Health.UP,
    )
    scheduler = Scheduler(setup)
    totals = Totals()
    for number, spec in enumerate(specs):
        scheduler.on_scrape(spec.name, EngineSample(3 + number % 7, number % 3, 0.25 + 1e-4 * number), 10.0)
        request = Request(id=number + 1, model=str(spec.model), prompt_tokens=123, max_tokens=50)
        scheduler.on_arrival(request, 11.0)
        each = totals.instances[spec.name]
        for outcome in (Outcome.OK, Outcome.NO_RESPONSE, Outcome.CLIENT_GONE):
            each.requests[outcome] = 1000 + number
        each.output_tokens, each.prompt_tokens = 1_234_567 + number, 7_654_321
        each.expected_s, each.served_s = 123.456789 * number, 120.987654 * number
    for name in models:
        for value in (0.01, 0.3, 2.0):
            model = totals.model(name)
            for histogram in (model.ttft, model.e2e, model.queue, model.output_ratio, model.time_ratio):
                histogram.observe(value)
    for outcome in Outcome:
        totals.requests[outcome, "stream", models[0], "2xx"] = 10
    source: Any = SimpleNamespace(
        scheduler=scheduler,
        totals=totals,
        watch=SimpleNamespace(invalid_samples={}),
        lost_lines=0,
        workers=(),
        waiting_elsewhere=({}, 0),
        sharing=None,
        now=lambda: 12.5,
        recent=totals.recent,
        reload_refused="",
    )
    return cast(FleetService, source)


def quantile(values: list[float], share: float) -> float:
    """A quantile by closest ranks."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


if __name__ == "__main__":
    sys.exit(main())
