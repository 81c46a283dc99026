"""Plans of what to rent: the problem, exact pruning, and one mixed-integer linear program for all of it.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetlb.errors import PlanError
from hetlb.plan.highs import INFINITY, LinearProgram, OnProgress, SolveLimits

#: Loads and counts this close to a limit are at it.
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class WorkloadType:
    """A type of request: mean lengths in tokens, and its share among the requests for all models."""

    name: str
    model: str
    share: float
    input_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """One way to run one instance. `throughput`: requests/s of each type if it served nothing else.

    `mixes` are rates (requests/s by type) that one instance was measured to serve together.
    """

    name: str
    model: str
    gpus: Mapping[str, int]
    price_per_hour: float
    throughput: Mapping[str, float]
    mixes: tuple[Mapping[str, float], ...] = ()

    @cached_property
    def modes(self) -> tuple[Mapping[str, float], ...]:
        """Rates that one instance can serve: every type alone, then the mixes."""
        alone = tuple({name: rate} for name, rate in self.throughput.items() if rate > 0)
        return alone + self.mixes

    def load(self, rates: Mapping[str, float]) -> float:
        """Instances needed for these rates if the types took turns; infinite for one it does not serve."""
        return math.fsum(
            rate / self.throughput[name] if self.throughput.get(name, 0.0) > 0 else INFINITY
            for name, rate in rates.items()
            if rate > 0
        )


@dataclass(frozen=True)
class Problem:
    """The problem: what may be rented, and a budget per hour or a request rate at least cost.

    `available`: GPUs of each kind, infinite where there is no limit. Shares of all workloads sum to 1.
    """

    workloads: tuple[WorkloadType, ...]
    configurations: tuple[Configuration, ...]
    available: Mapping[str, float]
    budget_per_hour: float = INFINITY
    request_rate: float | None = None

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Models that are asked for, in order."""
        return tuple(dict.fromkeys(workload.model for workload in self.workloads))

    def most(self, configuration: Configuration) -> float:
        """The most instances of a configuration that availability and budget allow."""
        most = [self.available.get(gpu, 0.0) / count for gpu, count in configuration.gpus.items()]
        if configuration.price_per_hour > 0:
            most.append(self.budget_per_hour / configuration.price_per_hour)
        least = min(most, default=INFINITY)
        return math.floor(least + TOLERANCE) if least < INFINITY else INFINITY

    def only(self, models: Sequence[str]) -> Problem:
        """The same problem for some of its models alone."""
        return replace(
            self,
            workloads=tuple(each for each in self.workloads if each.model in models),
            configurations=tuple(each for each in self.configurations if each.model in models),
        )


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
        """Relative distance of the plan from the bound."""
        if problem.request_rate is not None:
            return self.cost_per_hour / self.bound - 1.0 if self.bound > 0 else INFINITY
        return max(0.0, self.bound / self.throughput - 1.0) if self.throughput > 0 else INFINITY


# --- pruning --------------------------------------------------------------------------------------------


def prune(problem: Problem) -> Problem:
    """The problem without configurations that cannot be part of it or that another makes superfluous.

    Exact: a configuration goes where as many copies of another as fit in its GPUs and its price serve all
    that it serves. Of equals the first stays.
    """
    usable = [c for c in problem.configurations if problem.most(c) >= 1 and c.modes]
    kept: list[Configuration] = []
    for model in problem.models:
        kept += _undominated([c for c in usable if c.model == model], problem)
    order = {c.name: index for index, c in enumerate(problem.configurations)}
    return replace(problem, configurations=tuple(sorted(kept, key=lambda c: order[c.name])))


def _undominated(configurations: list[Configuration], problem: Problem) -> list[Configuration]:
    gpus = sorted({gpu for c in configurations for gpu in c.gpus})
    names = [workload.name for workload in problem.workloads]
    size = np.array([[c.gpus.get(g, 0) for g in gpus] for c in configurations], dtype=float)
    price = np.array([c.price_per_hour for c in configurations])
    rate = np.array([[c.throughput.get(w, 0.0) for w in names] for c in configurations])
    gone = np.zeros(len(configurations), dtype=bool)
    for i, c in enumerate(configurations):
        with np.errstate(divide="ignore", invalid="ignore"):
            copies = np.where(size > 0, np.floor(size[i] / size), INFINITY).min(axis=1, initial=INFINITY)
            by_price = np.where(price > 0, np.floor(price[i] / price * (1 + 1e-12)), INFINITY)
        copies = np.minimum(copies, by_price)
        copies[i] = 0
        able = (copies >= 1) & ~gone
        for j in np.flatnonzero(able):
            k = min(copies[j], 1e6)
            if np.all(k * rate[j] >= rate[i]) and all(_covers(configurations[j], k, mix) for mix in c.mixes):
                # Equals dominate each other: only the later one goes.
                same = k == 1 and np.array_equal(rate[i], rate[j]) and np.array_equal(size[i], size[j])
                if not same or price[j] < price[i] or j < i:
                    gone[i] = True
                    break
    return [c for c, out in zip(configurations, gone, strict=True) if not out]


def _covers(configuration: Configuration, copies: float, mix: Mapping[str, float]) -> bool:
    if configuration.load(mix) <= copies:
        return True
    return any(
        all(copies * other.get(name, 0.0) >= rate for name, rate in mix.items())
        for other in configuration.mixes
    )


# --- the program ----------------------------------------------------------------------------------------


