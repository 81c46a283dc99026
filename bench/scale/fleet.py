"""Fleets of three kinds of GPUs in virtual time, of any size, and a load in proportion to them."""

from __future__ import annotations

import random
from pathlib import Path

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health, InstanceSpec
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

ROOT = Path(__file__).parents[2]
KINDS = ("h100_sxm", "a100_sxm", "l40s", "a100_sxm")
MODEL = "llama-3.1-8b"
#: Requests/s that one such fleet of four serves at most, per instance (`schedulers.py --saturate`).
TRACE = ROOT / "bench" / "data" / "azure-conv-sample.csv"


def rows() -> list[Row]:
    """Lengths of the load: a sample of Azure's conversations."""
    return read_trace(TRACE)


def fleet(count: int, lengths: list[Row]) -> tuple[SchedulerSetup, dict[str, EngineSpec]]:
    """`count` instances, a quarter of them fast, half medium, a quarter slow."""
    profiles = {kind: load_profile(ROOT / "profiling" / f"{kind}-{MODEL}-tp1.yaml") for kind in set(KINDS)}
    specs, engines = [], {}
    for n in range(count):
        profile = profiles[KINDS[n % len(KINDS)]]
        name = f"i{n}"
        specs.append(InstanceSpec(name, MODEL, latency=profile.latency, capacity=profile.capacity))
        engines[name] = EngineSpec(profile.latency, EngineLimits.from_capacity(profile.capacity))
    setup = SchedulerSetup(
        specs=tuple(specs),
        policy="hetlb",
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor="empirical",
        seed=0,
        lengths=LengthDistribution(row.output_tokens for row in lengths),
        initial_health=Health.UP,
    )
    return setup, engines


def load(lengths: list[Row], count: int, rate: float, seed: int = 0) -> list[PlannedRequest]:
    """Poisson arrivals at `rate` requests/s; 0 for all at once."""
    rng = random.Random(seed)
    now, plan = 0.0, []
    for n in range(count):
        row = lengths[rng.randrange(len(lengths))]
        plan.append(PlannedRequest(n, now, Row(None, row.input_tokens, row.output_tokens)))
        now += rng.expovariate(rate) if rate else 0.0
    return plan
