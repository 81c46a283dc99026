"""Plans of instances to rent: the problem, exact pruning, and one mixed-integer linear program for all of it.

A configuration is one way to run one instance of one model: its GPUs, its price, and the requests/s it
serves of each workload type. With y the number of instances, u the instances' worth of time spent in a
mode (one type alone, or a measured mix of types) and f the share of each type among all requests:

    maximise lambda   subject to   sum_k u[c,k] <= y[c]                       for every configuration c
                                   sum_ck rate[c,k,w] u[c,k] >= lambda f[w]   for every type w
                                   price . y <= budget, GPUs . y <= available, y whole numbers

It is linear because the mix of types is fixed: the makespan of N requests is N / lambda, and the paper's
bilinear form (Jiang et al., ICML 2025, section 4.3) and its binary search over the makespan are not needed.
With a target rate in place of a budget, lambda is fixed and the price is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetlb.balancer.config.profile_file import Profile
from hetlb.errors import PlanError
from hetlb.tools.plan.highs import INFINITY, LinearProgram, OnProgress, SolveLimits
from hetlb.tools.plan.workloads import RequestType
from hetlb.tools.sim.staged_engine import EngineStage

#: Loads and counts this close to a limit are at it.
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class ConfigurationStage:
    """Part of an instance: GPUs of one kind with tensor parallelism, and their share of the layers.

    With `data_parallel_size` that is the GPUs of a rank; each GPU of the server holds whole experts.
    """

    gpu: str
    tensor_parallel_size: int
    layers: Fraction
    data_parallel_size: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class Configuration:
    """One way to run one instance. `throughput`: requests/s of each type if it served nothing else.

    `mixes` are rates (requests/s by type) that one instance was measured to serve together. The program needs
    no more. `profile` is None if the throughput was stated; `origin` says what the throughput rests on,
    `engine_stages` what a pipeline's profile was composed of, `mix_rate` what was measured on the whole mix.
    """

    name: str
    model: str
    gpus: Mapping[str, int]
    throughput: Mapping[str, float]
    mixes: tuple[Mapping[str, float], ...] = ()
    stages: tuple[ConfigurationStage, ...] = ()
    origin: str = "stated"
    profile: Profile | None = None
    engine_stages: tuple[EngineStage, ...] = ()
    mix_rate: float | None = None

    @cached_property
    def modes(self) -> tuple[Mapping[str, float], ...]:
        alone = tuple({name: rate} for name, rate in self.throughput.items() if rate > 0)
        return alone + self.mixes

    def load(self, rates: Mapping[str, float]) -> float:
        """Return the fewest instances that serve these rates, in any mode; infinite if none can."""
        if not self.mixes:
            return math.fsum(
                rate / self.throughput[name] if self.throughput.get(name, 0.0) > 0 else INFINITY
                for name, rate in rates.items()
                if rate > 0
            )
        program = LinearProgram()
        columns = [program.column(-1.0) for _ in self.modes]
        for name, rate in rates.items():
            program.row(zip(columns, (mode.get(name, 0.0) for mode in self.modes), strict=True), lower=rate)
        solution = program.solve(SolveLimits())
        return INFINITY if solution is None else -solution.objective


@dataclass(frozen=True)
class Problem:
    """The problem: the instances for rent, and a budget per hour or a request rate at least cost.

    `available`: GPUs of each kind, infinite if there is no limit; `prices` of one and hour. Shares of all
    workloads sum to 1.
    """

    workloads: tuple[RequestType, ...]
    configurations: tuple[Configuration, ...]
    available: Mapping[str, float]
    prices: Mapping[str, float]
    budget_per_hour: float = INFINITY
    request_rate: float | None = None

    @cached_property
    def by_name(self) -> Mapping[str, Configuration]:
        return {c.name: c for c in self.configurations}

    @cached_property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(workload.model for workload in self.workloads))

    def price(self, configuration: Configuration) -> float:
        """Return the price of one instance per hour."""
        return math.fsum(self.prices[gpu] * count for gpu, count in configuration.gpus.items())

    def most(self, configuration: Configuration) -> float:
        """Return the most instances of a configuration that availability and budget allow."""
        most = [self.available.get(gpu, 0.0) / count for gpu, count in configuration.gpus.items()]
        if (price := self.price(configuration)) > 0:
            most.append(self.budget_per_hour / price)
        least = min(most, default=INFINITY)
        return math.floor(least + TOLERANCE) if least < INFINITY else INFINITY

    def only(self, model: str) -> Problem:
        return replace(
            self,
            workloads=tuple(each for each in self.workloads if each.model == model),
            configurations=tuple(each for each in self.configurations if each.model == model),
        )

    def worth(self, plan: RentPlan) -> float:
        """Return the throughput of a plan, or with a target rate its cost below 0: the more the better."""
        return plan.throughput if self.request_rate is None else -plan.cost_per_hour


@dataclass(frozen=True)
class RentPlan:
    """Instances by configuration, and the requests/s of each type that each configuration serves.

    `bound`: no plan has more throughput (with a target rate: none costs less).
    """

    counts: Mapping[str, int]
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    throughput: float = 0.0
    cost_per_hour: float = 0.0
    bound: float = INFINITY

    def gap(self, problem: Problem) -> float:
        """Return the relative distance of the plan from the bound."""
        if problem.request_rate is not None:
            return self.cost_per_hour / self.bound - 1.0 if self.bound > 0 else INFINITY
        return max(0.0, self.bound / self.throughput - 1.0) if self.throughput > 0 else INFINITY


@dataclass(frozen=True)
class SolvedPlan:
    """A plan with the problem it solves: the table's, with all mixes that were measured on the way.

    `plans` is the number of measured plans. A target was missed by the share `disagreement`.
    """

    problem: Problem
    plan: RentPlan
    plans: int = 0
    disagreement: float = 0.0


# --- pruning --------------------------------------------------------------------------------------------


def prune(problem: Problem) -> Problem:
    """Return the problem without configurations that cannot be in a plan or that another one replaces.

    Exact: a configuration is left out if copies of another one, as many as fit its GPUs, serve all that it
    serves. Of equal ones the first stays.
    """
    kept: list[Configuration] = []
    for c in problem.configurations:
        if problem.most(c) >= 1 and c.modes and not any(_replaces(other, c) for other in kept):
            kept = [other for other in kept if not _replaces(c, other)] + [c]
    return replace(problem, configurations=tuple(kept))


def _replaces(one: Configuration, other: Configuration) -> bool:
    """Return True if copies of `one` on the GPUs of `other` serve all that it serves."""
    if one.model != other.model:
        return False
    copies = min(other.gpus.get(gpu, 0) // count for gpu, count in one.gpus.items())
    return copies >= 1 and all(one.load(mode) <= copies for mode in other.modes)


# --- the program ----------------------------------------------------------------------------------------


class Formulation:
    """The program over lambda, y and u.

    y has a column for each configuration, u for each mode. `counts` fixes y; `relaxed` lets y be fractional.
    """

    def __init__(
        self, problem: Problem, *, counts: Mapping[str, int] | None = None, relaxed: bool = False
    ) -> None:
        self.problem = problem
        self.program = program = LinearProgram()
        target = problem.request_rate
        cheapest = target is not None
        rate = target if target is not None else 0.0
        self.rate = program.column(0.0 if cheapest else 1.0, rate, rate if cheapest else INFINITY)
        self.counts: list[int] = []
        self.modes: list[list[int]] = []
        serving: dict[str, list[tuple[int, float]]] = {workload.name: [] for workload in problem.workloads}
        for c in problem.configurations:
            if counts is None:
                lower, upper = 0.0, problem.most(c)
            else:
                lower = upper = float(counts.get(c.name, 0))
            cost = -problem.price(c) if cheapest else 0.0
            y = program.column(cost, lower, upper, integer=counts is None and not relaxed)
            modes = [program.column() for _ in c.modes]
            for column, rates in zip(modes, c.modes, strict=True):
                for name, each in rates.items():
                    if name in serving:
                        serving[name].append((column, each))
            program.row([(y, -1.0), *((column, 1.0) for column in modes)], upper=0.0)
            self.counts.append(y)
            self.modes.append(modes)
        for workload in problem.workloads:
            program.row([(self.rate, -workload.share), *serving[workload.name]], lower=0.0)
        self.resources = resource_rows(problem)
        self.resource_rows = [
            program.row(zip(self.counts, row, strict=True), upper=limit)
            for row, limit in self.resources.values()
        ]

    def counts_of(self, values: NDArray[np.float64]) -> dict[str, int]:
        """Return the whole instances of a point of the program."""
        return {
            c.name: round(values[y])
            for c, y in zip(self.problem.configurations, self.counts, strict=True)
            if round(values[y]) > 0
        }

    def rates(self, values: NDArray[np.float64]) -> dict[tuple[str, str], float]:
        """Return requests/s by (type, configuration), each type's cut to its demand."""
        found: dict[tuple[str, str], float] = {}
        for c, modes in zip(self.problem.configurations, self.modes, strict=True):
            for column, rates in zip(modes, c.modes, strict=True):
                if values[column] > 0:
                    for name, each in rates.items():
                        key = (name, c.name)
                        found[key] = found.get(key, 0.0) + each * float(values[column])
        for workload in self.problem.workloads:
            asked = workload.share * float(values[self.rate])
            keys = [key for key in found if key[0] == workload.name]
            served = math.fsum(found[key] for key in keys)
            for key in keys:
                found[key] *= asked / served if served > 0 else 0.0
        return {key: value for key, value in found.items() if value > TOLERANCE * 1e-3}


