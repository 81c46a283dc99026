"""Cost of a decision that may split a request, against one that may not: `python bench/split/decisions.py`.

Microseconds of the choice alone and of an arrival with what it books, medians over a simulation at half load,
interpreted or compiled. Half of the instances read faster and the other half decode faster, so that pairs are
worth weighing.
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
    """A policy whose choices are timed."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.taken_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def choose(self, *what: Any) -> Any:
        return self._timed(self._policy.choose, *what)

    def choose_split(self, *what: Any) -> Any:
        return self._timed(self._policy.choose_split, *what)

    def _timed(self, call: Any, *what: Any) -> Any:
        began = time.perf_counter()
        found = call(*what)
        self.taken_s.append(time.perf_counter() - began)
        return found


def measure(instances: int, roles: list[Role] | None, requests: int) -> tuple[float, float, float]:
    """Median microseconds of a choice and of an arrival, and the share of requests that were split."""
    profiles = [profile_of(name) for name in (L40S, H20) * (instances // 2)]
    rng = random.Random(instances)
    planned = plan(lengths("chat", requests, rng), 3.0 * instances, rng)
    run: Any = simulation(profiles, roles, 12e9, planned)
    arrive = run.scheduler.on_arrival
    policy = Timed(run.scheduler._policy)
    taken_s = []

    def timed(scheduler: Any, request: Any) -> Any:
        began = time.perf_counter()
        commands = arrive(request, run._now)
        taken_s.append(time.perf_counter() - began)
        return commands

    run._arrived = timed
    run.scheduler._policy = policy
    result = run.run()
    choice_s, arrival_s = statistics.median(policy.taken_s), statistics.median(taken_s)
    return 1e6 * choice_s, 1e6 * arrival_s, result.transfers / requests


def main() -> None:
    """Print a row for every number of instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    for instances in SIZES:
        whole = measure(instances, None, args.requests)
        mixed = measure(instances, [Role.BOTH] * instances, args.requests)
        print(
            f"{instances:3d} instances, {mixed[2]:.0%} split: choice {whole[0]:6.1f} and {mixed[0]:6.1f} us "
            f"({mixed[0] / whole[0]:.2f}), arrival {whole[1]:6.1f} and {mixed[1]:6.1f} us "
            f"({mixed[1] / whole[1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
