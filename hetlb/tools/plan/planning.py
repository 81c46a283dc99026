"""Plans from a market: the throughput table, the program, mixes corrected by simulation, baselines.

The table holds requests/s of every configuration on every type alone. An instance of a plan serves several
types at once, and what it then serves is not what they would by turns (prompts fill the steps in which
others decode). So the mixes of a plan are measured, given to the program as further ways to run an
instance, and the plan is made anew, until plan and measurement agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetlb.errors import ConfigError, PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.configurations import candidates
from hetlb.tools.plan.highs import INFINITY, OnProgress, SolveLimits
from hetlb.tools.plan.market import Market
from hetlb.tools.plan.rent_program import Configuration, Problem, RentPlan, assign
from hetlb.tools.plan.simplest import without_ties
from hetlb.tools.plan.throughput import Measured
from hetlb.tools.plan.workloads import Clustering, RequestType, cluster

#: Rounds of measuring mixes and planning anew, and the relative difference that ends them.
MOST_ROUNDS = 5
AGREED_SHARE = 0.005


@dataclass(frozen=True)
class Table:
    """All that a plan is made from; the last two need a trace. `longest_tokens` counts one request.

    `ties`: configurations left out of the problem, as simpler ones equal them.
    """

    market: Market
    problem: Problem
    ties: tuple[Configuration, ...] = ()
    clustering: Clustering | None = None
    longest_tokens: int | None = None

    @property
    def simulated(self) -> bool:
        return all(each.profile is not None for each in self.problem.configurations)

    @property
    def lengths_known(self) -> bool:
        stated = self.market.file.workloads
        return all(each.input_tokens is not None and each.output_tokens is not None for each in stated)


# --- the table ------------------------------------------------------------------------------------------


def request_types(
    market: Market, rows: Sequence[tuple[int, int]] | None, count: int, seed: int
) -> tuple[tuple[RequestType, ...], Clustering | None]:
    """Return the stated types, or clusters of a trace's (prompt, output) tokens. Raises `ConfigError`."""
    path = market.path
    if rows is not None:
        if market.file.workloads:
            raise ConfigError(f"{path}: workloads: expected either workloads or --trace, got both")
        if len(market.models) > 1:
            raise ConfigError(f"{path}: models: expected one model with --trace, got {len(market.models)}")
        clustering = cluster(rows, count, next(iter(market.models)), seed)
        return clustering.types, clustering
    if not market.file.workloads:
        raise ConfigError(f"{path}: workloads: expected at least one workload, or --trace, got neither")
    total = math.fsum(each.share for each in market.file.workloads)
    needed = not market.file.configurations or any(c.profile for c in market.file.configurations)
    types = []
    for index, each in enumerate(market.file.workloads):
        where = f"workloads[{index}]"
        for key in ("input_tokens", "output_tokens"):
            if needed and getattr(each, key) is None:
                raise ConfigError(f"{path}: {where}.{key}: expected a value, but the key is missing")
        rows_of_type = ((each.input_tokens or 1, each.output_tokens or 1),)
        types.append(
            RequestType(each.name, market.model_of(each.model, where), each.share / total, rows_of_type)
        )
    return tuple(types), None