def resource_rows(problem: Problem) -> dict[str, tuple[list[float], float]]:
    """Return the use of each resource by each instance, and its limit: "budget", and kinds of GPU."""
    rows: dict[str, tuple[list[float], float]] = {}
    if problem.budget_per_hour < INFINITY:
        prices = [problem.price(c) for c in problem.configurations]
        rows["budget"] = (prices, problem.budget_per_hour * (1.0 + 1e-12))
    for gpu in sorted({gpu for c in problem.configurations for gpu in c.gpus}):
        if (limit := problem.available.get(gpu, 0.0)) < INFINITY:
            rows[gpu] = ([float(c.gpus.get(gpu, 0)) for c in problem.configurations], limit)
    return rows


def cost_of(problem: Problem, counts: Mapping[str, int]) -> float:
    return math.fsum(problem.price(c) * counts.get(c.name, 0) for c in problem.configurations)


def assign(problem: Problem, counts: Mapping[str, int], bound: float = INFINITY) -> RentPlan | None:
    """Return the best assignment of requests to given instances, without idle ones, if any serves all."""
    used = replace(
        problem, configurations=tuple(c for c in problem.configurations if counts.get(c.name, 0) > 0)
    )
    formulation = Formulation(used, counts=counts)
    solution = formulation.program.solve(SolveLimits())
    if solution is None or solution.values[formulation.rate] <= 0:
        return None
    needed = {}
    for c, modes in zip(used.configurations, formulation.modes, strict=True):
        if least := math.ceil(sum(solution.values[column] for column in modes) - TOLERANCE):
            needed[c.name] = min(counts[c.name], least)
    rate = float(solution.values[formulation.rate])
    return RentPlan(needed, formulation.rates(solution.values), rate, cost_of(problem, needed), bound)


