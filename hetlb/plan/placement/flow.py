"""Maximum flow of a placement: tokens/s that can pass from the source through all layers to the sink.

The value is exact up to the rounding of sums (relative 1e-12), the flow obeys every capacity and is
conserved at every node, and it is the same for the same input. Formulation of Helix (Mei et al., ASPLOS 2025,
section 4.3): a node is an arc of capacity T_j, a link an arc of its tokens/s.

Dinic's algorithm is written out here because the search computes tens of thousands of flows of some 50
vertices: SciPy's maximum_flow takes integers only, and building a graph object for a library costs more than
the flow itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from hetlb.core.paths.stages import SINK, SOURCE, Edge
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement

#: Residual capacities below this share of the largest one are rounding, not capacity.
_RELATIVE_EPSILON = 1e-13


class Dinic:
    """A flow network with float capacities (Dinic, 1970)."""

    __slots__ = ("_capacity", "_head", "_out")

    def __init__(self, vertices: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(vertices)]
        self._head: list[int] = []
        self._capacity: list[float] = []

    def add_arc(self, tail: int, head: int, capacity: float) -> int:
        """Add an arc; returns its number, for `flow_of`."""
        number = len(self._head)
        self._out[tail].append(number)
        self._out[head].append(number + 1)
        self._head += (head, tail)
        self._capacity += (capacity, 0.0)
        return number

    def flow_of(self, arc: int) -> float:
        """Flow on an arc."""
        return self._capacity[arc + 1]

    def run(self, source: int, sink: int) -> float:
        """Push as much as can be pushed; returns the total."""
        epsilon = _RELATIVE_EPSILON * max(self._capacity, default=0.0)
        out, head, capacity = self._out, self._head, self._capacity
        total = 0.0
        while True:
            level = [-1] * len(out)
            level[source] = 0
            queue = deque((source,))
            while queue:
                vertex = queue.popleft()
                for arc in out[vertex]:
                    if capacity[arc] > epsilon and level[head[arc]] < 0:
                        level[head[arc]] = level[vertex] + 1
                        queue.append(head[arc])
            if level[sink] < 0:
                return total
            position = [0] * len(out)
            while (pushed := self._push(source, sink, level, position, epsilon)) > 0.0:
                total += pushed

    def _push(self, source: int, sink: int, level: list[int], position: list[int], epsilon: float) -> float:
        """Push along one path of the level graph; 0 if none is left."""
        out, head, capacity = self._out, self._head, self._capacity
        path: list[int] = []
        vertex = source
        while vertex != sink:
            arcs = out[vertex]
            while position[vertex] < len(arcs):
                arc = arcs[position[vertex]]
                if capacity[arc] > epsilon and level[head[arc]] == level[vertex] + 1:
                    path.append(arc)
                    vertex = head[arc]
                    break
                position[vertex] += 1
            else:
                if not path:
                    return 0.0
                vertex = head[path.pop() ^ 1]
                position[vertex] += 1
        amount = min(capacity[arc] for arc in path)
        for arc in path:
            capacity[arc] -= amount
            capacity[arc ^ 1] += amount
        return amount


@dataclass(frozen=True, slots=True)
class Flow:
    """A maximum flow: its value, and tokens/s on every link that carries some."""

    tokens_per_s: float
    links: dict[Edge, float]

    def through(self, node: str) -> float:
        """Tokens/s through a node."""
        return sum(rate for (_, receiver), rate in self.links.items() if receiver == node)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A path of the flow and its tokens/s."""

    nodes: tuple[str, ...]
    tokens_per_s: float


