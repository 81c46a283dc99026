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

from hetlb.config.profile_file import Profile
from hetlb.errors import ConfigError, PlanError
from hetlb.plan import decompose
from hetlb.plan.check import check_rent
from hetlb.plan.configurations import ConfigurationCandidate, candidates
from hetlb.plan.highs import INFINITY, OnProgress, SolveLimits
from hetlb.plan.market import Market
from hetlb.plan.rent_program import Configuration, Problem, RentPlan, WorkloadType, assign, prune
from hetlb.plan.rent_simulation import SimulatedFleet, simulate
from hetlb.plan.throughput import Measured, bubbles, engine_spec, slowed
from hetlb.plan.workloads import Clustering, RequestType, cluster

#: Rounds of measuring mixes and planning anew, and the relative difference that ends them.
MOST_ROUNDS = 5
AGREED = 0.005


@dataclass(frozen=True)
class Table:
    """All that a plan is made from: types, candidates with their throughput, and the problem they make.

    `clustering` and `longest_tokens`, the longest request of a trace, are None for stated types.
    """

    market: Market
    types: tuple[RequestType, ...]
    candidates: Mapping[str, ConfigurationCandidate]
    problem: Problem
    clustering: Clustering | None = None
    longest_tokens: int | None = None

    @property
    def simulated(self) -> bool:
        """True if every configuration has a profile, so that a plan can be simulated."""
        return all(each.profile is not None for each in self.candidates.values())

    @property
    def lengths_known(self) -> bool:
        """True if the types say how long their requests are."""
        stated = self.market.file.workloads
        return all(each.input_tokens is not None and each.output_tokens is not None for each in stated)


@dataclass(frozen=True)
class Baseline:
    """Throughput of renting or dividing in another way, None where it serves nothing."""

    throughput: float
    cost_per_hour: float


# --- the table ------------------------------------------------------------------------------------------


def request_types(
    market: Market, rows: Sequence[tuple[int, int]] | None, count: int, seed: int
) -> tuple[tuple[RequestType, ...], Clustering | None]:
    """The stated types, or clusters of a trace's (prompt, output) tokens. Raises `ConfigError`."""
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
    """Throughputs of all configurations on all types. Raises `ConfigError` or `PlanError`."""
    types, clustering = request_types(market, rows, count, seed)
    longest: dict[str, int] = {}
    for kind in types:
        longest[kind.model] = max(longest.get(kind.model, 1), kind.longest_tokens)
    found = candidates(market, longest)
    known = {kind.name for kind in types}
    configurations, with_rates = [], {}
    for done, candidate in enumerate(found):
        on_progress(done, len(found))
        if candidate.profile is not None:
            rates = {
                kind.name: measured.alone(candidate.profile, kind, candidate.engine_stages)
                for kind in types
                if kind.model == candidate.model
            }
        else:
            rates = dict(candidate.throughput or {})
            for name in rates:
                if name not in known:
                    raise ConfigError(
                        f"{market.path}: configurations.{candidate.name}.throughput: expected workloads out "
                        f"of {', '.join(sorted(known))}, got {name!r}"
                    )
        with_rates[candidate.name] = replace(candidate, throughput=rates)
        configurations.append(
            Configuration(candidate.name, candidate.model, candidate.gpus, candidate.price_per_hour, rates)
        )
    problem = Problem(
        tuple(
            WorkloadType(kind.name, kind.model, kind.share, kind.input_tokens, kind.output_tokens)
            for kind in types
        ),
        tuple(configurations),
        market.available,
        market.budget,
        None if market.file.target is None else market.file.target.request_rate,
    )
    longest_row = None if rows is None else max(prompt + output for prompt, output in rows)
    return Table(market, types, with_rates, problem, clustering, longest_row)


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
    """The best plan, its mixes corrected by simulation. Raises `PlanError` where there is none."""
    problem = table.problem
    plan = decompose.solve(problem, limits, on_progress)
    check_rent(problem, plan)
    if not table.simulated:
        return SolvedPlan(problem, plan)
    number = 1
    while True:
        corrected, disagreement = correct_mixes(table, measured, problem, plan)
        if disagreement <= AGREED or number >= MOST_ROUNDS or limits.over:
            break
        problem, number = corrected, number + 1
        plan = decompose.solve(problem, limits, on_progress)
        check_rent(problem, plan)
    # What is promised is what was measured: rates that were too high are lowered, those too low are not
    # raised, so that the bound still holds.
    lowered, disagreement = correct_mixes(table, measured, problem, plan, lower_only=True)
    promised = assign(lowered, plan.counts, plan.bound)
    if promised is None:
        return SolvedPlan(problem, plan, number, disagreement)
    promised = replace(promised, counts=plan.counts, cost_per_hour=plan.cost_per_hour)
    check_rent(lowered, promised)
    return SolvedPlan(lowered, promised, number, disagreement)


