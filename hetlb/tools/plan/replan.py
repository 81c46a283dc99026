"""A running plan and a change: the new plan, and the moves that lead to it, weighed against their cost.

An instance that is started loads its model for some minutes, and serves nothing meanwhile. Over a horizon
(the time until the next change is expected) it is worth that much less than one that keeps running. First
the fewest moves are found that keep a given share of what a plan from scratch would serve, then, with no
more moves than that, the plan that serves most over the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetlb.errors import PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.highs import INFINITY, OnProgress, SolveLimits
from hetlb.tools.plan.market import MoveCost
from hetlb.tools.plan.rent_program import Formulation, Problem, RentPlan, assign, cost_of

#: Relative gap of all programs: a smaller gain is not worth a move.
_RELATIVE_GAP = 1e-3


@dataclass(frozen=True)
class Moves:
    """Instances to start and to stop, by configuration."""

    start: Mapping[str, int]
    stop: Mapping[str, int]

    @property
    def count(self) -> int:
        return sum(self.start.values()) + sum(self.stop.values())


def moves_between(old: Mapping[str, int], new: Mapping[str, int]) -> Moves:
    names = dict.fromkeys([*old, *new])
    difference = {name: new.get(name, 0) - old.get(name, 0) for name in names}
    return Moves(
        {name: count for name, count in difference.items() if count > 0},
        {name: -count for name, count in difference.items() if count < 0},
    )


@dataclass(frozen=True)
class Replanned:
    """The new plan that follows `old` instances, beside a plan from scratch."""

    old: Mapping[str, int]
    plan: RentPlan
    scratch: RentPlan

    @property
    def moves(self) -> Moves:
        return moves_between(self.old, self.plan.counts)

    @property
    def scratch_moves(self) -> Moves:
        return moves_between(self.old, self.scratch.counts)


def replan(
    problem: Problem,
    old: Mapping[str, int],
    cost: MoveCost,
    limits: SolveLimits,
    on_progress: OnProgress | None = None,
) -> Replanned:
    """Return a plan for the changed `problem` that follows `old`. Raises `PlanError` if there is none."""
    limits = replace(limits, gap=max(_RELATIVE_GAP, limits.gap))
    scratch = decompose.solve(problem, limits, on_progress)
    best = scratch
    if old:
        share = cost.keep if problem.request_rate is None else 1.0 / max(cost.keep, 1e-9)
        kept = share * problem.worth(scratch)
        fewest = _solve(problem, old, cost, limits, kept=kept)
        if fewest is not None:
            count = moves_between(old, fewest.counts).count
            best = _solve(problem, old, cost, limits, most_moves=count) or fewest
            if problem.worth(best) < kept - 1e-9 * abs(kept):
                best = fewest
    return Replanned(old, best, scratch)


def _solve(
    problem: Problem,
    old: Mapping[str, int],
    cost: MoveCost,
    limits: SolveLimits,
    *,
    kept: float | None = None,
    most_moves: int | None = None,
) -> RentPlan | None:
    """Return a plan that follows the `old` instances, None without one.

    With `kept`: the plan with the fewest moves among plans worth `kept`. With `most_moves`: the best plan
    over the horizon with no more moves than that.
    """
    # Running instances stay in the program, even if a plan from scratch would not choose them.
    usable = tuple(c for c in problem.configurations if problem.most(c) >= 1 and c.modes)
    formulation = Formulation(replace(problem, configurations=usable))
    program, target = formulation.program, problem.request_rate
    moves: list[tuple[int, float]] = []
    gone = sum(count for name, count in old.items() if name not in {c.name for c in usable})
    for c, y, modes in zip(usable, formulation.counts, formulation.modes, strict=True):
        running = float(old.get(c.name, 0))
        started, stopped = program.column(), program.column()
        program.row([(started, 1.0), (y, -1.0)], lower=-running)
        program.row([(stopped, 1.0), (y, 1.0)], lower=running)
        moves += [(started, 1.0), (stopped, 1.0)]
        if kept is not None:
            program.set_cost(y, 0.0)
        elif target is not None:
            program.set_cost(started, -problem.price(c) * cost.discount)
        else:
            program.row([(y, -1.0), (started, cost.discount), *((u, 1.0) for u in modes)], upper=0.0)
    if kept is None:
        program.row(moves, upper=float((most_moves or 0) - gone))
    else:
        for column, each in moves:
            program.set_cost(column, -each)
        program.set_cost(formulation.rate, 0.0)
        if target is None:
            program.set_bounds(formulation.rate, kept, INFINITY)
        else:
            prices = ((y, problem.price(c)) for c, y in zip(usable, formulation.counts, strict=True))
            program.row(prices, upper=-kept)
    solution = program.solve(limits)
    if solution is None:
        return None
    counts = formulation.counts_of(solution.values)
    plan = assign(problem, counts, 0.0 if target is not None else INFINITY)
    if plan is None:
        return None
    # An instance without work that runs already need not be stopped.
    return replace(plan, counts=counts, cost_per_hour=cost_of(problem, counts))


def require_known(problem: Problem, old: Mapping[str, int]) -> dict[str, int]:
    """Return the running instances that the changed problem still knows. Raises `PlanError` if none is."""
    names = {c.name for c in problem.configurations}
    kept = {name: count for name, count in old.items() if name in names}
    if old and not kept:
        raise PlanError(f"the running plan: expected configurations of this market, got {', '.join(old)}")
    return kept
