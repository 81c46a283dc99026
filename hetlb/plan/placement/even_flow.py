"""The most even of all maximum flows of a placement.

The value is that of the maximum flow; among all flows of that value this one has the least sum of
f^2 / capacity over nodes and links, so replicas share their load by speed and no queue is longer than it
must be.

A maximum flow is not unique: an algorithm that stops at the first one leaves replicas idle that the flow does
not need, and weighted round robin would never use them. A convex quadratic program, solved by HiGHS.
"""

from __future__ import annotations

import highspy
import numpy as np

from hetlb.core.paths.stages import SINK, SOURCE, Edge
from hetlb.plan.highs import new_solver
from hetlb.plan.placement.flow import Flow, max_flow, valid_links
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement

#: Flows below this share of the total are rounding of the solver.
_LEAST_SHARE = 1e-7
#: Networks of 24 nodes need about a hundred iterations.
_MOST_ITERATIONS = 1000
#: Larger ones take a maximum flow as it comes: links of one, and seconds of the solver.
_MOST_LINKS = 3000
_MOST_S = 2.0


def balanced_flow(cluster: PlaceCluster, placement: Placement, *, partial_inference: bool = False) -> Flow:
    """The maximum flow with its load spread most evenly; as it came where the solver finds no optimum."""
    flow = max_flow(cluster, placement, partial_inference=partial_inference)
    if flow.tokens_per_s <= 0.0:
        return flow
    edges = valid_links(cluster, placement, partial_inference=partial_inference)
    if len(edges) > _MOST_LINKS:
        return flow
    names = [node.name for node in cluster.nodes if node.name in placement]
    rates = {
        node.name: cluster.kind(node).rate(placement[node.name][1] - placement[node.name][0])
        for node in cluster.nodes
        if node.name in placement
    }
    total = flow.tokens_per_s
    # Variables: the flow of every link, then of every node, as shares of the total.
    count = len(edges) + len(names)
    link_caps = [cluster.link_rate(edge, cluster.links[edge]) / total for edge in edges]
    caps = [*(min(1.0, cap) for cap in link_caps), *(min(1.0, rates[name] / total) for name in names)]
    weights = [*(1.0 / cap for cap in link_caps), *(total / rates[name] for name in names)]
    rows = _conservation(edges, names)
    values = _solve(caps, weights, rows, count)
    if values is None:
        return flow
    links = {edge: share * total for edge, share in zip(edges, values, strict=False) if share > _LEAST_SHARE}
    return Flow(total, links)


def _conservation(edges: list[Edge], names: list[str]) -> list[tuple[list[int], list[float], float]]:
    """Rows: what enters a node is what passes it and what leaves it; one unit leaves the source."""
    column = {name: len(edges) + i for i, name in enumerate(names)}
    into: dict[str, list[int]] = {name: [] for name in (*names, SINK)}
    out: dict[str, list[int]] = {name: [] for name in (*names, SOURCE)}
    for i, (sender, receiver) in enumerate(edges):
        out[sender].append(i)
        into[receiver].append(i)
    rows = []
    for name in names:
        rows.append(([*into[name], column[name]], [1.0] * len(into[name]) + [-1.0], 0.0))
        rows.append(([*out[name], column[name]], [1.0] * len(out[name]) + [-1.0], 0.0))
    rows.append((out[SOURCE], [1.0] * len(out[SOURCE]), 1.0))
    return rows


def _solve(
    caps: list[float], weights: list[float], rows: list[tuple[list[int], list[float], float]], count: int
) -> list[float] | None:
    """The optimum or a point near it, None where the solver gives none (once in some thousand networks)."""
    solver = new_solver()
    # The active-set method may cycle where much is degenerate; every point on its way is a flow.
    solver.setOptionValue("qp_iteration_limit", _MOST_ITERATIONS)
    solver.setOptionValue("time_limit", _MOST_S)
    # The caps leave room for the rounding of the maximum flow.
    solver.addVars(count, np.zeros(count), np.array(caps) * (1.0 + 1e-9))
    for columns, coefficients, bound in rows:
        solver.addRow(bound, bound, len(columns), np.array(columns, dtype=np.int32), np.array(coefficients))
    hessian = highspy.HighsHessian()
    hessian.dim_ = count
    hessian.format_ = highspy.HessianFormat.kTriangular
    hessian.start_ = np.arange(count + 1, dtype=np.int32)
    hessian.index_ = np.arange(count, dtype=np.int32)
    hessian.value_ = np.array(weights)
    solver.passHessian(hessian)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    return [float(value) for value in solver.getSolution().col_value]
