"""Cost of a decision that may split a request, against one that may not: `python bench/split/decisions.py`.

Microseconds, medians over a simulation at half load, interpreted or compiled: the choice alone, made in both
ways for every request in the same state, and whole arrivals (prediction, choice, booking) in two simulations
of which one splits. Half of the instances read faster and the other half decode faster, so that pairs are
worth weighing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from per_request import H20, L40S, lengths, plan, profile_of, simulation

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Request, Role
from hetlb.options.split.hand_overs import HandOvers
from hetlb.options.split.pairs import choose_split
from hetlb.tools.sim.fleet_simulation import FleetSimulation

SIZES = (2, 4, 8, 16, 64)


class Timed(FleetSimulation):
    """A simulation whose arrivals are timed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.arrival_s: list[float] = []

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        began = time.perf_counter()
        commands = scheduler.on_arrival(request, self._events.now)
        self.arrival_s.append(time.perf_counter() - began)
        return commands


class Chosen(FleetSimulation):
    """A simulation whose requests are chosen for in both ways first, timed; it learns nothing from that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ordinary_s: list[float] = []
        self.split_s: list[float] = []

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        placement, parts = scheduler.placement, scheduler.fleet.ready[request.model].up
        ctx = placement.context(request, scheduler.predictor.predict(request), 0, self._events.now)
        policy, splits = placement.policy, placement.splits
        assert isinstance(splits, HandOvers), "expected an instance with kv_transfer"
        transfers = splits.transfers
        policy.choose(ctx, parts)  # finds what the mean request costs, for both
        began = time.perf_counter()
        policy.choose(ctx, parts)
        between = time.perf_counter()
        choose_split(policy, ctx, parts, transfers, True)
        self.split_s.append(time.perf_counter() - between)
        self.ordinary_s.append(between - began)
        return scheduler.on_arrival(request, self._events.now)


@dataclass(frozen=True)
class Costs:
    """Median microseconds without and with splitting, and the share of requests that were split."""

    choice: tuple[float, float]
    arrival: tuple[float, float]
    share: float


def median_us(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds)


def measure(instances: int, requests: int) -> Costs:
    """Return costs with `instances` instances."""
    profiles = [profile_of(name) for name in (L40S, H20) * (instances // 2)]
    rng = random.Random(instances)
    planned = plan(lengths("chat", requests, rng), 3.0 * instances, rng)
    mixed = [Role.BOTH] * instances
    chosen: Any = simulation(profiles, mixed, 12e9, planned, Chosen)
    whole: Any = simulation(profiles, None, 12e9, planned, Timed)
    split: Any = simulation(profiles, mixed, 12e9, planned, Timed)
    whole.run()
    split.run()
    return Costs(
        share=chosen.run().transfers / requests,
        choice=(median_us(chosen.ordinary_s), median_us(chosen.split_s)),
        arrival=(median_us(whole.arrival_s), median_us(split.arrival_s)),
    )


def main() -> None:
    """Print a row for every number of instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    for instances in SIZES:
        costs = measure(instances, args.requests)
        (choice, split), (arrival, split_arrival) = costs.choice, costs.arrival
        print(
            f"{instances:3d} instances, {costs.share:.0%} split: choice {choice:6.1f} and {split:6.1f} us, "
            f"ratio {split / choice:.2f}; arrival {arrival:6.1f} and {split_arrival:6.1f} us, "
            f"ratio {split_arrival / arrival:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
