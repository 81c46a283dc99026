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

from hetlb.core.latency import LatencyModel
from hetlb.errors import PlanError
from hetlb.plan.common.capacity import exact, usable_bytes
from hetlb.plan.model_shape import ModelShape, refusal

#: Requests of a trace: (input tokens, output tokens).
Rows = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PlanModel:
    """The model to be served, and the longest request that must fit."""

    name: str
    parameters: float
    bytes_per_parameter: float
    kv_bytes_per_token: int
    max_input_tokens: int
    max_output_tokens: int
    #: Counts that vLLM must split evenly; None: not known, so degrees are not checked.
    shape: ModelShape | None = None

    @property
    def weight_bytes(self) -> Fraction:
        """Bytes of all weights."""
        return exact(self.parameters) * exact(self.bytes_per_parameter)

    @property
    def longest_request_bytes(self) -> int:
        """KV bytes of the longest request."""
        return self.kv_bytes_per_token * (self.max_input_tokens + self.max_output_tokens)


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpus` alike GPUs of `memory_bytes` each; `profiles` holds (degree, key of its profile) pairs."""

    name: str
    gpu: str
    gpus: int
    memory_bytes: int
    gpu_memory_utilization: float
    reserved_bytes_per_gpu: int
    profiles: tuple[tuple[int, str], ...]
    #: Price of one GPU, in whatever currency; None: not stated.
    price_per_gpu_hour: float | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything but the name: machines of one kind have one ranking."""
        return (
            self.gpu,
            self.gpus,
            self.memory_bytes,
            self.gpu_memory_utilization,
            self.reserved_bytes_per_gpu,
            self.profiles,
            self.price_per_gpu_hour,
        )


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


#: (profile key, kv_cache_tokens, instances) -> tokens/s of the whole machine.
Estimator = Callable[[str, int, int], float]


def memory(model: PlanModel, machine: Machine, degree: int) -> Memory:
    """`M_kv = t * (utilization * memory - reserved) - weights`, and whether the longest request fits it."""
    usable = usable_bytes(
        degree, machine.memory_bytes, machine.gpu_memory_utilization, machine.reserved_bytes_per_gpu
    )
    kv_bytes = usable - model.weight_bytes
    missing = max(0, math.ceil(model.longest_request_bytes - kv_bytes))
    return Memory(kv_bytes, max(0, math.floor(kv_bytes / model.kv_bytes_per_token)), missing)


def degrees(machine: Machine) -> list[int]:
    """Every degree that divides the GPU count, and those of profiles that leave GPUs over."""
    profiled = {degree for degree, _ in machine.profiles if degree <= machine.gpus}
    return sorted({d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0} | profiled)


def misfit(model: PlanModel, machine: Machine, degree: int, pipeline_parallel_size: int = 1) -> str:
    """Reason for which an instance of these degrees cannot run on a machine; empty where it can."""
    if model.shape is not None and (why := refusal(model.shape, degree, pipeline_parallel_size)):
        return f"vLLM refuses it: {why}"
    room = memory(model, machine, degree * pipeline_parallel_size)
    if room.missing_bytes:
        return f"does not fit: {room.missing_bytes} bytes missing"
    if degree not in dict(machine.profiles):
        return f"no profile for tensor_parallel_size {degree}"
    return ""


def search(
    model: PlanModel,
    machines: Sequence[Machine],
    estimate: Estimator,
    on_option: Callable[[], None] = lambda: None,
) -> list[MachinePlan]:
    """One plan per machine, in their order. `on_option` is called after every degree of every kind.

    Raises `PlanError` where an estimate is no throughput.
    """
    rankings: dict[tuple[object, ...], tuple[Option, ...]] = {}
    for machine in machines:
        if machine.kind in rankings:
            continue
        options = []
        for degree in degrees(machine):
            options.append(_option(model, machine, degree, estimate))
            on_option()
        options.sort(key=lambda o: (not o.feasible, -o.throughput_tok_s, o.tensor_parallel_size))
        rankings[machine.kind] = tuple(options)
    return [MachinePlan(machine, rankings[machine.kind]) for machine in machines]


def _option(model: PlanModel, machine: Machine, degree: int, estimate: Estimator) -> Option:
    room = memory(model, machine, degree)
    instances = machine.gpus // degree
    reason = misfit(model, machine, degree)
    if not reason:
        profile = dict(machine.profiles)[degree]
        throughput = estimate(profile, room.kv_cache_tokens, instances)
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