def correct_mixes(
    table: Table, measured: Measured, problem: Problem, plan: RentPlan, *, lower_only: bool = False
) -> tuple[Problem, float]:
    """The problem with the plan's own mixes measured, and the largest relative difference to the plan.

    A mix that serves more than planned becomes a way to run its configuration; one that serves less lowers
    all rates of its configuration.
    """
    kinds = {kind.name: kind for kind in table.types}
    worst = 0.0
    changed: dict[str, Configuration] = {}
    for configuration in problem.configurations:
        rates = {name: rate for (name, c), rate in plan.rates.items() if c == configuration.name}
        candidate = table.candidates[configuration.name]
        if len(rates) < 2 or candidate.profile is None:
            continue
        total = math.fsum(rates.values())
        planned = total / plan.counts[configuration.name]
        served = measured.together(candidate.profile, rates, kinds, candidate.engine_stages)
        # What the plan leaves idle is no disagreement: instances are whole, work is not.
        load = least_load(configuration, rates) / plan.counts[configuration.name]
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


def least_load(configuration: Configuration, rates: Mapping[str, float]) -> float:
    """The fewest instances that serve these rates in the configuration's modes."""
    workloads = tuple(WorkloadType(name, configuration.model, rate) for name, rate in rates.items())
    one = Problem(workloads, (configuration,), dict.fromkeys(configuration.gpus, INFINITY))
    plan = assign(one, {configuration.name: 1})
    assert plan is not None, "expected a configuration to serve what it was planned for"
    return 1.0 / plan.throughput


def profile_of(table: Table, plan: RentPlan, name: str) -> Profile | None:
    """The profile of a configuration under its part of a plan: of a pipeline with the bubbles it then has."""
    candidate = table.candidates[name]
    if candidate.profile is None or not candidate.engine_stages:
        return candidate.profile
    kinds = {kind.name: kind for kind in table.types}
    mix = [(rate, kinds[kind].rows) for (kind, c), rate in sorted(plan.rates.items()) if c == name]
    return slowed(candidate.profile, bubbles(engine_spec(candidate.profile), mix, candidate.engine_stages))


def simulate_plan(
    table: Table,
    plan: RentPlan,
    *,
    policy: str = "hetlb",
    predictor: str = "empirical",
    seed: int = 0,
    load: float = INFINITY,
) -> SimulatedFleet | None:
    """The plan's fleet under a policy (see `simulate`), None where some configuration has no profile."""
    if not table.simulated:
        return None
    profiles = {
        name: profile for name in plan.counts if (profile := profile_of(table, plan, name)) is not None
    }
    return simulate(plan, profiles, table.types, policy=policy, predictor=predictor, seed=seed, load=load)


# --- baselines ------------------------------------------------------------------------------------------


