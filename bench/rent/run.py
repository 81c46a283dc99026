"""Acceptance of `hetlb rent`, line by line: one sub-command each (`python bench/rent/run.py --help`).

Each prints what it measured; `--json FILE` keeps it. Times are CPU seconds of this process, since the machine
may be shared; wall seconds stand beside them where a limit is one of wall time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rent import made_up, paper

from hetlb.errors import ConfigError, PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.common.capacity import divide_layers
from hetlb.tools.plan.configurations import capacity_of, compose, profile_on, speed_of
from hetlb.tools.plan.highs import INFINITY, SolveLimits
from hetlb.tools.plan.market import MoveCost, load_market
from hetlb.tools.plan.planning import Table, make_table, measure_alone, measure_table
from hetlb.tools.plan.rent_baselines import baselines, proportional_rate, round_robin_rate
from hetlb.tools.plan.rent_program import (
    Configuration,
    ConfigurationStage,
    Formulation,
    Problem,
    RentPlan,
    SolvedPlan,
    assign,
    prune,
    relaxation,
)
from hetlb.tools.plan.rent_search import PlanSearch
from hetlb.tools.plan.rent_simulation import simulate_plan
from hetlb.tools.plan.replan import moves_between, replan
from hetlb.tools.plan.throughput import Measured
from hetlb.tools.plan.workloads import RequestType

TRACES = ("trace1_swiss_ai", "trace2_azure", "trace3_wildgpt")
BUDGETS = (15.0, 30.0, 60.0)
AVAILABLE = ("avail1", "avail2", "avail3", "avail4")
KEYS = ("8b", "70b")
#: Solves of each case, of which the median counts.
REPEATS = 1
#: Every this many cases one is solved by binary search too, which is slow.
SEARCHED = 4
#: The plans whose whole fleet is simulated: spread over models, traces, budgets and availabilities.
TRUTH = (
    ("8b", "trace1_swiss_ai", 15.0, "avail1"),
    ("8b", "trace2_azure", 30.0, "avail2"),
    ("8b", "trace3_wildgpt", 15.0, "avail3"),
    ("8b", "trace1_swiss_ai", 30.0, "avail4"),
    ("8b", "trace3_wildgpt", 30.0, "avail1"),
    ("70b", "trace1_swiss_ai", 30.0, "avail2"),
    ("70b", "trace2_azure", 60.0, "avail3"),
    ("70b", "trace3_wildgpt", 60.0, "avail4"),
    ("70b", "trace2_azure", 30.0, "avail1"),
    ("70b", "trace3_wildgpt", 30.0, "avail2"),
)


class Bench:
    """What all sub-commands share: the paper's tables, profiles and throughputs made once."""

    def __init__(self, shared: Path, work: Path) -> None:
        self._shared = shared
        self.work = work
        self.hw = shared / "data" / "hw"
        self._tables: dict[tuple[str, ...], Table] = {}
        self.measured = Measured(work / "throughput.jsonl")
        self.every = 1
        #: Random markets that are compared with enumeration.
        self.random = 200
        #: Made-up markets whose plans are served.
        self.markets = 13
        #: Seed of the first of them.
        self.seed = 0
        #: Seconds of each plan of `parts`.
        self.seconds = 300.0

    @cached_property
    def cost(self) -> dict[str, Any]:
        """The paper's tables."""
        return paper.load_cost(self._shared)

    def table(self, key: str, trace: str, budget: float, available: str) -> Table:
        """The table of one of the paper's cases."""
        paper.make_profiles(self.hw, self.work / "profiles")
        snapshot = self.cost["availability"]["snapshots"][available]
        if (key,) not in self._tables:
            shares = {key: self.cost["trace_ratios_percent"]["traces"][trace]}
            # All GPUs are enumerated once; each case cuts down what is available.
            most: dict[str, int | None] = dict.fromkeys(snapshot, 40)
            document = paper.market(self.cost, self.work / "profiles", [key], shares, most, budget)
            market = load_market(paper.write_market(self.work / f"{key}.yaml", document))
            self._tables[key,] = measure_alone(make_table(market, self.measured), self.measured)
        table = self._tables[key,]
        ratios = self.cost["trace_ratios_percent"]["traces"][trace]
        workloads = tuple(
            replace(w, share=r / 100) for w, r in zip(table.problem.workloads, ratios, strict=True)
        )
        problem = replace(
            table.problem,
            workloads=workloads,
            available={gpu: float(count) for gpu, count in snapshot.items()},
            budget_per_hour=budget,
        )
        return replace(table, problem=problem)

    def cases(self) -> list[tuple[str, str, float, str]]:
        """All 72 of them."""
        return list(itertools.product(KEYS, TRACES, BUDGETS, AVAILABLE))


