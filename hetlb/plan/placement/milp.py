"""An exact search for the highest flow by mixed integer programming (HiGHS).

No placement without partial inference has a higher flow than `Solved.bound`.

The program counts machines instead of naming them: z[g, s, j] machines of kind g hold the layers [s, s + j)
and pass f[g, s, j] <= T_gj z[g, s, j] tokens/s; what ends at a layer boundary begins there. That has no
symmetry between equal machines and no big-M, unlike Helix's (ASPLOS 2025, section 4.4), which names nodes
and links. Links are left out: it is a relaxation where a link binds, and exact where none does. Rates are
capped by an upper bound, without which the relaxation would hold single layers at absurd rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from hetlb.plan.placement.cluster import Cluster, Node
from hetlb.plan.placement.heuristics import Intervals


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of the solver: an upper bound, and the best placement it met (None if none)."""

    bound: float
    placement: Intervals | None
    optimal: bool


def solve(cluster: Cluster, seconds: float, most: float, *, seed: int = 0) -> Solved:
    """Run HiGHS for so many seconds. `most` is an upper bound on the flow, from `bounds.flow_bound`."""
    layers = cluster.model.layers
    groups = _groups(cluster)
    columns = [
        (group, first, length)
        for group, nodes in enumerate(groups)
        for length in range(1, cluster.most_layers(nodes[0]) + 1)
        for first in range(layers - length + 1)
    ]
    count = len(columns)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    for option, value in (
        ("threads", 1),
        ("time_limit", seconds),
        ("random_seed", seed),
        ("mip_rel_gap", 1e-6),
    ):
        solver.setOptionValue(option, value)
    rates = np.array([min(most, cluster.kind(groups[group][0]).rate(length)) for group, _, length in columns])
    numbers = np.array([float(len(groups[group])) for group, _, _ in columns])
    # Columns: counts z, then flows f.
    solver.addVars(2 * count, np.zeros(2 * count), np.concatenate((numbers, rates * numbers)))
    solver.changeColsIntegrality(
        count, np.arange(count, dtype=np.int32), np.array([highspy.HighsVarType.kInteger] * count)
    )
    infinity = highspy.kHighsInf
    for i in range(count):
        solver.addRow(-infinity, 0.0, 2, np.array([i, count + i], dtype=np.int32), np.array([-rates[i], 1.0]))
    for group, nodes in enumerate(groups):
        held = np.array([i for i, column in enumerate(columns) if column[0] == group], dtype=np.int32)
        solver.addRow(0.0, float(len(nodes)), len(held), held, np.ones(len(held)))
    for boundary in range(1, layers):
        ending = [count + i for i, (_, first, length) in enumerate(columns) if first + length == boundary]
        starting = [count + i for i, (_, first, _) in enumerate(columns) if first == boundary]
        index = np.array(ending + starting, dtype=np.int32)
        solver.addRow(0.0, 0.0, len(index), index, np.array([1.0] * len(ending) + [-1.0] * len(starting)))
    entering = np.array([count + i for i, (_, first, _) in enumerate(columns) if first == 0], dtype=np.int32)
    for column in entering:
        solver.changeColCost(int(column), 1.0)
    solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
    solver.run()
    info = solver.getInfo()
    bound = min(most, float(info.mip_dual_bound))
    if info.primal_solution_status != 2:
        return Solved(bound, None, optimal=False)
    values = solver.getSolution().col_value
    placement = _intervals(groups, {columns[i]: round(values[i]) for i in range(count)})
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Solved(bound, placement, optimal)


def _groups(cluster: Cluster) -> list[list[Node]]:
    """Machines that hold the same layers at the same rates."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in cluster.nodes:
        groups.setdefault((node.kind, cluster.most_layers(node)), []).append(node)
    return list(groups.values())


def _intervals(groups: list[list[Node]], counts: Mapping[tuple[int, int, int], int]) -> Intervals:
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
