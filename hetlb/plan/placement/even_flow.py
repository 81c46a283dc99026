"""The most even of all maximum flows of a placement.

The value is that of the maximum flow; among all flows of that value this one has the least sum of
f^2 / capacity over nodes and links, so replicas share their load by speed and no queue is longer than it
must be.

A maximum flow is not unique: an algorithm that stops at the first one leaves replicas idle that the flow does
not need, and weighted round robin would never use them. A convex quadratic program, solved by HiGHS.
"""

from __future__ import annotations

from hetlb.core.paths.stages import SINK, SOURCE
from hetlb.errors import PlanError
from hetlb.plan.highs import LinearProgram, SolveLimits
from hetlb.plan.placement.flow import Flow, max_flow, valid_links
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement

#: Flows below this share of the total are rounding of the solver.
_LEAST_SHARE = 1e-7
#: Larger networks take a maximum flow as it comes: links of one, and seconds of the solver.
_MOST_LINKS = 3000
_MOST_S = 2.0
#: The limits leave room for the rounding of the maximum flow.
_ROOM = 1.0 + 1e-9


def balanced_flow(cluster: PlaceCluster, placement: Placement, *, partial_inference: bool = False) -> Flow:
    """The maximum flow with its load spread most evenly; as it came where the solver finds no optimum."""
    flow = max_flow(cluster, placement, partial_inference=partial_inference)
    edges = valid_links(cluster, placement, partial_inference=partial_inference)
    if flow.tokens_per_s <= 0.0 or len(edges) > _MOST_LINKS:
        return flow
    nodes = [node for node in cluster.nodes if node.name in placement]
    # Columns: the flow of every link, then of every node, as shares of the total.
    total, program = flow.tokens_per_s, LinearProgram()

    def column(rate: float) -> int:
        index = program.column(upper=min(1.0, rate / total) * _ROOM)
        program.subtract_square(index, total / rate)
        return index

    into: dict[str, list[tuple[int, float]]] = {name: [] for name in (*placement, SINK)}
    out: dict[str, list[tuple[int, float]]] = {name: [] for name in (*placement, SOURCE)}
    links = []
    for sender, receiver in edges:
        links.append(column(cluster.link_rate((sender, receiver), cluster.links[sender, receiver])))
        out[sender].append((links[-1], 1.0))
        into[receiver].append((links[-1], 1.0))
    for node in nodes:
        first, end = placement[node.name]
        through = column(cluster.kind(node).rate(end - first))
        program.row([*into[node.name], (through, -1.0)], 0.0, 0.0)
        program.row([*out[node.name], (through, -1.0)], 0.0, 0.0)
    program.row(out[SOURCE], 1.0, 1.0)
    try:
        solution = program.solve(SolveLimits().within(_MOST_S))
    except PlanError:  # once in some thousand networks
        return flow
    if solution is None:
        return flow
    shares = zip(edges, solution.values[links], strict=True)
    return Flow(total, {edge: float(share) * total for edge, share in shares if share > _LEAST_SHARE})