def exact(problem: Problem, gap: float = 1e-4, seconds: float = 60.0) -> RentPlan:
    """A plan within a gap, checked."""
    plan = decompose.solve(problem, SolveLimits(gap, time.monotonic() + seconds))
    check_rent(problem, plan)
    return plan


def attempted(problem: Problem) -> RentPlan | None:
    """Return a plan within a coarser gap, None if there is none."""
    try:
        return exact(problem, 1e-3)
    except PlanError:
        return None


# --- toy ------------------------------------------------------------------------------------------------


def toy_problem(toy: dict[str, Any]) -> Problem:
    """The paper's worked example."""
    total = sum(toy["requests"].values())
    return Problem(
        tuple(RequestType(name, "m", count / total) for name, count in toy["requests"].items()),
        tuple(Configuration(c["name"], "m", c["gpus"], c["rps"]) for c in toy["configs"]),
        toy["availability"],
        toy["price_per_h"],
        toy["budget_per_h"],
    )


def toy(bench: Bench) -> dict[str, Any]:
    """The optimum to 1e-9, and every step of the paper's walk."""
    example = bench.cost["toy_example"]
    problem = toy_problem(example)
    total = sum(example["requests"].values())
    plan = exact(problem, 1e-9)
    seconds = total / plan.throughput
    optimum = float(Fraction(example["optimum"]["makespan_fraction"]))
    print(f"optimum {seconds:.12f} s, expected {optimum:.12f}, difference {seconds - optimum:.1e}")
    print(f"rent {dict(plan.counts)} for {plan.cost_per_hour:g} per hour")
    for (name, configuration), rate in sorted(plan.rates.items()):
        share = rate / (problem_share(problem, name) * plan.throughput)
        print(f"  {name} on {configuration}: {share:.12f} ({Fraction(share).limit_denominator(100)})")
    steps = []
    for step in example["paper_steps"]:
        counts = {name: step["replicas"].count(name) for name in step["replicas"]}
        if step["assignment"] == "proportional":
            found = total / proportional_rate(problem, counts)
        else:
            by_name = {c.name: c for c in problem.configurations}
            found = max(
                by_name[name].load({w: share * example["requests"][w] for w, share in split.items()})
                for name, split in step["assignment"].items()
            )
        steps.append({"step": step["step"], "paper_s": step["paper_s"], "found_s": found})
        print(f"  {step['step']}: {found:.6f} s (paper {step['paper_s']}, exact {step['recomputed_s']:.6f})")
    best = [
        assign(problem, dict(zip(example["enumeration"]["copies_order"], e["copies"], strict=True)))
        for e in example["enumeration"]["best"]
    ]
    for entry, each in zip(example["enumeration"]["best"], best, strict=True):
        assert each is not None
        print(f"  {entry['copies']}: {total / each.throughput:.9f} s (enumerated {entry['makespan_s']:.9f})")
    return {"seconds": seconds, "difference": seconds - optimum, "steps": steps}


def problem_share(problem: Problem, name: str) -> float:
    """The share of a workload."""
    return next(w.share for w in problem.workloads if w.name == name)


# --- random small instances -----------------------------------------------------------------------------