def make_table(
    market: Market,
    measured: Measured,
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    count: int = 9,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """Return the throughputs of all configurations on all types. Raises `ConfigError` or `PlanError`."""
    types, clustering = request_types(market, rows, count, seed)
    longest: dict[str, int] = {}
    for kind in types:
        longest[kind.model] = max(longest.get(kind.model, 1), kind.longest_tokens)
    found = candidates(market, longest)
    known = {kind.name for kind in types}
    configurations = []
    for done, candidate in enumerate(found):
        on_progress(done, len(found))
        rates = candidate.throughput
        if candidate.profile is not None:
            rates = {
                kind.name: measured.alone(candidate.profile, kind, candidate.engine_stages)
                for kind in types
                if kind.model == candidate.model
            }
        for name in rates:
            if name not in known:
                raise ConfigError(
                    f"{market.path}: configurations.{candidate.name}.throughput: expected workloads out "
                    f"of {', '.join(sorted(known))}, got {name!r}"
                )
        configurations.append(replace(candidate, throughput=rates))
    kept = configurations if market.file.configurations else without_ties(configurations)
    names = {each.name for each in kept}
    ties = tuple(each for each in configurations if each.name not in names)
    target = market.file.target
    problem = Problem(
        types,
        tuple(kept),
        market.available,
        market.prices,
        market.budget,
        None if target is None else target.request_rate,
    )
    longest_row = None if rows is None else max(prompt + output for prompt, output in rows)
    return Table(market, problem, ties, clustering, longest_row)


# --- the plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SolvedPlan:
    """A plan with the problem it solves: the table's, with the mixes that were measured on the way.

    `rounds` of them; `disagreement` is the largest relative difference left between plan and measurement.
    """

    problem: Problem
    plan: RentPlan
    rounds: int = 0
    disagreement: float = 0.0


def make_plan(
    table: Table, measured: Measured, limits: SolveLimits, on_progress: OnProgress | None = None
) -> SolvedPlan:
    """Return the best plan, its mixes corrected by simulation. Raises `PlanError` where there is none."""
    problem = table.problem
    plan = decompose.solve(problem, limits, on_progress)
    check_rent(problem, plan)
    if not table.simulated:
        return SolvedPlan(problem, plan)
    number = 1
    while True:
        corrected, disagreement = correct_mixes(measured, problem, plan)
        if disagreement <= AGREED_SHARE or number >= MOST_ROUNDS or limits.over:
            break
        problem, number = corrected, number + 1
        plan = decompose.solve(problem, limits, on_progress)
        check_rent(problem, plan)
    # The plan promises measured rates: too high ones are lowered, too low ones are not raised, so that
    # the bound still holds.
    lowered, disagreement = correct_mixes(measured, problem, plan, lower_only=True)
    promised = assign(lowered, plan.counts, plan.bound)
    if promised is None:
        return SolvedPlan(problem, plan, number, disagreement)
    promised = replace(promised, counts=plan.counts, cost_per_hour=plan.cost_per_hour)
    check_rent(lowered, promised)
    return SolvedPlan(lowered, promised, number, disagreement)


def correct_mixes(
    measured: Measured, problem: Problem, plan: RentPlan, *, lower_only: bool = False
) -> tuple[Problem, float]:
    """Return the problem with the plan's own mixes measured, and the largest relative difference to the plan.

    A mix that serves more than planned becomes a way to run its configuration; one that serves less lowers
    all rates of its configuration.
    """
    rows = {kind.name: kind.rows for kind in problem.workloads}
    worst = 0.0
    changed: dict[str, Configuration] = {}
    for configuration in problem.configurations:
        rates = {name: rate for (name, c), rate in plan.rates.items() if c == configuration.name}
        if len(rates) < 2 or configuration.profile is None:
            continue
        total = math.fsum(rates.values())
        planned = total / plan.counts[configuration.name]
        together = [(rate, rows[name]) for name, rate in sorted(rates.items())]
        served = measured.of_mix(configuration.profile, together, configuration.engine_stages)
        # Idle parts of the plan are no disagreement: instances are whole, work is not.
        load = configuration.load(rates) / plan.counts[configuration.name]
        ratio = served / (planned / load) if planned > 0 else 1.0
        worst = max(worst, abs(ratio - 1.0))
        if ratio > 1.0 and not lower_only:
            mix = {name: served * rate / total for name, rate in rates.items()}
            changed[configuration.name] = replace(configuration, mixes=(*configuration.mixes, mix))
        elif ratio < 1.0:
            changed[configuration.name] = replace(
                configuration,
                throughput={name: rate * ratio for name, rate in configuration.throughput.items()},
                mixes=tuple({n: r * ratio for n, r in mix.items()} for mix in configuration.mixes),
            )
    configurations = tuple(changed.get(c.name, c) for c in problem.configurations)
    return replace(problem, configurations=configurations), worst


# --- baselines ------------------------------------------------------------------------------------------


def baselines(
    planned: SolvedPlan, limits: SolveLimits, ties: Sequence[Configuration] = ()
) -> dict[str, dict[str, float]]:
    """Return the same budget (or target) spent otherwise; instances that serve nothing are left out.

    `ties` are the table's: one degree for all takes them, too.
    """
    problem, plan, every = planned.problem, planned.plan, planned.problem.configurations
    tied = (*every, *ties)
    of_gpu = {
        gpu: replace(problem, configurations=tuple(c for c in every if set(c.gpus) == {gpu}))
        for gpu in sorted({gpu for c in every for gpu in c.gpus})
    }
    of_degree = {
        f"TP {degree}": replace(
            problem, configurations=tuple(c for c in tied if c.stages[0].tensor_parallel_size == degree)
        )
        for degree in sorted({c.stages[0].tensor_parallel_size for c in tied})
    }
    variants = {"homogeneous ({})": of_gpu}
    if problem.budget_per_hour < INFINITY or problem.request_rate:
        variants["homogeneous ({}), any number"] = {
            gpu: replace(each, available={gpu: INFINITY}) for gpu, each in of_gpu.items()
        }
    variants |= {"uniform composition": {"": _uniform(problem)}, "one TP for all ({})": of_degree}
    found = {}
    for label, options in variants.items():
        solved = [(name, each) for name, option in options.items() if (each := _solved(option, limits))]
        if solved:
            name, best = max(solved, key=lambda each: problem.worth(each[1]))
            found[label.format(name)] = best.throughput, best.cost_per_hour
    found["round robin over the plan"] = round_robin_rate(problem, plan.counts), plan.cost_per_hour
    found["in proportion over the plan"] = proportional_rate(problem, plan.counts), plan.cost_per_hour
    return {label: {"throughput_req_s": rate, "cost_per_hour": cost} for label, (rate, cost) in found.items()}


def _solved(problem: Problem, limits: SolveLimits) -> RentPlan | None:
    try:
        plan = decompose.solve(problem, limits)
    except PlanError:
        return None
    check_rent(problem, plan)
    return plan


def _uniform(problem: Problem) -> Problem:
    """Return the budget divided evenly over the available kinds of GPUs."""
    gpus = {gpu for c in problem.configurations for gpu in c.gpus}
    if problem.budget_per_hour == INFINITY:
        return problem
    part, available = problem.budget_per_hour / len(gpus), {}
    for gpu in sorted(gpus):
        price = problem.prices[gpu]
        available[gpu] = min(problem.available.get(gpu, 0), part // price if price > 0 else INFINITY)
    return replace(problem, available=available)


def round_robin_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Return the requests/s where each instance of a model gets as many of each type: the slowest decides."""
    rate = INFINITY
    for model in problem.models:
        own = [c for c in problem.configurations if c.model == model and counts.get(c.name, 0) > 0]
        number = sum(counts[c.name] for c in own)
        for c in own:
            load = c.load({w.name: w.share / number for w in problem.workloads if w.model == model})
            rate = min(rate, 1.0 / load if load > 0 else INFINITY)
    return rate if rate < INFINITY else 0.0


def proportional_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Return the requests/s where each type is divided by the instances' rates on it, type by type.

    The rule of the paper's example (section 4.2): time = sum over types of requests / sum of rates.
    """
    rate = INFINITY
    for model in problem.models:
        seconds = 0.0
        for workload in problem.workloads:
            if workload.model == model:
                total = math.fsum(
                    c.throughput.get(workload.name, 0.0) * counts.get(c.name, 0)
                    for c in problem.configurations
                )
                seconds += workload.share / total if total > 0 else INFINITY
        rate = min(rate, 1.0 / seconds if seconds > 0 else INFINITY)
    return rate
