"""Servers of a plan under the production scheduler, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PlannedType, PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec, KvLink, Role
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation, KvLinks
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

#: Arrivals at a fleet that is to be full, over the rate that it is planned to serve. With more of them a
#: queue grows, of which the policy chooses, and the figure depends on the length of the run.
OVERLOAD = 1.05


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """An engine with its role, and its KV transfers if it takes part in any."""

    name: str
    engine: EngineSpec
    role: Role = Role.BOTH
    kv_transfer: KvLink | None = None


def arrivals(
    rows: Sequence[tuple[int, int]], request_rate: float, rng: random.Random, count: int | None = None
) -> list[PlannedRequest]:
    """Return requests of these lengths (`count`, cycled, or all), Poisson at a rate, or all at once."""
    return make_plan([Row(None, prompt, output) for prompt, output in rows], count, request_rate, rng)


def run_fleet(
    servers: Sequence[SimulatedServer],
    requests: Sequence[PlannedRequest],
    outputs: Iterable[int],
    *,
    model: str = "model",
    policy: str = "hetlb",
    predictor: str = "empirical",
    worth: tuple[tuple[str, float], ...] = (),
    types: tuple[PlannedType, ...] = (),
    links: KvLinks | None = None,
    seed: int = 0,
) -> FleetResult:
    """Serve the requests without limits of the queue; `outputs` are the lengths that the predictor knows."""
    specs = []
    for server in servers:
        limits, ranks = server.engine.limits, server.engine.ranks
        sizes = limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens
        specs.append(
            InstanceSpec(
                name=server.name,
                model=model,
                latency=server.engine.latency,
                capacity=Capacity(
                    ranks * limits.kv_cache_tokens,
                    *sizes,
                    engines=ranks if ranks > 1 else None,
                    kv_tokens_per_request=limits.kv_cache_tokens if ranks > 1 else None,
                    kv_need=limits.need,
                ),
                role=server.role,
                kv_transfer=server.kv_transfer,
            )
        )
    setup = SchedulerSetup(
        specs=tuple(specs),
        policy=policy,
        params=PolicyParams(worth=worth, types=types),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor=predictor,
        lengths=LengthDistribution(outputs),
        initial_health=Health.UP,
        seed=seed,
    )
    engines = {server.name: server.engine for server in servers}
    return FleetSimulation(setup, engines, requests, model=model, links=links).run()
