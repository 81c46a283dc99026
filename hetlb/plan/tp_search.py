"""Tensor-parallel degree per machine: the memory constraint and the exhaustive search of the paper.

Every degree that divides the GPU count is ranked, the infeasible ones last with the reason and
the missing bytes; what throughput a degree has is said by an estimator given as an argument, once per
kind of machine. `static_estimate` is algorithm 1 of Xiong et al., arXiv 2504.15303. Memory is computed
in exact fractions, so limits agree with a hand computation to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hetlb.config.cluster import Cluster
from hetlb.config.plan_tables import Machine
from hetlb.config.profile_file import Profile
from hetlb.core.latency import LatencyModel
from hetlb.errors import PlanError
from hetlb.plan.common.capacity import exact
from hetlb.plan.model_shape import refusal

#: Requests of a trace: (input tokens, output tokens).
Rows = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that an instance of some degree leaves for the KV cache. `missing_bytes` is 0 where it fits."""

    kv_bytes: Fraction
    kv_cache_tokens: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    """One degree of one machine. `throughput_tok_s` is of the whole machine, 0 if infeasible."""

    tensor_parallel_size: int
    instances: int
    throughput_tok_s: float
    kv_cache_tokens: int
    feasible: bool
    reason: str
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """The ranking of one machine, best first; `best` is None where nothing fits."""

    machine: Machine
    ranking: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The first of the ranking, if it can be used."""
        return self.ranking[0] if self.ranking and self.ranking[0].feasible else None


#: (profile, KV cache tokens) -> tokens/s of one instance.
Estimator = Callable[[Profile, int], float]


def memory(cluster: Cluster, machine: Machine, gpus: int) -> Memory:
    """`M_kv = t * (utilization * memory - reserved) - weights`, and whether the longest request fits it."""
    model = cluster.model
    kv_bytes = machine.usable(gpus) - exact(model.parameters) * exact(model.bytes_per_parameter)
    missing = max(0, math.ceil(model.kv_bytes_per_token * cluster.limits.tokens - kv_bytes))
    return Memory(kv_bytes, max(0, math.floor(kv_bytes / model.kv_bytes_per_token)), missing)


def degrees(machine: Machine) -> list[int]:
    """Every degree that divides the GPU count, and those of profiles that leave GPUs over."""
    return sorted({d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0} | machine.profiles.keys())


def misfit(cluster: Cluster, machine: Machine, degree: int, pipeline_parallel_size: int = 1) -> str:
    """Reason for which an instance of these degrees cannot run on a machine; empty where it can."""
    shape = cluster.model.shape
    if shape is not None and (why := refusal(shape, degree, pipeline_parallel_size)):
        return f"vLLM refuses it: {why}"
    room = memory(cluster, machine, degree * pipeline_parallel_size)
    if room.missing_bytes:
        return f"does not fit: {room.missing_bytes} bytes missing"
    if degree not in machine.profiles:
        return f"no profile for tensor_parallel_size {degree}"
    return ""


def search(
    cluster: Cluster, estimate: Estimator, on_option: Callable[[], None] = lambda: None
) -> list[MachinePlan]:
    """One plan per machine, in their order. `on_option` is called after every degree of every kind.

    Raises `PlanError` where an estimate is no throughput.
    """
    rankings: dict[tuple[object, ...], tuple[Option, ...]] = {}
    for machine in cluster.machines:
        if machine.kind in rankings:
            continue
        options = []
        for degree in degrees(machine):
            options.append(_option(cluster, machine, degree, estimate))
            on_option()
        options.sort(key=lambda o: (not o.feasible, -o.throughput_tok_s, o.tensor_parallel_size))
        rankings[machine.kind] = tuple(options)
    return [MachinePlan(machine, rankings[machine.kind]) for machine in cluster.machines]


def _option(cluster: Cluster, machine: Machine, degree: int, estimate: Estimator) -> Option:
    room = memory(cluster, machine, degree)
    instances = machine.gpus // degree
    reason = misfit(cluster, machine, degree)
    if not reason:
        throughput = instances * estimate(machine.profiles[degree], room.kv_cache_tokens)
        if not (math.isfinite(throughput) and throughput > 0):
            raise PlanError(
                f"{machine.name}, degree {degree}: expected a throughput above 0, got {throughput}"
            )
        return Option(degree, instances, throughput, room.kv_cache_tokens, True, "")
    return Option(degree, instances, 0.0, room.kv_cache_tokens, False, reason, room.missing_bytes)


# --- algorithm 1 ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests prefilled and decoded together: their mean input, their longest output."""

    size: int
    input_tokens: float
    output_tokens: int


def pack(rows: Rows, kv_cache_tokens: int, max_num_seqs: int) -> list[Batch]:
    """Greedily, in trace order: the largest batches whose inputs and outputs fit the KV cache.

    A request that alone exceeds the cache is left out.
    """
    batches: list[Batch] = []
    size = inputs = outputs = longest = 0
    for input_tokens, output_tokens in rows:
        need = input_tokens + output_tokens
        if need > kv_cache_tokens:
            continue
        if size and (size >= max_num_seqs or inputs + outputs + need > kv_cache_tokens):
            batches.append(Batch(size, inputs / size, longest))
            size = inputs = outputs = longest = 0
        size, inputs, outputs = size + 1, inputs + input_tokens, outputs + output_tokens
        longest = max(longest, output_tokens)
    if size:
        batches.append(Batch(size, inputs / size, longest))
    return batches


def static_estimate(latency: LatencyModel, rows: Rows, kv_cache_tokens: int, max_num_seqs: int) -> float:
    """Tokens/s (input and output) of one instance on these rows, by the paper's algorithm 1 from k1..k8.

    It promises the order of degrees, not the absolute figure: a real engine refills its batch.
    """
    seconds = sum(
        latency.paper_prefill_s(batch.size, batch.input_tokens)
        + latency.paper_decode_s(batch.size, batch.input_tokens, batch.output_tokens)
        for batch in pack(rows, kv_cache_tokens, max_num_seqs)
    )
    tokens = sum(i + o for i, o in rows if i + o <= kv_cache_tokens)
    return tokens / seconds if seconds > 0 else 0.0
