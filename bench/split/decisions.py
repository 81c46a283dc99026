"""Cost of a decision that may split a request, against one that may not: `python bench/split/decisions.py`.

Microseconds, medians over a simulation at half load, interpreted or compiled; both choices are made of every
request, in the same state. Half of the instances read faster and the other half decode faster, so that pairs
are worth weighing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from per_request import H20, L40S, lengths, plan, profile_of, simulation

from hetlb.core.types import Role

SIZES = (2, 4, 8, 16, 64)


class Timed:
    """A scheduler whose arrivals are chosen for in both ways first, timed; it learns nothing from that."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.ordinary_s: list[float] = []
        self.split_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def on_arrival(self, request: Any, now: float) -> Any:
        self._time(request, now)
        return self._scheduler.on_arrival(request, now)

    def _time(self, request: Any, now: float) -> None:
        scheduler = self._scheduler
        placement, parts = scheduler.placement, scheduler.fleet.ready[request.model].parts
        ctx = placement.context(request, scheduler.predictor.predict(request), 0, now, None)
        policy, transfers = placement.policy, scheduler._holds.transfers
        policy.choose(ctx, parts)  # finds what the mean request costs, for both
        began = time.perf_counter()
        policy.choose(ctx, parts)
        between = time.perf_counter()
        policy.choose_split(ctx, parts, transfers, True)
        self.split_s.append(time.perf_counter() - between)
        self.ordinary_s.append(between - began)


def measure(instances: int, requests: int) -> tuple[float, float, float]:
    """Median microseconds of the ordinary choice and of the other, and the share of split requests."""
    profiles = [profile_of(name) for name in (L40S, H20) * (instances // 2)]
    rng = random.Random(instances)
    planned = plan(lengths("chat", requests, rng), 3.0 * instances, rng)
    run: Any = simulation(profiles, [Role.BOTH] * instances, 12e9, planned)
    timed = run.scheduler = Timed(run.scheduler)
    result = run.run()
    ordinary_s, split_s = statistics.median(timed.ordinary_s), statistics.median(timed.split_s)
    return 1e6 * ordinary_s, 1e6 * split_s, result.transfers / requests


def main() -> None:
    """Print a row for every number of instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    for instances in SIZES:
        ordinary, split, share = measure(instances, args.requests)
        print(
            f"{instances:3d} instances, {share:.0%} split: {ordinary:6.1f} and {split:6.1f} us, "
            f"ratio {split / ordinary:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
