"""Branches: the cheapest machines that together hold layers at a rate, and the groups of alike machines.

Machines that are alike (kind, layers, region) are counted, not named. At a target rate a machine of a group
holds at most so many layers, and the cheapest set of machines for some layers is a knapsack, solved for all
target rates at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetlb.plan.placement.place_cluster import PlaceCluster, PlaceNode

#: The most machines of a group in one branch.
_MOST_ALIKE = 40


@dataclass(frozen=True, slots=True)
class MachineGroup:
    """Machines that are alike. `rates[j]`: tokens/s with j layers."""

    nodes: tuple[PlaceNode, ...]
    rates: tuple[float, ...]


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


def _most_layers(rates: Sequence[float], target: float) -> int:
    return max((j for j, rate in enumerate(rates) if j and rate >= target * (1.0 - 1e-12)), default=0)
