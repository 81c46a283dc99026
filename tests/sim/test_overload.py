"""Ten times what the fleet can do: it goes on doing what it can, and is over it at once."""

from __future__ import annotations

import random
import statistics

import pytest
from helpers import FAST, MODEL, spec

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, Outcome
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult, FleetSeries
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

CAPACITY = Capacity(200_000, 16, 64, 2048, None, 200_000)
SPECS = tuple(spec(f"i{i}", slower=1.0 + i, capacity=CAPACITY) for i in range(3))
ENGINES = {
    each.name: EngineSpec(FAST.scaled(1.0 + i), EngineLimits.from_capacity(CAPACITY))
    for i, each in enumerate(SPECS)
}
#: Seconds of the three parts, and how many times the capacity is asked for in each.
CALM_S, STORM_S = 20.0, 25.0
PARTS = ((CALM_S, 0.5), (STORM_S, 10.0), (CALM_S, 0.5))
QUEUE = 200


def simulate(plan: list[PlannedRequest], queue: int | None) -> tuple[FleetResult, int]:
    """The run, and the longest queue of its moments."""
    setup = SchedulerSetup(
        specs=SPECS,
        policy="hetlb",
        params=PolicyParams(),
        limits=QueueLimits(max_requests=queue, max_bytes=None, timeout_s=None),
        predictor="empirical",
        seed=0,
        lengths=LengthDistribution(each.output_tokens for each in plan),
        initial_health=Health.UP,
    )
    series = FleetSeries()
    result = FleetSimulation(setup, ENGINES, plan, model=MODEL, series=series).run()
    return result, max(moment.held for moment in series.moments)


def lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(20, 400), rng.randrange(20, 180)


@pytest.fixture(scope="module")
def capacity_rps() -> float:
    """Requests per second that the fleet does with as many waiting as there may be."""
    rng = random.Random(2)
    plan = [PlannedRequest(i, 0.0, Row(None, *lengths(rng))) for i in range(3000)]
    result, _ = simulate(plan, None)
    return len(plan) / max(record.last_token_s or 0.0 for record in result.records)


def test_overload_costs_nothing_but_what_is_turned_down(capacity_rps: float) -> None:
    rng = random.Random(1)
    plan: list[PlannedRequest] = []
    now = began = 0.0
    for part_s, times in PARTS:
        began, now = began + part_s, began
        while (now := now + rng.expovariate(times * capacity_rps)) < began:
            plan.append(PlannedRequest(len(plan), now, Row(None, *lengths(rng))))
    result, longest = simulate(plan, QUEUE)
    storm_ends = CALM_S + STORM_S

    done = [record for record in result.records if record.ok]
    in_storm = [r for r in done if r.last_token_s is not None and CALM_S <= r.last_token_s < storm_ends]
    assert len(in_storm) / STORM_S >= 0.9 * capacity_rps
    assert QUEUE * 0.9 < longest <= QUEUE
    # Who is let in waits for the queue in front of it at most, and for its prompt to be read.
    waited = [r.ttft_s for r in done if r.ttft_s is not None]
    assert statistics.quantiles(waited, n=100)[98] <= 1.25 * QUEUE / capacity_rps + 0.5

    turned_down = [
        record.scheduled_s
        for record, outcome in zip(result.records, result.outcomes, strict=True)
        if outcome is not Outcome.OK
    ]
    assert min(turned_down) > CALM_S
    assert max(turned_down) < storm_ends + 1.0
    before = [r.ttft_s for r in done if r.scheduled_s < CALM_S and r.ttft_s is not None]
    after = [r.ttft_s for r in done if r.scheduled_s > storm_ends + 5.0 and r.ttft_s is not None]
    assert statistics.median(after) <= 1.5 * statistics.median(before), "five seconds later it is over"
