"""Search for plans: programs over kinds of groups; their choices are placed on machines and joined by flows.

Every plan keeps all limits; Ctrl-C or the end of the time leave the best so far. Choices of a program on the
way to its best are plans too, for a judge. Moves of GPUs between the groups found (HexGen-2, section 3.4)
gain nothing: bench/PLANNING.md. Of a small cluster every partition into groups with roles is seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetlb.tools.plan.common.composition import MOST_GPUS
from hetlb.tools.plan.disaggregation.cost import GroupTable
from hetlb.tools.plan.disaggregation.network import Network
from hetlb.tools.plan.disaggregation.program import Choice, Templates
from hetlb.tools.plan.disaggregation.split_cluster import Composition, Role, ServerGroup, SplitPlan
from hetlb.tools.plan.highs import OnProgress, SolveLimits

#: Share of the time left for the templates, and for the program without splitting; both need less as a rule.
#: The other program uses the latter's simulations, too. And the least seconds of either.
_TEMPLATES_SHARE, _COLOCATED_SHARE, _LEAST_S = 0.3, 0.6, 0.3


@dataclass
class SplitsFound:
    """The best plans, the best first, and the best one of groups that all do both.

    `bound`: no plan serves more. `template_bound`: no plan of the program's own groups serves more. Infinite
    if unknown.
    """

    plans: list[SplitPlan] = field(default_factory=list)
    colocated: SplitPlan | None = None
    bound: float = math.inf
    template_bound: float = math.inf


def search(
    table: GroupTable,
    limits: SolveLimits,
    *,
    roles: Sequence[Role] = tuple(Role),
    on_progress: OnProgress | None = None,
) -> SplitsFound:
    """Return the plans of groups in these roles that were found within the limits."""
    found, network = SplitsFound(), Network(table.cluster)
    templates = Templates(table, _part(limits, _TEMPLATES_SHARE))

    def plan(choice: Choice) -> SplitPlan:
        placed = (table.group(composition, role) for composition, role in templates.place(choice))
        return network.solve([group for group in placed if group is not None and group.capacity > 0.0])

    # A solver may find nothing in a time that is over: this plan needs none.
    whole = [templates.simplest()]
    if on_progress is not None and whole[0]:
        on_progress(plan(whole[0]).throughput, math.inf)
    both = templates.solve(_part(limits, _COLOCATED_SHARE), (Role.BOTH,))
    if both is not None:
        whole += both.choices
    best = max(map(plan, whole), key=lambda each: each.throughput)
    if best.throughput > 0.0:
        found.colocated = best
    choices = dict.fromkeys(whole) if Role.BOTH in roles else {}
    solved = templates.solve(limits, roles, on_progress)
    if solved is not None:
        choices |= dict.fromkeys(solved.choices)
        whole_bound = math.inf if both is None else both.bound
        found.template_bound = max(solved.bound, whole_bound if Role.BOTH in roles else 0.0)
        if templates.complete:
            found.bound = found.template_bound
    plans = [each for each in map(plan, choices) if each.throughput > 0.0]
    found.plans = sorted(plans, key=lambda each: -each.throughput)
    return found


def _part(limits: SolveLimits, share: float) -> SolveLimits:
    """Return limits of a part of the search: a share of the time left, but enough for a small problem."""
    return limits.within(max(_LEAST_S, share * limits.left_s))


# --- every plan -----------------------------------------------------------------------------------------

_SPLIT_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ROUNDING = 1e-9
#: Seconds of the search for plans beside the best, and its share of the time left.
SEARCH_S, _OTHERS_SHARE = 20.0, 0.4


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


def find_exhaustively(
    table: GroupTable, limits: SolveLimits, on_progress: OnProgress | None = None
) -> SplitsFound:
    """Return the best plan of all and, for the simulation that chooses, the plans of a search."""
    others = search(
        table, limits.within(min(SEARCH_S, _OTHERS_SHARE * limits.left_s)), on_progress=on_progress
    )
    every = Exhaustive(table)
    best = every.run(limits)
    colocated = Exhaustive(table, (Role.BOTH,)).run(limits)
    if not every.complete or best is None:
        plans = others.plans if best is None else [best, *others.plans]
        return replace(others, plans=sorted(plans, key=lambda each: -each.throughput))
    return SplitsFound([best, *others.plans], colocated or others.colocated, best.throughput)