def random_problem(rng: random.Random) -> Problem:
    """Up to three kinds of GPU, six configurations, three types, one or two models."""
    gpus = ["a", "b", "c"][: rng.randint(1, 3)]
    price = {gpu: rng.choice((0.5, 1.0, 1.7, 2.0, 3.1)) for gpu in gpus}
    models = ["m", "n"][: rng.randint(1, 2)]
    workloads = [
        RequestType(f"{model}{w}", model, rng.uniform(0.1, 1.0))
        for model in models
        for w in range(rng.randint(1, 3))
    ]
    total = sum(w.share for w in workloads)
    configurations = []
    for index in range(rng.randint(3, 6)):
        model = models[index % len(models)]
        used = {gpu: rng.randint(1, 2) for gpu in rng.sample(gpus, rng.randint(1, min(2, len(gpus))))}
        rates = {
            w.name: rng.uniform(0.1, 3.0) if rng.random() < 0.85 else 0.0
            for w in workloads
            if w.model == model
        }
        configurations.append(Configuration(f"c{index}", model, used, rates))
    return Problem(
        tuple(replace(w, share=w.share / total) for w in workloads),
        tuple(configurations),
        {gpu: float(rng.randint(1, 4)) for gpu in gpus},
        price,
        rng.choice((1.0, 5.0, 9.0)),
    )


def enumerate_best(problem: Problem) -> float:
    """The best rate over all feasible numbers of instances, 0 if none serves everything."""
    best = 0.0
    ranges = [range(int(problem.most(c)) + 1) for c in problem.configurations]
    for counts in itertools.product(*ranges):
        cost = sum(n * problem.price(c) for n, c in zip(counts, problem.configurations, strict=True))
        used: dict[str, int] = {}
        for n, c in zip(counts, problem.configurations, strict=True):
            for gpu, each in c.gpus.items():
                used[gpu] = used.get(gpu, 0) + each * n
        if cost > problem.budget_per_hour + 1e-9 or any(
            n > problem.available.get(g, 0) for g, n in used.items()
        ):
            continue
        named = {c.name: n for c, n in zip(problem.configurations, counts, strict=True) if n}
        plan = assign(problem, named) if named else None
        best = max(best, plan.throughput if plan is not None else 0.0)
    return best


def random_instances(bench: Bench) -> dict[str, Any]:
    """Small instances against enumeration."""
    rng, worst, plans, without = random.Random(1), 0.0, 0, 0
    for _ in range(bench.random):
        problem = random_problem(rng)
        best = enumerate_best(problem)
        try:
            plan = exact(problem, 1e-9)
        except PlanError as error:
            if best > 0.0 or "\n" in str(error):
                raise SystemExit(f"enumeration found {best}: {error}") from error
            without += 1
            continue
        plans += 1
        worst = max(worst, abs(plan.throughput / best - 1.0))
    print(
        f"{bench.random} instances: {plans} plans, all checked, at most {worst:.1e} off enumeration "
        f"(relative); {without} without a plan in both"
    )
    return {"plans": plans, "infeasible": without, "worst": worst}


# --- the solver on the paper's cases --------------------------------------------------------------------


def binary_search(problem: Problem, tolerance: float = 1e-4) -> tuple[float, int]:
    """The paper's algorithm 1 on the rate: feasibility programs between the trivial bounds."""
    pruned = prune(problem)
    high, low, steps = relaxation(replace(pruned, budget_per_hour=INFINITY))[0], 0.0, 0
    while high - low > tolerance * high:
        middle, steps = (low + high) / 2, steps + 1
        formulation = Formulation(replace(pruned, request_rate=middle))
        for y in formulation.counts:
            formulation.program.set_cost(y, 0.0)
        found = formulation.program.solve(SolveLimits(deadline=time.monotonic() + 60))
        low, high = (middle, high) if found is not None else (low, middle)
    return low, steps


