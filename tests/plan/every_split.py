"""Every plan of a small cluster of prefill and decode groups: what the search is held against."""

from __future__ import annotations

import itertools

from hetlb.balancer.core.types import Role
from hetlb.tools.plan.common.composition import MOST_GPUS
from hetlb.tools.plan.disaggregation.cost import GroupTable
from hetlb.tools.plan.disaggregation.network import Network
from hetlb.tools.plan.disaggregation.split_cluster import Composition, ServerGroup, SplitPlan
from hetlb.tools.plan.highs import SolveLimits

_SPLIT_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ROUNDING = 1e-9


class Exhaustive:
    """One exhaustive search. `best` is there at any time; `complete` is True if it was not stopped.

    A partial plan is given up if a bound shows that no plan beyond it is better. The bound: with weights w
    and 1 - w on both phases, a plan serves at most w * prefill + (1 - w) * decode + both. The GPUs left of
    every machine add at most their best value per GPU.
    """

    def __init__(self, table: GroupTable, roles: tuple[Role, ...] = tuple(Role)) -> None:
        self._network = Network(table.cluster)
        self._left = [machine.gpus for machine in table.cluster.machines]
        self._options: list[tuple[Composition, list[ServerGroup]]] = []
        for counts in itertools.product(*(range(n + 1) for n in self._left)):
            composition = tuple((m, n) for m, n in enumerate(counts) if n)
            if not 0 < sum(counts) <= MOST_GPUS:
                continue
            groups = [g for role in roles if (g := table.group(composition, role)) is not None]
            if groups:
                self._options.append((composition, groups))
        # Per weight: the most that a GPU of each machine may add.
        self._densities = [self._density(weight) for weight in _SPLIT_WEIGHTS]
        self.best: SplitPlan | None = None
        self.complete = False
        self._most = 0.0
        self._chosen: list[ServerGroup] = []

    def _density(self, weight: float) -> list[float]:
        best = [0.0] * len(self._left)
        for composition, groups in self._options:
            value = max(_value(group, weight) for group in groups)
            each = value / sum(n for _, n in composition)
            for m, _ in composition:
                best[m] = max(best[m], each)
        return best

    def run(self, limits: SolveLimits) -> SplitPlan | None:
        """Search until all is seen or the limits are over; the best plan, None without any."""
        self._limits = limits
        self.complete = self._extend(0, 0.0, 0.0, 0.0)
        return self.best

    def _extend(self, first: int, prefill: float, decode: float, both: float) -> bool:
        if self._limits.over:
            return False
        if min(prefill, decode) + both > self._most * (1.0 + _ROUNDING):
            plan = self._network.solve(self._chosen)
            if plan.throughput > self._most * (1.0 + _ROUNDING):
                self.best, self._most = plan, plan.throughput
        left = self._left
        for weight, density in zip(_SPLIT_WEIGHTS, self._densities, strict=True):
            more = sum(n * each for n, each in zip(left, density, strict=True))
            if weight * prefill + (1.0 - weight) * decode + both + more <= self._most * (1.0 + _ROUNDING):
                return True
        for option in range(first, len(self._options)):
            composition, groups = self._options[option]
            if any(left[m] < n for m, n in composition):
                continue
            for m, n in composition:
                left[m] -= n
            for group in groups:
                self._chosen.append(group)
                done = self._extend(
                    option,
                    prefill + (group.capacity if group.role is Role.PREFILL else 0.0),
                    decode + (group.capacity if group.role is Role.DECODE else 0.0),
                    both + (group.capacity if group.role is Role.BOTH else 0.0),
                )
                self._chosen.pop()
                if not done:
                    return False
            for m, n in composition:
                left[m] += n
        return True


def _value(group: ServerGroup, weight: float) -> float:
    if group.role is Role.PREFILL:
        return weight * group.capacity
    return (1.0 - weight) * group.capacity if group.role is Role.DECODE else group.capacity