def solve(problem: Problem, limits: SolveLimits, on_progress: OnProgress | None = None) -> RentPlan:
    """Return the best plan by one mixed-integer program. Raises `PlanError` without one."""
    pruned = prune(problem)
    require_served(problem, pruned)
    formulation = Formulation(pruned)
    sign = 1.0 if problem.request_rate is None else -1.0
    report = None if on_progress is None else lambda best, bound: on_progress(sign * best, sign * bound)
    solution = formulation.program.solve(limits, on_progress=report)
    best = None
    if solution is not None and (sign < 0.0 or solution.values[formulation.rate] > TOLERANCE):
        best = assign(problem, formulation.counts_of(solution.values), sign * solution.bound)
    if best is None:  # also where its rate is within the solver's tolerance of nothing
        raise PlanError(_why_nothing(pruned, out_of_time=limits.over))
    return best


def relaxation(problem: Problem) -> tuple[float, dict[str, float]]:
    """Return the bound of the linear relaxation, and the worth of all of each resource, as shares."""
    formulation = Formulation(problem, relaxed=True)
    solution = formulation.program.solve(SolveLimits())
    if solution is None:
        return 0.0, {}
    worth = {
        name: abs(float(solution.duals[row])) * limit
        for (name, (_, limit)), row in zip(
            formulation.resources.items(), formulation.resource_rows, strict=True
        )
    }
    total = sum(worth.values())
    return solution.objective, {name: value / total for name, value in worth.items()} if total > 0 else {}


