"""Search for plans: programs over kinds of groups; their choices are placed on machines and joined by flows.

Every plan keeps all limits; Ctrl-C or the end of the time leave the best so far. Choices of a program on the
way to its best are plans too, for a judge. Moves of GPUs between the groups found (HexGen-2, section 3.4)
gain nothing: bench/PLANNING.md. Of a small cluster the program has every group, and proves its best plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetlb.tools.plan.disaggregation.cost import GroupTable
from hetlb.tools.plan.disaggregation.network import Network
from hetlb.tools.plan.disaggregation.program import Choice, Templates
from hetlb.tools.plan.disaggregation.split_cluster import Role, SplitPlan
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
    if templates.complete:
        limits = replace(limits, gap=0.0)

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
