"""An exact search for the highest flow by mixed integer programming.

No placement without partial inference has a higher flow than `Solved.bound`.

The program counts machines instead of naming them: z[g, s, j] machines of kind g hold the layers [s, s + j)
and pass f[g, s, j] <= T_gj z[g, s, j] tokens/s; what ends at a layer boundary begins there. That has no
symmetry between equal machines and no big-M, unlike Helix's (ASPLOS 2025, section 4.4), which names nodes
and links. Links are left out: it is a relaxation where a link binds, and exact where none does. Rates are
capped by an upper bound, without which the relaxation would hold single layers at absurd rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetlb.plan.highs import LinearProgram, SolveLimits
from hetlb.plan.placement.flow import max_flow
from hetlb.plan.placement.heuristics import Intervals
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement, PlaceNode, alike


@dataclass(frozen=True, slots=True)
class SolvedPlacement:
    """Result of the solver: an upper bound, and the best placement it met (None if none)."""

    bound: float
    placement: Intervals | None
    optimal: bool


def solve(
    cluster: PlaceCluster, limits: SolveLimits, most: float, *, start: Placement | None = None
) -> SolvedPlacement:
    """Run the solver within limits, from `start` on. `most`: an upper bound, as from `flow_bound`."""
    program = _Program(cluster, most)
    found = program.solve(limits, start)
    if found is None:
        return SolvedPlacement(most, None, optimal=False)
    counts, value, bound = found
    bound = min(most, bound)
    return SolvedPlacement(
        bound, _intervals(program.groups, counts), optimal=value >= bound * (1.0 - limits.gap - 1e-9)
    )


class _Program:
    """The program: a count and a flow for every (group, first layer, length)."""

    def __init__(self, cluster: PlaceCluster, most: float) -> None:
        layers = cluster.model.layers
        self._cluster = cluster
        self.groups = alike(cluster)
        self.columns = [
            (group, first, length)
            for group, nodes in enumerate(self.groups)
            for length in range(1, cluster.most_layers(nodes[0]) + 1)
            for first in range(layers - length + 1)
        ]
        self._program = program = LinearProgram()
        by_group: list[list[int]] = [[] for _ in self.groups]
        self._counts, self._flows = [], []
        ends: list[list[tuple[int, float]]] = [[] for _ in range(layers + 1)]
        for group, first, length in self.columns:
            nodes = self.groups[group]
            rate, number = min(most, cluster.kind(nodes[0]).rate(length)), float(len(nodes))
            z = program.column(upper=number, integer=True)
            f = program.column(1.0 if first == 0 else 0.0, upper=rate * number)
            program.row([(z, -rate), (f, 1.0)], upper=0.0)
            by_group[group].append(z)
            ends[first].append((f, -1.0))
            ends[first + length].append((f, 1.0))
            self._counts.append(z)
            self._flows.append(f)
        for nodes, held in zip(self.groups, by_group, strict=True):
            program.row([(z, 1.0) for z in held], upper=float(len(nodes)))
        for boundary in range(1, layers):
            program.row(ends[boundary], lower=0.0, upper=0.0)

    def solve(
        self, limits: SolveLimits, start: Placement | None
    ) -> tuple[dict[tuple[int, int, int], int], float, float] | None:
        """Counts, their flow and the bound."""
        point = None if start is None else self._point(start)
        solution = self._program.solve(limits, start=point)
        if solution is None:
            return None
        counts = {
            column: round(solution.values[z]) for column, z in zip(self.columns, self._counts, strict=True)
        }
        return counts, solution.objective, solution.bound

    def _point(self, start: Placement) -> list[float]:
        """A placement and its flow as values of all columns."""
        group = {node.name: g for g, nodes in enumerate(self.groups) for node in nodes}
        through: Counter[str] = Counter()
        for (_, receiver), rate in max_flow(self._cluster, start).links.items():
            through[receiver] += rate  # type: ignore[assignment]
        values = [0.0] * self._program.columns
        index = {column: i for i, column in enumerate(self.columns)}
        for name, (first, end) in start.items():
            i = index[group[name], first, end - first]
            values[self._counts[i]] += 1.0
            values[self._flows[i]] += through[name]
        return values


def _intervals(groups: list[list[PlaceNode]], counts: Mapping[tuple[int, int, int], int]) -> Intervals:
    """Machines by name for the counts; those left over hold the first layer."""
    free = [list(nodes) for nodes in groups]
    placement: Intervals = {}
    for (group, first, length), number in counts.items():
        for _ in range(number):
            placement[free[group].pop().name] = (first, first + length)
    for nodes in free:
        for node in nodes:
            placement[node.name] = (0, 1)
    return placement
