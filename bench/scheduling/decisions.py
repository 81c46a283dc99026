"""Cost of a decision: `python bench/scheduling/decisions.py --data DIR`, interpreted or compiled.

Microseconds of an arrival and of the end of an answer, for 2 to 1,000 instances, half full and with all
requests at once. Prompts share nothing. A simulation tells how long each request takes from its dispatch to
its first token and to its end; with these times the scheduler alone is driven several times. The figures are
the median and the mean over requests of the least time that the same call took.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cases import FLEETS, MODEL, Lab

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Dispatch, Lease, Outcome, Request
from hetlb.tools.sim.fleet_simulation import FleetSimulation

#: By number of instances: a fleet, copies of each of its instances, requests/s that fill about half of it.
_SIZES = {
    2: ("a100 tp4+tp1", 1, 8.0),
    16: ("8 kinds", 2, 120.0),
    64: ("8 kinds", 8, 480.0),
    256: ("8 kinds", 32, 1920.0),
    1000: ("8 kinds", 125, 7500.0),
}
#: Repetitions of the same calls.
_PLAYS: Final = 7
#: Events, in their order at the same instant.
_FIRST_TOKEN: Final = 0
_END: Final = 1
_ARRIVAL: Final = 2


class Job:
    """A request, when it comes, and seconds from its dispatch to its first token and to its end."""

    def __init__(self, request: Request, came_s: float, first_s: float, whole_s: float, tokens: int) -> None:
        self.request = request
        self.came_s = came_s
        self.first_s = first_s
        self.whole_s = whole_s
        self.tokens = tokens


class Play:
    """One run of a scheduler through the jobs, with the seconds of its calls by job."""

    def __init__(self, setup: SchedulerSetup, jobs: list[Job]) -> None:
        self._scheduler = Scheduler(setup)
        self._jobs = jobs
        self._leases: dict[int, Lease] = {}
        self._heap = [(job.came_s, _ARRIVAL, index) for index, job in enumerate(jobs)]
        heapq.heapify(self._heap)
        self.arrivals = [0.0] * len(jobs)
        self.ends = [0.0] * len(jobs)

    def run(self) -> None:
        """Make all calls."""
        scheduler, jobs = self._scheduler, self._jobs
        while self._heap:
            now, kind, index = heapq.heappop(self._heap)
            while (due := scheduler.next_deadline()) is not None and due <= now:
                self._take(scheduler.on_tick(due), due)
            job = jobs[index]
            if kind == _ARRIVAL:
                began = time.perf_counter()
                commands = scheduler.on_arrival(job.request, now)
                self.arrivals[index] = time.perf_counter() - began
            elif kind == _FIRST_TOKEN:
                commands = scheduler.on_first_token(self._leases[index], now)
            else:
                lease = self._leases.pop(index)
                lease.output_tokens = job.tokens
                began = time.perf_counter()
                commands = scheduler.on_lease_ended(lease, Outcome.OK, now)
                self.ends[index] = time.perf_counter() - began
            self._take(commands, now)

    def _take(self, commands: Iterable[object], now: float) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                index = command.request_id
                self._leases[index] = command.lease
                heapq.heappush(self._heap, (now + self._jobs[index].first_s, _FIRST_TOKEN, index))
                heapq.heappush(self._heap, (now + self._jobs[index].whole_s, _END, index))


def measure(lab: Lab, instances: int, rate: float) -> dict[str, float]:
    """Medians and means in microseconds."""
    name, copies, _ = _SIZES[instances]
    specs, engines = lab.fleet(tuple(replace(kind, count=copies) for kind in FLEETS[name]))
    planned = lab.plan("azure", min(300 * instances, 6000), rate, 0)
    setup = lab.setup(specs, "hetlb", "empirical", "azure", 0)
    simulation: Any = FleetSimulation(setup, engines, planned, model=MODEL)
    simulation.run()
    jobs = []
    for flight in simulation._flights:
        each, record, sent_s = flight.planned, flight.record, flight.lease.dispatched_at
        first_s, whole_s = record.first_token_s - sent_s, record.end_s - sent_s
        request = simulation.make_request(each)
        jobs.append(Job(request, each.scheduled_s, first_s, whole_s, record.output_tokens))
    least: Play | None = None
    for _ in range(_PLAYS):
        play = Play(setup, jobs)
        gc.collect()
        gc.disable()
        play.run()
        gc.enable()
        if least is not None:
            play.arrivals = list(map(min, play.arrivals, least.arrivals))
            play.ends = list(map(min, play.ends, least.ends))
        least = play
    assert least is not None
    return {
        "arrival_us": 1e6 * statistics.median(least.arrivals),
        "end_us": 1e6 * statistics.median(least.ends),
        "mean_arrival_us": 1e6 * statistics.fmean(least.arrivals),
        "mean_end_us": 1e6 * statistics.fmean(least.ends),
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
        print(
            "{instances:4d} {load:12s} arrival {arrival_us:7.2f} us (mean {mean_arrival_us:.2f}), "
            "end {end_us:7.2f} us (mean {mean_end_us:.2f})".format(**row)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
