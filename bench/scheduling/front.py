"""The default policy against every other one, on fleets and orders of traces that no rule was chosen on.

`python bench/scheduling/front.py --data DIR`: short runs (40 s, in which a fleet fills), long ones (240 s,
three quarters of it steady) and bursts (80 requests per instance at once). The policies of a case meet the
same requests at the same times. Printed: the default against the best other policy in each figure, the cases
in which another policy is better in both means by over 2 % (dominated) and, with `--cases`, each front:
mean TTFT against mean E2E. `--draw` draws other fleets and orders; `--runs FILE` keeps finished runs by the
digest of the sources; compiled it is many times as fast. `--smoke` takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cases import FLEETS, L8, L70, MODEL, Kind, Lab
from measure import _good, _sources, held_out_fleets

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

OTHERS: Final = (
    "rr", "wrr", "least-requests", "p2c", "least-kv", "peak-ewma", "paper", "lmetric", "lmetric-speed",
)  # fmt: skip
#: Figures, lower is better; of goodput (share of requests within 8 times of alone) the miss.
FIGURES: Final = ("mean_ttft", "p99_ttft", "mean_e2e", "p99_e2e", "mean_tpot")
LOADS: Final = (0.5, 0.8, 0.95)
TRACES: Final = ("sharegpt", "azure", "mooncake")
#: Seconds in which requests come.
SHORT_S: Final = 40.0
LONG_S: Final = 240.0
#: Requests per instance of a burst.
_BURST: Final = 80
#: Another policy dominates where it is better by more than this in both means.
MARGIN: Final = 1.02
#: Rows from which each engine's rate alone is taken.
_SAMPLE: Final = 1500
_SEED: Final = 4000
FIXED: Final[dict[str, tuple[Kind, ...]]] = {
    "kinds": tuple(Kind(system, L8, 1) for system in ("h100_sxm", "a100_sxm", "l40s")),
    "equal": (Kind("a100_sxm", L8, 1, 4),),
    "70B pair": (Kind("h100_sxm", L70, 4), Kind("l40s", L70, 8)),
    "8 kinds": FLEETS["8 kinds"],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet under a load of a trace for some seconds, in an order of the seed; without load a burst.

    `draw` is the fleets'.
    """

    draw: int
    fleet: str
    trace: str
    load: float
    seconds: float
    seed: int

    def __str__(self) -> str:
        return f"{self.fleet} / {self.trace} / {self.load:.0%} / {self.seconds:.0f} s"


def fleets(lab: Lab, draw: int) -> dict[str, tuple[Kind, ...]]:
    """Return the fleets by name: four fixed ones, and random ones."""
    return {**FIXED, **held_out_fleets(lab.layouts, _SEED + draw)}


def cases(lab: Lab, draw: int) -> list[Case]:
    """Return all cases; the traces of long runs and of bursts take turns."""
    found: list[Case] = []
    for number, fleet in enumerate(fleets(lab, draw)):
        turn = TRACES[number % len(TRACES)]
        loads = [(trace, load, SHORT_S) for trace in TRACES for load in LOADS]
        loads += [(turn, 0.8, LONG_S), (turn, 0.95, LONG_S), (turn, 0.0, 0.0)]
        for trace, load, seconds in loads:
            found.append(Case(draw, fleet, trace, load, seconds, _SEED * (1 + draw) + len(found)))
    return found


_lab: Lab | None = None
_alone: dict[tuple[str, str], float] = {}


def _start(data: Path) -> None:
    global _lab
    os.nice(5)
    _lab = Lab(data / "hw", data / "traces")


def _bound_rps(lab: Lab, case: Case) -> float:
    """Return the requests/s of all engines together, each alone with a sample of the trace at once."""
    known = _alone.get((case.fleet, case.trace))
    if known is None:
        _, engines = lab.fleet(fleets(lab, case.draw)[case.fleet])
        plan = lab.plan(case.trace, _SAMPLE, math.inf, 0)
        rates = {
            spec: run_alone(spec, plan, IterationRule.TOKEN).requests_per_s for spec in set(engines.values())
        }
        known = _alone[case.fleet, case.trace] = sum(rates[spec] for spec in engines.values())
    return known


def _plan(lab: Lab, case: Case) -> list[PlannedRequest]:
    rows: list[Row] = list(lab.rows(case.trace))
    rng = random.Random(case.seed)
    rng.shuffle(rows)
    if not case.load:
        count = _BURST * sum(kind.count for kind in fleets(lab, case.draw)[case.fleet])
        return make_plan(rows, count, math.inf, rng)
    rate = case.load * _bound_rps(lab, case)
    return make_plan(rows, max(60, round(rate * case.seconds)), rate, rng)


def simulate(case: Case, policy: str, weights: tuple[tuple[str, float], ...] = ()) -> dict[str, float]:
    """Run one case. Raises `AssertionError` unless all requests completed."""
    lab = _lab
    assert lab is not None, "expected the data to be read"
    specs, engines = lab.fleet(fleets(lab, case.draw)[case.fleet])
    plan = _plan(lab, case)
    setup = SchedulerSetup(
        specs=tuple(specs),
        policy=policy,
        params=PolicyParams(weights=weights),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor="online",
        seed=case.seed,
        lengths=None,
        initial_health=Health.UP,
    )
    result = FleetSimulation(setup, engines, plan, model=MODEL).run()
    summary = result.summary()
    assert summary["completed"] == len(plan), f"{case}: a request failed"
    found = {
        "mean_ttft": float(summary["mean_ttft_ms"]),
        "p99_ttft": float(summary["p99_ttft_ms"]),
        "mean_e2e": float(summary["mean_e2el_ms"]),
        "p99_e2e": float(summary["p99_e2el_ms"]),
        "mean_tpot": float(summary["mean_tpot_ms"]),
        "tokens_per_s": float(summary["total_token_throughput"]),
    }
    _, found["goodput"] = _good(result.records, plan, {engine.latency for engine in engines.values()})
    found["preemptions"] = float(sum(each["preemptions"] for each in result.counted.values()))
    return found