def solver(bench: Bench) -> dict[str, Any]:
    """All 72 cases to 1e-4, beside binary search; CPU seconds."""
    rows: list[dict[str, Any]] = []
    for case in bench.cases():
        problem = bench.table(*case).problem
        times = []
        plan = None
        for _ in range(REPEATS):
            began = time.process_time()
            try:
                plan = exact(problem)
            except PlanError as error:
                print(case, error)
                break
            times.append(time.process_time() - began)
        if plan is None:
            continue
        row: dict[str, Any] = {
            "case": case,
            "cpu_s": statistics.median(times),
            "gap": plan.gap(problem),
            "rate": plan.throughput,
            "configurations": len(problem.configurations),
            "pruned": len(prune(problem).configurations),
        }
        if len(rows) % SEARCHED == 0:
            began = time.process_time()
            row["binary_search_rate"], row["steps"] = binary_search(problem)
            row["binary_search_cpu_s"] = time.process_time() - began
        rows.append(row)
    searched = [r for r in rows if "steps" in r]
    own, other = [r["cpu_s"] for r in rows], [r["binary_search_cpu_s"] for r in searched]
    print(
        f"{len(rows)} cases, configurations {rows[0]['configurations']}, after pruning "
        f"{min(r['pruned'] for r in rows)}-{max(r['pruned'] for r in rows)}"
    )
    print(
        f"one program: median {statistics.median(own):.2f} s, worst {max(own):.2f} s CPU, largest gap "
        f"{max(r['gap'] for r in rows):.1e}"
    )
    print(
        f"binary search, {len(searched)} of them: median {statistics.median(other):.2f} s, worst "
        f"{max(other):.2f} s CPU; one program {statistics.median(r['cpu_s'] for r in searched):.2f}; rate at "
        f"most {max(r['binary_search_rate'] / r['rate'] - 1 for r in searched):.1e} above, "
        f"{max(1 - r['binary_search_rate'] / r['rate'] for r in searched):.1e} below"
    )
    return {"cases": rows}


# --- the paper's tables ---------------------------------------------------------------------------------


def tables(bench: Bench) -> dict[str, Any]:
    """Gains over homogeneous rents and the ablations, one in `--every` of the 72 cases."""
    rows: list[dict[str, Any]] = []
    for case in bench.cases()[:: bench.every]:
        table = bench.table(*case)
        try:
            plan = exact(table.problem)
        except PlanError:
            continue
        found = baselines(SolvedPlan(table.problem, plan), attempted, table.ties)
        gains = {
            name.split(" (")[0] + (", any number" if "any number" in name else ""): (
                plan.throughput / each["throughput_req_s"] - 1,
                name,
            )
            for name, each in found.items()
            if each["throughput_req_s"] > 0
        }
        rows.append({"case": case, "rate": plan.throughput, "gains": gains})
    for key in KEYS:
        print(key)
        names = list(dict.fromkeys(name for r in rows if r["case"][0] == key for name in r["gains"]))
        for name in names:
            values = [r["gains"][name][0] for r in rows if r["case"][0] == key and name in r["gains"]]
            print(
                f"  over {name}: mean {statistics.mean(values):+.1%}, least {min(values):+.1%}, "
                f"most {max(values):+.1%} ({len(values)} cases)"
            )
    claims = bench.cost["comparisons"]["claims"]
    print(
        f"the paper: over homogeneous {claims['throughput_gain_percent']}; losses without "
        f"{claims['ablation_loss_percent']}; its rates are of real GPUs, ours of tables and rooflines"
    )
    return {"cases": rows}


# --- scale ----------------------------------------------------------------------------------------------


def scale(bench: Bench, models: int, gpus: int, seconds: float, seed: int) -> dict[str, Any]:
    """Many models: the gap over time."""
    problem = made_up.problem(models, gpus, seed)
    began, cpu = time.monotonic(), time.process_time()
    history: list[tuple[float, float, float]] = []

    def note(best: float, bound: float) -> None:
        if best == best:
            history.append((time.monotonic() - began, time.process_time() - cpu, bound / best - 1))

    plan = decompose.solve(problem, SolveLimits(1e-3, began + seconds, seed), note)
    check_rent(problem, plan)
    wall, used = time.monotonic() - began, time.process_time() - cpu
    print(
        f"{models} models, {gpus} GPUs, seed {seed}: gap {plan.gap(problem):.3%} after {wall:.0f} s "
        f"({used:.0f} s CPU)"
    )
    for limit in (0.05, 0.03, 0.01, 0.003):
        first = next((entry for entry in history if entry[2] <= limit), None)
        if first is not None:
            print(f"  {limit:.1%} after {first[0]:.0f} s ({first[1]:.0f} s CPU)")
    return {
        "models": models,
        "gpus": gpus,
        "seed": seed,
        "gap": plan.gap(problem),
        "wall_s": wall,
        "cpu_s": used,
        "history": history,
    }


