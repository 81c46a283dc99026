"""Plans for many models at once: one small program a model, a price on every shared resource.

At a fixed rate lambda the models have nothing in common but budget and GPUs. A column is a set of instances
that serves one model at that rate; a master program picks one column a model (Dantzig and Wolfe, 1960).
With prices pi >= 0 on the resources, each scaled to 1 and pi summing to 1, the sum over models of the least
pi-cost of serving it at lambda is a lower bound on the share of the scarcest resource that any plan takes:
above 1, no plan reaches lambda. That bound rests on the bounds of the small programs alone. Plans come from
the master over whole columns, and from programs of a few models at a time with the rest held (a
neighbourhood search).
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetlb.plan.highs import INFINITY, LinearProgram, OnProgress, SolveLimits
from hetlb.plan.rent_program import (
    Configuration,
    Formulation,
    Problem,
    RentPlan,
    assign,
    prune,
    relaxation,
    require_served,
    resource_rows,
)
from hetlb.plan.rent_program import solve as solve_directly

#: Below so many models one program is faster.
FEWEST_MODELS = 3
#: Relative gap of the small programs, at first and at the finest: their bounds, not their incumbents, prove.
_ROUGH = 0.1
_COARSEST = 5e-3
_FINEST = 2e-4
_PRICING_S = 5.0
#: The solver's feasibility tolerance shows in the rate that a column reaches.
_SLACK = 1e-5
#: Models that a step of the neighbourhood search frees, and its seconds.
_FREED = (2, 3, 4)
_STEP_S = 4.0
_STEPS_IN_VAIN = 12
#: Share of the best prices that a step towards the master's keeps.
_KEEP = 0.8
#: Above this share of the resources a rate is so far from what can be that the next one is guessed from it.
_FAR = 1.002
#: Point between plan and bound at which the next round looks.
_WHERE = (0.65, 0.4, 0.2)
#: The share of the bound that the first plan aims at; how near to the rate of its columns a plan has to be.
_EARLY = 0.8
_NEAR = 2e-3
#: Small programs are solved side by side, in threads: the solver works without the interpreter's lock.
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Column:
    """Instances of one model: the share of every resource they take, and the rate lambda they reach."""

    counts: Mapping[str, int]
    usage: NDArray[np.float64]
    reaches: float


class _Model:
    """The small programs of one model: least price to serve it at a rate, most rate of given instances."""

    def __init__(self, problem: Problem, resources: Mapping[str, float]) -> None:
        self.problem = problem
        self.usage = np.array(
            [
                [
                    (c.price_per_hour if name == "budget" else c.gpus.get(name, 0)) / limit
                    for name, limit in resources.items()
                ]
                for c in problem.configurations
            ]
        )
        self._cover = Formulation(replace(problem, request_rate=None))
        program = self._cover.program
        program.set_cost(self._cover.rate, 0.0)
        self._fixed = Formulation(replace(problem, request_rate=None), counts={})
        self._columns: dict[tuple[tuple[str, int], ...], _Column] = {}

    @property
    def columns(self) -> list[_Column]:
        """All columns found so far."""
        return list(self._columns.values())

    def price(self, rate: float, prices: NDArray[np.float64], limits: SolveLimits, gap: float) -> float:
        """A lower bound of what serving at `rate` costs at these prices; keeps the column found on the way.

        Infinite where the model alone cannot be served at this rate.
        """
        cover = self._cover
        cost = self.usage @ prices
        # HiGHS tolerates 1e-7: costs of about 1 are far above that.
        scale = 1.0 / max(float(cost.min(initial=INFINITY, where=cost > 0)), 1e-9)
        for y, each in zip(cover.counts, cost, strict=True):
            cover.program.set_cost(y, -(each + 1e-9) * scale)
        cover.program.set_bounds(cover.rate, rate, INFINITY)
        deadline = min(limits.deadline, time.monotonic() + _PRICING_S)
        found: list[NDArray[np.float64]] = []
        solution = cover.program.solve(replace(limits, gap=gap, deadline=deadline), on_solution=found.append)
        if solution is None:
            return 0.0 if time.monotonic() >= deadline or limits.over else INFINITY
        for values in (*found, solution.values):
            self.keep(cover.counts_of(values))
        # The 1e-9 on every price only breaks ties: what it can add is taken off again.
        added = 1e-9 * max(sum(solution.values[y] for y in cover.counts), 1.0) * 2.0
        return float(max(0.0, -solution.bound / scale - added))

    def keep(self, counts: Mapping[str, int]) -> _Column | None:
        """The column of these instances, None where they do not serve the model."""
        key = tuple(sorted(counts.items()))
        if (known := self._columns.get(key)) is not None:
            return known
        reaches = self.reach(counts)
        if reaches <= 0:
            return None
        vector = np.array([counts.get(c.name, 0) for c in self.problem.configurations], dtype=float)
        column = self._columns[key] = _Column(dict(counts), vector @ self.usage, reaches)
        return column

    def reach(self, counts: Mapping[str, int]) -> float:
        """The most lambda that these instances serve."""
        for c, y in zip(self.problem.configurations, self._fixed.counts, strict=True):
            count = float(counts.get(c.name, 0))
            self._fixed.program.set_bounds(y, count, count)
        solution = self._fixed.program.solve(SolveLimits())
        return 0.0 if solution is None else float(solution.values[self._fixed.rate])


class Decomposition:
    """The search for one problem: `best` and `bound` come closer until the limits are reached."""

    def __init__(self, problem: Problem, limits: SolveLimits, on_progress: OnProgress | None = None) -> None:
        self._limits = limits
        self._on_progress = on_progress or (lambda _best, _bound: None)
        self._problem = problem
        self._random = random.Random(limits.seed)
        rows = resource_rows(problem)
        self._resources = {name: limit for name, (row, limit) in rows.items() if limit > 0 and any(row)}
        self._models = {model: _Model(problem.only([model]), self._resources) for model in problem.models}
        self.bound, prices = relaxation(problem)
        self._prices = np.array([prices.get(name, 0.0) for name in self._resources])
        if not self._prices.sum() > 0:
            self._prices = np.full(len(self._resources), 1.0 / max(1, len(self._resources)))
        self._precision = _COARSEST
        self._centre, self._centre_worth = self._prices, 0.0
        self._pool = ThreadPoolExecutor(_THREADS)
        self.counts: dict[str, int] = {}
        self.reached = 0.0

    def run(self) -> None:
        """Rounds of prices, neighbourhood searches where those are stuck, until the limits are reached."""
        # Something to hold soon, whatever ends the search.
        self._precision = _ROUGH
        self._round(_EARLY * self.bound)
        self._precision = _COARSEST
        rate = self.bound
        while not self._done() and self.reached < rate * (1.0 - _NEAR):
            total, taken = self._round(rate)
            rate *= 1.0 - 0.8 * (total - 1.0) if total > _FAR else 1.0 / min(max(taken, 1.0005), 1.05)
        stuck = 0
        while not self._done():
            before = self.reached, self.bound
            self._precision = min(_COARSEST, max(_FINEST, 0.2 * (self.bound / self.reached - 1.0)))
            self._round(self.reached + (self.bound - self.reached) * _WHERE[stuck % len(_WHERE)])
            stuck = 0 if (self.reached, self.bound) != before else stuck + 1
            if stuck >= len(_WHERE) and not self._done():
                self._search_neighbourhoods()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    # --- rounds of prices ---

    def _round(self, rate: float) -> tuple[float, float]:
        """Price every model at `rate`, take the best whole columns, learn new prices.

        Returns the least share of the resources that the prices prove is needed, and what the columns take.
        """
        total = self._price_all(rate, self._prices)
        if total > 1.0 + 1e-9:
            self.bound = min(self.bound, rate)
            self._on_progress(self.reached or math.nan, self.bound)
        if total / rate > self._centre_worth:
            self._centre, self._centre_worth = self._prices, total / rate
        prices = self._master(rate)
        taken = self._choose_columns(rate)
        # Prices of few columns are wild: a step from the best prices so far towards them.
        self._prices = _KEEP * self._centre + (1.0 - _KEEP) * prices
        return total, taken

    def _price_all(self, rate: float, prices: NDArray[np.float64]) -> float:
        """The least cost of all models at these prices, a lower bound of it."""
        return math.fsum(
            self._pool.map(
                lambda model: model.price(rate, prices, self._limits, self._precision), self._models.values()
            )
        )

    def _master(self, rate: float) -> NDArray[np.float64]:
        """Prices at which the known columns, taken in part, need the least of the scarcest resource."""
        program, _, rows, _ = self._master_program(rate, integer=False)
        solution = None if program is None else program.solve(SolveLimits())
        if solution is None:
            return self._prices
        prices = np.abs(solution.duals[rows])
        total = float(prices.sum())
        return np.asarray(prices / total) if total > 0 else self._prices

    def _master_program(
        self, rate: float, *, integer: bool
    ) -> tuple[LinearProgram | None, int, list[int], list[tuple[int, _Column]]]:
        program = LinearProgram()
        share = program.column(-1.0)
        picked: list[tuple[int, _Column]] = []
        for model in self._models.values():
            able = [column for column in model.columns if column.reaches >= rate * (1.0 - _SLACK)]
            if not able:
                return None, share, [], []
            indices = [program.column(upper=1.0, integer=integer) for _ in able]
            program.row([(index, 1.0) for index in indices], 1.0, 1.0)
            picked += zip(indices, able, strict=True)
        rows = [
            program.row([(share, -1.0), *((index, float(c.usage[r])) for index, c in picked)], upper=0.0)
            for r in range(len(self._resources))
        ]
        return program, share, rows, picked

    # --- plans ---

    def _choose_columns(self, rate: float) -> float:
        """Take one whole column a model that reaches `rate`; returns the share of the scarcest resource."""
        program, share, _, picked = self._master_program(rate, integer=True)
        if program is None:
            return INFINITY
        deadline = min(self._limits.deadline, time.monotonic() + _STEP_S)
        solution = program.solve(replace(self._limits, gap=1e-3, deadline=deadline))
        if solution is None or solution.values[share] > 1.0 + 1e-9:
            return INFINITY if solution is None else float(solution.values[share])
        counts: dict[str, int] = {}
        for index, column in picked:
            if solution.values[index] > 0.5:
                counts |= column.counts
        self._adopt(counts)
        return float(solution.values[share])

    def _adopt(self, counts: dict[str, int]) -> bool:
        """Take these instances if they serve more; whether they did."""
        reached = min(self._reach_of(model, counts) for model in self._models)
        if reached <= self.reached:
            return False
        self.counts, self.reached = counts, reached
        self._on_progress(self.reached, self.bound)
        return True

    def _reach_of(self, model: str, counts: Mapping[str, int]) -> float:
        column = self._models[model].keep(self._own(model, counts))
        return 0.0 if column is None else column.reaches

    def _own(self, model: str, counts: Mapping[str, int]) -> dict[str, int]:
        names = {c.name for c in self._models[model].problem.configurations}
        return {name: count for name, count in counts.items() if name in names}

    def _search_neighbourhoods(self) -> bool:
        """Free the models that hold the rest back, with some others, and plan them anew in what they have.

        Ends after some steps in vain; whether any step helped.
        """
        failures, before = 0, self.reached
        while not self._done() and failures < _STEPS_IN_VAIN:
            reaches = {model: self._reach_of(model, self.counts) for model in self._models}
            ascending = sorted(reaches, key=lambda model: reaches[model])
            size = min(len(ascending), _FREED[min(failures // 4, len(_FREED) - 1)])
            freed = [ascending[0]]
            others = ascending[1:]
            # Those with most to spare, or any.
            weights = [reaches[model] / self.reached - 1.0 + 0.002 for model in others]
            while len(freed) < size:
                chosen = self._random.choices(range(len(others)), weights)[0]
                freed.append(others.pop(chosen))
                weights.pop(chosen)
            failures = 0 if self._replan(freed) else failures + 1
        return self.reached > before

    def _replan(self, freed: list[str]) -> bool:
        problem = self._problem
        names = {c.name for model in freed for c in self._models[model].problem.configurations}
        held = {name: count for name, count in self.counts.items() if name not in names}
        configurations: dict[str, Configuration] = {c.name: c for c in problem.configurations}
        cost = math.fsum(configurations[name].price_per_hour * count for name, count in held.items())
        taken: dict[str, int] = {}
        for name, count in held.items():
            for gpu, each in configurations[name].gpus.items():
                taken[gpu] = taken.get(gpu, 0) + each * count
        part = replace(
            problem.only(freed),
            budget_per_hour=problem.budget_per_hour - cost,
            available={gpu: limit - taken.get(gpu, 0) for gpu, limit in problem.available.items()},
        )
        formulation = Formulation(part)
        program = formulation.program
        # More than this is of no use while the others are what they are.
        ceiling = min(
            (self._reach_of(model, self.counts) for model in self._models if model not in freed),
            default=INFINITY,
        )
        program.set_bounds(formulation.rate, self.reached, max(ceiling, self.reached * 1.0005))
        limits = replace(
            self._limits, gap=1e-4, deadline=min(self._limits.deadline, time.monotonic() + _STEP_S)
        )
        solution = program.solve(limits)
        if solution is None or solution.values[formulation.rate] <= self.reached * (1.0 + 1e-7):
            return False
        return self._adopt(held | formulation.counts_of(solution.values))

    def _done(self) -> bool:
        return self._limits.over or self.bound <= self.reached * (1.0 + self._limits.gap)


def solve(problem: Problem, limits: SolveLimits, on_progress: OnProgress | None = None) -> RentPlan:
    """The best plan found within the limits, by one program or by decomposition, with a proven bound.

    Raises `PlanError` where there is none.
    """
    pruned = prune(problem)
    require_served(problem, pruned)
    if len(problem.models) < FEWEST_MODELS or problem.request_rate is not None:
        return solve_directly(problem, limits, on_progress=on_progress)
    search = Decomposition(pruned, limits, on_progress)
    try:
        search.run()
    finally:
        search.close()
    if not search.counts:
        return solve_directly(
            problem, replace(limits, deadline=limits.deadline + 5.0), on_progress=on_progress
        )
    plan = assign(problem, search.counts, search.bound)
    assert plan is not None, "expected the instances found to serve every workload"
    return plan