def baselines(table: Table, planned: SolvedPlan, limits: SolveLimits) -> dict[str, Baseline]:
    """The same budget (or target) spent otherwise; what serves nothing is left out."""
    problem = planned.problem
    found: dict[str, Baseline] = {}
    gpus = sorted({gpu for c in problem.configurations for gpu in c.gpus})
    unlimited = dict.fromkeys(gpus, INFINITY)
    for key, available in (("homogeneous", problem.available), ("homogeneous, any number", unlimited)):
        if (
            key == "homogeneous, any number"
            and problem.budget_per_hour == INFINITY
            and not problem.request_rate
        ):
            continue
        options = {
            gpu: _solved(
                replace(
                    problem,
                    configurations=tuple(c for c in problem.configurations if set(c.gpus) == {gpu}),
                    available=available,
                ),
                limits,
            )
            for gpu in gpus
        }
        _keep_best(found, key, options, problem)
    _keep_best(found, "uniform composition", {"": _solved(_uniform(problem), limits)}, problem)
    degrees = {c.name: _degree(table, c) for c in problem.configurations}
    options = {
        f"TP {degree}": _solved(
            replace(
                problem,
                configurations=tuple(c for c in problem.configurations if degrees[c.name] == degree),
            ),
            limits,
        )
        for degree in sorted(set(degrees.values()))
    }
    _keep_best(found, "one TP for all", options, problem)
    plan = planned.plan
    found["round robin over the plan"] = Baseline(round_robin_rate(problem, plan.counts), plan.cost_per_hour)
    found["in proportion over the plan"] = Baseline(
        proportional_rate(problem, plan.counts), plan.cost_per_hour
    )
    return found


def _solved(problem: Problem, limits: SolveLimits) -> RentPlan | None:
    try:
        plan = decompose.solve(problem, limits)
    except PlanError:
        return None
    check_rent(problem, plan)
    return plan


def _keep_best(
    found: dict[str, Baseline], key: str, options: Mapping[str, RentPlan | None], problem: Problem
) -> None:
    plans = {name: plan for name, plan in options.items() if plan is not None}
    if not plans:
        return
    if problem.request_rate is None:
        name = max(plans, key=lambda each: plans[each].throughput)
    else:
        name = min(plans, key=lambda each: plans[each].cost_per_hour)
    head, _, rest = key.partition(",")
    label = f"{head} ({name}){',' + rest if rest else ''}" if name else key
    found[label] = Baseline(plans[name].throughput, plans[name].cost_per_hour)


def _uniform(problem: Problem) -> Problem:
    """The budget divided evenly over the kinds of GPUs, as far as they are available."""
    prices = {
        gpu: _price(problem, gpu) for gpu in sorted({g for c in problem.configurations for g in c.gpus})
    }
    if problem.budget_per_hour == INFINITY:
        return problem
    part = problem.budget_per_hour / len(prices)
    available = {
        gpu: min(problem.available.get(gpu, 0), part // price if price > 0 else INFINITY)
        for gpu, price in prices.items()
    }
    return replace(problem, available=available)


def _price(problem: Problem, gpu: str) -> float:
    """Price per GPU and hour, from a configuration of that kind alone."""
    own = [c for c in problem.configurations if set(c.gpus) == {gpu}]
    return own[0].price_per_hour / own[0].gpus[gpu] if own else INFINITY


def _degree(table: Table, configuration: Configuration) -> int:
    return table.candidates[configuration.name].stages[0].tensor_parallel_size


def round_robin_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Requests/s where every instance of a model gets as many of each type: the slowest is the bottleneck."""
    rate = INFINITY
    for model in problem.models:
        own = [c for c in problem.configurations if c.model == model and counts.get(c.name, 0) > 0]
        number = sum(counts[c.name] for c in own)
        for c in own:
            shares = {w.name: w.share / number for w in problem.workloads if w.model == model}
            load = c.load(shares) if not c.mixes else _load_or_infinity(c, shares)
            rate = min(rate, 1.0 / load if load > 0 else INFINITY)
    return rate if rate < INFINITY else 0.0


def _load_or_infinity(configuration: Configuration, rates: Mapping[str, float]) -> float:
    if configuration.load(rates) == INFINITY:
        return INFINITY
    return least_load(configuration, rates)


def proportional_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Requests/s where each type is divided by the instances' rates on it, the types one after the other.

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


def pruned_size(problem: Problem) -> int:
    """Configurations that are left after exact pruning."""
    return len(prune(problem).configurations)
