"""Failures of machines: the flow that is left, and the cheapest move of layers afterwards.

Machines that are alike and hold the same layers fail alike, so each class is looked at once. The move is
another machine's, of any class, to layers of the lost one; of those that give back the most flow, the one
that loads the fewest layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetlb.plan.highs import SolveLimits
from hetlb.plan.placement.flow import max_flow
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement, PlaceNode

#: The most layer boundaries of a move that are tried on either side.
_MOST_BOUNDS = 6


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
    """The placement without one of `nodes`, which are alike, and the best move of another one (None if none
    helps).
    """

    nodes: tuple[str, ...]
    tokens_per_s: float
    move: Move | None


def losses(
    cluster: PlaceCluster, placement: Placement, limits: SolveLimits, *, partial_inference: bool = False
) -> list[Loss]:
    """The loss of every class of nodes that hold layers, those that the limits leave time for."""
    found = []
    classes = _classes(cluster, placement)
    for nodes in classes:
        if limits.over:
            break
        found.append(_loss(cluster, placement, nodes, classes, limits, partial_inference))
    return found


def _classes(cluster: PlaceCluster, placement: Placement) -> list[list[PlaceNode]]:
    """Nodes of one kind and region that hold the same layers."""
    alike: dict[tuple[object, ...], list[PlaceNode]] = {}
    for node in cluster.nodes:
        if node.name in placement:
            key = (node.kind, node.region, cluster.most_layers(node), placement[node.name])
            alike.setdefault(key, []).append(node)
    return list(alike.values())


def _loss(
    cluster: PlaceCluster,
    placement: Placement,
    nodes: list[PlaceNode],
    classes: list[list[PlaceNode]],
    limits: SolveLimits,
    partial: bool,
) -> Loss:
    lost = nodes[0].name
    left = {name: interval for name, interval in placement.items() if name != lost}
    flow = max_flow(cluster, left, partial_inference=partial).tokens_per_s
    best: Move | None = None
    whole = max_flow(cluster, placement, partial_inference=partial).tokens_per_s
    names = tuple(node.name for node in nodes)
    if flow >= whole * (1.0 - 1e-9):
        return Loss(names, flow, None)
    for node in (next((each for each in alike if each.name != lost), None) for alike in classes):
        if node is None:
            continue
        for start, stop in _targets(placement, placement[lost], cluster.most_layers(node)):
            if limits.over:
                return Loss(names, flow, best)
            first, end = left[node.name]
            if (start, stop) == (first, end):
                continue
            loaded = sum(not first <= layer < end for layer in range(start, stop))
            moved = {**left, node.name: (start, stop)}
            after = max_flow(cluster, moved, partial_inference=partial).tokens_per_s
            least = flow if best is None else best.tokens_per_s
            better = after > least * (1.0 + 1e-9) + 1e-9
            equal = best is not None and abs(after - least) <= 1e-9 * max(1.0, least) and loaded < best.loaded
            if better or equal:
                best = Move(node.name, start, stop, loaded, after)
    return Loss(names, flow, best)


def _targets(placement: Placement, lost: tuple[int, int], most: int) -> Iterator[tuple[int, int]]:
    """Layers between boundaries near those of the lost machine, some of which it held."""
    bounds = sorted({bound for interval in placement.values() for bound in interval})
    starts = sorted(bounds, key=lambda bound: abs(bound - lost[0]))[:_MOST_BOUNDS]
    stops = sorted(bounds, key=lambda bound: abs(bound - lost[1]))[:_MOST_BOUNDS]
    for start in starts:
        for stop in stops:
            if 0 < stop - start <= most and start < lost[1] and stop > lost[0]:
                yield start, stop
