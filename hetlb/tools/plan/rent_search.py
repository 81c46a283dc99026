"""The best measured plan of a market: programs propose plans, and each plan is measured on its own mixes.

The program knows of each configuration what was measured: each type alone, the whole mix, and the mixes of
earlier plans. In between it interpolates, so that what a plan promises is not what it serves. Every plan is
therefore measured, and the answer is the best measured one of all rounds. An instance may serve less of a
mix than by turns, which no linear program describes: a program may miss a plan of fewer offers that is
better. So each part of the market is planned by itself, too, with and without pipelines, with one degree, and
with the budget divided evenly: offers that are taken away leave parts that were planned already, and an offer
that no best plan rents changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

from hetlb.errors import PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.highs import INFINITY, OnProgress, SolveLimits
from hetlb.tools.plan.planning import Table, mix_rate
from hetlb.tools.plan.rent_baselines import by_degree, uniform, without_pipelines
from hetlb.tools.plan.rent_program import (
    Configuration,
    Problem,
    RentPlan,
    SolvedPlan,
    assign,
    relaxation,
)
from hetlb.tools.plan.throughput import Measured
from hetlb.tools.sim.deadline import StoppedError, look

#: Rounds of measuring a plan's mixes and planning anew, and the relative difference that ends them.
_MOST_ROUNDS = 5
_AGREED_SHARE = 0.005
#: Plans within this share of each other are equally good: the cheapest is taken.
_EVEN_SHARE = 0.001
#: Most offers planned in every combination. Of more, only single ones, pairs, all but one, and all are
#: planned.
_MOST_COMBINED = 5

#: Limits of a plan that is made when no time is left.
_LATE_S, _LATE_GAP = 2.0, 0.01

OnBest = Callable[[RentPlan], None]


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan with the rates that its instances were measured to serve together.

    `kept`: measured over planned rate, before the plan was changed to the measured rates. With a target rate,
    a plan with less than 1 misses it.
    """

    plan: RentPlan
    kept: float = 1.0