class Formulation:
    """The program of a problem: columns lambda, y (one a configuration) and u (one a mode).

    `counts` fixes y; `relaxed` lets it be fractional.
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
            cost = -c.price_per_hour if cheapest else 0.0
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

    def plan(self, values: NDArray[np.float64], bound: float) -> RentPlan:
        """The plan that a solution is, its y rounded."""
        counts = self.counts_of(values)
        return RentPlan(
            counts,
            self.rates(values),
            float(values[self.rate]),
            cost_of(self.problem, counts),
            bound,
        )

    def counts_of(self, values: NDArray[np.float64]) -> dict[str, int]:
        """The whole instances of a point of the program."""
        return {
            c.name: round(values[y])
            for c, y in zip(self.problem.configurations, self.counts, strict=True)
            if round(values[y]) > 0
        }

    def rates(self, values: NDArray[np.float64]) -> dict[tuple[str, str], float]:
        """Requests/s by (type, configuration), each type's cut to what is asked for."""
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
    """Use by each instance of the budget (key "budget") and of each kind of GPU, and the limits."""
    rows: dict[str, tuple[list[float], float]] = {}
    if problem.budget_per_hour < INFINITY:
        prices = [c.price_per_hour for c in problem.configurations]
        rows["budget"] = (prices, problem.budget_per_hour * (1.0 + 1e-12))
    for gpu in sorted({gpu for c in problem.configurations for gpu in c.gpus}):
        if (limit := problem.available.get(gpu, 0.0)) < INFINITY:
            rows[gpu] = ([float(c.gpus.get(gpu, 0)) for c in problem.configurations], limit)
    return rows


def cost_of(problem: Problem, counts: Mapping[str, int]) -> float:
    """Price per hour of these instances."""
    return math.fsum(c.price_per_hour * counts.get(c.name, 0) for c in problem.configurations)


def assign(problem: Problem, counts: Mapping[str, int], bound: float = INFINITY) -> RentPlan | None:
    """The best assignment of requests to given instances (a linear program); instances without work go.

    None where they cannot serve every type, or not at the target rate.
    """
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
    return replace(
        formulation.plan(solution.values, bound), counts=needed, cost_per_hour=cost_of(problem, needed)
    )


def solve(
    problem: Problem,
    limits: SolveLimits,
    *,
    start: RentPlan | None = None,
    on_progress: OnProgress | None = None,
) -> RentPlan:
    """The best plan by one mixed-integer program. Raises `PlanError` where there is none, in one line."""
    pruned = prune(problem)
    require_served(problem, pruned)
    formulation = Formulation(pruned)
    sign = 1.0 if problem.request_rate is None else -1.0
    started = None if start is None else _start(formulation, start)
    report = None if on_progress is None else lambda best, bound: on_progress(sign * best, sign * bound)
    solution = formulation.program.solve(limits, start=started, on_progress=report)
    found = None if solution is None else formulation.plan(solution.values, sign * solution.bound)
    if found is None or (problem.request_rate is None and found.throughput <= TOLERANCE):
        if start is not None:
            return start
        raise PlanError(_why_nothing(pruned, out_of_time=limits.over))
    best = assign(problem, found.counts, found.bound)
    if best is None:  # what it serves is within the solver's tolerance of nothing
        raise PlanError(_why_nothing(pruned, out_of_time=limits.over))
    return best


def relaxation(problem: Problem) -> tuple[float, dict[str, float]]:
    """The bound of the linear relaxation (requests/s), and the price of each resource at it, summing to 1.

    A price is what all of a resource is worth, as a share of the whole.
    """
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


def _start(formulation: Formulation, plan: RentPlan) -> list[float] | None:
    """A plan as a point of the program."""
    problem = formulation.problem
    known = {c.name for c in problem.configurations}
    if not plan.counts.keys() <= known:
        return None
    fixed = Formulation(problem, counts=plan.counts)
    solution = fixed.program.solve(SolveLimits())
    return None if solution is None else [float(value) for value in solution.values]


# --- why there is no plan -------------------------------------------------------------------------------


def require_served(problem: Problem, pruned: Problem) -> None:
    """Raise `PlanError` that says what is missing where some workload has no configuration to serve it."""
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
            cheapest = min(within, key=lambda c: c.price_per_hour)
            raise PlanError(
                f"budget_per_hour: the cheapest instance for workload {workload.name} is {cheapest.name} at "
                f"{cheapest.price_per_hour:g} per hour, the budget is {problem.budget_per_hour:g}"
            )
        fewest = min(able, key=lambda c: sum(c.gpus.values()))
        missing = ", ".join(
            f"{n:g} {g} ({problem.available.get(g, 0):g} available)" for g, n in fewest.gpus.items()
        )
        raise PlanError(f"offers: the smallest instance for workload {workload.name} needs {missing}")


def _why_nothing(problem: Problem, *, out_of_time: bool) -> str:
    """One line that says what is missing where every workload by itself could be served."""
    bound, _ = relaxation(replace(problem, request_rate=None))
    if problem.request_rate is not None and bound < problem.request_rate:
        return (
            f"target.request_rate: expected at most {bound:.6g} requests/s, which is all that the offers can "
            f"serve, got {problem.request_rate:g}"
        )
    if out_of_time:
        return "no plan was found within the time limit; give --time-limit more seconds"
    # Far above the solver's tolerance, far below what one instance serves.
    some = 0.01 * min(rate for c in problem.configurations for rate in c.throughput.values() if rate > 0)
    least = Formulation(replace(problem, budget_per_hour=INFINITY, request_rate=problem.request_rate or some))
    solution = least.program.solve(SolveLimits(gap=1e-6))
    if solution is None:
        return "offers: too few GPUs to serve every workload at once, whatever the budget"
    return (
        f"budget_per_hour: at least {-solution.objective:.6g} per hour is needed to serve every workload, "
        f"the budget is {problem.budget_per_hour:g}"
    )
