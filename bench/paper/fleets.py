"""The machines of the paper's experiments, as far as this project has them.

The paper (Xiong et al., arXiv 2504.15303) measured V100-32GB and A800 machines with Llama-3-8B. No measured
latency grid of a V100 is at hand. So every experiment runs on several fleets: on the V100 as a roofline of
its data sheet (`profiling/v100-*-roofline.yaml`, unmeasured) with the KV memory that the paper's own formula
gives it; on the same roofline slowed to what the paper's result allows (`slowed_v100`); and on the closest
layouts whose grids are measured. An A800 is an A100 with slower NVLink: at TP 1 it is the A100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hetlb.config.cluster import load_cluster
from hetlb.config.profile import load_profile
from hetlb.core.admission import QueueLimits
from hetlb.core.latency import IterationRule, LatencyModel
from hetlb.core.policies.baselines import PolicyParams
from hetlb.core.predictor import LengthDistribution
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Capacity, Health, InstanceSpec
from hetlb.plan.tp_search import Machine, PlanModel, memory
from hetlb.sim.engine import EngineLimits
from hetlb.sim.fleet import EngineSpec
from hetlb.sim.sweep import Cell, Load, Study, run_sweep
from hetlb.workload.traces import Row, read_trace

ROOT = Path(__file__).resolve().parents[2]
SHAREGPT = ROOT / "bench/data/sharegpt-first-turn.csv"
AZURE = ROOT / "bench/data/azure-conv-sample.csv"
MODEL = "llama-8b"
#: vLLM's defaults of the time; neither the paper's settings nor the profiles say otherwise.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 256, 2048, 16
V100_CLUSTER = ROOT / "configs/clusters/v100-llama-3-8b.yaml"


@dataclass(frozen=True, slots=True)
class Layout:
    """One server: how fast it is, what its KV cache holds, and where its profile is from."""

    gpu: str
    tp: int
    latency: LatencyModel
    kv_cache_tokens: int
    origin: str

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return f"{self.gpu} TP {self.tp}"

    @property
    def capacity(self) -> Capacity:
        """For scheduler and engine alike."""
        kv = self.kv_cache_tokens
        return Capacity(kv, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, None, kv)


def v100_machine() -> tuple[PlanModel, Machine]:
    """The paper's machine: 8 x V100-32GB, and Llama-3-8B."""
    cluster = load_cluster(V100_CLUSTER)
    return cluster.model, cluster.machines[0]


@cache
def v100(tp: int) -> Layout:
    """V100-32GB, roofline."""
    profile = load_profile(ROOT / f"profiling/v100-llama-3-8b-tp{tp}-roofline.yaml")
    room = memory(*v100_machine(), tp)
    return Layout("V100", tp, profile.latency, room.kv_cache_tokens, "roofline of the data sheet, unmeasured")


#: More than this the paper's V100 at TP 1 cannot have done, requests/s. At 24 requests/s its scheduler
#: reached 2.225 times round robin's throughput. Round robin reaches twice the rate of TP 1, since it ends
#: when the slower of two has done its half; and no scheduler reaches more than the 24 that arrive.
MOST_V100_TP1_RPS = 24 / (2 * 2.225)
#: The same for V100 at TP 2 in section 5.3: five instances, 1.336 times round robin at 16 requests/s. It is
#: less than half of the TP 1 above, so the requests there must have been several times heavier.
MOST_V100_TP2_RPS = 16 / (5 * 1.336)


@cache
def slowed_v100(tp: int) -> Layout:
    """The roofline, every duration multiplied so that TP 1 does `MOST_V100_TP1_RPS` on ShareGPT lengths."""
    factor = alone_rps(v100(1)) / MOST_V100_TP1_RPS
    layout = v100(tp)
    return replace(
        layout,
        gpu="slowed V100",
        latency=layout.latency.scaled(factor),
        origin=f"the roofline, {factor:.2f} times slower, unmeasured",
    )


@cache
def measured(system: str, tp: int) -> Layout:
    """One of the measured grids under `profiling/`."""
    profile = load_profile(ROOT / f"profiling/{system}-llama-3.1-8b-tp{tp}.yaml")
    assert profile.engine.kv_cache_tokens is not None, f"expected the capacity of {profile.name}"
    gpu = system.partition("_")[0].upper()
    origin = "measured grid (aiconfigurator-core 0.12.0)"
    return Layout(gpu, tp, profile.latency, profile.engine.kv_cache_tokens, origin)


def alone_rps(layout: Layout, trace: Path = SHAREGPT) -> float:
    """Requests/s of one server alone with 1,500 requests at once."""
    study = make_study([layout], trace=trace, count=1500)
    run = run_sweep(study, [Cell("single", math.inf, 0)])[0]
    return float(run.summary["request_throughput"])


def lengths(trace: Path) -> list[Row]:
    """The rows of a trace without their arrival times."""
    return [Row(None, row.input_tokens, max(1, row.output_tokens)) for row in read_trace(trace)]


def make_study(
    layouts: Sequence[Layout],
    *,
    trace: Path = SHAREGPT,
    weights: Sequence[float] = (),
    predictor: str = "normal",
    count: int | None = None,
) -> Study:
    """A fleet of these servers and `count` requests of the trace, for `run_sweep`."""
    rows = lengths(trace)
    names = [
        f"{layout.name} #{layouts[:index].count(layout) + 1}" if layouts.count(layout) > 1 else layout.name
        for index, layout in enumerate(layouts)
    ]
    specs = tuple(
        InstanceSpec(name, MODEL, "", weight, layout.latency, layout.capacity)
        for name, layout, weight in zip(names, layouts, weights or [1.0] * len(layouts), strict=True)
    )
    setup = SchedulerSetup(
        specs=specs,
        policy="rr",
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor=predictor,
        seed=0,
        lengths=LengthDistribution(row.output_tokens for row in rows),
        initial_health=Health.UP,
    )
    engines = {
        spec.name: EngineSpec(layout.latency, EngineLimits.from_capacity(layout.capacity))
        for spec, layout in zip(specs, layouts, strict=True)
    }
    return Study(setup, engines, MODEL, IterationRule.TOKEN, Load(rows, count))
