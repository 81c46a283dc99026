"""Simulations of placements of one cluster, every path of which is checked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from hetlb.core.paths.path_ledger import PathDispatch
from hetlb.core.paths.path_scheduler import PathScheduler
from hetlb.core.predictor import EmpiricalPredictor, LengthDistribution
from hetlb.plan.highs import SolveLimits
from hetlb.plan.placement.check_path import check_path
from hetlb.plan.placement.flow import Flow
from hetlb.plan.placement.heuristics import Intervals
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.plan.placement.place_search import Judge
from hetlb.sim.pipelines import OfflineLoad, PipelineResult, PipelineSimulation
from hetlb.workload.arrivals import gaps_s

#: Seconds of virtual time: before the measurement, and measured while candidates are compared.
_WARM_UP_S = 60.0
_SHORT_S = 240.0
#: A run that was stopped counts from this share of its window on.
_LEAST_SHARE = 0.3


class PlacementSimulator:
    """Simulator of placements of a cluster for requests of these `lengths` (prompt and output tokens).

    `scheduler` is a path policy; `rate` is requests/s, infinite for as much as fits.
    """

    def __init__(
        self,
        cluster: PlaceCluster,
        lengths: list[tuple[int, int]],
        *,
        scheduler: str,
        rate: float,
        seed: int,
        partial_inference: bool,
    ) -> None:
        self.partial_inference = partial_inference
        self._cluster = cluster
        self._lengths = lengths
        self._outputs = LengthDistribution(output for _, output in lengths)
        self._scheduler = scheduler
        self._rate = rate
        self._seed = seed
        self._results: dict[tuple[tuple[str, tuple[int, int]], ...], PipelineResult] = {}

    def _draw(self) -> Iterator[tuple[int, int]]:
        rng = random.Random(self._seed)
        while True:
            yield rng.choice(self._lengths)

    def run(
        self, placement: Placement, flow: Flow, seconds: float, limits: SolveLimits
    ) -> PipelineResult | None:
        """Simulate, with every path checked; None where the limits ended it too early. Raises `PlanError`."""
        network = self._cluster.network(placement, partial_inference=self.partial_inference, flows=flow.links)
        predictor = EmpiricalPredictor(self._outputs)
        scheduler = PathScheduler(network, predictor, policy=self._scheduler, seed=self._seed)

        def watch(dispatch: PathDispatch, now: float) -> None:
            check_path(network, dispatch.lease.hops)

        simulation = PipelineSimulation(
            network, scheduler, self._draw(), watch=watch, stop=lambda: limits.over
        )
        if math.isinf(self._rate):
            result = simulation.run_offline(OfflineLoad(), warm_up_s=_WARM_UP_S, measured_s=seconds)
            return result if result.window_s >= _LEAST_SHARE * seconds else None
        count = math.ceil(self._rate * (_WARM_UP_S + seconds))
        gaps = gaps_s(count, self._rate, 1.0, random.Random(self._seed))
        arrivals = list(itertools.accumulate(gaps, initial=0.0))
        result = simulation.run_online(arrivals, warm_up_s=_WARM_UP_S, measured_s=seconds)
        return result if result.window_s >= _LEAST_SHARE * seconds else None

    def result_of(self, placement: Placement) -> PipelineResult | None:
        """The last run of a placement that a judge has made, None without one."""
        return self._results.get(tuple(sorted(placement.items())))

    def judge(self, seconds: float) -> Judge:
        """Output tokens/s of a placement, measured for `seconds` or for a short time."""

        def judged(placement: Intervals, flow: Flow, whole: bool, limits: SolveLimits) -> float | None:
            measured = seconds if whole else min(seconds, _SHORT_S)
            result = self.run(placement, flow, measured, limits)
            if result is not None:
                self._results[tuple(sorted(placement.items()))] = result
            return None if result is None else result.decode_tokens_per_s

        return judged
