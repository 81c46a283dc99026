"""Placements of separate pipelines by column generation: the start of the search at any size.

A pipeline is a multiset of machines that together hold every layer; its rate is the highest at which each of
them still passes what it holds. Machines that are alike (kind, layers, region) are counted, not named. The
linear program

    max sum rate_c x_c   with   sum_c machines_gc x_c <= number of g, for every group g

has a column per pipeline, made when its price is right: at a target rate a machine of a group holds at
most so many layers, and the cheapest set of machines for all layers is a knapsack, solved for all target
rates at once. The pipelines of the optimum, in whole numbers, are the placement; a price per hop asks for
shorter ones, which have a lower flow and less latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetlb.core.paths.stages import SINK, SOURCE
from hetlb.plan.highs import LinearProgram, SolveLimits
from hetlb.plan.placement.heuristics import Intervals
from hetlb.plan.placement.place_cluster import PlaceCluster, PlaceNode

#: Rounds of pricing, and columns of each.
_MOST_ROUNDS = 80
_EACH_ROUND = 8
#: The most machines of a group in one pipeline.
_MOST_ALIKE = 40
#: A column is worth adding from this reduced cost on, relative to its rate.
_WORTH = 1e-6


@dataclass(frozen=True, slots=True)
class MachineGroup:
    """Machines that are alike. `rates[j]`: tokens/s with j layers."""

    nodes: tuple[PlaceNode, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline: machines of each group, and its tokens/s."""

    counts: tuple[int, ...]
    rate: float
    branches: Branches


def groups_of(cluster: PlaceCluster) -> list[MachineGroup]:
    """Machines by kind, layers that they can hold, and region; regions stand together."""
    alike: dict[tuple[str, str, int], list[PlaceNode]] = {}
    for node in cluster.nodes:
        alike.setdefault((node.region, node.kind, cluster.most_layers(node)), []).append(node)
    found = []
    for key in sorted(alike):
        nodes = alike[key]
        kind = cluster.kind(nodes[0])
        found.append(MachineGroup(tuple(nodes), (0.0, *(kind.rate(j) for j in range(1, key[2] + 1)))))
    return found


def rates_between(
    cluster: PlaceCluster, measure: Callable[[list[float]], float]
) -> dict[tuple[str, str], float]:
    """Tokens/s of the links from one region to another, all links of a pair as one `measure` of them."""
    between: dict[tuple[str, str], list[float]] = {}
    region = {node.name: node.region for node in cluster.nodes}
    for edge, link in cluster.links.items():
        if not _outside(edge):
            between.setdefault((region[edge[0]], region[edge[1]]), []).append(cluster.link_rate(edge, link))
    return {key: measure(rates) for key, rates in between.items()}


