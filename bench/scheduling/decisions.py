"""Cost of a decision: `python bench/scheduling/decisions.py --data DIR`, interpreted or compiled.

Microseconds of an arrival and of the end of an answer, medians, in a simulation of 2, 8 and 64 instances:
half full, and with all requests at once. Prompts share nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import FLEETS, MODEL, Lab

from hetlb.sim.fleet import FleetSimulation

#: Instances: a fleet, so many copies of each, requests/s that fill about half of it.
_SIZES = {2: ("a100 tp4+tp1", 1, 8.0), 8: ("8 kinds", 1, 60.0), 64: ("8 kinds", 8, 480.0)}


class Timed:
    """A scheduler whose arrivals and ends are timed."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.arrivals: list[float] = []
        self.ends: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def on_arrival(self, request: Any, now: float) -> Any:
        arrive = self._scheduler.on_arrival
        began = time.perf_counter()
        commands = arrive(request, now)
        self.arrivals.append(time.perf_counter() - began)
        return commands

    def on_lease_ended(self, *what: Any, **more: Any) -> Any:
        end = self._scheduler.on_lease_ended
        began = time.perf_counter()
        commands = end(*what, **more)
        self.ends.append(time.perf_counter() - began)
        return commands


def measure(lab: Lab, instances: int, rate: float) -> dict[str, float]:
    """Medians in microseconds."""
    name, copies, _ = _SIZES[instances]
    specs, engines = lab.fleet(tuple(replace(kind, count=copies) for kind in FLEETS[name]))
    plan = lab.plan("azure", min(300 * instances, 6000), rate, 0)
    setup = lab.setup(specs, "hetlb", "empirical", "azure", 0)
    simulation: Any = FleetSimulation(setup, engines, plan, model=MODEL)
    timed = simulation.scheduler = Timed(simulation.scheduler)
    simulation.run()
    return {
        "arrival_us": 1e6 * statistics.median(timed.arrivals),
        "end_us": 1e6 * statistics.median(timed.ends),
    }


def decision_times(data: Path) -> list[dict[str, Any]]:
    """A row by number of instances and load."""
    lab = Lab(data / "hw", data / "traces")
    return [
        {"instances": instances, "load": load, **measure(lab, instances, rate)}
        for instances, (_, _, half) in _SIZES.items()
        for load, rate in (("half full", half), ("all at once", math.inf))
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    args = parser.parse_args()
    for row in decision_times(args.data):
        print("{instances:3d} {load:12s} arrival {arrival_us:7.2f} us, end {end_us:7.2f} us".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
