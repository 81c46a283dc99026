"""The grid of cases that guards the scheduler: real fleets, real traces, rates, predictors and mishaps.

Fleets are built from measured latency grids (`aic_vllm.csv`, `aic_kv_capacity.csv`: NVIDIA
aiconfigurator-core 0.12.0, Apache-2.0), requests from public traces; bench/scheduling/RESULTS.md says which.
A case names everything that decides its outcome; the engines run on the measured grid (the better
form of prefill, made monotone), the scheduler is given the profile that `hetlb profile` makes of it.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec
from hetlb.tools.profiler.fit import fit
from hetlb.tools.profiler.grid import Point, StepKind
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

MODEL = "m"
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 256, 2048, 16
#: Longer requests are left out: the smallest engine of any fleet holds them.
LONGEST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Kind:
    """One layout of a model: `count` servers of `tp` GPUs of a system."""

    system: str
    model: str
    tp: int
    count: int = 1


L8, Q32, L70, Q14 = "Llama-3.1-8B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-14B"
FLEETS: dict[str, tuple[Kind, ...]] = {
    "a100 tp4+tp1": (Kind("a100_sxm", L8, 4), Kind("a100_sxm", L8, 1)),
    "4 kinds tp2": tuple(Kind(system, L8, 2) for system in ("b200_sxm", "h100_sxm", "a100_sxm", "l40s")),
    "32B h100+l40s": (Kind("h100_sxm", Q32, 4), Kind("l40s", Q32, 4)),
    "b200+l40s": (Kind("b200_sxm", L8, 1), Kind("l40s", L8, 1)),
    "8 kinds": (
        *(Kind("h100_sxm", L8, tp) for tp in (1, 2)),
        *(Kind("a100_sxm", L8, tp) for tp in (1, 4)),
        *(Kind("l40s", L8, tp) for tp in (1, 2, 4)),
        Kind("b200_sxm", L8, 1),
    ),
    "16 of 4 kinds": (
        Kind("b200_sxm", L8, 1, 2),
        Kind("h100_sxm", L8, 1, 2),
        Kind("a100_sxm", L8, 1, 4),
        Kind("l40s", L8, 1, 8),
    ),
    "70B": (Kind("h100_sxm", L70, 4), Kind("a100_sxm", L70, 8), Kind("l40s", L70, 8)),
    "14B 3xl40s+a100": (Kind("a100_sxm", Q14, 1), Kind("l40s", Q14, 1, 3)),
}
TRACES = {
    "sharegpt": "sharegpt-lengths-a.csv",
    "azure": "azure-conv-2023-h1.csv",
    "mooncake": "mooncake-conversation-h1.csv",
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated: `rate` is a share of the throughput under `hetlb` at once, None is all at once.

    `wrong` scales what the scheduler believes of every second instance (up) and of the others (down);
    `slowed` is when the first instance becomes three times slower, as a share of the run; `burst` sends
    ten times the rate for 20 s from the middle on.
    """

    fleet: str
    trace: str
    predictor: str
    per_instance: int = 1500
    seed: int = 0


class Lab:
    """The data, read once; fits and fleets are made on demand and kept."""

    def __init__(self, hardware: Path, traces: Path) -> None:
        self._traces = traces
        with (hardware / "aic_kv_capacity.csv").open() as file:
            self._kv = {
                (r["system"], r["model"], int(r["tp"])): int(r["kv_tokens"])
                for r in csv.DictReader(file)
                if r["fits"] == "1"
            }
        self._points: dict[tuple[str, str, int], list[Point]] = defaultdict(list)
        with (hardware / "aic_vllm.csv").open() as file:
            for r in csv.DictReader(file):
                point = Point(
                    StepKind(r["phase"]), int(r["batch"]), int(r["length"]), float(r["latency_ms"]) / 1e3
                )
                self._points[r["system"], r["model"], int(r["tp"])].append(point)
        self.latency = cache(self._fit)
        self.rows = cache(self._read)

    @property
    def layouts(self) -> list[tuple[str, str, int]]:
        """(system, model, tp) of everything that fits in memory."""
        return sorted(self._kv)

    def _fit(self, system: str, model: str, tp: int) -> LatencyModel:
        return fit(self._points[system, model, tp]).latency

    def _read(self, trace: str) -> list[Row]:
        rows = read_trace(self._traces / TRACES[trace])
        return [r for r in rows if r.input_tokens + max(1, r.output_tokens) <= LONGEST_TOKENS]

    def fleet(self, kinds: Sequence[Kind]) -> tuple[tuple[InstanceSpec, ...], dict[str, EngineSpec]]:
        """Specs for the scheduler and engines for the simulation, alike."""
        specs, engines = [], {}
        for kind in kinds:
            latency = self.latency(kind.system, kind.model, kind.tp)
            kv = self._kv[kind.system, kind.model, kind.tp]
            capacity = Capacity(kv, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, None, kv)
            for index in range(kind.count):
                name = f"{kind.system}-tp{kind.tp}-{index}"
                specs.append(InstanceSpec(name, MODEL, "", 1.0, latency, capacity))
                engines[name] = EngineSpec(latency, EngineLimits.from_capacity(capacity))
        return tuple(specs), engines

    def plan(self, trace: str, count: int, rate: float, seed: int) -> list[PlannedRequest]:
        """`count` rows of the trace in an order of the seed, at `rate` requests/s (inf: at once)."""
        rows = list(self.rows(trace))
        random.Random(seed).shuffle(rows)
        return make_plan(rows, count, rate, random.Random(seed))

    def setup(
        self, specs: Sequence[InstanceSpec], policy: str, predictor: str, trace: str, seed: int
    ) -> SchedulerSetup:
        """A scheduler as `hetlb simulate` makes it."""
        return SchedulerSetup(
            specs=tuple(specs),
            policy=policy,
            params=PolicyParams(),
            limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
            predictor=predictor,
            seed=seed,
            lengths=LengthDistribution(row.output_tokens for row in self.rows(trace)),
            initial_health=Health.UP,
        )


def scaled(specs: Sequence[InstanceSpec], factors: Sequence[float]) -> tuple[InstanceSpec, ...]:
    """The specs with every duration that the scheduler believes in multiplied."""
    return tuple(
        replace(spec, latency=spec.latency.scaled(factor)) if spec.latency is not None else spec
        for spec, factor in zip(specs, factors, strict=True)
    )
