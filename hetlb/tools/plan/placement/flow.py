"""Maximum flows of placements: tokens/s that can pass from the source through all layers to the sink.

The value is exact up to the rounding of sums (relative 1e-12), the flow obeys every capacity and is
conserved at every node, and it is the same for the same input. Formulation of Helix (Mei et al., ASPLOS 2025,
section 4.3): a node is an arc of capacity T_j, a link an arc of its tokens/s.

Dinic's algorithm is written out here because the search computes tens of thousands of flows of some 50
vertices: SciPy's maximum_flow takes integers only, and building a graph object for a library costs more than
the flow itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from hetlb.errors import PlanError
from hetlb.tools.paths.stages import SINK, SOURCE, Edge
from hetlb.tools.plan.highs import LinearProgram, SolveLimits
from hetlb.tools.plan.placement.place_cluster import Interval, PlaceCluster, Placement

#: Least residual capacity over the largest one: smaller ones are rounding.
_RELATIVE_EPSILON = 1e-13
#: Least share of the total flow: smaller ones are rounding of the solver of `balanced`.
_LEAST_SHARE = 1e-7
#: Most links: the maximum flow of a larger network is not balanced. Seconds of the solver for it.
_MOST_LINKS = 3000
_MOST_S = 2.0
#: Least share of a link in an even flow: smaller ones are rounding. Most solutions for its potentials.
_LEAST_EVEN_SHARE, _MOST_POTENTIALS = 1e-6, 10
#: Bounds against rounding in an even flow: leak of a vertex; fastest link over fastest node.
_LEAK_SHARE, _MOST_LINK_FACTOR = 1e-12, 1e4
#: The limits of `balanced` leave room for the rounding of the maximum flow.
_ROOM_FACTOR = 1.0 + 1e-9


class Dinic:
    """A flow network with float capacities (Dinic, 1970)."""

    __slots__ = ("_capacity", "_head", "_out")

    def __init__(self, vertices: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(vertices)]
        self._head: list[int] = []
        self._capacity: list[float] = []

    def add_arc(self, tail: int, head: int, capacity: float) -> None:
        number = len(self._head)
        self._out[tail].append(number)
        self._out[head].append(number + 1)
        self._head += (head, tail)
        self._capacity += (capacity, 0.0)

    def arcs(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield (tail, head, residual capacity, flow) of every arc."""
        head, capacity = self._head, self._capacity
        for arc in range(0, len(head), 2):
            yield head[arc + 1], head[arc], capacity[arc], capacity[arc + 1]

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
        return sum(rate for (_, receiver), rate in self.links.items() if receiver == node)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A path of the flow and its tokens/s."""

    nodes: tuple[str, ...]
    tokens_per_s: float


class PlacementFlows:
    """Maximum flows of placements of one cluster, some 20,000 a second.

    A placement is given by the interval of every node in their order, (0, 0) for none: source to nodes that
    start at layer 0; i to j where j starts at i's end or, with partial inference, holds i's end and more;
    nodes that end at the last layer to the sink. Node i is entered at vertex 2 i and left at 2 i + 1.
    """

    def __init__(self, cluster: PlaceCluster) -> None:
        self.cluster = cluster
        self.names = [node.name for node in cluster.nodes]
        self.rates = [cluster.rates(node) for node in cluster.nodes]
        # No arc carries more than all nodes together: larger capacities would only cost precision.
        top = sum(max(rates) for rates in self.rates)

        def rate(sender: str, receiver: str) -> float:
            return min(top, cluster.link_rate((sender, receiver)))

        self._between = [[rate(a, b) for b in self.names] for a in self.names]
        self._in = [rate(SOURCE, name) for name in self.names]
        self._out = [rate(name, SINK) for name in self.names]
        self._ends = [*(name for name in self.names for _ in range(2)), SOURCE, SINK]
        #: Names of the vertices of an even flow: all nodes as receivers, then as senders.
        self._tails, self._heads = (
            [*self.names, *self.names, SOURCE, ""],
            [*self.names, *self.names, "", SINK],
        )

    def held(self, placement: Placement) -> list[Interval]:
        return [placement.get(name, (0, 0)) for name in self.names]

    def value(self, held: Sequence[Interval]) -> float:
        return self._run(held)[1]

    def flow(self, placement: Placement) -> Flow:
        return self._first(placement)[0]

    def balanced(self, placement: Placement) -> Flow:
        """Return the most even of all maximum flows; any of them if the solver finds no optimum.

        The most even one has the least sum of f^2 / capacity over nodes and links, so that replicas share
        their load by speed. A first maximum flow would leave replicas idle that it does not need.
        """
        flow, edges = self._first(placement)
        if flow.tokens_per_s <= 0.0 or len(edges) > _MOST_LINKS:
            return flow
        # Columns: the flow of every link, then of every node, as shares of the total.
        total = flow.tokens_per_s
        rates = [self.cluster.link_rate(edge) for edge in edges]
        into: dict[str, list[int]] = {name: [] for name in (*placement, SINK)}
        out: dict[str, list[int]] = {name: [] for name in (*placement, SOURCE)}
        for index, (sender, receiver) in enumerate(edges):
            out[sender].append(index)
            into[receiver].append(index)
        rows: list[list[tuple[int, float]]] = []
        for name, node_rates in zip(self.names, self.rates, strict=True):
            if name in placement:
                first, end = placement[name]
                through = len(rates), -1.0
                rates.append(node_rates[end - first])
                rows.append([*((index, 1.0) for index in into[name]), through])
                rows.append([*((index, 1.0) for index in out[name]), through])
        rows.append([(index, 1.0) for index in out[SOURCE]])
        sums = [*([0.0] * (len(rows) - 1)), 1.0]
        try:
            solution = LinearProgram.of_equations(
                [min(1.0, rate / total) * _ROOM_FACTOR for rate in rates],
                rows,
                sums,
                [total / rate for rate in rates],
            ).solve(SolveLimits().within(_MOST_S))
        except PlanError:  # once in some thousand networks
            return flow
        if solution is None:
            return flow
        shares = zip(edges, solution.values[: len(edges)], strict=True)
        return Flow(total, {edge: float(share) * total for edge, share in shares if share > _LEAST_SHARE})

    def even(self, held: Sequence[Interval]) -> dict[Edge, float]:
        """Return the share of each link if nothing were full: flows with the least sum of f^2 / capacity.

        That is the current in a network of resistors. It is some ten times as fast as `balanced`, and the
        same if no capacity binds. Empty if no request gets through.
        """
        count = len(held)
        first, end = np.array(held).T
        through, enter, leave = np.arange(count), 2 * count, 2 * count + 1
        inside, between, sources, sinks = self._conductances
        follows = first[None, :] == end[:, None]
        if self.cluster.partial_inference:
            follows |= (first[None, :] < end[:, None]) & (end[:, None] < end[None, :])
        used = end > first
        lines = np.zeros((leave + 1, leave + 1))
        lines[through, count + through] = inside[through, end - first]
        lines[count:enter, :count] = between * (follows & used & used[:, None])
        lines[enter, :count] = sources * ((first == 0) & used)
        lines[count:enter, leave] = sinks * ((end == self.cluster.model.layers) & used)
        drawn = np.zeros(leave + 1)
        drawn[enter], drawn[leave] = 1.0, -1.0
        for _ in range(_MOST_POTENTIALS):
            both = -lines - lines.T
            degree = -both.sum(axis=1)
            leaks = _LEAK_SHARE * (degree + 1.0)  # parts of the network may be isolated
            np.fill_diagonal(both, degree + leaks)
            potential = np.linalg.solve(both, drawn)
            if leaks @ abs(potential) > 0.5:  # there is no way through
                return {}
            flow = lines * (potential[:, None] - potential)
            if flow.min() >= -_LEAST_EVEN_SHARE:
                break
            lines[flow < -_LEAST_EVEN_SHARE] = 0.0  # nothing goes backwards
        flow[:count] = 0.0
        return {
            (self._tails[tail], self._heads[head]): float(flow[tail, head])
            for tail, head in np.argwhere(flow > _LEAST_EVEN_SHARE)
        }

    @cached_property
    def _conductances(self) -> tuple[NDArray[np.float64], ...]:
        """Return the tokens/s of nodes by layers, of links between them, from the source and to the sink."""
        inside = np.zeros((len(self.rates), max(map(len, self.rates))))
        for own, rates in zip(inside, self.rates, strict=True):
            own[: len(rates)] = rates
        most = _MOST_LINK_FACTOR * inside.max()
        between, sources, sinks = (
            np.array([min(most, self.cluster.link_rate((sender, receiver))) for sender, receiver in edges])
            for edges in (
                product(self.names, self.names),
                ((SOURCE, name) for name in self.names),
                ((name, SINK) for name in self.names),
            )
        )
        return inside, between.reshape(len(self.names), -1), sources, sinks

    def _first(self, placement: Placement) -> tuple[Flow, list[Edge]]:
        """Return a maximum flow as it comes, and the links that a request may take."""
        network, total = self._run(self.held(placement))
        carried: dict[Edge, float] = {}
        edges = []
        for tail, head, _, flow in network.arcs():
            if (edge := self._edge(tail, head)) is not None:
                edges.append(edge)
                if flow > 0.0:
                    carried[edge] = flow
        return Flow(total, carried), edges

    def edges(self, placement: Placement) -> list[Edge]:
        """Return the links that a request may take."""
        found = (self._edge(tail, head) for tail, head, _, _ in self._network(self.held(placement)).arcs())
        return [edge for edge in found if edge is not None]

    def _edge(self, tail: int, head: int) -> Edge | None:
        """Return the link of an arc, None for the arc of a node."""
        edge = self._ends[tail], self._ends[head]
        return None if edge[0] == edge[1] else edge

    def _run(self, held: Sequence[Interval]) -> tuple[Dinic, float]:
        network = self._network(held)
        return network, network.run(2 * len(held), 2 * len(held) + 1)

    def _network(self, held: Sequence[Interval]) -> Dinic:
        layers, partial = self.cluster.model.layers, self.cluster.partial_inference
        network = Dinic(2 * len(held) + 2)
        source, sink = 2 * len(held), 2 * len(held) + 1
        by_first: dict[int, list[int]] = {}
        for i, (first, end) in enumerate(held):
            if first == end:
                continue
            network.add_arc(2 * i, 2 * i + 1, self.rates[i][end - first])
            by_first.setdefault(first, []).append(i)
            if first == 0 and self._in[i]:
                network.add_arc(source, 2 * i, self._in[i])
            if end == layers and self._out[i]:
                network.add_arc(2 * i + 1, sink, self._out[i])
        for i, (start, at) in enumerate(held):
            if start == at:
                continue
            between = self._between[i]
            receivers = by_first.get(at, [])
            if partial:
                receivers = receivers + [j for j, (first, end) in enumerate(held) if first < at < end]
            for j in receivers:
                if between[j]:
                    network.add_arc(2 * i + 1, 2 * j, between[j])
        return network


def max_flow(cluster: PlaceCluster, placement: Placement) -> Flow:
    """Return the maximum flow of one placement. Nodes without layers carry nothing."""
    return PlacementFlows(cluster).flow(placement)


def pipelines(flow: Flow) -> list[Pipeline]:
    """Return the flow as paths, greatest first: from node to node over the link with most of the rest.

    At most one path per link; together they carry the whole flow, to rounding. There are no cycles in a flow
    through layers.
    """
    least = 1e-9 * max(1.0, flow.tokens_per_s)
    left: dict[str, dict[str, float]] = {}
    for (sender, receiver), rate in flow.links.items():
        left.setdefault(sender, {})[receiver] = rate
    found = []
    while True:
        path = [SOURCE]
        while after := left.get(path[-1]):
            path.append(max(after, key=lambda name: after[name]))
        if path == [SOURCE]:
            break
        edges = list(pairwise(path))
        amount = min(left[sender][receiver] for sender, receiver in edges)
        for sender, receiver in edges:
            left[sender][receiver] -= amount
            if left[sender][receiver] <= least:
                del left[sender][receiver]
        if path[-1] == SINK:  # else a rest of rounding
            found.append(Pipeline(tuple(path[1:-1]), amount))
    return sorted(found, key=lambda pipeline: -pipeline.tokens_per_s)
