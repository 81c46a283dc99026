"""An exact search for the highest flow by mixed integer programming.

No placement without partial inference has a higher flow than its bound.

The program counts machines instead of naming them: z[g, s, j] machines of kind g hold the layers [s, s + j)
and pass f[g, s, j] <= T_gj z[g, s, j] tokens/s; what ends at a layer boundary begins there. That has no
symmetry between equal machines and no big-M, unlike Helix's (ASPLOS 2025, section 4.4), which names nodes
and links. Links are left out: it is a relaxation where a link binds, and exact where none does. Rates are
capped by an upper bound, without which the relaxation would hold single layers at absurd rates.
"""

from __future__ import annotations

from hetlb.tools.plan.highs import LinearProgram, SolveLimits
from hetlb.tools.plan.placement.flow import max_flow
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement


def solve(
    cluster: PlaceCluster, limits: SolveLimits, most: float, start: Placement | None = None
) -> tuple[float, Placement | None]:
    """Return the bound, `most` at first, and the best placement met from `start` on, None without one."""
    layers, groups, program = cluster.model.layers, cluster.groups(), LinearProgram()
    # Columns of the count and the flow by (group, first layer, length).
    columns: dict[tuple[int, int, int], tuple[int, int]] = {}
    ends: list[list[tuple[int, float]]] = [[] for _ in range(layers + 1)]
    for g, group in enumerate(groups):
        number, held = float(len(group.nodes)), []
        for length in range(1, len(group.rates)):
            rate = min(most, group.rates[length])
            for first in range(layers - length + 1):
                z = program.column(upper=number, integer=True)
                f = program.column(1.0 if first == 0 else 0.0, upper=rate * number)
                program.row([(z, -rate), (f, 1.0)], upper=0.0)
                held.append((z, 1.0))
                ends[first].append((f, -1.0))
                ends[first + length].append((f, 1.0))
                columns[g, first, length] = z, f
        program.row(held, upper=number)
    for boundary in range(1, layers):
        program.row(ends[boundary], lower=0.0, upper=0.0)
    point = None
    if start is not None:
        point = [0.0] * program.columns
        flow = max_flow(cluster, start)
        group_of = {node.name: g for g, group in enumerate(groups) for node in group.nodes}
        for name, (first, end) in start.items():
            z, f = columns[group_of[name], first, end - first]
            point[z] += 1.0
            point[f] += flow.through(name)
    solution = program.solve(limits, start=point)
    if solution is None:
        return most, None
    free = [list(group.nodes) for group in groups]
    placement: Placement = {}
    for (g, first, length), (z, _) in columns.items():
        for _ in range(round(solution.values[z])):
            placement[free[g].pop().name] = (first, first + length)
    # Nodes left over hold the first layer.
    return min(most, solution.bound), placement | {node.name: (0, 1) for nodes in free for node in nodes}