class PlanSearch:
    """The search in one market. `on_best` is told of each better plan."""

    def __init__(
        self,
        table: Table,
        measured: Measured,
        limits: SolveLimits,
        on_progress: OnProgress | None = None,
        on_best: OnBest = lambda plan: None,
    ) -> None:
        self.best: MeasuredPlan | None = None
        self.plans = 0
        self._table = table
        self._measured = measured
        self.limits = limits
        self._on_progress = on_progress
        self._on_best = on_best
        self._rows = {kind.name: kind.rows for kind in table.problem.workloads}
        #: Measured mixes (requests/s of each type), by the kinds of GPUs of a part of the market, then by
        #: configuration.
        self._mixes: dict[frozenset[str], dict[str, list[Mapping[str, float]]]] = {}
        #: Parts of the market with mixes that the present plan may use, by their kinds of GPUs; the largest
        #: comes last.
        self._scopes: list[frozenset[str]] = []
        #: Plans by configurations, availability, and whether the mixes of smaller parts were used.
        self._known: dict[tuple[object, ...], MeasuredPlan | None] = {}

    @property
    def problem(self) -> Problem:
        """Return the table's problem with everything that was measured."""
        self._scopes = list(self._mixes)
        return self._with_mixes(self._table.problem)

    def solved(self) -> SolvedPlan:
        """Return the best measured plan; for stated throughputs the program's plan. Raises `PlanError`."""
        table = self._table
        if not table.simulated:
            plan = decompose.solve(table.problem, self.limits, self._on_progress)
            check_rent(table.problem, plan)
            return SolvedPlan(table.problem, plan)
        with suppress(StoppedError), self.limits.stopping():
            self._run()
        if self.best is None:  # no time was left to measure one
            late = SolveLimits(_LATE_GAP, time.monotonic() + _LATE_S)
            self.best = MeasuredPlan(decompose.solve(table.problem, late))
        problem, plan = self.problem, self.best.plan
        bound = _bound(problem, self.limits)
        if problem.request_rate is None:
            plan = replace(plan, bound=max(bound, plan.throughput))
        else:
            plan = replace(plan, bound=min(bound, plan.cost_per_hour))
        check_rent(problem, plan)
        return SolvedPlan(problem, plan, self.plans, 1.0 - self.best.kept)

    def plan_of(self, problem: Problem) -> RentPlan | None:
        """Return the plan of another problem, measured if the market's is.

        None if there is no plan, or no time.
        """
        if self._table.simulated:
            with suppress(StoppedError), self.limits.stopping():
                found = self.best_of(problem)
                return None if found is None else found.plan
            return None
        try:
            return decompose.solve(problem, self.limits)
        except PlanError:
            return None

    def _run(self) -> None:
        """Plan the market and its parts; set `best` to the best plan. Raises `PlanError` if there is none.

        The plan of a part depends on measurements of this part and of smaller ones alone. So one more offer
        does not change the plans of the others. If a plan leaves GPUs of its part unused, it belongs to a
        smaller part, and is skipped if all parts are planned.
        """
        whole = self._table.problem
        closed = len(_gpus(whole)) <= _MOST_COMBINED
        self._take(self.best_of(whole, required=True))
        best: MeasuredPlan | None = None
        for part in _parts(whole):
            simple = (*by_degree(part).values(), uniform(part))
            for problem, informed in ((part, False), (part, True), *((each, False) for each in simple)):
                found = self.best_of(problem, informed=informed)
                if found is None or (closed and _gpus(part, found.plan.counts) != _gpus(part)):
                    continue
                best = better(whole, best, found)
                self._take(found)
        self.best = best or self.best

    def best_of(
        self, problem: Problem, *, required: bool = False, informed: bool = False
    ) -> MeasuredPlan | None:
        """Return the best measured plan of a problem, None if it has none. Raises `StoppedError`.

        `informed`: the mixes measured for smaller parts of it are used, too.
        """
        own = _gpus(problem)
        key = (
            tuple(c.name for c in problem.configurations),
            tuple(sorted(problem.available.items())),
            informed,
        )
        if key not in self._known:
            self._mixes.setdefault(own, {})
            parts = sorted((each for each in self._mixes if each < own), key=lambda s: (len(s), sorted(s)))
            self._scopes = [*(parts if informed else ()), own]
            rounds = self._informed if informed else self._rounds
            self._known[key] = rounds(problem, required=required)
        return self._known[key]

    def _rounds(self, problem: Problem, *, required: bool) -> MeasuredPlan | None:
        best: MeasuredPlan | None = None
        starts = [
            tuple(_known_mix(problem, c, careful=careful) for c in problem.configurations)
            for careful in (True, False)
        ]
        for configurations in starts[: 1 + (starts[0] != starts[1])]:
            working = replace(problem, configurations=configurations)
            for _ in range(_MOST_ROUNDS):
                try:
                    found, corrected = self._round(working)
                except PlanError:
                    if required and best is None:
                        raise
                    break
                best = better(problem, best, found)
                if required:
                    self._take(best)
                if corrected is None:
                    break
                working = corrected
        return best

    def _informed(self, problem: Problem, *, required: bool = False) -> MeasuredPlan | None:
        best: MeasuredPlan | None = None
        for _ in range(_MOST_ROUNDS):
            try:
                found = better(problem, best, self._round(self._with_mixes(problem))[0])
            except PlanError:
                break
            if found is best:
                break
            best = found
        return best

    def _round(self, working: Problem) -> tuple[MeasuredPlan, Problem | None]:
        """Plan and measure once. Return the measured plan and a corrected problem, None if both agreed."""
        look()
        plan = decompose.solve(working, self.limits, self._on_progress)
        found, ratios = self._measure(working, plan)
        for _ in range(_MOST_ROUNDS):  # the same instances, the requests divided by measured rates
            divided = assign(self._with_mixes(working), found.plan.counts)
            if divided is None or divided.throughput <= found.plan.throughput * (1.0 + _EVEN_SHARE):
                break
            again = self._measure(working, divided)[0]
            if better(working, found, again) is found:
                break
            found = again
        if all(abs(ratio - 1.0) <= _AGREED_SHARE for ratio in ratios.values()):
            return found, None
        corrected = (self._corrected(c, ratios.get(c.name)) for c in working.configurations)
        return found, replace(working, configurations=tuple(corrected))

    def _corrected(self, c: Configuration, ratio: float | None) -> Configuration:
        """Return a configuration corrected by its ratio of measured to planned rate.

        If it served less than planned, all its rates are lowered. Otherwise its measured mixes are added.
        """
        if ratio is None or ratio >= 1.0:
            return c if ratio is None else replace(c, mixes=tuple(self._known_mixes(c.name)))
        return replace(
            c,
            throughput={name: rate * ratio for name, rate in c.throughput.items()},
            mixes=tuple({n: r * ratio for n, r in mix.items()} for mix in c.mixes),
        )

    def _measure(self, working: Problem, plan: RentPlan) -> tuple[MeasuredPlan, dict[str, float]]:
        """Return the plan at the rate that its instances were measured to serve.

        Also return the ratio of measured to planned rate for each configuration.
        """
        self.plans += 1
        known, kept = working.by_name, INFINITY
        ratios: dict[str, float] = {}
        for name, count in plan.counts.items():
            c = known[name]
            rates = {kind: rate for (kind, at), rate in plan.rates.items() if at == name}
            whole = math.fsum(rates.values())
            if c.profile is None or whole <= 0.0:
                kept = min(kept, 1.0)
                continue
            mix = [(rate, self._rows[kind]) for kind, rate in sorted(rates.items())]
            served = self._measured.of_mix(c.profile, mix, c.engine_stages)
            kept = min(kept, served * count / whole)
            # Idle parts of the plan are no disagreement: the number of instances is whole.
            ratios[name] = served * c.load(rates) / whole
            own = self._mixes[self._scopes[-1]].setdefault(name, [])
            own.append({kind: served * rate / whole for kind, rate in rates.items()})
        if working.request_rate is not None or kept == INFINITY:
            return MeasuredPlan(plan, min(kept, 1.0)), ratios
        brought = {key: rate * kept for key, rate in plan.rates.items()}
        return MeasuredPlan(replace(plan, rates=brought, throughput=plan.throughput * kept)), ratios

    def _known_mixes(self, name: str) -> list[Mapping[str, float]]:
        return [mix for scope in self._scopes for mix in self._mixes[scope].get(name, ())]

    def _with_mixes(self, problem: Problem) -> Problem:
        """Return a problem with everything that was measured of its configurations."""
        found = []
        for c in problem.configurations:
            mixes = (*c.mixes, *self._known_mixes(c.name))
            unique = {tuple(sorted(mix.items())): mix for mix in mixes if len(mix) > 1}
            # A type alone may be an estimate until then: time was short.
            alone = {name: rate for mix in mixes if len(mix) == 1 for name, rate in mix.items()}
            found.append(replace(c, throughput={**c.throughput, **alone}, mixes=tuple(unique.values())))
        return replace(problem, configurations=tuple(found))

    def _take(self, found: MeasuredPlan | None) -> None:
        best = better(self._table.problem, self.best, found)
        if best is not None and best is not self.best:
            self.best = best
            self._on_best(best.plan)


