"""Plans for many models at once: one small program a model, a price on every shared resource.

At a fixed rate lambda the models have nothing in common but budget and GPUs. A column is a set of instances
that serves one model at that rate; a master program picks one column a model (Dantzig and Wolfe, 1960).
With prices pi >= 0 on the resources, each scaled to 1 and pi summing to 1, the sum over models of the least
pi-cost of serving it at lambda is a lower bound on the share of the scarcest resource that any plan takes:
above 1, no plan reaches lambda. That bound rests on the bounds of the small programs alone. Plans come from
the master over whole columns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetlb.errors import PlanError
from hetlb.tools.plan.highs import INFINITY, LinearProgram, OnProgress, Solution, SolveLimits
from hetlb.tools.plan.rent_program import (
    Formulation,
    Problem,
    RentPlan,
    assign,
    prune,
    relaxation,
    resource_rows,
)
from hetlb.tools.plan.rent_program import solve as solve_directly

#: Share of the time in which one program may solve it, and the most seconds. Of few models or GPUs it does,
#: and better.
_ONE_PROGRAM_SHARE, _ONE_PROGRAM_S = 0.25, 60.0
#: Relative gap of the small programs, at first and at the finest. Their bounds prove the result, not their
#: solutions.
_COARSEST_GAP = 0.1
_FINEST_GAP = 2e-4
#: Seconds of a small program, and of a master over whole columns.
_PRICING_S, _MASTER_S = 5.0, 4.0
#: Share of the time. If no plan is found by then, one program gets the rest.
_FIRST_SHARE = 0.6
#: Share of a column's rate that the feasibility tolerance of the solver may be short of.
_RATE_TOLERANCE = 1e-5
#: Weight of the best prices so far when they are moved towards the master's prices.
_KEPT_SHARE = 0.8
#: Rates of the next rounds, as shares of the way from plan to bound, while neither changes.
_LOOK_SHARES = (0.65, 0.4, 0.2)
#: Rounds in which neither changes, after which neither is expected to.
_MOST_STUCK = 30
#: Small programs are solved side by side, in threads: the solver works without the interpreter's lock.
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Column:
    """Instances of one model: the share of every resource they take, and the rate lambda they reach."""

    counts: Mapping[str, int]
    usage: NDArray[np.float64]
    reaches: float


class _Model:
    """Columns of one model, and the small program that finds them: the least price to serve it at a rate."""

    def __init__(self, problem: Problem, resources: Mapping[str, float]) -> None:
        self.columns: dict[tuple[tuple[str, int], ...], _Column] = {}
        self._problem = problem
        self._usage = np.array(
            [
                [
                    (problem.price(c) if name == "budget" else c.gpus.get(name, 0)) / limit
                    for name, limit in resources.items()
                ]
                for c in problem.configurations
            ]
        )
        self._cover = Formulation(problem)
        self._cover.program.set_cost(self._cover.rate, 0.0)

    def price(self, rate: float, prices: NDArray[np.float64], limits: SolveLimits, gap: float) -> float:
        """Return a lower bound of the cost of serving at `rate`, infinite if impossible."""
        cover = self._cover
        cost = self._usage @ prices
        # HiGHS tolerates 1e-7: costs of about 1 are far above that.
        scale = 1.0 / max(float(cost.min(initial=INFINITY, where=cost > 0)), 1e-9)
        for y, each in zip(cover.counts, cost, strict=True):
            cover.program.set_cost(y, -(each + 1e-9) * scale)
        cover.program.set_bounds(cover.rate, rate, INFINITY)
        found: list[NDArray[np.float64]] = []
        pricing = limits.within(_PRICING_S, gap)
        solution = cover.program.solve(pricing, on_solution=found.append)
        if solution is None:
            return 0.0 if pricing.over else INFINITY
        for values in (*found, solution.values):
            self._keep(cover.counts_of(values))
        # The 1e-9 on every price only breaks ties: its effect is taken off again.
        added = 1e-9 * max(sum(solution.values[y] for y in cover.counts), 1.0) * 2.0
        return float(max(0.0, -solution.bound / scale - added))

    def _keep(self, counts: Mapping[str, int]) -> None:
        key = tuple(counts.items())
        if key in self.columns or (plan := assign(self._problem, counts)) is None:
            return
        own = np.array([plan.counts.get(c.name, 0) for c in self._problem.configurations], dtype=float)
        self.columns[key] = _Column(plan.counts, own @ self._usage, plan.throughput)


class Decomposition:
    """The search for one problem: `reached` and `bound` come closer until the limits are reached."""

    def __init__(self, problem: Problem, limits: SolveLimits, on_progress: OnProgress | None = None) -> None:
        self._limits = limits
        self._on_progress = on_progress or (lambda _best, _bound: None)
        rows = resource_rows(problem)
        self._resources = {name: limit for name, (row, limit) in rows.items() if limit > 0 and any(row)}
        self._models = [_Model(problem.only(model), self._resources) for model in problem.models]
        self.bound, prices = relaxation(problem)
        self._prices = np.array([prices.get(name, 0.0) for name in self._resources])
        if not self._prices.sum() > 0:
            self._prices = np.full(len(self._resources), 1.0 / max(1, len(self._resources)))
        self._centre, self._centre_worth = self._prices, 0.0
        self.counts: dict[str, int] = {}
        self.reached = 0.0

    def run(self) -> None:
        """Run rounds of prices until the limits are reached, or many rounds change nothing."""
        stuck, first = 0, self._limits.within(_FIRST_SHARE * self._limits.left_s)
        with ThreadPoolExecutor(_THREADS) as pool:
            while stuck < _MOST_STUCK and self.bound > self.reached * (1.0 + self._limits.gap):
                limits = self._limits if self.counts else first
                if limits.over:
                    break
                before = self.reached, self.bound
                rate = self.reached + (self.bound - self.reached) * _LOOK_SHARES[stuck % len(_LOOK_SHARES)]
                self._price(rate, pool, limits)
                self._choose(rate, limits)
                stuck = 0 if (self.reached, self.bound) != before else stuck + 1

    def _price(self, rate: float, pool: ThreadPoolExecutor, limits: SolveLimits) -> None:
        """Price every model at `rate`, and learn new prices from the columns known then."""
        left = self.bound / self.reached - 1.0 if self.reached > 0.0 else INFINITY
        arguments = rate, self._prices, limits, min(_COARSEST_GAP, max(_FINEST_GAP, 0.2 * left))
        total = math.fsum(pool.map(lambda model: model.price(*arguments), self._models))
        if total > 1.0 + 1e-9:
            self.bound = min(self.bound, rate)
            self._on_progress(self.reached or math.nan, self.bound)
        if total / rate > self._centre_worth:
            self._centre, self._centre_worth = self._prices, total / rate
        solution, rows, _ = self._master(rate, SolveLimits())
        if solution is not None and (duals := np.abs(solution.duals[rows])).sum() > 0:
            # Prices of few columns are wild: a step from the best prices so far towards them.
            self._prices = _KEPT_SHARE * self._centre + (1.0 - _KEPT_SHARE) * duals / duals.sum()

    def _choose(self, rate: float, limits: SolveLimits) -> None:
        """Choose one whole column of each model that reaches `rate`.

        The choice counts if the columns fit together and serve more than before.
        """
        solution, _, picked = self._master(rate, limits.within(_MASTER_S, 1e-3), integer=True)
        if solution is None or -solution.objective > 1.0 + 1e-9:
            return
        chosen = [column for index, column in picked if solution.values[index] > 0.5]
        reached = min(column.reaches for column in chosen)
        if reached > self.reached:
            self.counts, self.reached = {}, reached
            for column in chosen:
                self.counts |= column.counts
            self._on_progress(self.reached, self.bound)

    def _master(
        self, rate: float, limits: SolveLimits, *, integer: bool = False
    ) -> tuple[Solution | None, list[int], list[tuple[int, _Column]]]:
        """Return the columns, whole or in part, that reach `rate` with the least of the scarcest resource.

        Returns the rows of the resources and the columns with their indices, too.
        """
        program = LinearProgram()
        share = program.column(-1.0)
        picked: list[tuple[int, _Column]] = []
        for model in self._models:
            able = [
                column
                for column in model.columns.values()
                if column.reaches >= rate * (1.0 - _RATE_TOLERANCE)
            ]
            if not able:
                return None, [], []
            indices = [program.column(upper=1.0, integer=integer) for _ in able]
            program.row([(index, 1.0) for index in indices], 1.0, 1.0)
            picked += zip(indices, able, strict=True)
        rows = [
            program.row([(share, -1.0), *((index, float(c.usage[r])) for index, c in picked)], upper=0.0)
            for r in range(len(self._resources))
        ]
        return program.solve(limits), rows, picked


def solve(problem: Problem, limits: SolveLimits, on_progress: OnProgress | None = None) -> RentPlan:
    """Return the best plan with a proven bound. Raises `PlanError`.

    One program begins; what it cannot solve in its share of the time a decomposition goes on with.
    """
    if len(problem.models) < 2 or problem.request_rate is not None:
        return solve_directly(problem, limits, on_progress)
    first, start = limits.within(min(_ONE_PROGRAM_SHARE * limits.left_s, _ONE_PROGRAM_S)), None
    try:
        start = solve_directly(problem, first, on_progress)
    except PlanError:
        if not first.over:
            raise
    if start is not None and start.gap(problem) <= limits.gap:
        return start
    search = Decomposition(prune(problem), limits, on_progress)
    if start is not None:
        search.counts, search.reached = dict(start.counts), start.throughput
        search.bound = min(search.bound, start.bound)
    search.run()
    if not search.counts:
        return solve_directly(problem, limits, on_progress)
    plan = assign(problem, search.counts, search.bound)
    assert plan is not None, "expected the instances found to serve every workload"
    return plan
