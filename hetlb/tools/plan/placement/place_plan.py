"""One placement from start to end: bound, search, simulation and failures, each within its share of the time.

At every moment there is a best plan so far: the time limit and an interrupt end whatever is running, and
what is known by then is the answer.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor
from hetlb.errors import PlanError
from hetlb.tools.paths.path_scheduler import PathScheduler
from hetlb.tools.paths.stages import PathLease
from hetlb.tools.plan.check import check_path, check_placement
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.placement.estimate import Estimator
from hetlb.tools.plan.placement.flow import Flow, PlacementFlows
from hetlb.tools.plan.placement.flow_bounds import flow_bound
from hetlb.tools.plan.placement.place_cluster import Interval, PlaceCluster, Placement, PlaceNode
from hetlb.tools.plan.placement.place_search import FIRST_WINDOW_S, PlacementCandidate, PlacementSearch
from hetlb.tools.sim.pipelines import OfflineLoad, PipelineResult, PipelineSimulation
from hetlb.tools.workload.arrivals import gaps_s

#: Share of the time for the bound, and share after which the search ends; the rest is for failures.
_BOUND_SHARE, _SEARCH_SHARE = 0.1, 0.9
#: The same with a placement given: there is no search.
_GIVEN_SHARE = 0.7
#: Seconds of virtual time before the measurement: of an empty cluster, and of one that begins full.
_WARM_UP_S, _FULL_WARM_UP_S = 60.0, 10.0
#: Seconds of arrivals of an online load, of a run that goes on.
_MOST_WINDOW_S = 3600.0

OnPhase = Callable[[str, PlacementCandidate | None], object]


@dataclass(frozen=True)
class PlacementSimulator:
    """Simulator of placements of a cluster for requests of these `lengths` (prompt and output tokens).

    `scheduler` is a path policy; `rate` is requests/s, infinite for as much as fits.
    """

    cluster: PlaceCluster
    lengths: Sequence[tuple[int, int]]
    scheduler: str = "hetlb"
    rate: float = math.inf
    seed: int = 0

    def _draw(self) -> Iterator[tuple[int, int]]:
        rng = random.Random(self.seed)
        while True:
            yield rng.choice(self.lengths)

    def begin(self, placement: Placement, flow: Flow) -> PlacementRun:
        """Return a run that can be continued; an offline one begins with a full cluster."""
        return PlacementRun(self, placement, flow)

    def run(
        self, placement: Placement, flow: Flow, seconds: float, limits: SolveLimits
    ) -> PipelineResult | None:
        """Simulate over doubled windows up to `seconds`; None if the limits ended the first one."""
        run, window_s = self.begin(placement, flow), min(FIRST_WINDOW_S, seconds)
        with limits.stopping():
            while run.advance(window_s) is not None and window_s < seconds:
                window_s = min(2.0 * window_s, seconds)
        return run.result

    def arrivals(self, seconds: float) -> list[float]:
        """Return the arrival times of an online load."""
        count = math.ceil(self.rate * (_WARM_UP_S + seconds))
        gaps = gaps_s(count, self.rate, 1.0, random.Random(self.seed))
        return list(itertools.accumulate(gaps, initial=0.0))

    def simulation(self, placement: Placement, flow: Flow) -> PipelineSimulation:
        """Return a simulation that has not begun."""
        network = self.cluster.network(placement, flow.links)
        predictor = SamplePredictor(LengthDistribution(output for _, output in self.lengths), capped=True)
        scheduler = PathScheduler(network, predictor, policy=self.scheduler, seed=self.seed)

        def watch(lease: PathLease) -> None:
            check_path(network, lease.hops)

        return PipelineSimulation(network, scheduler, self._draw(), watch=watch)


class PlacementRun:
    """The simulation of one placement in a race: its window grows until the deadline ends it."""

    def __init__(self, simulator: PlacementSimulator, placement: Placement, flow: Flow) -> None:
        self._simulator = simulator
        self._simulation = simulator.simulation(placement, flow)
        #: Figures of the last whole window.
        self.result: PipelineResult | None = None

    def advance(self, window_s: float) -> float | None:
        """Return the output tokens/s of a window in seconds, None if the deadline ended it."""
        simulator, simulation = self._simulator, self._simulation
        if self.result is not None:
            result = simulation.extend(window_s)
        elif math.isinf(simulator.rate):
            result = simulation.run_offline(
                OfflineLoad(), warm_up_s=_FULL_WARM_UP_S, measured_s=window_s, filled=True
            )
        else:
            arrivals = simulator.arrivals(_MOST_WINDOW_S)
            result = simulation.run_online(arrivals, warm_up_s=_WARM_UP_S, measured_s=window_s)
        if result.window_s < window_s:
            return None
        self.result = replace(result)
        return result.decode_tokens_per_s


@dataclass(frozen=True)
class PlacePlan:
    """A placement with its figures; `highest_flow` is the search's, None without one."""

    cluster: PlaceCluster
    chosen: PlacementCandidate
    bound: float
    highest_flow: PlacementCandidate | None
    result: PipelineResult | None
    losses: list[Loss]
    interrupted: bool
    #: Candidates of the search with a flow, the best first, and the number of all.
    candidates: Sequence[PlacementCandidate] = ()
    met: int = 0


def plan_placement(
    simulator: PlacementSimulator,
    limits: SolveLimits,
    *,
    simulate_s: float | None = None,
    given: Placement | None = None,
    on_phase: OnPhase | None = None,
) -> PlacePlan:
    """Search for a placement, or evaluate a given one. Raises `PlanError` if no token gets through."""
    seconds, cluster = limits.left_s, simulator.cluster
    bound = flow_bound(cluster, limits.within(_BOUND_SHARE * seconds))
    searching = limits.within((_GIVEN_SHARE if given is not None else _SEARCH_SHARE) * seconds)
    flows, highest = PlacementFlows(cluster), None
    candidates: Sequence[PlacementCandidate] = ()
    met = 0
    if given is not None:
        chosen = PlacementCandidate(given, flows.balanced(given))
    else:
        estimator = Estimator(cluster, simulator.lengths)
        search = PlacementSearch(
            cluster,
            estimator,
            None if simulate_s is None else simulator.begin,
            longest_s=simulate_s or 0.0,
            bound=bound,
            progress=on_phase,
        )
        found = search.run(searching)
        if not found.candidates:
            if limits.interrupted:
                raise KeyboardInterrupt
            raise PlanError("expected a way from source through all layers to sink, got none")
        chosen, highest, bound = found.best, found.highest_flow, found.bound
        candidates, met = found.candidates, found.met
    check_placement(cluster, chosen.placement, chosen.flow, bound)
    result = chosen.run.result if isinstance(chosen.run, PlacementRun) else None
    if result is None and simulate_s is not None:
        result = simulator.run(chosen.placement, chosen.flow, simulate_s, searching)
    lost = [] if limits.interrupted else losses(flows, chosen.placement, limits)
    return PlacePlan(cluster, chosen, bound, highest, result, lost, limits.interrupted, candidates, met)


# --- failures -------------------------------------------------------------------------------------------

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