def _run(job: tuple[Case, str]) -> dict[str, float]:
    return simulate(*job)


class Runs:
    """Runs in parallel processes, kept in a file by the digest of the sources."""

    def __init__(self, data: Path, jobs: int, kept: Path | None) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(jobs, _start, (data,))
        self._kept = kept
        self._known: dict[str, dict[str, float]] = {}
        self._digest = _sources()
        if kept is not None and kept.exists():
            for line in kept.read_text().splitlines():
                digest, name, figures = json.loads(line)
                if digest == self._digest:
                    self._known[name] = figures

    def __call__(self, jobs: Iterable[tuple[Case, str]]) -> dict[tuple[Case, str], dict[str, float]]:
        """Return the figures of every job."""
        wanted = list(jobs)
        missing = [job for job in wanted if str(job) not in self._known]
        for job, figures in zip(missing, self._pool.imap(_run, missing), strict=True):
            self._known[str(job)] = figures
            if self._kept is not None:
                with self._kept.open("a") as file:
                    file.write(json.dumps([self._digest, str(job), figures]) + "\n")
        return {job: self._known[str(job)] for job in wanted}

    def close(self) -> None:
        self._pool.terminate()


Table = dict[Case, dict[str, dict[str, float]]]


def dominated(figures: dict[str, dict[str, float]], own: str) -> list[str]:
    """Return the policies that are better in both means by more than the margin."""
    mine = figures[own]
    return [
        name
        for name, each in figures.items()
        if name != own and all(each[key] * MARGIN < mine[key] for key in ("mean_ttft", "mean_e2e"))
    ]


def verdict(table: Table, own: str, among: Callable[[Case], bool] = lambda case: True) -> dict[str, Any]:
    """Return how `own` stands against the best other policy of each case and figure."""
    chosen = {case: figures for case, figures in table.items() if among(case)}
    ratios: dict[str, list[float]] = {key: [] for key in FIGURES}
    near = worse = 0
    goods = []
    for figures in chosen.values():
        others = [each for name, each in figures.items() if name != own]
        for key in FIGURES:
            ratios[key].append(min(each[key] for each in others) / figures[own][key])
        near += all(
            figures[own][key] <= MARGIN * min(each[key] for each in others)
            for key in ("mean_ttft", "mean_e2e")
        )
        worse += bool(dominated(figures, own))
        goods.append(figures[own]["goodput"] - max(each["goodput"] for each in others))
    return {
        "cases": len(chosen),
        "dominated": worse,
        "near": near,
        "goodput_points": 100.0 * statistics.fmean(goods),
        **{key: statistics.geometric_mean(found) for key, found in ratios.items()},
        **{f"{key} at least 1": sum(ratio >= 1.0 for ratio in found) for key, found in ratios.items()},
    }


def print_verdict(title: str, found: dict[str, Any]) -> None:
    """Print a row: means of (best other) / own, and in brackets the cases of at least 1."""
    told = ", ".join(f"{key} {found[key]:.3f} ({found[f'{key} at least 1']})" for key in FIGURES)
    worse, near, points = found["dominated"], found["near"], found["goodput_points"]
    print(
        f"{title}: {found['cases']} cases, dominated {worse}, near both {near}; {told}; goodput {points:+.2f}"
    )


def print_fronts(table: Table, own: str) -> None:
    """Print of every case the policies that no other one dominates, and the default."""
    for case, figures in table.items():
        shown = [name for name in figures if name == own or not dominated(figures, name)]
        shown.sort(key=lambda name: figures[name]["mean_ttft"])
        told = ", ".join(
            f"{'*' * (name == own)}{name} {each['mean_ttft']:.0f}/{each['mean_e2e']:.0f}"
            for name in shown
            for each in (figures[name],)
        )
        print(f"{case}: {told}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="keep finished runs here")
    parser.add_argument("--draw", type=int, default=0, help="another number draws other fleets and orders")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th case")
    parser.add_argument("--cases", action="store_true", help="print the front of every case")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--smoke", action="store_true", help="two small cases, three policies")
    args = parser.parse_args(arguments)
    lab = Lab(args.data / "hw", args.data / "traces")
    wanted = cases(lab, args.draw)[:: args.every]
    policies: tuple[str, ...] = ("hetlb", *OTHERS)
    if args.smoke:
        wanted = [Case(0, "equal", "azure", 0.5, 5.0, 1), Case(0, "kinds", "sharegpt", 0.8, 10.0, 2)]
        policies = ("hetlb", "rr", "lmetric-speed")
    runs = Runs(args.data, args.jobs, args.runs)
    try:
        figures = runs((case, policy) for case in wanted for policy in policies)
    finally:
        runs.close()
    table = {case: {policy: figures[case, policy] for policy in policies} for case in wanted}
    lengths: dict[str, Callable[[Case], bool]] = {
        "burst": lambda case: case.load == 0.0,
        "short": lambda case: 0.0 < case.seconds <= SHORT_S,
        "long": lambda case: case.seconds > SHORT_S,
    }
    for title, of_length in lengths.items():
        for load in (0.0, *LOADS):
            among = lambda case, of=of_length, load=load: of(case) and case.load == load  # noqa: E731
            if any(map(among, table)):
                print_verdict(f"{title}, {load:.0%}", verdict(table, "hetlb", among))
    if args.cases:
        print_fronts(table, "hetlb")
    if args.json is not None:
        args.json.write_text(json.dumps([[str(case), each] for case, each in table.items()], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
