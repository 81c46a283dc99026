"""Placements as one chain of stages with several machines each, by column generation at a given flow.

A stage is a number of layers and the machines that hold them, whose rates add up to the flow. At a flow the
linear program

    max sum layers_c x_c   with   sum_c machines_gc x_c <= number of g, for every group g

says how many layers its machines can cover; the flow is reached where whole stages cover all. Stages are made
when their price is right: the cheapest machines whose rates reach the flow, a knapsack of a few kinds. The
highest flow is found by bisection. Where pipelines (`columns`) leave machines over, stages use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetlb.plan.highs import LinearProgram, SolveLimits
from hetlb.plan.placement.columns import groups_of
from hetlb.plan.placement.flow import max_flow
from hetlb.plan.placement.heuristics import Intervals
from hetlb.plan.placement.place_cluster import PlaceCluster

_MOST_ROUNDS = 60
#: Halvings of the interval between a known flow and the bound, and seconds of each program.
_HALVINGS = 8
_PROGRAM_S = 2.0
#: Steps of one knapsack.
_MOST_STEPS = 4000
_WORTH = 1e-6
#: Share of a flow that the links must carry for a higher one to be tried.
_LINKS_CARRY = 0.9


@dataclass(frozen=True, slots=True)
class _Stage:
    """So many layers, and machines of each group."""

    layers: int
    counts: tuple[int, ...]


class StageChain:
    """The search for one cluster. A stage is in one region, and stages of a region stand together."""

    def __init__(self, cluster: PlaceCluster) -> None:
        self._cluster = cluster
        self._layers = cluster.model.layers
        self._groups = groups_of(cluster)
        self._regions: dict[str, list[int]] = {}
        for g, group in enumerate(self._groups):
            self._regions.setdefault(group.nodes[0].region, []).append(g)

    def highest(self, low: float, high: float, limits: SolveLimits) -> Intervals | None:
        """The placement of the highest flow found between both."""
        best, most = None, 0.0
        for _ in range(_HALVINGS):
            if limits.over:
                break
            # Nearer to what is known: whole stages seldom come close to the bound.
            flow = 0.6 * low + 0.4 * high
            stages = self._cover(flow, limits)
            if stages is None:
                high = flow
                continue
            placement = self._placement(stages)
            reached = max_flow(self._cluster, placement).tokens_per_s
            if reached > most:
                best, most = placement, reached
            # Links between regions may let less through: then a lower flow has stages that suit them better.
            if reached >= _LINKS_CARRY * flow:
                low = flow
            else:
                high = flow
        return best

    def _cover(self, flow: float, limits: SolveLimits) -> list[_Stage] | None:
        """Whole stages for all layers, None where none were found."""
        known: dict[_Stage, None] = dict.fromkeys(self._cheapest(flow, [1.0] * len(self._groups)))
        for _ in range(_MOST_ROUNDS):
            if not known or limits.over:
                return None
            covered, duals = self._relaxed(list(known))
            new = [
                stage
                for stage in self._cheapest(flow, duals)
                if stage.layers
                > (1.0 + _WORTH) * sum(n * d for n, d in zip(stage.counts, duals, strict=True))
            ]
            fresh = [stage for stage in new if stage not in known]
            if not fresh:
                break
            known.update(dict.fromkeys(fresh))
        if covered < self._layers * (1.0 - 1e-9):
            return None
        return self._whole(list(known), limits)

    def _relaxed(self, stages: Sequence[_Stage]) -> tuple[float, list[float]]:
        program = LinearProgram()
        columns = [program.column(float(stage.layers)) for stage in stages]
        self._machine_rows(program, stages, columns)
        solution = program.solve(SolveLimits())
        assert solution is not None, "expected no stages at all to be feasible"
        return solution.objective, [abs(float(dual)) for dual in solution.duals]

    def _whole(self, stages: Sequence[_Stage], limits: SolveLimits) -> list[_Stage] | None:
        program = LinearProgram()
        covered = program.column(1.0, upper=float(self._layers))
        columns = [program.column(integer=True) for _ in stages]
        self._machine_rows(program, stages, columns)
        held = [(column, float(stage.layers)) for column, stage in zip(columns, stages, strict=True)]
        program.row([(covered, -1.0), *held], lower=0.0)
        solution = program.solve(limits.within(_PROGRAM_S))
        if solution is None or solution.objective < self._layers - 1e-6:
            return None
        return [
            stage
            for stage, column in zip(stages, columns, strict=True)
            for _ in range(round(solution.values[column]))
        ]

    def _machine_rows(self, program: LinearProgram, stages: Sequence[_Stage], columns: Sequence[int]) -> None:
        for g, group in enumerate(self._groups):
            entries = [(c, float(stage.counts[g])) for c, stage in zip(columns, stages, strict=True)]
            program.row(entries, upper=float(len(group.nodes)))

    def _cheapest(self, flow: float, prices: Sequence[float]) -> list[_Stage]:
        """For every number of layers the machines of the least price that reach the flow."""
        groups = self._groups
        most = max(len(group.rates) for group in groups)
        found = []
        for region in self._regions.values():
            for layers in range(1, most):
                able = [
                    (prices[g], groups[g].rates[layers], len(groups[g].nodes), g)
                    for g in region
                    if layers < len(groups[g].rates)
                ]
                counts = _cheapest_cover(able, flow)
                if counts is not None:
                    found.append(_Stage(layers, tuple(counts.get(g, 0) for g in range(len(groups)))))
        return found

    def _placement(self, stages: list[_Stage]) -> Intervals:
        free = [list(group.nodes) for group in self._groups]
        over = sum(stage.layers for stage in stages) - self._layers
        placement: Intervals = {}
        at = 0
        for stage in self._ordered(stages):
            less = min(over, stage.layers - 1)
            over -= less
            end = at + stage.layers - less
            for g, count in enumerate(stage.counts):
                for _ in range(count):
                    placement[free[g].pop(0).name] = (at, end)
            at = end
        return placement

    def _ordered(self, stages: list[_Stage]) -> list[_Stage]:
        """Region by region; at both ends of each the stages with most machines, which have most links."""
        found: list[_Stage] = []
        for region in self._regions.values():
            own = [stage for stage in stages if any(stage.counts[g] for g in region)]
            own.sort(key=lambda each: (sum(each.counts), each.counts, each.layers), reverse=True)
            found += [*own[0::2], *reversed(own[1::2])]
        return found


def _cheapest_cover(able: list[tuple[float, float, int, int]], flow: float) -> dict[int, int] | None:
    """Machines (price, rate, number, group) whose rates reach the flow at the least price, by group."""
    order = sorted(able, key=lambda each: (each[0] / min(each[1], flow), -each[1]))
    best_cost, best = math.inf, None
    stack: list[tuple[int, float, float, tuple[tuple[int, int], ...]]] = [(0, flow, 0.0, ())]
    steps = 0
    while stack and steps < _MOST_STEPS:
        steps += 1
        index, left, cost, taken = stack.pop()
        if left <= flow * 1e-9:
            if cost < best_cost:
                best_cost, best = cost, dict(taken)
            continue
        if index == len(order) or cost + left * order[index][0] / order[index][1] >= best_cost - 1e-12:
            continue
        price, rate, number, group = order[index]
        stack += [  # the most of the cheapest comes first
            (index + 1, left - count * rate, cost + count * price, (*taken, (group, count)))
            for count in range(min(number, math.ceil(left / rate)) + 1)
        ]
    return best
