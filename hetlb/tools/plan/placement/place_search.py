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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from hetlb.tools.paths.stages import SINK, SOURCE
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.placement.block_columns import BlockChain
from hetlb.tools.plan.placement.estimate import Estimator
from hetlb.tools.plan.placement.flow import Flow, PlacementFlows
from hetlb.tools.plan.placement.flow_bounds import compute_bound, highest_flow
from hetlb.tools.plan.placement.heuristics import chains, petals, separate_pipelines, swarm
from hetlb.tools.plan.placement.place_cluster import Interval, PlaceCluster, Placement, PlaceNode


class JudgedRun(Protocol):
    """A simulation of one placement that can be continued."""

    def advance(self, window_s: float) -> float | None:
        """Return the output tokens/s of a window in seconds, None if the deadline ended it."""


#: Begins the simulation of a placement under a flow.
Judge = Callable[[Placement, Flow], JudgedRun]
#: The interval of every node, in their order.
Layout = list[Interval]

#: Shares of the time after which constructions and annealing end, with a judge (which takes the rest) and
#: without.
_ENDS_JUDGED = (0.1, 0.65)
_ENDS_ALONE = (0.3, 1.0)
#: Restarts of the annealing, with a judge and without. They share the time equally.
_ISLANDS_JUDGED, _ISLANDS_ALONE = 1, 4
#: Simple rules that a plan is compared with.
BASELINES = ("swarm", "separate-pipelines", "petals")
#: Places tried for each machine that a construction leaves over.
_PLACES = 8
#: Most machines for the integer program, which cannot prove the highest flow of more in seconds.
_EXACT_NODES = 30
#: Temperatures at the beginning and the end, as shares of the score at the beginning.
_FLOW_HEAT = (0.06, 0.003)
_ESTIMATE_HEAT = (0.02, 0.001)
#: Weight of coverage of layers among placements of equal flow.
_COVER_WEIGHT = 0.1
#: Fewest and most simulated candidates.
_FEWEST_LISTED, _MOST_LISTED = 2, 80
#: Seconds of the first window of a simulation. Cost of all rounds of a race, in first windows.
FIRST_WINDOW_S = 20.0
_ROUNDS_COST = 2.5
#: Relative error of the difference of two simulations, times their window in seconds. Short windows show
#: transients.
DOUBT_S = 2.0
#: Share of the bound from which on the highest flow of blocks is searched.
_LEAST_SHARE = 0.3


@dataclass(slots=True)
class PlacementCandidate:
    """A placement with its figures. Tokens/s; None if it was not simulated.

    `window_s` is its simulation's, `by_window` has the figures of shorter ones, too; `rule` names the simple
    rule that it follows, "" for none.
    """

    placement: Placement
    flow: Flow
    estimate: float = 0.0
    simulated: float | None = None
    window_s: float = 0.0
    run: JudgedRun | None = None
    rule: str = ""
    by_window: dict[float, float] = field(default_factory=dict)


@dataclass(slots=True)
class PlacementsFound:
    """Result of a search: candidates with a flow, the best first; all that were met, by number.

    `bound`: no placement has a higher flow.
    """

    candidates: list[PlacementCandidate] = field(default_factory=list)
    bound: float = math.inf
    met: int = 0

    @property
    def highest_flow(self) -> PlacementCandidate:
        return max(self.candidates, key=_by_flow)

    @property
    def best(self) -> PlacementCandidate:
        return self.candidates[0]


def _by_throughput(candidate: PlacementCandidate) -> tuple[float, float, float, float]:
    """Return a sort key by simulated throughput.

    Candidates with longer simulations rank higher, as they were the better half before.
    """
    return (
        candidate.window_s,
        candidate.simulated or 0.0,
        candidate.estimate,
        candidate.flow.tokens_per_s,
    )


def _by_flow(candidate: PlacementCandidate) -> tuple[float, float, float]:
    return (round(candidate.flow.tokens_per_s, 6), candidate.simulated or 0.0, candidate.estimate)


