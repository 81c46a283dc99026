"""Search for placements: annealing over the flow, then over an estimate; a judge (the simulator) has the
last word.

Every candidate fits its nodes and has a flow; the same seed and the same number of steps give the
same candidates (a time limit ends the search wherever it is); an interrupt ends it with the best so far.

The highest flow is not the best system: it says nothing of hops, links and the KV cache. So the search keeps
many candidates, ranks them by an estimate and has the best ones simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hetlb.core.paths.stages import SINK, SOURCE
from hetlb.plan.placement.balance import balanced_flow
from hetlb.plan.placement.cluster import Cluster
from hetlb.plan.placement.estimate import Estimator
from hetlb.plan.placement.flow import Dinic, Flow
from hetlb.plan.placement.heuristics import Intervals, chains, petals, separate_pipelines, swarm

#: Simulated output tokens/s of a placement under a flow; the flag asks for the whole run instead of a short
#: one.
Judge = Callable[[Intervals, Flow, bool], float]

#: Shares of the time for annealing over flow and over the estimate, with a judge (who has the rest) and
#: without.
_SHARES_JUDGED = (0.15, 0.45)
_SHARES_ALONE = (0.7, 0.3)
#: Restarts, each with a share of both annealings.
_ISLANDS = 4
#: Temperatures at the beginning and the end, as shares of the score at the beginning.
_FLOW_HEAT = (0.06, 0.003)
_ESTIMATE_HEAT = (0.02, 0.001)
#: A placement whose layers are better covered is preferred among those of equal flow.
_COVER_WEIGHT = 0.1
#: Candidates of each order that the judge may see.
_MOST_LISTED = 40


@dataclass(slots=True)
class Candidate:
    """A placement with what is known of it. Tokens/s; None where it was not simulated."""

    placement: Intervals
    flow: Flow
    estimate: float = 0.0
    simulated: float | None = None
    origin: str = ""


@dataclass(slots=True)
class Found:
    """Result of a search: candidates, the best first, and whether it was interrupted."""

    candidates: list[Candidate] = field(default_factory=list)
    interrupted: bool = False

    @property
    def highest_flow(self) -> Candidate:
        """The candidate with the highest flow; of equals the better one."""
        return max(self.candidates, key=_by_flow)

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]


def _by_throughput(candidate: Candidate) -> tuple[float, float, float]:
    return (candidate.simulated or 0.0, candidate.estimate, candidate.flow.tokens_per_s)


def _by_flow(candidate: Candidate) -> tuple[float, float, float]:
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

    def __init__(self, cluster: Cluster, *, partial_inference: bool = False) -> None:
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

    def score(self, layout: _Layout) -> float:
        """The flow, and a little for the layer with the least throughput."""
        cover = [0.0] * (self._layers + 1)
        for i, (first, end) in enumerate(zip(layout.firsts, layout.ends, strict=True)):
            rate = self._rates[i][end - first]
            cover[first] += rate
            cover[end] -= rate
        least = at = math.inf
        at = 0.0
        for change in cover[:-1]:
            at += change
            least = min(least, at)
        return self.flow(layout) + _COVER_WEIGHT * least


class Search:
    """One search: islands of annealing, then the judge."""

    def __init__(
        self,
        cluster: Cluster,
        estimator: Estimator,
        judge: Judge | None,
        *,
        partial_inference: bool = False,
        starts: Sequence[tuple[str, Intervals]] = (),
        enough: float = math.inf,
        seed: int = 0,
        clock: Callable[[], float],
        progress: Callable[[str, Candidate | None], object] | None = None,
    ) -> None:
        """Without a `judge` the highest flow is best, and the estimate decides among equals.

        `starts` are placements to begin at, by name; a search for flow ends at `enough` tokens/s.
        `clock` gives seconds; `progress` is told each phase and the best candidate so far.
        """
        self._cluster = cluster
        self._names = [node.name for node in cluster.nodes]
        self._estimator = estimator
        self._judge = judge
        self._quality = _by_flow if judge is None else _by_throughput
        self._partial = partial_inference
        self._given = starts
        self._enough = enough
        self._rng = random.Random(seed)
        self._clock = clock
        self._progress = progress or (lambda phase, best: None)
        self._flows = FlowEvaluator(cluster, partial_inference=partial_inference)
        self._known: dict[tuple[int, ...], Candidate] = {}
        self._interrupted = False

    def run(self, seconds: float) -> Found:
        """Search for so many seconds; without any left, what it would begin with is judged by estimate alone.

        Without any placement that has a flow, `candidates` is empty.
        """
        try:
            flow_share, estimate_share = _SHARES_ALONE if self._judge is None else _SHARES_JUDGED
            self._explore(seconds * flow_share / _ISLANDS, seconds * estimate_share / _ISLANDS)
            if self._judge is not None:
                self._judge_best(self._judge, seconds * (1.0 - flow_share - estimate_share))
        except KeyboardInterrupt:
            self._interrupted = True
        return self.found()

    def found(self) -> Found:
        """The candidates known now."""
        return Found(sorted(self._known.values(), key=self._quality, reverse=True), self._interrupted)

    # --- annealing ---

    def _explore(self, flow_s: float, estimate_s: float) -> None:
        starts = list(self._starts())
        for origin, start in starts:
            self._keep(start, origin)
        for island in range(_ISLANDS):
            best = self._best()
            if (
                self._judge is None
                and best is not None
                and best.flow.tokens_per_s >= self._enough * (1 - 1e-9)
            ):
                return
            # One island begins at the best heuristic, the others at chains in random order.
            layout = starts[0][1].copy() if island == 0 else self._layout(chains(self._cluster, self._rng))
            layout = self._anneal(layout, self._flows.score, flow_s, _FLOW_HEAT)
            self._keep(layout, "flow")
            self._progress("annealing", self._best())
            self._anneal(layout, self._estimate, estimate_s, _ESTIMATE_HEAT)
            self._progress("annealing", self._best())

    def _starts(self) -> Iterator[tuple[str, _Layout]]:
        named: list[tuple[str, Intervals | None]] = [
            ("swarm", swarm(self._cluster)),
            ("separate", separate_pipelines(self._cluster)),
        ]
        if self._partial:
            named += [("petals", petals(self._cluster, self._rng))]
        named += self._given
        named += [("chains", chains(self._cluster, self._rng))]
        layouts = [(name, self._layout(placement)) for name, placement in named if placement is not None]
        yield from sorted(layouts, key=lambda each: -self._flows.flow(each[1]))

    def _layout(self, placement: Intervals) -> _Layout:
        """A layout of all nodes; those that a heuristic leaves out hold the first layer."""
        intervals = [placement.get(name, (0, 1)) for name in self._names]
        return _Layout([first for first, _ in intervals], [end for _, end in intervals])

    def _best(self) -> Candidate | None:
        return max(self._known.values(), key=self._quality, default=None)

    def _keep(self, layout: _Layout, origin: str) -> Candidate | None:
        """Evaluate a layout and remember it; None if it has no flow."""
        key = layout.key()
        candidate = self._known.get(key)
        if candidate is None:
            placement = dict(zip(self._names, zip(layout.firsts, layout.ends, strict=True), strict=True))
            flow = balanced_flow(self._cluster, placement, partial_inference=self._partial)
            if flow.tokens_per_s <= 0.0:
                return None
            estimate = self._estimator.estimate(placement, flow.links)
            candidate = Candidate(placement, flow, estimate.decode_tokens_per_s, origin=origin)
            self._known[key] = candidate
        return candidate

    def _estimate(self, layout: _Layout) -> float:
        if self._flows.flow(layout) <= 0.0:
            return 0.0
        candidate = self._keep(layout, "estimate")
        return 0.0 if candidate is None else candidate.estimate

    def _anneal(
        self, layout: _Layout, score: Callable[[_Layout], float], seconds: float, heat: tuple[float, float]
    ) -> _Layout:
        """Simulated annealing; returns the best layout met, without any time the one given."""
        if seconds <= 0.0:
            return layout
        rng = self._rng
        began = self._clock()
        now_at = best_at = score(layout)
        best = layout
        scale = max(1.0, now_at)
        while (gone := (self._clock() - began) / seconds) < 1.0:
            changed = self._change(layout)
            if changed is None:
                continue
            value = score(changed)
            temperature = scale * heat[0] * (heat[1] / heat[0]) ** gone
            if value >= now_at or rng.random() < math.exp((value - now_at) / temperature):
                layout, now_at = changed, value
                if value > best_at:
                    best, best_at = changed, value
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

    def _judge_best(self, judge: Judge, seconds: float) -> None:
        """Simulate the best by estimate and by flow in turn, shortly; then the best of those for the whole
        time.
        """
        began = self._clock()
        queue = self._shortlist()
        short: list[tuple[float, Candidate]] = []
        while queue and self._clock() - began < 0.6 * seconds:
            candidate = queue.pop(0)
            short.append((judge(candidate.placement, candidate.flow, False), candidate))
            self._progress("simulating", self._best())
        short.sort(key=lambda each: -each[0])
        for _, candidate in short:
            if candidate.simulated is None:
                candidate.simulated = judge(candidate.placement, candidate.flow, True)
                self._progress("simulating", self._best())
            if self._clock() - began >= seconds:
                break

    def _shortlist(self) -> list[Candidate]:
        """Candidates that differ, the best by estimate and the best by flow in turn."""
        by_estimate = _distinct(sorted(self._known.values(), key=lambda each: -each.estimate))
        by_flow = _distinct(
            sorted(self._known.values(), key=lambda each: (-round(each.flow.tokens_per_s, 3), -each.estimate))
        )
        listed: list[Candidate] = []
        for index in range(max(len(by_estimate), len(by_flow))):
            for row in (by_estimate, by_flow):
                if index < len(row) and not any(row[index] is each for each in listed):
                    listed.append(row[index])
        return listed


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of which no two differ in fewer than three nodes, in order."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if len(kept) == _MOST_LISTED:
            break
        if all(_differing(candidate, other) >= 3 for other in kept):
            kept.append(candidate)
    return kept


def _differing(one: Candidate, other: Candidate) -> int:
    return sum(interval != other.placement[name] for name, interval in one.placement.items())