class Branches:
    """The cheapest machines of some groups that together hold layers, at every rate that a machine has.

    At a rate a machine of a group holds at most so many layers: a knapsack over groups.
    """

    def __init__(
        self, groups: Sequence[MachineGroup], scope: Sequence[int], layers: int, most: float = math.inf
    ) -> None:
        """`scope`: indices of groups; `layers`: the most of a branch; `most`: its highest rate."""
        self._groups, self._scope, self._layers = groups, scope, layers
        self.rates = np.array(sorted({min(most, rate) for g in scope for rate in groups[g].rates[1:]}))
        #: Most layers of a group's machine at every rate.
        self._held = np.array([[_most_layers(group.rates, rate) for rate in self.rates] for group in groups])

    def cheapest(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[NDArray[np.int16]]]:
        """Least prices by rate and layers, and the machines taken, for `machines`; `prices` by group."""
        layers = self._layers
        at = np.arange(layers + 1)[None, :]
        cost = np.full((len(self.rates), layers + 1), np.inf)
        cost[:, 0] = 0.0
        taken: list[NDArray[np.int16]] = []
        for g in self._scope:
            each = self._held[g][:, None]
            best, count = cost.copy(), np.zeros(cost.shape, dtype=np.int16)
            least = int(each[each > 0].min(initial=layers))
            for k in range(1, min(len(self._groups[g].nodes), _MOST_ALIKE, -(-layers // max(1, least))) + 1):
                before = np.maximum(0, at - k * each)
                reached = np.take_along_axis(cost, before, axis=1) + k * prices[g]
                better = (reached < best - 1e-12) & (each > 0)
                best, count = np.where(better, reached, best), np.where(better, k, count).astype(np.int16)
            cost = best
            taken.append(count)
        return cost, taken

    def machines(self, rate: int, layers: int, taken: list[NDArray[np.int16]]) -> tuple[int, ...]:
        """Machines of each group in the cheapest branch of the rate with this index."""
        counts, left = [0] * len(self._groups), layers
        for g, count in zip(reversed(self._scope), reversed(taken), strict=True):
            counts[g] = int(count[rate, left])
            left = max(0, left - counts[g] * int(self._held[g, rate]))
        return tuple(counts)

    def highest(self, counts: Sequence[int]) -> float:
        """The highest rate at which so many machines of each group hold all layers of a branch."""
        return float(self.rates[np.array(counts) @ self._held >= self._layers].max())

    def shares(self, counts: Sequence[int], rate: float, layers: int) -> list[tuple[int, int]]:
        """Group and layers of each machine of a branch: all that its rate allows, slow ones fewer."""
        at = int(np.searchsorted(self.rates, rate * (1.0 - 1e-12)))
        shares = [(g, int(self._held[g, at])) for g, n in enumerate(counts) for _ in range(n)]
        over = sum(held for _, held in shares) - layers
        while over > 0:
            # One layer less where the machine is slowest, of those that keep the rate.
            i = max(
                (i for i, (_, held) in enumerate(shares) if held > 1),
                key=lambda i: (self._keeps(shares[i], rate), 1.0 / self._speed(shares[i])),
            )
            shares[i] = shares[i][0], shares[i][1] - 1
            over -= 1
        return shares

    def _keeps(self, share: tuple[int, int], rate: float) -> bool:
        return self._groups[share[0]].rates[share[1] - 1] >= rate * (1.0 - 1e-9)

    def _speed(self, share: tuple[int, int]) -> float:
        rates = self._groups[share[0]].rates
        return rates[share[1]] * share[1]


class Pipelines:
    """Column generation for one cluster."""

    def __init__(self, cluster: PlaceCluster) -> None:
        self._layers = cluster.model.layers
        self.groups = groups_of(cluster)
        self._scopes = list(self._find_scopes(cluster))
        self._columns: dict[tuple[int, ...], Column] = {}

    def _find_scopes(self, cluster: PlaceCluster) -> Iterator[Branches]:
        """Groups whose machines may be in one pipeline, with the highest rate of the links between them."""
        outside = min(
            (cluster.link_rate(e, link) for e, link in cluster.links.items() if _outside(e)), default=0.0
        )
        between = rates_between(cluster, min)
        regions: dict[str, list[int]] = {}
        for g, group in enumerate(self.groups):
            regions.setdefault(group.nodes[0].region, []).append(g)
        for name, held in regions.items():
            most = min(outside, between.get((name, name), math.inf))
            yield Branches(self.groups, held, self._layers, most)
        if len(regions) > 1:
            most = min(outside, *between.values()) if between else 0.0
            yield Branches(self.groups, range(len(self.groups)), self._layers, most)

    def solve(self, hop_price: float, limits: SolveLimits) -> list[Column]:
        """Pipelines in whole numbers, one entry each; a hop costs `hop_price` tokens/s of the objective."""
        for _ in range(_MOST_ROUNDS):
            duals = self._relaxed(hop_price)
            if limits.over or not self._price(duals, hop_price):
                break
        known = list(self._columns.values())
        if not known:
            return []
        program, columns = self._program(known, hop_price, integer=True)
        solution = program.solve(limits)
        if solution is None:
            return []
        return [
            column
            for column, index in zip(known, columns, strict=True)
            for _ in range(round(solution.values[index]))
        ]

    def _program(
        self, known: Sequence[Column], hop_price: float, *, integer: bool
    ) -> tuple[LinearProgram, list[int]]:
        program = LinearProgram()
        columns = [
            program.column(max(0.0, each.rate - hop_price * sum(each.counts)), integer=integer)
            for each in known
        ]
        for g, group in enumerate(self.groups):
            entries = [(index, float(each.counts[g])) for index, each in zip(columns, known, strict=True)]
            program.row(entries, upper=float(len(group.nodes)))
        return program, columns

    def _relaxed(self, hop_price: float) -> NDArray[np.float64]:
        """Prices of a machine of each group."""
        known = list(self._columns.values())
        if not known:
            return np.zeros(len(self.groups))
        solution = self._program(known, hop_price, integer=False)[0].solve(SolveLimits())
        assert solution is not None, "expected no pipelines at all to be feasible"
        return np.abs(solution.duals)

    def _price(self, duals: NDArray[np.float64], hop_price: float) -> bool:
        """Add pipelines that are worth more than their machines; False where there is none."""
        added = False
        for branches in self._scopes:
            cost, taken = branches.cheapest(duals + hop_price)
            gain = branches.rates - cost[:, self._layers]
            for r in np.argsort(-gain)[:_EACH_ROUND]:
                if gain[r] > _WORTH * branches.rates[r]:
                    counts = branches.machines(int(r), self._layers, taken)
                    if counts not in self._columns:
                        self._columns[counts] = Column(counts, branches.highest(counts), branches)
                        added = True
        return added

    # --- placements ---

    def placement(self, columns: Sequence[Column]) -> Intervals:
        """Machines by name for pipelines; those that are in none are left out."""
        free = [list(group.nodes) for group in self.groups]
        placement: Intervals = {}
        for column in sorted(columns, key=lambda each: each.counts, reverse=True):
            at = 0
            for g, held in column.branches.shares(column.counts, column.rate, self._layers):
                placement[free[g].pop(0).name] = (at, at + held)
                at += held
        return placement


def _outside(edge: tuple[str, str]) -> bool:
    return edge[0] == SOURCE or edge[1] == SINK


def _most_layers(rates: Sequence[float], target: float) -> int:
    return max((j for j, rate in enumerate(rates) if j and rate >= target * (1.0 - 1e-12)), default=0)