def _surely_better(one: PlacementCandidate, rule: PlacementCandidate) -> bool:
    """Return True if a candidate is better than a rule by more than the error of a simulation.

    Both figures are of the longest window that both have.
    """
    assert rule.simulated is not None, "expected a simulated rule"
    window_s = min(one.window_s, rule.window_s)
    return one.by_window.get(window_s, 0.0) > rule.by_window[window_s] * (1.0 + DOUBT_S / window_s)


class PlacementSearch:
    """One search: constructions, islands of annealing, then the judge."""

    def __init__(
        self,
        cluster: PlaceCluster,
        estimator: Estimator,
        judge: Judge | None,
        *,
        longest_s: float = FIRST_WINDOW_S,
        bound: float = math.inf,
        progress: Callable[[str, PlacementCandidate | None], object] | None = None,
    ) -> None:
        """Without a `judge` the highest flow is best, and the estimate decides among equals.

        `longest_s` is the window of the longest simulations.
        `bound`: no placement has a higher flow, and a search for flow ends there. `progress` is told each
        phase and the best candidate so far.
        """
        self._cluster = cluster
        self._estimator = estimator
        self._judge = judge
        self._first_s, self._longest_s = min(FIRST_WINDOW_S, longest_s), longest_s
        #: Most seconds that a simulation over the first window took.
        self._cost_s = 0.0
        self._quality: Callable[[PlacementCandidate], tuple[float, ...]]
        self._quality = _by_flow if judge is None else _by_throughput
        self._bound = bound
        self._rng = random.Random()
        self._progress = progress or (lambda phase, best: None)
        self._flows = PlacementFlows(cluster)
        self._most = [cluster.most_layers(node) for node in cluster.nodes]
        #: Candidates by their layouts (nodes alike in order), and estimates of all layouts met.
        self._known: dict[tuple[Interval, ...], PlacementCandidate] = {}
        self._estimates: dict[tuple[Interval, ...], float] = {}
        #: Classes of several interchangeable nodes. One order of their intervals stands for all orders.
        self._alike = [own for own in _classes(cluster) if len(own) > 1]

    def run(self, limits: SolveLimits) -> PlacementsFound:
        """Search within the limits; no `candidates` where no placement has a flow."""
        with limits.stopping():
            return self._run(limits)

    def _run(self, limits: SolveLimits) -> PlacementsFound:
        self._rng.seed(limits.seed)
        seconds = limits.left_s
        ends = _ENDS_ALONE if self._judge is None else _ENDS_JUDGED
        constructing, annealing = (limits.within(share * seconds) for share in ends)
        layouts = self._construct(constructing)
        if self._judge is not None:  # simple rules first, then the most promising constructions
            built = sorted(self._known.values(), key=lambda each: (not each.rule, -each.estimate))
            self._enter(built[: sum(bool(each.rule) for each in built) + _FEWEST_LISTED], limits)
        if not self._done and not limits.over:
            self._explore(layouts, annealing)
            if self._judge is not None:
                self._race(limits)
        best = sorted(self._known.values(), key=self._quality, reverse=True)
        rule = next((each for each in best if each.rule and each.simulated is not None), None)
        if rule is not None and not _surely_better(best[0], rule):
            best.remove(rule)
            best.insert(0, rule)
        return PlacementsFound(best, self._bound, len(self._known | self._estimates))

    @property
    def _done(self) -> bool:
        """True if no flow can be higher and nothing else counts."""
        best = self._best()
        return self._judge is None and best is not None and best.flow.tokens_per_s >= self._bound * (1 - 1e-9)

    # --- constructions ---

    def _construct(self, limits: SolveLimits) -> list[Layout]:
        """Return the placements to begin with, the highest flow first."""
        layouts = []
        for origin, placement in self._constructed(limits):
            layout = self._complete(placement, limits)
            layouts.append(layout)
            self._keep(layout)
            if origin in BASELINES and (known := self._keep(self._layout(placement))) is not None:
                known.rule = origin
            self._progress(origin, self._best())
            if self._done:
                break
        layouts.sort(key=lambda each: -self._flows.value(each))
        return layouts

    def _constructed(self, limits: SolveLimits) -> Iterator[tuple[str, Placement]]:
        cluster = self._cluster
        named = {"swarm": swarm(cluster), "separate-pipelines": separate_pipelines(cluster)}
        if self._cluster.partial_inference:
            named["petals"] = petals(cluster, self._rng)
        named["chains"] = chains(cluster, self._rng)
        yield from ((name, placement) for name, placement in named.items() if placement is not None)
        yield from self._block_chains(limits)
        if len(cluster.nodes) <= _EXACT_NODES and not self._cluster.partial_inference and not limits.over:
            best = self._best()
            start = None if best is None else best.placement
            most = min(self._bound, compute_bound(cluster))
            self._bound, solved = highest_flow(cluster, limits, most, start)
            if solved is not None:
                yield "solver", solved

    def _block_chains(self, limits: SolveLimits) -> Iterator[tuple[str, Placement]]:
        """Yield one chain of blocks over everything, and one per region."""
        cluster = self._cluster
        regions: dict[str, list[PlaceNode]] = {}
        for node in cluster.nodes:
            regions.setdefault(node.region, []).append(node)

        def chain(nodes: Sequence[PlaceNode]) -> Placement | None:
            part = cluster.subset(nodes)
            if limits.over or sum(map(part.most_layers, nodes)) < part.model.layers:
                return None
            most = min(self._bound, compute_bound(part))
            return BlockChain(part).highest(_LEAST_SHARE * most, most, limits)

        if (whole := chain(cluster.nodes)) is not None:
            yield "blocks", whole
        own: Placement = {}
        for nodes in regions.values() if len(regions) > 1 else ():
            own.update(chain(nodes) or {})
        if own:
            yield "blocks by region", own

    def _complete(self, placement: Placement, limits: SolveLimits) -> Layout:
        """Return a layout of all nodes: each node left over goes to the layers with the largest gain.

        The gain is in flow; without any, the node goes to the layers with the least throughput.
        """
        layout = self._layout(placement)
        places = sorted(set(placement.values()))
        cover = self._cover(layout)
        for i, node in enumerate(self._cluster.nodes):
            if node.name in placement:
                continue
            fitting = [each for each in places if each[1] - each[0] <= self._most[i]]
            fitting.sort(key=lambda each: min(cover[each[0] : each[1]]))
            best = -1.0
            for interval in fitting[:_PLACES]:
                before, layout[i] = layout[i], interval
                flow = 0.0 if limits.over else self._flows.value(layout)
                if flow > best:
                    best = flow
                else:
                    layout[i] = before
            cover = self._cover(layout)
        return layout

    def _cover(self, layout: Layout) -> list[float]:
        """Return the tokens/s of all machines that hold a layer, by layer."""
        changes = [0.0] * (self._cluster.model.layers + 1)
        for rates, (first, end) in zip(self._flows.rates, layout, strict=True):
            changes[first] += rates[end - first]
            changes[end] -= rates[end - first]
        return list(accumulate(changes[:-1]))

    def _score(self, layout: Layout) -> float:
        """Return the flow, plus a small weight for the layer with the least throughput."""
        return self._flows.value(layout) + _COVER_WEIGHT * min(self._cover(layout))

    # --- annealing ---

    def _explore(self, layouts: list[Layout], limits: SolveLimits) -> None:
        """Anneal from the best constructions, over the flow or, with a judge, over the estimate."""
        judged = self._judge is not None
        score, heat = (self._estimate, _ESTIMATE_HEAT) if judged else (self._score, _FLOW_HEAT)
        if judged:
            best = sorted(self._known.values(), key=lambda each: -each.estimate)
            layouts = [self._layout(each.placement) for each in best]
        starts = layouts[: _ISLANDS_JUDGED if judged else _ISLANDS_ALONE]
        starts = starts or [self._layout(chains(self._cluster, self._rng))]
        each_s = limits.left_s / len(starts)
        for number, layout in enumerate(starts, start=1):
            left = limits.left_s - (len(starts) - number) * each_s
            self._keep(self._anneal(layout, score, limits.within(left), heat))
            self._progress("annealing", self._best())
            if self._done:
                return

    def _layout(self, placement: Placement) -> Layout:
        """Return a layout of all nodes; nodes that a heuristic leaves out hold the first layer."""
        return [placement.get(name, (0, 1)) for name in self._flows.names]

    def _best(self) -> PlacementCandidate | None:
        return max(self._known.values(), key=self._quality, default=None)

    def _keep(self, layout: Layout) -> PlacementCandidate | None:
        """Evaluate a layout and remember it; None if it has no flow."""
        layout = self._ordered(layout)
        key = tuple(layout)
        if (known := self._known.get(key)) is not None:
            return known
        placement = dict(zip(self._flows.names, layout, strict=True))
        flow = self._flows.balanced(placement)
        if flow.tokens_per_s <= 0.0:
            return None
        estimate = self._estimator.estimate(placement, flow.links)
        candidate = self._known[key] = PlacementCandidate(placement, flow, estimate)
        return candidate

    def _ordered(self, layout: Layout) -> Layout:
        """Return the layout in its normal form: in each class of interchangeable nodes, intervals are sorted.

        Two layouts that differ only by an exchange of such nodes have the same form.
        """
        ordered = layout[:]
        for own in self._alike:
            for node, interval in zip(own, sorted(layout[node] for node in own), strict=True):
                ordered[node] = interval
        return ordered

    def _estimate(self, layout: Layout) -> float:
        """Return an estimate of the output tokens/s. It takes an even flow in place of the exact one."""
        key = tuple(self._ordered(layout))
        found = self._estimates.get(key)
        if found is None:
            placement = dict(zip(self._flows.names, key, strict=True))
            found = self._estimates[key] = self._estimator.estimate(placement, self._flows.even(key))
        return found

    def _anneal(
        self, layout: Layout, score: Callable[[Layout], float], limits: SolveLimits, heat: tuple[float, float]
    ) -> Layout:
        """Change a layout by simulated annealing. Return the best one met; without time, the given one.

        The temperature falls from `heat[0]` to `heat[1]`, each times the score at the beginning.
        """
        seconds, rng = limits.left_s, self._rng
        best, most = layout, score(layout)
        at, scale = most, max(1.0, most)
        while seconds > 0.0 and (left := limits.left_s / seconds) > 0.0:
            if (changed := self._change(layout)) is None:
                continue
            temperature = scale * heat[0] * (heat[1] / heat[0]) ** (1.0 - left)
            value = score(changed)
            if value >= at + temperature * math.log(max(rng.random(), 1e-12)):
                layout, at = changed, value
                if value > most:
                    best, most = changed, value
        return best

    def _change(self, layout: Layout) -> Layout | None:
        """Return a layout nearby, None if the change drawn does not fit."""
        draw, changed = self._rng.random(), layout[:]
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

    def _fits(self, layout: Layout, *nodes: int) -> bool:
        return all(1 <= layout[i][1] - layout[i][0] <= self._most[i] for i in nodes)

    def _shift_boundary(self, layout: Layout) -> bool:
        """Move a boundary between stages by one layer, for all nodes that meet there."""
        boundary = self._rng.choice(layout)[self._rng.randrange(2)]
        if boundary in (0, self._cluster.model.layers):
            return False
        moved = boundary + self._rng.choice((-1, 1))
        for k, (first, end) in enumerate(layout):
            if boundary in (first, end):
                layout[k] = moved if first == boundary else first, moved if end == boundary else end
                if not self._fits(layout, k):
                    return False
        return True

    def _swap(self, layout: Layout) -> bool:
        """Swap two nodes."""
        i, j = self._rng.randrange(len(layout)), self._rng.randrange(len(layout))
        layout[i], layout[j] = layout[j], layout[i]
        return self._fits(layout, i, j)

    def _align(self, layout: Layout) -> bool:
        """Give a node an interval between two boundaries of others."""
        i = self._rng.randrange(len(layout))
        first = self._rng.choice(sorted({first for first, _ in layout}))
        ends = [end for end in sorted({end for _, end in layout}) if 0 < end - first <= self._most[i]]
        if not ends:
            return False
        layout[i] = first, self._rng.choice(ends)
        return True

    def _redraw(self, layout: Layout) -> bool:
        i = self._rng.randrange(len(layout))
        length = self._rng.randint(1, self._most[i])
        first = self._rng.randint(0, self._cluster.model.layers - length)
        layout[i] = first, first + length
        return True

    def _divide(self, layout: Layout) -> bool:
        """Give a node the first layers of another one, which keeps the others."""
        i, j = self._rng.randrange(len(layout)), self._rng.randrange(len(layout))
        first, end = layout[j]
        if i == j or end - first < 2:
            return False
        middle = self._rng.randint(first + 1, end - 1)
        layout[i], layout[j] = (first, middle), (middle, end)
        return self._fits(layout, i)

    # --- the race ---

    def _enter(self, candidates: Sequence[PlacementCandidate], limits: SolveLimits) -> None:
        """Simulate candidates over the first window."""
        assert self._judge is not None, "expected a judge"
        for candidate in candidates:
            if limits.over:
                return
            if candidate.run is None:
                candidate.run = self._judge(candidate.placement, candidate.flow)
                began = limits.clock()
                self._advance(candidate, self._first_s)
                self._cost_s = max(self._cost_s, limits.clock() - began)
            self._progress("simulating", self._best())

    @staticmethod
    def _advance(candidate: PlacementCandidate, window_s: float) -> None:
        assert candidate.run is not None, f"{candidate.placement} has no run"
        figure = candidate.run.advance(window_s)
        if figure is not None:
            candidate.simulated, candidate.window_s = figure, window_s
            candidate.by_window[window_s] = figure

    def _race(self, limits: SolveLimits) -> None:
        """Halve successively: more candidates over the first window, then the better half over twice as long.

        Runs go on where they stopped. The best goes first, so that a limit leaves the best known.
        """
        left = limits.left_s
        if left <= 0.0:
            return
        many = int(left / (max(self._cost_s, 1e-3) * _ROUNDS_COST)) if math.isfinite(left) else _MOST_LISTED
        self._enter(self._shortlist(max(_FEWEST_LISTED, min(_MOST_LISTED, many))), limits)
        rules = [each for each in self._known.values() if each.rule and each.simulated is not None]
        racing = sorted(
            (each for each in self._known.values() if each.simulated is not None),
            key=_by_throughput,
            reverse=True,
        )
        window_s = self._first_s
        over = False
        while racing and window_s < self._longest_s and not over:
            # The best two go on to the end: a plan is not chosen by a short window. So does the best rule,
            # which the answer must not be below.
            ahead = racing[: max(_FEWEST_LISTED, (len(racing) + 1) // 2)]
            rules = [max(rules, key=_by_throughput)] if rules else []
            racing = [*ahead, *(each for each in rules if each not in ahead)]
            window_s = min(2.0 * window_s, self._longest_s)
            for candidate in racing:
                over = limits.over
                if over:
                    break
                self._advance(candidate, window_s)
                self._progress("simulating", self._best())
            racing.sort(key=_by_throughput, reverse=True)

    def _shortlist(self, count: int) -> list[PlacementCandidate]:
        """Return the best `count` layouts by estimate. Any two of them differ in three nodes or more."""
        listed: list[PlacementCandidate] = []
        for key in sorted(self._estimates, key=lambda each: -self._estimates[each]):
            if len(listed) == count:
                break
            if all(_differing(key, self._held(other)) >= 3 for other in listed) and (
                candidate := self._keep(list(key))
            ):
                listed.append(candidate)
        return listed

    def _held(self, candidate: PlacementCandidate) -> list[Interval]:
        return self._flows.held(candidate.placement)


def _classes(cluster: PlaceCluster) -> list[list[int]]:
    """Return the indices of nodes in classes: of one kind, with equal links to every other node."""
    found: list[list[int]] = []
    for i, node in enumerate(cluster.nodes):
        for own in found:
            if _exchangeable(cluster, node, cluster.nodes[own[0]]):
                own.append(i)
                break
        else:
            found.append([i])
    return found


def _exchangeable(cluster: PlaceCluster, one: PlaceNode, other: PlaceNode) -> bool:
    if replace(one, name="", host="", gpu=None) != replace(other, name="", host="", gpu=None):
        return False
    links, names = cluster.links, [SOURCE, SINK, *(node.name for node in cluster.nodes)]
    a, b = one.name, other.name
    return links.get((a, b)) == links.get((b, a)) and all(
        links.get((a, name)) == links.get((b, name)) and links.get((name, a)) == links.get((name, b))
        for name in names
        if name not in (a, b)
    )


def _differing(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
