"""Search for placements: constructed ones, annealed over the flow or, where a judge (the simulator) has the
last word, over an estimate.

It can be stopped at any time, and has the best so far at every moment. Every candidate fits its nodes and has
a flow; the same seed and the same number of steps give the same candidates (a time limit ends the search
wherever it is).

The highest flow is not the best system: it says nothing of hops, links and the KV cache. So the search keeps
many candidates, ranks them by an estimate and has the best ones simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hetlb.core.paths.stages import SINK, SOURCE
from hetlb.plan.common.annealing import anneal
from hetlb.plan.highs import SolveLimits
from hetlb.plan.placement.block_columns import BlockChain
from hetlb.plan.placement.estimate import Estimator
from hetlb.plan.placement.even_flow import balanced_flow
from hetlb.plan.placement.flow import Dinic, Flow
from hetlb.plan.placement.flow_bounds import compute_bound
from hetlb.plan.placement.heuristics import Intervals, chains, petals, separate_pipelines, swarm
from hetlb.plan.placement.milp import solve
from hetlb.plan.placement.place_cluster import PlaceCluster, PlaceNode, subset

#: Simulated output tokens/s of a placement under a flow, None where the limits ended it; the flag asks for
#: the whole run instead of a short one.
Judge = Callable[[Intervals, Flow, bool, SolveLimits], float | None]

#: Shares of the time by the end of which constructions and annealing end; with a judge (who has the rest) and
#: without.
_ENDS_JUDGED = (0.1, 0.55)
_ENDS_ALONE = (0.3, 1.0)
#: Restarts of the annealing, each with its share of the time.
_ISLANDS_JUDGED, _ISLANDS_ALONE = 2, 4
#: Machines that a construction leaves over are tried in so many places each.
_PLACES = 8
#: Up to so many machines the integer program can prove the highest flow in seconds.
_MOST_EXACT = 30
#: Temperatures at the beginning and the end, as shares of the score at the beginning.
_FLOW_HEAT = (0.06, 0.003)
_ESTIMATE_HEAT = (0.02, 0.001)
#: A placement whose layers are better covered is preferred among those of equal flow.
_COVER_WEIGHT = 0.1
#: Candidates of each order that the judge may see.
_MOST_LISTED = 40
#: Share of a bound from which on the highest flow of blocks is looked for.
_LEAST_SHARE = 0.3


@dataclass(slots=True)
class PlacementCandidate:
    """A placement with what is known of it. Tokens/s; None where it was not simulated."""

    placement: Intervals
    flow: Flow
    estimate: float = 0.0
    simulated: float | None = None
    origin: str = ""


@dataclass(slots=True)
class PlacementsFound:
    """Result of a search: candidates, the best first; `bound`: no placement has a higher flow."""

    candidates: list[PlacementCandidate] = field(default_factory=list)
    bound: float = math.inf

    @property
    def highest_flow(self) -> PlacementCandidate:
        """The candidate with the highest flow; of equals the better one."""
        return max(self.candidates, key=_by_flow)

    @property
    def best(self) -> PlacementCandidate:
        """The best candidate."""
        return self.candidates[0]


def _by_throughput(candidate: PlacementCandidate) -> tuple[float, float, float]:
    return (candidate.simulated or 0.0, candidate.estimate, candidate.flow.tokens_per_s)


def _by_flow(candidate: PlacementCandidate) -> tuple[float, float, float]:
    return (round(candidate.flow.tokens_per_s, 6), candidate.simulated or 0.0, candidate.estimate)


class _Layout:
    """Intervals of all nodes by index, for fast changes."""

    __slots__ = ("ends", "firsts")

    def __init__(self, firsts: list[int], ends: list[int]) -> None:
        self.firsts = firsts
        self.ends = ends

    def copy(self) -> _Layout:
        return _Layout(self.firsts[:], self.ends[:])

    def key(self) -> tuple[int, ...]:
        return (*self.firsts, *self.ends)


class FlowEvaluator:
    """The maximum flow of layouts of one cluster, some 20,000 a second."""

    def __init__(self, cluster: PlaceCluster, *, partial_inference: bool = False) -> None:
        nodes = cluster.nodes
        self._layers = cluster.model.layers
        self._partial = partial_inference
        self.most = [cluster.most_layers(node) for node in nodes]
        self._rates = [
            [0.0, *(cluster.kind(node).rate(j) for j in range(1, most + 1))]
            for node, most in zip(nodes, self.most, strict=True)
        ]
        top = sum(max(rates) for rates in self._rates)

        def rate(sender: str, receiver: str) -> float:
            link = cluster.links.get((sender, receiver))
            return 0.0 if link is None else min(top, cluster.link_rate((sender, receiver), link))

        names = [node.name for node in nodes]
        self._between = [[rate(a, b) for b in names] for a in names]
        self._in = [rate(SOURCE, name) for name in names]
        self._out = [rate(name, SINK) for name in names]

    def flow(self, layout: _Layout) -> float:
        """Tokens/s of the maximum flow."""
        firsts, ends, layers = layout.firsts, layout.ends, self._layers
        count = len(firsts)
        network = Dinic(2 * count + 2)
        source, sink = 2 * count, 2 * count + 1
        by_first: dict[int, list[int]] = {}
        for i, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            network.add_arc(2 * i, 2 * i + 1, self._rates[i][end - first])
            by_first.setdefault(first, []).append(i)
            if first == 0:
                network.add_arc(source, 2 * i, self._in[i])
            if end == layers:
                network.add_arc(2 * i + 1, sink, self._out[i])
        for i, end in enumerate(ends):
            between = self._between[i]
            for j in by_first.get(end, ()):
                network.add_arc(2 * i + 1, 2 * j, between[j])
            if self._partial:
                for j in range(count):
                    if firsts[j] < end < ends[j]:
                        network.add_arc(2 * i + 1, 2 * j, between[j])
        return network.run(source, sink)

    def cover(self, layout: _Layout) -> list[float]:
        """Tokens/s of all machines that hold a layer, by layer."""
        changes = [0.0] * (self._layers + 1)
        for i, (first, end) in enumerate(zip(layout.firsts, layout.ends, strict=True)):
            rate = self._rates[i][end - first]
            changes[first] += rate
            changes[end] -= rate
        return list(accumulate(changes[:-1]))

    def score(self, layout: _Layout) -> float:
        """The flow, and a little for the layer with the least throughput."""
        return self.flow(layout) + _COVER_WEIGHT * min(self.cover(layout))


class PlacementSearch:
    """One search: constructions, islands of annealing, then the judge."""

    def __init__(
        self,
        cluster: PlaceCluster,
        estimator: Estimator,
        judge: Judge | None,
        *,
        partial_inference: bool = False,
        bound: float = math.inf,
        progress: Callable[[str, PlacementCandidate | None], object] | None = None,
    ) -> None:
        """Without a `judge` the highest flow is best, and the estimate decides among equals.

        `bound`: no placement has a higher flow, and a search for flow ends there. `progress` is told each
        phase and the best candidate so far.
        """
        self._cluster = cluster
        self._names = [node.name for node in cluster.nodes]
        self._estimator = estimator
        self._judge = judge
        self._quality = _by_flow if judge is None else _by_throughput
        self._partial = partial_inference
        self._bound = bound
        self._rng = random.Random()
        self._progress = progress or (lambda phase, best: None)
        self._flows = FlowEvaluator(cluster, partial_inference=partial_inference)
        self._known: dict[tuple[int, ...], PlacementCandidate] = {}

    def run(self, limits: SolveLimits) -> PlacementsFound:
        """Search within the limits; without any time, what it would begin with is judged by estimate alone.

        Without any placement that has a flow, `candidates` is empty.
        """
        self._rng.seed(limits.seed)
        seconds = limits.left_s
        ends = _ENDS_ALONE if self._judge is None else _ENDS_JUDGED
        constructing, annealing = (limits.within(share * seconds) for share in ends)
        layouts = self._construct(constructing)
        if not self._done:
            self._explore(layouts, annealing)
        if self._judge is not None:
            self._judge_best(self._judge, limits)
        best = sorted(self._known.values(), key=self._quality, reverse=True)
        return PlacementsFound(best, self._bound)

    @property
    def _done(self) -> bool:
        """True if no flow can be higher and nothing else counts."""
        best = self._best()
        return self._judge is None and best is not None and best.flow.tokens_per_s >= self._bound * (1 - 1e-9)

    # --- constructions ---

    def _construct(self, limits: SolveLimits) -> list[_Layout]:
        """Placements to begin with, the highest flow first."""
        layouts = []
        for origin, placement in self._constructed(limits):
            layout = self._complete(placement, limits)
            layouts.append(layout)
            self._keep(layout, origin)
            self._progress(origin, self._best())
            if self._done:
                break
        layouts.sort(key=lambda each: -self._flows.flow(each))
        return layouts

    def _constructed(self, limits: SolveLimits) -> Iterator[tuple[str, Intervals]]:
        cluster = self._cluster
        named = {"swarm": swarm(cluster), "separate": separate_pipelines(cluster)}
        if self._partial:
            named["petals"] = petals(cluster, self._rng)
        named["chains"] = chains(cluster, self._rng)
        yield from ((name, placement) for name, placement in named.items() if placement is not None)
        yield from self._block_chains(limits)
        if len(cluster.nodes) <= _MOST_EXACT and not self._partial and not limits.over:
            best = self._best()
            start = None if best is None else best.placement
            solved = solve(cluster, limits, min(self._bound, compute_bound(cluster)), start=start)
            self._bound = min(self._bound, solved.bound)
            if solved.placement is not None:
                yield "solver", solved.placement

    def _block_chains(self, limits: SolveLimits) -> Iterator[tuple[str, Intervals]]:
        """One chain of blocks over everything, and one per region."""
        cluster = self._cluster
        regions: dict[str, list[PlaceNode]] = {}
        for node in cluster.nodes:
            regions.setdefault(node.region, []).append(node)

        def chain(nodes: Sequence[PlaceNode]) -> Intervals | None:
            part = subset(cluster, nodes)
            if limits.over or sum(map(part.most_layers, nodes)) < part.model.layers:
                return None
            most = min(self._bound, compute_bound(part))
            return BlockChain(part).highest(_LEAST_SHARE * most, most, limits)

        if (whole := chain(cluster.nodes)) is not None:
            yield "blocks", whole
        own: Intervals = {}
        for nodes in regions.values() if len(regions) > 1 else ():
            own.update(chain(nodes) or {})
        if own:
            yield "blocks by region", own

    def _complete(self, placement: Intervals, limits: SolveLimits) -> _Layout:
        """A layout of all nodes: those left over go where they add most flow, or where cover is thinnest."""
        layout = self._layout(placement)
        left = [i for i, name in enumerate(self._names) if name not in placement]
        places = sorted(set(placement.values()))
        cover = self._flows.cover(layout)
        for i in left:
            fitting = [each for each in places if each[1] - each[0] <= self._flows.most[i]]
            fitting.sort(key=lambda each: min(cover[each[0] : each[1]]))
            best = -1.0
            for first, end in fitting[:_PLACES]:
                before = layout.firsts[i], layout.ends[i]
                layout.firsts[i], layout.ends[i] = first, end
                flow = 0.0 if limits.over else self._flows.flow(layout)
                if flow > best:
                    best = flow
                else:
                    layout.firsts[i], layout.ends[i] = before
            cover = self._flows.cover(layout)
        return layout

    # --- annealing ---

    def _explore(self, layouts: list[_Layout], limits: SolveLimits) -> None:
        """Anneal from the best constructions, over the flow or, with a judge, over the estimate."""
        judged = self._judge is not None
        score, heat = (self._estimate, _ESTIMATE_HEAT) if judged else (self._flows.score, _FLOW_HEAT)
        if judged:
            best = sorted(self._known.values(), key=lambda each: -each.estimate)
            layouts = [self._layout(each.placement) for each in best]
        starts = layouts[: _ISLANDS_JUDGED if judged else _ISLANDS_ALONE]
        starts = starts or [self._layout(chains(self._cluster, self._rng))]
        each_s = limits.left_s / len(starts)
        for number, layout in enumerate(starts, start=1):
            left = limits.left_s - (len(starts) - number) * each_s
            self._keep(self._anneal(layout, score, limits.within(left), heat), "annealing")
            self._progress("annealing", self._best())
            if self._done:
                return

    def _layout(self, placement: Intervals) -> _Layout:
        """A layout of all nodes; those that a heuristic leaves out hold the first layer."""
        intervals = [placement.get(name, (0, 1)) for name in self._names]
        return _Layout([first for first, _ in intervals], [end for _, end in intervals])

    def _best(self) -> PlacementCandidate | None:
        return max(self._known.values(), key=self._quality, default=None)

    def _keep(self, layout: _Layout, origin: str) -> PlacementCandidate | None:
        """Evaluate a layout and remember it; None if it has no flow."""
        key = layout.key()
        candidate = self._known.get(key)
        if candidate is None:
            placement = dict(zip(self._names, zip(layout.firsts, layout.ends, strict=True), strict=True))
            flow = balanced_flow(self._cluster, placement, partial_inference=self._partial)
            if flow.tokens_per_s <= 0.0:
                return None
            estimate = self._estimator.estimate(placement, flow.links)
            candidate = PlacementCandidate(placement, flow, estimate.decode_tokens_per_s, origin=origin)
            self._known[key] = candidate
        return candidate

    def _estimate(self, layout: _Layout) -> float:
        candidate = self._keep(layout, "estimate")
        return 0.0 if candidate is None else candidate.estimate

    def _anneal(
        self,
        layout: _Layout,
        score: Callable[[_Layout], float],
        limits: SolveLimits,
        heat: tuple[float, float],
    ) -> _Layout:
        """Simulated annealing; returns the best layout met, without any time the one given."""
        seconds = limits.left_s
        if seconds <= 0.0:
            return layout
        best, best_at = layout, score(layout)

        def evaluate(changed: _Layout, _threshold: float) -> tuple[_Layout, float]:
            nonlocal best, best_at
            value = score(changed)
            if value > best_at:
                best, best_at = changed, value
            return changed, value

        anneal(
            layout,
            best_at,
            self._change,
            evaluate,
            done=lambda: 1.0 - limits.left_s / seconds,
            scale=max(1.0, best_at),
            heat=heat,
            rng=self._rng,
        )
        return best

    def _change(self, layout: _Layout) -> _Layout | None:
        """A layout nearby, None if the change drawn does not fit."""
        draw = self._rng.random()
        changed = layout.copy()
        if draw < 0.30:
            fits = self._shift_boundary(changed)
        elif draw < 0.55:
            fits = self._swap(changed)
        elif draw < 0.80:
            fits = self._align(changed)
        elif draw < 0.90:
            fits = self._redraw(changed)
        else:
            fits = self._divide(changed)
        return changed if fits else None

    def _shift_boundary(self, layout: _Layout) -> bool:
        """Move a boundary between stages by one layer, for all nodes that meet there."""
        firsts, ends = layout.firsts, layout.ends
        i = self._rng.randrange(len(firsts))
        boundary = firsts[i] if self._rng.random() < 0.5 else ends[i]
        if boundary in (0, self._cluster.model.layers):
            return False
        step = self._rng.choice((-1, 1))
        for k in range(len(firsts)):
            if firsts[k] == boundary:
                firsts[k] += step
            if ends[k] == boundary:
                ends[k] += step
            if not 1 <= ends[k] - firsts[k] <= self._flows.most[k]:
                return False
        return True

    def _swap(self, layout: _Layout) -> bool:
        """Two nodes change places."""
        firsts, ends, most = layout.firsts, layout.ends, self._flows.most
        i, j = self._rng.randrange(len(firsts)), self._rng.randrange(len(firsts))
        firsts[i], firsts[j] = firsts[j], firsts[i]
        ends[i], ends[j] = ends[j], ends[i]
        return ends[i] - firsts[i] <= most[i] and ends[j] - firsts[j] <= most[j]

    def _align(self, layout: _Layout) -> bool:
        """A node takes an interval between two boundaries of others."""
        i = self._rng.randrange(len(layout.firsts))
        first = self._rng.choice(sorted(set(layout.firsts)))
        ends = [end for end in sorted(set(layout.ends)) if 0 < end - first <= self._flows.most[i]]
        if not ends:
            return False
        layout.firsts[i], layout.ends[i] = first, self._rng.choice(ends)
        return True

    def _redraw(self, layout: _Layout) -> bool:
        """A node takes any interval."""
        i = self._rng.randrange(len(layout.firsts))
        length = self._rng.randint(1, self._flows.most[i])
        first = self._rng.randint(0, self._cluster.model.layers - length)
        layout.firsts[i], layout.ends[i] = first, first + length
        return True

    def _divide(self, layout: _Layout) -> bool:
        """A node takes the first layers of another one, which keeps the others."""
        firsts, ends = layout.firsts, layout.ends
        i, j = self._rng.randrange(len(firsts)), self._rng.randrange(len(firsts))
        if i == j or ends[j] - firsts[j] < 2:
            return False
        middle = self._rng.randint(firsts[j] + 1, ends[j] - 1)
        firsts[i], ends[i], firsts[j] = firsts[j], middle, middle
        return ends[i] - firsts[i] <= self._flows.most[i]

    # --- the judge ---

    def _judge_best(self, judge: Judge, limits: SolveLimits) -> None:
        """Simulate the best by estimate and by flow in turn, shortly; then the best of those for the whole
        time.
        """
        early = limits.within(0.6 * limits.left_s)
        queue = self._shortlist()
        short: list[tuple[float, PlacementCandidate]] = []
        while queue and not early.over:
            candidate = queue.pop(0)
            figure = judge(candidate.placement, candidate.flow, False, early)
            if figure is not None:
                short.append((figure, candidate))
            self._progress("simulating", self._best())
        short.sort(key=lambda each: -each[0])
        for figure, candidate in short:
            whole = judge(candidate.placement, candidate.flow, True, limits)
            # Of runs that there was no time for, the short ones decide.
            candidate.simulated = figure if whole is None else whole
            self._progress("simulating", self._best())
            if limits.over:
                break

    def _shortlist(self) -> list[PlacementCandidate]:
        """Candidates that differ, the best by estimate and the best by flow in turn."""
        by_estimate = _distinct(sorted(self._known.values(), key=lambda each: -each.estimate))
        by_flow = _distinct(
            sorted(self._known.values(), key=lambda each: (-round(each.flow.tokens_per_s, 3), -each.estimate))
        )
        listed: list[PlacementCandidate] = []
        for index in range(max(len(by_estimate), len(by_flow))):
            for row in (by_estimate, by_flow):
                if index < len(row) and not any(row[index] is each for each in listed):
                    listed.append(row[index])
        return listed


def _distinct(candidates: Sequence[PlacementCandidate]) -> list[PlacementCandidate]:
    """Candidates of which no two differ in fewer than three nodes, in order."""
    kept: list[PlacementCandidate] = []
    for candidate in candidates:
        if len(kept) == _MOST_LISTED:
            break
        if all(_differing(candidate, other) >= 3 for other in kept):
            kept.append(candidate)
    return kept


def _differing(one: PlacementCandidate, other: PlacementCandidate) -> int:
    return sum(interval != other.placement[name] for name, interval in one.placement.items())