def valid_links(cluster: PlaceCluster, placement: Placement, *, partial_inference: bool) -> list[Edge]:
    """Links that a request may take under a placement, in the order of the nodes.

    Source to nodes that start at layer 0; i to j where j starts at i's end or, with partial inference, holds
    i's end and more; nodes that end at the last layer to the sink.
    """
    placed = [(node.name, *placement[node.name]) for node in cluster.nodes if node.name in placement]
    links = cluster.links
    found = [(SOURCE, name) for name, first, _ in placed if first == 0 and (SOURCE, name) in links]
    by_end: dict[int, list[str]] = {}
    for name, _, end in placed:
        by_end.setdefault(end, []).append(name)
    for end, senders in sorted(by_end.items()):
        receivers = [
            name for name, first, last in placed if first == end or (partial_inference and first < end < last)
        ]
        found += [
            (sender, receiver) for sender in senders for receiver in receivers if (sender, receiver) in links
        ]
    return found + [
        (name, SINK) for name, _, end in placed if end == cluster.model.layers and (name, SINK) in links
    ]


def max_flow(cluster: PlaceCluster, placement: Placement, *, partial_inference: bool = False) -> Flow:
    """The maximum flow of a placement. Nodes without layers carry nothing."""
    names = [node.name for node in cluster.nodes if node.name in placement]
    index = {name: 2 * i for i, name in enumerate(names)}
    source, sink = 2 * len(names), 2 * len(names) + 1
    rates = {
        node.name: cluster.kind(node).rate(placement[node.name][1] - placement[node.name][0])
        for node in cluster.nodes
        if node.name in placement
    }
    # No arc carries more than all nodes together: larger capacities would only cost precision.
    most = sum(rates.values())
    network = Dinic(2 * len(names) + 2)
    for name in names:
        network.add_arc(index[name], index[name] + 1, rates[name])
    arcs: dict[Edge, int] = {}
    for edge in valid_links(cluster, placement, partial_inference=partial_inference):
        tail = source if edge[0] == SOURCE else index[edge[0]] + 1
        head = sink if edge[1] == SINK else index[edge[1]]
        arcs[edge] = network.add_arc(tail, head, min(most, cluster.link_rate(edge, cluster.links[edge])))
    value = network.run(source, sink)
    return Flow(value, {edge: flow for edge, arc in arcs.items() if (flow := network.flow_of(arc)) > 0.0})


def pipelines(flow: Flow) -> list[Pipeline]:
    """The flow as paths, greatest first: repeatedly the path whose narrowest link is widest.

    At most one path per link; together they carry the whole flow. There are no cycles in a flow through
    layers.
    """
    left = dict(flow.links)
    least = 1e-9 * max(1.0, flow.tokens_per_s)
    found = []
    while (nodes := _widest(left, least)) is not None:
        edges = list(zip((SOURCE, *nodes), (*nodes, SINK), strict=True))
        amount = min(left[edge] for edge in edges)
        for edge in edges:
            left[edge] -= amount
            if left[edge] <= least:
                del left[edge]
        found.append(Pipeline(nodes, amount))
    return sorted(found, key=lambda pipeline: -pipeline.tokens_per_s)


def _widest(links: dict[Edge, float], least: float) -> tuple[str, ...] | None:
    """Nodes of the widest path from source to sink, None if there is none."""
    out: dict[str, list[tuple[str, float]]] = {}
    for (sender, receiver), rate in links.items():
        out.setdefault(sender, []).append((receiver, rate))
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for name in _order(out):
        width, path = (float("inf"), ()) if name == SOURCE else best.get(name, (0.0, ()))
        if width <= least:
            continue
        for receiver, rate in out.get(name, ()):
            reached = min(width, rate)
            if reached > best.get(receiver, (least, ()))[0]:
                best[receiver] = (reached, (*path, receiver))
    return best[SINK][1][:-1] if SINK in best else None


def _order(out: dict[str, list[tuple[str, float]]]) -> Iterable[str]:
    """Vertices that can be reached from the source, each before its successors."""
    found: list[str] = []
    seen: set[str] = set()
    stack: list[tuple[str, bool]] = [(SOURCE, False)]
    while stack:
        name, done = stack.pop()
        if done:
            found.append(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(receiver, False) for receiver, _ in out.get(name, ()) if receiver not in seen]
    return reversed(found)
