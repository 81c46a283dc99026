"""A running plan and a change: the new plan, and the moves that lead to it, weighed against what they cost.

An instance that is started loads its model for some minutes, and serves nothing meanwhile. Over a horizon
(the time until the next change is expected) it is worth that much less than one that keeps running. The
program maximises what the fleet serves over the horizon; where that would keep less than a given share of a
plan from scratch, moves are made cheaper until it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetlb.errors import PlanError
from hetlb.plan import decompose
from hetlb.plan.highs import INFINITY, OnProgress, SolveLimits
from hetlb.plan.rent import Formulation, Plan, Problem, assign

#: How much cheaper moves become in each further try.
_CHEAPER = 0.4
_TRIES = 4
#: The gap of the further tries: a better plan than this is not worth a move.
_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Seconds that loading a model takes, seconds until the next change, and the share of a plan from
    scratch that must be kept.
    """

    load_s: float = 300.0
    horizon_s: float = 3600.0
    keep: float = 0.95

    @property
    def discount(self) -> float:
        """The part of the horizon in which a started instance serves nothing."""
        return min(1.0, self.load_s / self.horizon_s)


@dataclass(frozen=True)
class Moves:
    """Instances to start and to stop, by configuration."""

    start: Mapping[str, int]
    stop: Mapping[str, int]

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self.start.values()) + sum(self.stop.values())


@dataclass(frozen=True)
class Replanned:
    """The new plan and its moves, beside a plan from scratch and its moves."""

    plan: Plan
    moves: Moves
    scratch: Plan
    scratch_moves: Moves


def moves_between(old: Mapping[str, int], new: Mapping[str, int]) -> Moves:
    """What leads from one set of instances to another."""
    names = dict.fromkeys([*old, *new])
    difference = {name: new.get(name, 0) - old.get(name, 0) for name in names}
    return Moves(
        {name: count for name, count in difference.items() if count > 0},
        {name: -count for name, count in difference.items() if count < 0},
    )


def replan(
    problem: Problem,
    old: Mapping[str, int],
    cost: MoveCost,
    limits: SolveLimits,
    on_progress: OnProgress | None = None,
) -> Replanned:
    """A plan for the changed `problem` that follows `old`. Raises `PlanError` where there is none."""
    scratch = decompose.solve(problem, limits, on_progress)
    best, discount = scratch, cost.discount
    for _ in range(_TRIES):
        found = _with_moves(problem, old, discount, replace(limits, gap=max(_GAP, limits.gap)))
        if found is not None and _keeps(problem, found, scratch, cost.keep):
            best = found
            break
        discount *= _CHEAPER
    return Replanned(best, moves_between(old, best.counts), scratch, moves_between(old, scratch.counts))


def _keeps(problem: Problem, found: Plan, scratch: Plan, share: float) -> bool:
    if problem.request_rate is None:
        return found.throughput >= share * scratch.throughput
    return found.cost_per_hour * share <= scratch.cost_per_hour


def _with_moves(
    problem: Problem, old: Mapping[str, int], discount: float, limits: SolveLimits
) -> Plan | None:
    """The plan that serves most over the horizon (with a target rate: costs least)."""
    # What runs stays worth considering, whatever else would be better from scratch.
    usable = tuple(c for c in problem.configurations if problem.most(c) >= 1 and c.modes)
    formulation = Formulation(replace(problem, configurations=usable))
    program = formulation.program
    for c, y, modes in zip(usable, formulation.counts, formulation.modes, strict=True):
        fixed_rate = problem.request_rate is not None
        started = program.column(-c.price_per_hour * discount if fixed_rate else 0.0)
        program.row([(started, 1.0), (y, -1.0)], lower=-float(old.get(c.name, 0)))
        if not fixed_rate:
            program.row([(y, -1.0), (started, discount), *((u, 1.0) for u in modes)], upper=0.0)
    solution = program.solve(limits)
    if solution is None:
        return None
    counts = formulation.counts_of(solution.values)
    bound = 0.0 if problem.request_rate is not None else INFINITY
    return assign(problem, counts, bound)


def require_known(problem: Problem, old: Mapping[str, int]) -> dict[str, int]:
    """The running instances that the changed problem still knows; all others are lost.

    Raises `PlanError` where none is.
    """
    names = {c.name for c in problem.configurations}
    kept = {name: count for name, count in old.items() if name in names}
    if old and not kept:
        raise PlanError(f"the running plan: expected configurations of this market, got {', '.join(old)}")
    return kept