def better(problem: Problem, one: MeasuredPlan | None, other: MeasuredPlan | None) -> MeasuredPlan | None:
    """Return the better of two plans, the cheaper if they are even, else the first."""
    if one is None or other is None:
        return one or other
    costs = other.plan.cost_per_hour - one.plan.cost_per_hour
    gain = other.kept - one.kept
    if problem.request_rate is None:
        gain = other.plan.throughput / one.plan.throughput - 1.0 if one.plan.throughput > 0 else 1.0
    even = abs(gain) <= _EVEN_SHARE
    return other if (costs < 0.0 if even else gain > 0.0) else one


def _known_mix(problem: Problem, c: Configuration, *, careful: bool) -> Configuration:
    """Return a configuration that takes the measured rate of the whole mix into account.

    If the mix serves more than the types one after the other, it is added as a mode. If it serves less and
    the start is `careful`, all rates are lowered by that share.
    """
    if c.mix_rate is None or len(c.throughput) < 2:
        return c
    ratio = c.mix_rate / by_turns if (by_turns := mix_rate(problem, replace(c, mix_rate=None))) > 0 else 0.0
    if ratio < 1.0:
        return replace(c, throughput={n: r * ratio for n, r in c.throughput.items()}) if careful else c
    own = [kind for kind in problem.workloads if kind.model == c.model]
    share = math.fsum(kind.share for kind in own)
    return replace(c, mixes=(*c.mixes, {kind.name: c.mix_rate * kind.share / share for kind in own}))


def _gpus(problem: Problem, counts: Mapping[str, int] | None = None) -> frozenset[str]:
    """Return the kinds of GPUs of a problem, or of a plan (`counts`) for it."""
    known = problem.by_name
    names = known if counts is None else counts
    return frozenset(gpu for name in names for gpu in known[name].gpus)


def _parts(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with each subset of its offers, the smallest first, with and without pipelines."""
    every = problem.configurations
    gpus = sorted({gpu for c in every for gpu in c.gpus})
    for size in range(1, len(gpus) + 1):
        if len(gpus) > _MOST_COMBINED and 2 < size < len(gpus) - 1:
            continue
        for chosen in combinations(gpus, size):
            part = replace(problem, configurations=tuple(c for c in every if set(c.gpus) <= set(chosen)))
            yield from (each for each in (part, without_pipelines(part)) if each.configurations)


def _bound(problem: Problem, limits: SolveLimits) -> float:
    """Return the throughput (with a target rate the cost) that no plan of the measured rates exceeds."""
    relaxed = abs(relaxation(problem)[0])
    try:
        proven = decompose.solve(problem, limits).bound
    except PlanError:  # no time is left
        return relaxed
    return min(proven, relaxed) if problem.request_rate is None else max(proven, relaxed)
