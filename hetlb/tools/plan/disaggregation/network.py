"""KV flows between prefill and decode groups: the requests/s that a set of groups serves.

Flows keep every group's capacity and every link's rate; the value is the highest there is, to
rounding.

Every stage of a prefill group sends the KV cache of its layers to the stages of the decode group that hold
them (HexGen-2, section 3.3 and appendix A). Inside a machine, pairs of GPUs send side by side; between two
machines all share one link. A linear program finds the flows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetlb.tools.plan.common.capabilities import refused
from hetlb.tools.plan.disaggregation.split_cluster import Role, ServerGroup, SplitCluster, SplitPlan
from hetlb.tools.plan.highs import LinearProgram, SolveLimits

#: Share of a link that a plan uses. Transfers come at random, and a scheduler that chooses request by request
#: follows no flow: over fuller links KV caches wait, and fill the prefill groups that keep them meanwhile.
LINK_SHARE = 0.4
#: Least share of the total flow: smaller ones are rounding.
_LEAST_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class Route:
    """KV transfers between two groups.

    They have bytes of a request on each link, seconds inside machines, and the most requests/s.
    """

    link_bytes: tuple[tuple[tuple[int, int], float], ...]
    inside_s: float
    capacity: float


def layer_ranges(group: ServerGroup) -> Iterator[tuple[int, int, int, int]]:
    """Return (machine, GPUs, first layer, end) of every stage."""
    first = 0
    for stage in group.stages:
        yield stage.machine, stage.gpus, first, first + stage.layers
        first += stage.layers


class Network:
    """Flows of one cluster; routes are kept, since a search asks for the same ones again and again."""

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster
        self._rates = tuple(tuple(LINK_SHARE * rate for rate in row) for row in cluster.links.bytes_per_s)
        self._routes: dict[tuple[object, object], Route] = {}

    def route(self, sender: ServerGroup, receiver: ServerGroup) -> Route:
        key = sender.stages, receiver.stages
        if key not in self._routes:
            self._routes[key] = self._find_route(sender, receiver)
        return self._routes[key]

    def _find_route(self, sender: ServerGroup, receiver: ServerGroup) -> Route:
        rates, size = self._rates, self._cluster.kv_bytes / self._cluster.model.layers
        links: dict[tuple[int, int], float] = {}
        inside_s = 0.0
        for machine, gpus, first, end in layer_ranges(sender):
            for other, others, start, stop in layer_ranges(receiver):
                overlap = min(end, stop) - max(first, start)
                if overlap <= 0:
                    continue
                if machine != other:
                    links[machine, other] = links.get((machine, other), 0.0) + overlap * size
                else:
                    lanes = min(gpus, others)
                    inside_s = max(inside_s, overlap * size / (lanes * rates[machine][machine]))
        capacity = 1.0 / inside_s if inside_s > 0.0 else math.inf
        for (machine, other), sent in links.items():
            capacity = min(capacity, rates[machine][other] / sent)
        return Route(tuple(links.items()), inside_s, capacity)

    def solve(self, groups: Sequence[ServerGroup]) -> SplitPlan:
        """Return the plan with the most requests/s of these groups.

        A plan that splits leaves out groups for both phases if their servers cannot take part in transfers.
        """
        plan = self._solve(groups)
        able = [group for group in groups if group.role is not Role.BOTH or not refused(group.form())]
        if not plan.splits or len(able) == len(groups):
            return plan
        whole = [group for group in groups if group.role is Role.BOTH]
        return max(self._solve(able), self._solve(whole), key=lambda each: each.throughput)

    def _solve(self, groups: Sequence[ServerGroup]) -> SplitPlan:
        served = {g: each.capacity for g, each in enumerate(groups) if each.role is Role.BOTH}
        senders = [g for g, each in enumerate(groups) if each.role is Role.PREFILL]
        receivers = [g for g, each in enumerate(groups) if each.role is Role.DECODE]
        flows: dict[tuple[int, int], float] = {}
        if senders and receivers:
            routes = {(p, d): self.route(groups[p], groups[d]) for p in senders for d in receivers}
            flows = self._program(groups, routes)
        return SplitPlan(tuple(groups), flows, served)

    def _program(
        self, groups: Sequence[ServerGroup], routes: dict[tuple[int, int], Route]
    ) -> dict[tuple[int, int], float]:
        program = LinearProgram()
        columns = {pair: program.column(1.0, 0.0, route.capacity) for pair, route in routes.items()}
        for side in (0, 1):
            by_group: dict[int, list[tuple[int, float]]] = {}
            for pair, column in columns.items():
                by_group.setdefault(pair[side], []).append((column, 1.0))
            for g, entries in by_group.items():
                program.row(entries, upper=groups[g].capacity)
        by_link: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for pair, route in routes.items():
            for link, size in route.link_bytes:
                by_link.setdefault(link, []).append((columns[pair], size))
        rates = self._rates
        for (i, j), entries in by_link.items():
            # In units of the link, so that all coefficients are near 1.
            rate = max(rates[i][j], 1.0)
            program.row([(c, size / rate) for c, size in entries], upper=rates[i][j] / rate)
        solution = program.solve(SolveLimits())
        assert solution is not None, "expected the empty flow to be feasible"
        least = _LEAST_SHARE * max(1e-12, solution.objective)
        return {pair: float(solution.values[c]) for pair, c in columns.items() if solution.values[c] > least}
