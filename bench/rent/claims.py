"""Claims of the cost paper beside throughput: latency, two models, budgets, what its two headlines rest on.

python bench/rent/claims.py PART --shared FOLDER [--work FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rent import paper
from rent.run import AVAILABLE, BUDGETS, KEYS, TRACES, Bench, exact

from hetlb.errors import PlanError
from hetlb.tools.plan.highs import INFINITY, SolveLimits
from hetlb.tools.plan.market import load_market
from hetlb.tools.plan.planning import make_table, measure_alone, measure_table
from hetlb.tools.plan.rent_program import Problem, RentPlan, assign
from hetlb.tools.plan.rent_search import PlanSearch
from hetlb.tools.plan.rent_simulation import SimulatedFleet, simulate_plan

#: Arrivals over the rate of the best rent of one kind of GPU.
BUSY = 0.8
#: Prices of an H100 over the paper's, for the part `prices`.
PRICES = (1.0, 1.25, 1.5, 2.0)


def homogeneous(problem: Problem, available: dict[str, float] | None = None) -> RentPlan | None:
    """The best rent of one kind of GPU, as many as available or as given; None where there is none."""
    found = []
    for gpu in {gpu for c in problem.configurations for gpu in c.gpus}:
        own = tuple(c for c in problem.configurations if set(c.gpus) == {gpu})
        one = replace(problem, configurations=own, available=available or problem.available)
        try:
            found.append(exact(one, 1e-3))
        except PlanError:
            continue
    return max(found, key=lambda each: each.throughput, default=None)


def latency(bench: Bench) -> list[dict[str, Any]]:
    """Seconds of requests under the plan and under the best rent of one kind, at the same arrivals."""
    rows = []
    for key, trace, budget in itertools.product(KEYS, TRACES, (15.0, 30.0)):
        limits = SolveLimits(1e-3, time.monotonic() + 300)
        table = measure_table(bench.table(key, trace, budget, "avail2"), bench.measured, limits)
        planned = PlanSearch(table, bench.measured, limits).solved()
        one = homogeneous(planned.problem)
        if one is None:
            continue
        row: dict[str, Any] = {"case": (key, trace, budget), "rate": BUSY * one.throughput}
        for name, plan in (("plan", planned.plan), ("one kind", one)):
            found = simulate_plan(table, plan, load=row["rate"] / plan.throughput)
            row[name] = seconds(found)
        row["mean"] = row["plan"]["mean"] / row["one kind"]["mean"] - 1.0
        for figure in ("p90", "p99"):
            row[figure] = row["plan"][figure] / row["one kind"][figure] - 1.0
        print(row, flush=True)
        rows.append(row)
    for figure in ("mean", "p90", "p99"):
        print(figure, f"{statistics.mean(row[figure] for row in rows):+.1%}")
    return rows


def seconds(found: SimulatedFleet) -> dict[str, float]:
    """Mean and percentiles 90 and 99 of the seconds from arrival to the last token."""
    each = sorted(record.e2el_s for record in found.records if record.last_token_s is not None)
    return {
        "mean": statistics.mean(each),
        "p90": each[int(0.9 * len(each))],
        "p99": each[int(0.99 * len(each))],
    }


#: Workloads of the paper's figure 4 with short answers, as this module orders them, and their share before
#: and in a surge: the paper says neither.
SURGE = 0.5


def surge(bench: Bench) -> list[dict[str, Any]]:
    """Return throughputs after a surge of short answers and a loss of 4 H100 (table 7), old plan and new."""
    rows = []
    for key in KEYS:
        table = bench.table(key, "trace2_azure", 30.0, "avail1")
        old = exact(table.problem, 1e-3)
        outputs = [kind.output_tokens for kind in table.problem.workloads]
        short = [output <= statistics.median(outputs) for output in outputs]
        before = sum(kind.share for kind, own in zip(table.problem.workloads, short, strict=True) if own)
        workloads = tuple(
            replace(kind, share=(1.0 - SURGE) * kind.share + (SURGE * kind.share / before if own else 0.0))
            for kind, own in zip(table.problem.workloads, short, strict=True)
        )
        kept = {name: float(count) for name, count in old.counts.items()}
        for what, problem in (
            ("surge of short answers", replace(table.problem, workloads=workloads)),
            ("4 H100 lost", replace(table.problem, available=_without(table.problem, old, "H100", 4))),
        ):
            stays = assign(problem, _within(problem, kept))
            anew = exact(problem, 1e-3)
            rows.append(
                {
                    "model": key,
                    "what": what,
                    "before": old.throughput,
                    "after": 0.0 if stays is None else stays.throughput,
                    "planned_anew": anew.throughput,
                }
            )
            print(rows[-1], flush=True)
    return rows


def _without(problem: Problem, plan: RentPlan, gpu: str, count: int) -> dict[str, float]:
    """Return what is available once `count` of the GPUs that a plan uses are lost."""
    used = sum(problem.by_name[name].gpus.get(gpu, 0) * n for name, n in plan.counts.items())
    return {**problem.available, gpu: float(max(0, used - count))}


def _within(problem: Problem, counts: dict[str, float]) -> dict[str, int]:
    """Return instances of a plan that fit what is available, fewer where they use what is lost."""
    left = dict(problem.available)
    found = {}
    for name, count in counts.items():
        needs = problem.by_name[name].gpus
        fit = min([int(count), *(int(left[gpu] // need) for gpu, need in needs.items())])
        for gpu, need in needs.items():
            left[gpu] -= fit * need
        found[name] = fit
    return found


def two_models(bench: Bench) -> list[dict[str, Any]]:
    """80 % of the requests to the 8B model, 20 % to the 70B one, against one kind of GPU."""
    rows = []
    paper.make_profiles(bench.hw, bench.work / "profiles")
    for trace, budget, available in itertools.product(TRACES, (30.0, 60.0), AVAILABLE):
        ratios = bench.cost["trace_ratios_percent"]["traces"][trace]
        shares = {"8b": [0.8 * r for r in ratios], "70b": [0.2 * r for r in ratios]}
        snapshot = bench.cost["availability"]["snapshots"][available]
        document = paper.market(bench.cost, bench.work / "profiles", list(KEYS), shares, snapshot, budget)
        market = load_market(paper.write_market(bench.work / "both.yaml", document))
        table = measure_alone(make_table(market, bench.measured), bench.measured)
        rows.append({"case": (trace, budget, available), **gains(table.problem)})
        plan = exact(table.problem, 1e-3)
        spent = {
            model: sum(
                n * table.problem.price(c)
                for c in table.problem.configurations
                if c.model == model and (n := plan.counts.get(c.name, 0))
            )
            for model in table.problem.models
        }
        rows[-1]["share_of_money"] = {model: each / sum(spent.values()) for model, each in spent.items()}
        print(rows[-1], flush=True)
    for figure in ("available", "any number"):
        values = [row[figure] for row in rows if row[figure] is not None]
        print(figure, f"{statistics.mean(values):+.1%}", f"most {max(values):+.1%}", len(values))
    return rows


def gains(problem: Problem) -> dict[str, Any]:
    """A plan over the best rent of one kind: as many as available, any number, no limits for both."""
    unlimited = {gpu: INFINITY for c in problem.configurations for gpu in c.gpus}
    plan = exact(problem, 1e-3)
    free = exact(replace(problem, available=unlimited), 1e-3)
    one, most = homogeneous(problem), homogeneous(problem, unlimited)
    return {
        "available": None if one is None else plan.throughput / one.throughput - 1.0,
        "any number": None if most is None else plan.throughput / most.throughput - 1.0,
        "both any number": None if most is None else free.throughput / most.throughput - 1.0,
    }


def prices(bench: Bench) -> list[dict[str, Any]]:
    """Gain of mixing where nothing is scarce, over the price of an H100."""
    rows = []
    for key, trace, budget, factor in itertools.product(KEYS, TRACES, BUDGETS, PRICES):
        problem = bench.table(key, trace, budget, "avail1").problem
        offer = bench.cost["gpus"]["H100"]["price_per_h"]
        priced = replace(problem, prices={**problem.prices, "H100": factor * offer})
        rows.append({"case": (key, trace, budget), "h100": factor, **gains(priced)})
    for key, factor in itertools.product(KEYS, PRICES):
        own = [row for row in rows if row["case"][0] == key and row["h100"] == factor]
        print(key, f"H100 at {factor:g} of its price:", {
            figure: f"{statistics.mean(r[figure] for r in own if r[figure] is not None):+.1%}"
            for figure in ("available", "any number", "both any number")
        }, flush=True)  # fmt: skip
    return rows


def degrees(bench: Bench) -> list[dict[str, Any]]:
    """A plan over each single TP degree for all GPUs, and over the best one."""
    rows = []
    for case in bench.cases():
        table = bench.table(*case)
        try:
            plan = exact(table.problem, 1e-3)
        except PlanError:
            continue
        row: dict[str, Any] = {"case": case, "over": {}}
        for degree in (1, 2, 4, 8):
            every = (*table.problem.configurations, *table.ties)
            own = tuple(c for c in every if c.stages[0].tensor_parallel_size == degree)
            try:
                one = exact(replace(table.problem, configurations=own), 1e-3)
            except PlanError:
                continue
            row["over"][degree] = plan.throughput / one.throughput - 1.0
        rows.append(row)
    for key, degree in itertools.product(KEYS, (1, 2, 4, 8)):
        values = [r["over"][degree] for r in rows if r["case"][0] == key and degree in r["over"]]
        if values:
            print(key, f"TP {degree}: mean {statistics.mean(values):+.1%}, {len(values)} cases", flush=True)
    return rows


def budgets(bench: Bench) -> list[dict[str, Any]]:
    """The gain over one kind of GPU by budget."""
    rows = []
    for key, trace, budget in itertools.product(KEYS, TRACES, (7.5, 15.0, 30.0, 45.0, 60.0)):
        table = bench.table(key, trace, budget, "avail2")
        try:
            rows.append({"case": (key, trace, budget), **gains(table.problem)})
        except PlanError:
            continue
    for key, budget in itertools.product(KEYS, (7.5, 15.0, 30.0, 45.0, 60.0)):
        own = [row for row in rows if row["case"][0] == key and row["case"][2] == budget]
        for figure in ("available", "any number"):
            values = [row[figure] for row in own if row[figure] is not None]
            if values:
                print(key, budget, figure, f"{statistics.mean(values):+.1%}", flush=True)
    return rows


def observations(bench: Bench) -> list[dict[str, Any]]:
    """Requests/s per dollar of each type by kind of GPU, with the best layout of each."""
    rows = []
    for key in KEYS:
        problem = bench.table(key, TRACES[0], 60.0, "avail1").problem
        for kind in problem.workloads:
            most: dict[str, float] = {}
            for c in problem.configurations:
                if len(c.gpus) == 1 and (rate := c.throughput.get(kind.name, 0.0)) > 0.0:
                    gpu = next(iter(c.gpus))
                    most[gpu] = max(most.get(gpu, 0.0), rate / problem.price(c))
            rows.append(
                {"model": key, "workload": (kind.input_tokens, kind.output_tokens), "per_dollar": most}
            )
    return rows


def compositions(bench: Bench) -> list[dict[str, Any]]:
    """Share of the rented GPUs by the paper's classes."""
    rows = []
    for key, trace, budget, available in itertools.product(KEYS, TRACES, BUDGETS, AVAILABLE):
        problem = bench.table(key, trace, budget, available).problem
        try:
            plan = exact(problem, 1e-3)
        except PlanError:
            continue
        gpus = dict.fromkeys(paper.CLASSES.values(), 0)
        for name, count in plan.counts.items():
            for gpu, each in problem.by_name[name].gpus.items():
                gpus[paper.CLASSES[gpu]] += count * each
        total = sum(gpus.values())
        rows.append(
            {"case": (key, trace, budget, available), **{name: n / total for name, n in gpus.items()}}
        )
    return rows


def thirty_b(bench: Bench) -> list[dict[str, Any]]:
    """Requests/s planned for LLaMA-30B at 15 dollars on trace 2 (table 3), by rooflines of all GPUs."""
    rows = []
    for available in AVAILABLE:
        problem = bench.table("30b", "trace2_azure", 15.0, available).problem
        rows.append({"available": available, "throughput": exact(problem).throughput})
        print(rows[-1], flush=True)
    return rows


PARTS = {
    each.__name__: each
    for each in (
        latency, two_models, prices, degrees, budgets, surge, observations, compositions, thirty_b,
    )
}  # fmt: skip


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).parents[2]
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--shared", type=Path, default=root.parent / "shared", help="the paper's tables")
    parser.add_argument("--work", type=Path, default=root / "bench" / "rent" / ".work")
    parser.add_argument("--json", type=Path, default=root / "bench" / "results" / "rent-claims.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    known = json.loads(args.json.read_text()) if args.json.exists() else {}
    rows = PARTS[args.part](Bench(args.shared, args.work))
    args.json.write_text(json.dumps({**known, args.part: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
