"""Failures of nodes: the placement that is left, and the cheapest move of layers afterwards.

For every node the flow without it, and the change of one other node's layers that gives the most
flow back; of equal ones the change that loads the fewest layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetlb.plan.placement.cluster import Cluster, Placement
from hetlb.plan.placement.flow import max_flow


@dataclass(frozen=True, slots=True)
class Move:
    """One node holds other layers; `loaded` of them are new to it."""

    node: str
    first: int
    end: int
    loaded: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The placement without a node, and the best move of another one (None if none helps)."""

    node: str
    tokens_per_s: float
    move: Move | None


def losses(cluster: Cluster, placement: Placement, *, partial_inference: bool = False) -> list[Loss]:
    """The loss of every node that holds layers, in the order of the nodes."""
    return [
        _loss(cluster, placement, node.name, partial_inference)
        for node in cluster.nodes
        if node.name in placement
    ]


def _loss(cluster: Cluster, placement: Placement, lost: str, partial: bool) -> Loss:
    left = {name: interval for name, interval in placement.items() if name != lost}
    flow = max_flow(cluster, left, partial_inference=partial).tokens_per_s
    best: Move | None = None
    bounds = sorted({bound for interval in placement.values() for bound in interval})
    for node in cluster.nodes:
        if node.name not in left:
            continue
        first, end = left[node.name]
        for start in bounds:
            for stop in bounds:
                if not 0 < stop - start <= cluster.most_layers(node) or (start, stop) == (first, end):
                    continue
                loaded = sum(not first <= layer < end for layer in range(start, stop))
                moved = {**left, node.name: (start, stop)}
                after = max_flow(cluster, moved, partial_inference=partial).tokens_per_s
                least = max(flow, 0.0) if best is None else best.tokens_per_s
                better = after > least * (1.0 + 1e-9) + 1e-9
                equal = (
                    best is not None and abs(after - least) <= 1e-9 * max(1.0, least) and loaded < best.loaded
                )
                if better or equal:
                    best = Move(node.name, start, stop, loaded, after)
    return Loss(lost, flow, best)