# --- truth ----------------------------------------------------------------------------------------------


def truth(bench: Bench) -> dict[str, Any]:
    """Plans with measured mixes against the simulated fleet."""
    rows = []
    for case in TRUTH:
        table = bench.table(*case)
        limits = SolveLimits(1e-4, time.monotonic() + 300)
        table = measure_table(table, bench.measured, limits)
        planned = PlanSearch(table, bench.measured, limits).solved()
        plan = planned.plan
        row: dict[str, Any] = {
            "case": case,
            "planned": plan.throughput,
            "plans_measured": planned.plans,
            "rent": dict(plan.counts),
        }
        for policy, predictor in (
            ("hetlb", "oracle"),
            ("hetlb", "empirical"),
            ("rr", "empirical"),
        ):
            found = simulate_plan(table, plan, policy=policy, predictor=predictor)
            row[f"{policy}/{predictor}"] = found.request_throughput / plan.throughput
            row[f"{policy}/{predictor} to the end"] = len(found.records) / found.makespan_s / plan.throughput
        row["rr planned"] = round_robin_rate(planned.problem, plan.counts) / plan.throughput
        rows.append(row)
        print(
            " ".join(map(str, case)),
            f"planned {plan.throughput:.3f}",
            " ".join(f"{k} {v:.3f}" for k, v in row.items() if "/" in k or k == "rr planned"),
            dict(plan.counts),
            flush=True,
        )
    for key in ("hetlb/oracle", "hetlb/empirical"):
        values = [row[key] for row in rows]
        # Under round robin the fast instances are done long before the slow ones: only the end tells.
        gains = [row[f"{key} to the end"] / row["rr/empirical to the end"] for row in rows]
        print(
            f"{key}: within 5 % in {sum(abs(v - 1) <= 0.05 for v in values)} of {len(values)}, at least 0.97 "
            f"in {sum(v >= 0.97 for v in values)}, least {min(values):.3f}, most {max(values):.3f}; to the "
            f"last request {statistics.mean(gains):.2f} times round robin in the mean, least {min(gains):.2f}"
        )
    return {"cases": rows}


# --- division ------------------------------------------------------------------------------------------


def division(bench: Bench) -> dict[str, Any]:
    """Return made-up markets of eight kinds and four types, served with and without their worth."""
    rows = []
    for seed in range(bench.seed, bench.seed + bench.markets):
        path = paper.write_market(bench.work / f"made-up-{seed}.yaml", made_up.market(seed))
        limits = SolveLimits(1e-4, time.monotonic() + 300)
        table = measure_table(make_table(load_market(path), bench.measured), bench.measured, limits)
        plan = PlanSearch(table, bench.measured, limits).solved().plan
        row: dict[str, Any] = {"market": seed, "planned": plan.throughput, "rent": dict(plan.counts)}
        for predictor in ("oracle", "empirical"):
            for plain in (True, False):
                found = simulate_plan(table, plan, predictor=predictor, plain=plain)
                row[f"{predictor}{' without worth' if plain else ''}"] = (
                    found.request_throughput / plan.throughput
                )
        rows.append(row)
        print(row, flush=True)
    return {"cases": rows}


# --- parts of a market ----------------------------------------------------------------------------------


#: GPU of an offer that another one dominates.
_WORSE = "worse"


