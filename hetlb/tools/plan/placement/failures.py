"""Failures of machines: the flow left, and the cheapest move of layers afterwards.

Machines that are alike and hold the same layers fail alike, so each class is looked at once. The move is
another machine's, of any class, to layers of the lost one; among moves that give back the most flow, the one
that loads the fewest layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.placement.flow import PlacementFlows
from hetlb.tools.plan.placement.place_cluster import Interval, Placement, PlaceNode

#: The most layer boundaries of a move tried on either side.
_MOST_BOUNDS = 6


@dataclass(frozen=True, slots=True)
class Move:
    """One node holds other layers; `loaded` of them are new to it."""

    node: str
    layers: Interval
    loaded: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The placement without one of `nodes`, which are alike, and the best move of another, if any helps."""

    nodes: tuple[str, ...]
    tokens_per_s: float
    move: Move | None


def losses(flows: PlacementFlows, placement: Placement, limits: SolveLimits) -> list[Loss]:
    """Return the loss of every class of nodes that hold layers, until the limits end."""
    alike: dict[tuple[object, ...], list[PlaceNode]] = {}
    for node in flows.cluster.nodes:
        if node.name in placement:
            key = (node.kind, node.region, flows.cluster.most_layers(node), placement[node.name])
            alike.setdefault(key, []).append(node)
    found = []
    for nodes in alike.values():
        if limits.over:
            break
        found.append(_loss(flows, placement, nodes, list(alike.values()), limits))
    return found


def _loss(
    flows: PlacementFlows,
    placement: Placement,
    nodes: list[PlaceNode],
    classes: list[list[PlaceNode]],
    limits: SolveLimits,
) -> Loss:
    def value(held: Placement) -> float:
        return flows.value(flows.held(held))

    lost = nodes[0].name
    left = {name: interval for name, interval in placement.items() if name != lost}
    flow, names = value(left), tuple(node.name for node in nodes)
    best: Move | None = None
    if flow >= value(placement) * (1.0 - 1e-9):
        return Loss(names, flow, None)
    for node in (next((each for each in alike if each.name != lost), None) for alike in classes):
        if node is None:
            continue
        for start, stop in _targets(placement, placement[lost], flows.cluster.most_layers(node)):
            if limits.over:
                return Loss(names, flow, best)
            first, end = left[node.name]
            if (start, stop) == (first, end):
                continue
            loaded = sum(not first <= layer < end for layer in range(start, stop))
            after = value({**left, node.name: (start, stop)})
            least = flow if best is None else best.tokens_per_s
            better = after > least * (1.0 + 1e-9) + 1e-9
            equal = best is not None and abs(after - least) <= 1e-9 * max(1.0, least) and loaded < best.loaded
            if better or equal:
                best = Move(node.name, (start, stop), loaded, after)
    return Loss(names, flow, best)


def _targets(placement: Placement, lost: Interval, most: int) -> Iterator[Interval]:
    """Yield ranges between boundaries near the lost machine's that hold some of its layers."""
    bounds = sorted({bound for interval in placement.values() for bound in interval})
    starts = sorted(bounds, key=lambda bound: abs(bound - lost[0]))[:_MOST_BOUNDS]
    stops = sorted(bounds, key=lambda bound: abs(bound - lost[1]))[:_MOST_BOUNDS]
    for start in starts:
        for stop in stops:
            if 0 < stop - start <= most and start < lost[1] and stop > lost[0]:
                yield start, stop
