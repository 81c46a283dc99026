"""Servers, lengths and studies of the paper's experiments, as far as this project has them.

The paper (Xiong et al., arXiv 2504.15303) measured 8 x V100-32GB (Llama-3-8B; DeepSeek-R1-Distill-Qwen-14B
at TP 2 in section 5.3) and one A800 80GB, with vLLM 0.6.0 and requests of ShareGPT. What is not at hand:

- a measured grid of a V100. A roofline of its data sheet stands in, every duration multiplied by `slowness`,
  the one free parameter of these benches. KV memory is what the paper's own formula gives.
- the text's sample of ShareGPT. `sharegpt-first-turn.csv` holds first turns of a part of it; both lengths are
  multiplied so that their means are the means of what `vllm bench serve` sends (`MEAN_INPUT`, `MEAN_OUTPUT`).
- a grid of the 14B model. Qwen3-14B (same hidden size and heads, 40 layers for 48, 14.8e9 parameters both)
  on an A100 stands for it on an A800, whose NVLink alone is slower: at TP 1 they are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec
from hetlb.tools.plan.cluster import Cluster, ClusterLimits
from hetlb.tools.plan.common.plan_tables import Machine, Model
from hetlb.tools.plan.tp_search import Part, memory
from hetlb.tools.profiler.fit import fit
from hetlb.tools.profiler.sources import Roofline
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import Study
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

ROOT = Path(__file__).resolve().parents[2]
SHAREGPT = ROOT / "bench/data/sharegpt-first-turn.csv"
MODEL = "llama"
#: vLLM's defaults of the time; neither the paper's settings nor the profiles say otherwise.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 256, 2048, 16
#: Tokens of what `vllm bench serve --dataset-name sharegpt` sends: 217 to 230 in and 200 to 203 out in ten
#: public logs, each of at least 500 requests.
MEAN_INPUT, MEAN_OUTPUT = 225.0, 202.0
#: Its limits: the prompt, and the prompt with its answer.
_LONGEST_INPUT, _LONGEST = 1024, 2048
_SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """One server: how fast it is, what its KV cache holds, and where its figures are from."""

    name: str
    latency: LatencyModel
    kv_cache_tokens: int
    origin: str

    @property
    def capacity(self) -> Capacity:
        """For scheduler and engine alike."""
        kv = self.kv_cache_tokens
        return Capacity(kv, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, None, kv)


# --- servers --------------------------------------------------------------------------------------------

LLAMA_8B = Model(name="Llama-3-8B", parameters=8.03e9, kv_bytes_per_token=131_072)
QWEN_14B = Model(name="DeepSeek-R1-Distill-Qwen-14B", parameters=14.77e9, kv_bytes_per_token=196_608)
V100_BOX = Machine("v100-box", "V100-SXM2-32GB", 8, 34_359_738_368, 0.9, 2_147_483_648)
A800_BOX = Machine("a800-box", "A800 80GB PCIe", 1, 85_899_345_920, 0.9, 2_147_483_648)
_LIMITS = ClusterLimits(max_input_tokens=2048, max_output_tokens=1024)
_MEASURED = "measured kernels (aiconfigurator-core 0.12.0)"


def _alone(model: Model) -> Cluster:
    return Cluster(path=ROOT, model=model, limits=_LIMITS, machines=())


@cache
def v100(tp: int, slowness: float = 1.0, model: Model = LLAMA_8B) -> Layout:
    """A V100-32GB server: the roofline of `profiling/v100-*-roofline.yaml`, `slowness` times as slow."""
    roofline = Roofline(
        peak_flops=125e12,
        bandwidth_bytes_s=900e9,
        model=model.known,
        tensor_parallel_size=tp,
        step_overhead_s=(1 + tp) / 1e3,
    )
    latency = fit(roofline.points()).latency
    return Layout(
        f"V100 TP {tp}",
        latency.scaled(slowness),
        memory(_alone(model), V100_BOX, Part(tp)).kv_cache_tokens,
        f"roofline of the data sheet, {slowness:g} times as slow, unmeasured",
    )


@cache
def measured(system: str, tp: int) -> Layout:
    """Llama-3.1-8B on one of the measured grids under `profiling/`."""
    profile = load_profile(ROOT / f"profiling/{system}-llama-3.1-8b-tp{tp}.yaml")
    assert profile.engine.kv_cache_tokens is not None, f"expected the capacity of {profile.name}"
    gpu = system.partition("_")[0].upper()
    return Layout(f"{gpu} TP {tp}", profile.latency, profile.engine.kv_cache_tokens, _MEASURED)


@cache
def a800_14b() -> Layout:
    """One A800 with the 14B model."""
    profile = load_profile(ROOT / "profiling/a100_sxm-qwen3-14b-tp1.yaml")
    tokens = memory(_alone(QWEN_14B), A800_BOX, Part(1)).kv_cache_tokens
    return Layout("A800 TP 1", profile.latency, tokens, f"{_MEASURED}: A100, Qwen3-14B")


# --- requests -------------------------------------------------------------------------------------------


@cache
def sharegpt(mean_output: float = MEAN_OUTPUT, mean_input: float = MEAN_INPUT) -> tuple[Row, ...]:
    """The rows of `SHAREGPT` with both lengths multiplied to these means, cut where the tool cuts."""
    rows = read_trace(SHAREGPT)
    inputs = _scaled([row.input_tokens for row in rows], mean_input, _LONGEST_INPUT)
    outputs = _scaled([max(1, row.output_tokens) for row in rows], mean_output, None)
    longest = _LONGEST if mean_output <= MEAN_OUTPUT else math.inf  # longer answers are no longer ShareGPT's
    return tuple(Row(None, i, int(min(o, longest - i))) for i, o in zip(inputs, outputs, strict=True))


def _scaled(lengths: Sequence[int], mean: float, most: int | None) -> list[int]:
    """Lengths times the factor that gives them this mean, at least `_SHORTEST`, at most `most`."""

    def at(factor: float) -> list[int]:
        cut = math.inf if most is None else most
        return [int(min(cut, max(_SHORTEST, round(length * factor)))) for length in lengths]

    low, high = 0.01, 100.0
    for _ in range(50):
        factor = math.sqrt(low * high)
        if sum(at(factor)) < mean * len(lengths):
            low = factor
        else:
            high = factor
    return at(high)


def sample(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows drawn at random."""
    return random.Random(f"paper {seed}").choices(rows, k=count)


def make_study(
    layouts: Sequence[Layout],
    rows: Sequence[Row],
    *,
    weights: Sequence[float] = (),
    predictor: str = "normal",
) -> Study:
    """A fleet of these servers and these requests, for `run_sweep`."""
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
    return Study(setup, engines, MODEL, IterationRule.TOKEN, Load(rows))