# --- why there is no plan -------------------------------------------------------------------------------


def require_served(problem: Problem, pruned: Problem) -> None:
    """Raise `PlanError` with the reason where some workload has no configuration to serve it."""
    for workload in problem.workloads:
        mine = [c for c in problem.configurations if c.model == workload.model]
        if not mine:
            raise PlanError(
                f"model {workload.model}: expected a configuration that fits it, got none of "
                f"{len(problem.configurations)}"
            )
        able = [c for c in mine if c.throughput.get(workload.name, 0.0) > 0]
        if not able:
            raise PlanError(
                f"workload {workload.name}: expected a configuration of {workload.model} that serves it, "
                f"got none of {len(mine)}"
            )
        if any(c.throughput.get(workload.name, 0.0) > 0 for c in pruned.configurations):
            continue
        within = [c for c in able if all(problem.available.get(g, 0) >= n for g, n in c.gpus.items())]
        if within:
            cheapest = min(within, key=problem.price)
            raise PlanError(
                f"budget_per_hour: the cheapest instance for workload {workload.name} is {cheapest.name} at "
                f"{problem.price(cheapest):g} per hour, the budget is {problem.budget_per_hour:g}"
            )
        fewest = min(able, key=lambda c: sum(c.gpus.values()))
        missing = ", ".join(
            f"{n:g} {g} ({problem.available.get(g, 0):g} available)" for g, n in fewest.gpus.items()
        )
        raise PlanError(f"offers: the smallest instance for workload {workload.name} needs {missing}")


def _why_nothing(problem: Problem, *, out_of_time: bool) -> str:
    """Return one line with the shortage where every workload by itself could be served."""
    bound, _ = relaxation(replace(problem, request_rate=None))
    if problem.request_rate is not None and bound < problem.request_rate:
        return (
            f"target.request_rate: expected at most {bound:.6g} requests/s, which is all that the offers can "
            f"serve, got {problem.request_rate:g}"
        )
    if out_of_time:
        return "no plan was found within the time limit; give --time-limit more seconds"
    # Far above the solver's tolerance, far below the rate of one instance.
    some = 0.01 * min(rate for c in problem.configurations for rate in c.throughput.values() if rate > 0)
    least = Formulation(replace(problem, budget_per_hour=INFINITY, request_rate=problem.request_rate or some))
    solution = least.program.solve(SolveLimits(gap=1e-6))
    if solution is None:
        return "offers: too few GPUs to serve every workload at once, whatever the budget"
    return (
        f"budget_per_hour: at least {-solution.objective:.6g} per hour is needed to serve every workload, "
        f"the budget is {problem.budget_per_hour:g}"
    )
