"""Simulation of hetlb's rows: the same requests at the same times, by the same policy.

A job's loads are simulated one after the other, as its router saw them, so that what has been learnt is the
same; times are of engines that are not slowed. Nothing of the run is used but its plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fleets import Fleet
from traffic import TRAFFIC, WARM_UP, rows_for, some_rows

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health, InstanceSpec
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest, Waves, make_plan
from hetlb.tools.workload.records import summarize
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS

#: Policy by router, where the scheduler is hetlb's and knows the true profiles.
POLICIES = {"hetlb": "hetlb", "hetlb-lmetric": "lmetric"}
#: Seconds between the last arrival of a load and the first of the next: all have ended by then.
_PAUSE_S = 1000.0


def simulated(fleet: Fleet, router: str, number: int) -> dict[str, dict[str, Any]]:
    """Figures of a round by load, as `summarize` names them."""
    full_rps = fleet.requests_per_s(rows_for(fleet.lengths)) * fleet.time_scale
    plan: list[PlannedRequest] = []
    places: dict[str, slice] = {}
    for label, count, rate, waves in _loads(fleet, full_rps):
        rows = some_rows(fleet.lengths, "", count, random.Random(f"{fleet.name}/{label}/{number}"))
        rng, blocks = random.Random(number), HASH_BLOCK_TOKENS
        load = make_plan(rows, len(rows), rate, rng, waves=waves, hash_block_tokens=blocks)
        begun, start_s = len(plan), plan[-1].scheduled_s + _PAUSE_S if plan else 0.0
        plan += [
            replace(each, index=begun + each.index, scheduled_s=start_s + each.scheduled_s) for each in load
        ]
        places[label] = slice(begun, len(plan))
    names = [name for name, _ in fleet.engines]
    limits = [EngineLimits.from_capacity(each.capacity) for each in fleet.profiles]
    setup = SchedulerSetup(
        specs=tuple(
            InstanceSpec(name, "m", "", 1.0, each.latency, each.capacity)
            for name, each in zip(names, fleet.profiles, strict=True)
        ),
        policy=POLICIES[router],
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor="online",
        seed=number,
        lengths=None,
        initial_health=Health.UP,
    )
    engines = {
        name: EngineSpec(each.latency, limit, prefix_cache=True)
        for name, each, limit in zip(names, fleet.profiles, limits, strict=True)
    }
    records = FleetSimulation(setup, engines, plan, model="m").run().records
    return {label: summarize(records[place]) for label, place in places.items()}


def _loads(fleet: Fleet, full_rps: float) -> Iterator[tuple[str, int, float, Waves | None]]:
    """Label, number of requests, rate and waves of every load of a job, in the time of the engines."""
    warm = False
    for traffic in TRAFFIC.values():
        if traffic.name not in fleet.loads or traffic.kind:
            continue
        if not traffic.fresh and not warm:
            warm = True
            yield "warm-up", WARM_UP, full_rps / 2.0, None
        rate, count = traffic.rate_and_count(fleet, full_rps / fleet.time_scale)
        waves = traffic.waves and Waves(
            traffic.waves.on_s / fleet.time_scale, traffic.waves.off_s / fleet.time_scale
        )
        yield traffic.name, count, rate * fleet.time_scale, waves