def parts(bench: Bench) -> dict[str, Any]:
    """Return drawn markets of models of today, planned whole, without each offer, with a worse one; served.

    The worse one is another drawn offer at half its speed for the same price.
    """
    rows: list[dict[str, Any]] = []
    models = bench.hw.parent / "models" / "today"
    for seed in range(bench.seed, bench.seed + bench.markets):
        document = made_up.market_of_today(seed, models)
        gpus = [offer["gpu"] for offer in document["offers"]]
        worse = dict(random.Random(seed).choice(document["offers"]))
        slow = {key: each / 2 for key, each in worse["roofline"].items()}
        worse |= {"gpu": _WORSE, "roofline": slow}
        rates: dict[str, float] = {}
        rented = False
        served: dict[str, float] = {}
        for without in ("", _WORSE, *gpus):
            offers = [offer for offer in document["offers"] if offer["gpu"] != without]
            offers += [worse] if without == _WORSE else []
            path = paper.write_market(bench.work / "part.yaml", document | {"offers": offers})
            limits = SolveLimits(1e-4, time.monotonic() + bench.seconds)
            try:
                table = measure_table(make_table(load_market(path), bench.measured), bench.measured, limits)
                plan = PlanSearch(table, bench.measured, limits).solved().plan
            except (ConfigError, PlanError):
                rates[without] = 0.0
                continue
            rates[without] = plan.throughput
            if without == _WORSE:
                known = table.problem.by_name
                rented = any(_WORSE in known[name].gpus for name in plan.counts)
            if not without:
                for predictor in ("oracle", "empirical"):
                    found = simulate_plan(table, plan, predictor=predictor)
                    served[predictor] = found.request_throughput / plan.throughput
        most = max(rate for gpu, rate in rates.items() if gpu in gpus)
        row = {
            "market": seed, "gpus": gpus, "rates": rates, "served": served, "worse_is_rented": rented,
            "gain_without_one": most / (rates[""] or INFINITY) - 1.0,
            "change_by_a_worse_one": rates[_WORSE] / (rates[""] or INFINITY) - 1.0,
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    gains = [row["gain_without_one"] for row in rows if row["rates"][""]]
    changes = [row["change_by_a_worse_one"] for row in rows if row["rates"][""]]
    print(
        f"{len(gains)} markets: without one of its offers a plan serves at most {max(gains):+.2%}, more "
        f"than +0.5 % in {sum(gain > 0.005 for gain in gains)}; with a worse offer {min(changes):+.2%} to "
        f"{max(changes):+.2%}, exactly the same in {changes.count(0.0)}"
    )
    for predictor in ("oracle", "empirical"):
        share = [row["served"][predictor] for row in rows if row["served"]]
        print(f"served under hetlb, {predictor} lengths: {min(share):.3f} to {max(share):.3f} of the plan")
    return {"cases": rows}


# --- the estimator --------------------------------------------------------------------------------------


def estimator(bench: Bench) -> dict[str, Any]:
    """The paper's table 6 by the planner's own composition of profiles, requests/s and per price."""
    table = bench.table("70b", "trace2_azure", 60.0, "avail2")
    prices = {gpu: each["price_per_h"] for gpu, each in bench.cost["gpus"].items()}
    rows = []
    model = table.market.models[paper.MODELS["70b"]["name"]]
    for row in bench.cost["estimator_examples"]["rows"]:
        kinds = row["gpus"].split("+")
        gpus = [kinds[s * len(kinds) // row["pp"]] for s in range(row["pp"])]
        found = [profile_on(table.market, model, table.market.offers[g], row["tp"]) for g in gpus]
        whole = [each for each in found if each is not None]
        layers = divide_layers([speed_of(each) for each in whole], model.layers)
        stages = tuple(ConfigurationStage(g, row["tp"], share) for g, share in zip(gpus, layers, strict=True))
        tokens, across = capacity_of(table.market, model, stages), row["span"] != "one machine"
        profile, own = compose(table.market, model, "composed", stages, whole, tokens, across=across)
        kind = next(k for k in table.problem.workloads if k.input_tokens == 2455 and k.output_tokens == 18)
        rate = bench.measured.alone(profile, kind, own)
        price = sum(prices[stage.gpu] * stage.tensor_parallel_size for stage in stages)
        rows.append({**row, "requests_s": rate, "per_price": rate / price, "kv": tokens})
    for row in rows:
        error = row["per_price"] / row["real_rps"] - 1
        print(
            f"{row['gpus']} ({row['tp']},{row['pp']}) {row['span']}: {row['requests_s']:.2f} requests/s, "
            f"{row['per_price']:.3f} per $/h; the paper: real {row['real_rps']}, estimated "
            f"{row['estimated_rps']}; ours {error:+.0%} off the real one"
        )
    pairs = list(itertools.combinations(rows, 2))
    right = sum((a["per_price"] - b["per_price"]) * (a["real_rps"] - b["real_rps"]) >= 0 for a, b in pairs)
    print(f"order per price: {right} of {len(pairs)} pairs as measured in the paper")
    return {"rows": rows, "pairs_right": right, "pairs": len(pairs)}


# --- replanning -----------------------------------------------------------------------------------------


def replanning(bench: Bench) -> dict[str, Any]:
    """Losing 2 of 8 H100, and a mix that turns from long inputs to long outputs."""
    rows = []
    for key, budget in itertools.product(KEYS, (30.0, 60.0)):
        table = bench.table(key, "trace1_swiss_ai", budget, "avail1")
        old = exact(table.problem)
        lost = replace(table.problem, available={**table.problem.available, "H100": 6.0})
        turned = bench.table(key, "trace3_wildgpt", budget, "avail1").problem
        for what, problem in (("2 of 8 H100 lost", lost), ("long inputs to long outputs", turned)):
            began = time.process_time()
            found = replan(problem, old.counts, MoveCost(), SolveLimits(1e-4, time.monotonic() + 60))
            cpu = time.process_time() - began
            check_rent(problem, found.plan)
            kept = found.plan.throughput / found.scratch.throughput
            rows.append(
                {
                    "model": key,
                    "budget": budget,
                    "what": what,
                    "kept": kept,
                    "cpu_s": cpu,
                    "moves": found.moves.count,
                    "starts": sum(found.moves.start.values()),
                    "scratch_moves": found.scratch_moves.count,
                    "scratch_starts": sum(found.scratch_moves.start.values()),
                }
            )
            stays = assign(problem, {n: min(c, old.counts[n]) for n, c in old.counts.items()})
            as_is = 0.0 if stays is None or what.startswith("2") else stays.throughput
            print(
                f"{key} {budget:g}/h, {what}: {kept:.1%} of scratch with {found.moves.count} moves against "
                f"{found.scratch_moves.count} ({cpu:.2f} s CPU)"
                + (f"; without any move {as_is / found.scratch.throughput:.1%}" if as_is else "")
            )
            assert moves_between(old.counts, found.plan.counts) == found.moves
    return {"cases": rows}


def main() -> None:
    """Run one sub-command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names: dict[str, Callable[[Bench], dict[str, Any]]] = {
        "toy": toy,
        "random": random_instances,
        "solver": solver,
        "tables": tables,
        "truth": truth,
        "division": division,
        "parts": parts,
        "estimator": estimator,
        "replanning": replanning,
    }
    parser.add_argument("what", choices=(*names, "scale"))
    root = Path(__file__).parents[2]
    parser.add_argument("--shared", type=Path, default=root.parent / "shared", help="the paper's tables")
    parser.add_argument("--work", type=Path, default=root / "bench" / "rent" / ".work")
    parser.add_argument("--every", type=int, default=1, help="solve each Nth case (tables)")
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--markets", type=int, default=13, help="drawn markets (division, parts)")
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few instances (random)")
    args = parser.parse_args()
    if not args.smoke:
        args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.shared, args.work)
    bench.every, bench.markets, bench.seed = args.every, args.markets, args.seed
    if args.smoke:
        bench.random = 5
    if args.what == "scale":
        found = scale(bench, args.models, args.gpus, args.seconds, args.seed)
    else:
        found = names[args.what](bench)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
