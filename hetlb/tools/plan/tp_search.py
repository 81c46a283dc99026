"""Instances that one machine can run: the memory constraint, and the exhaustive search of the paper.

Every tensor-parallel degree that divides the GPU count is ranked, the infeasible ones last with the reason
and the missing bytes; what throughput an instance has is said by a function given as an argument, once per
kind of machine. Pipelines of such degrees are options of the same form. Memory is computed in exact
fractions, so limits agree with a hand computation to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import msgspec

from hetlb.balancer.config.profile_file import Profile
from hetlb.errors import PlanError
from hetlb.tools.models.degrees import needs_whole_experts, refusal
from hetlb.tools.plan.cluster import Cluster
from hetlb.tools.plan.common.capacity import divide_layers, exact, kv_bytes
from hetlb.tools.plan.common.composition import (
    LinkSeconds,
    StageProfile,
    activation_link,
    compose_profile,
    engine_stages,
    estimated_profile,
)
from hetlb.tools.plan.common.data_parallel import (
    Degrees,
    copies_cache,
    data_parallel_degrees,
    rank_bytes,
)
from hetlb.tools.plan.common.plan_tables import INSIDE_BYTES_PER_S, Machine
from hetlb.tools.plan.throughput import Mix, with_bubbles
from hetlb.tools.sim.deadline import StoppedError

#: Reason of an option for which no time was left.
NOT_MEASURED: Final = "not measured: no time was left"
#: Seconds per batch of the link between stages inside a machine.
_LINK_BATCH_S = 5e-5


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Degrees of one instance."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def name(self) -> str:
        stages = f"pp{self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        ranks = f"dp{self.data_parallel_size}" if self.data_parallel_size > 1 else ""
        return f"tp{self.tensor_parallel_size}{stages}{ranks}"

    @property
    def ranks(self) -> Degrees:
        return Degrees(self.tensor_parallel_size, self.data_parallel_size)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for the KV cache that an instance of some degree has. `missing_bytes` is 0 if it fits.

    For a data-parallel server, the tokens are the sum over ranks and the bytes are one rank's: a request
    belongs to one rank.
    """

    kv_cache_tokens: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    """An instance on a machine: its profile with the KV cache it has there, its tokens/s alone while full.

    One that cannot run has a reason, and neither profile nor throughput.
    """

    part: Part
    memory: Memory
    reason: str = ""
    profile: Profile | None = None
    throughput_tok_s: float = 0.0

    @property
    def feasible(self) -> bool:
        return not self.reason

    @property
    def estimated(self) -> bool:
        """True for a data-parallel layout without a profile of its own."""
        profile = self.profile
        return profile is not None and any(each.startswith(f"{self.part.name}: ") for each in profile.assumed)


#: Tokens/s of one instance of a profile.
Throughput = Callable[[Profile], float]
#: Options of one stage of every kind of machine, best first.
Rankings = Mapping[tuple[object, ...], list[Option]]


def memory(cluster: Cluster, machine: Machine, part: Part) -> Memory:
    """Return `t * (utilization * memory - reserved) - weights`, and whether the longest request fits it.

    Of a pipeline the stage with the least room for its share decides.
    """
    model, usable = cluster.model, machine.usable(part.tensor_parallel_size)
    if part.data_parallel_size > 1:
        room = rank_bytes(model, usable, part.ranks)
    else:
        weights = exact(model.parameters) * exact(model.bytes_per_parameter)
        room = kv_bytes([(usable, share) for share in _shares(cluster, part)], weights)
    copies, longest = exact(model.known.replication(part.tensor_parallel_size)), cluster.limits.tokens
    need = exact(model.known.allocated.of(longest))
    tokens = math.floor(room / (model.kv_bytes_per_token * copies))
    return Memory(max(0, tokens) * part.data_parallel_size, max(0, math.ceil(need * copies - room)))


def _shares(cluster: Cluster, part: Part) -> list[Fraction]:
    """Return the shares of the layers of each stage."""
    return divide_layers([1] * part.pipeline_parallel_size, cluster.model.layers or None)


def degrees(machine: Machine) -> list[int]:
    """Return every degree that divides the GPU count, and degrees of profiles that leave GPUs over."""
    return sorted({d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0} | machine.profiles.keys())


def parts(cluster: Cluster, machine: Machine) -> list[Part]:
    """Return every degree, and the data-parallel layouts of a model with experts.

    Without a profile a layout counts only if tensor parallelism over its GPUs keeps copies of the cache.
    """
    ranked = dict.fromkeys(Degrees(*each) for each in machine.ranked)
    for each in data_parallel_degrees(cluster.model, machine.gpus):
        if copies_cache(cluster.model, each.gpus):
            ranked[each] = None
    return [Part(degree) for degree in degrees(machine)] + [Part(each.tp, 1, each.dp) for each in ranked]


def search(
    cluster: Cluster,
    throughput: Throughput,
    on_option: Callable[[Machine, Option], None] = lambda machine, option: None,
) -> dict[tuple[object, ...], list[Option]]:
    """Rank all degrees of every kind of machine. Raises `PlanError` if a throughput is none.

    What the deadline leaves no time for is not measured.
    """
    rankings = {}
    for kind, machine in {machine.kind: machine for machine in cluster.machines}.items():
        options: list[Option] = []
        for part in parts(cluster, machine):
            options.append(_option(cluster, machine, part, throughput, []))
            on_option(machine, options[-1])
        options.sort(key=lambda option: (not option.feasible, -whole_tok_s(machine, option), option.part))
        rankings[kind] = options
    return rankings


def whole_tok_s(machine: Machine, option: Option) -> float:
    """Return the tokens/s of a machine with as many instances as fit."""
    return machine.gpus // option.part.gpus * option.throughput_tok_s


def best_pipelines(
    cluster: Cluster,
    machine: Machine,
    throughput: Throughput,
    most_stages: int,
    mix: Mix,
) -> list[Option]:
    """Return the best pipeline of every number of GPUs, with its bubbles on this mix."""
    best: dict[int, Option] = {}
    for stages in range(2, most_stages + 1):
        for degree in machine.profiles:
            part = Part(degree, stages)
            if part.gpus > machine.gpus:
                continue
            option, known = _option(cluster, machine, part, throughput, mix), best.get(part.gpus)
            if option.feasible and (known is None or option.throughput_tok_s > known.throughput_tok_s):
                best[part.gpus] = option
    return list(best.values())


def _option(cluster: Cluster, machine: Machine, part: Part, throughput: Throughput, mix: Mix) -> Option:
    room = memory(cluster, machine, part)
    if reason := _misfit(cluster, machine, part, room):
        return Option(part, room, reason)
    try:
        profile = _profile(cluster, machine, part, room.kv_cache_tokens // part.data_parallel_size, mix)
        if profile is None:
            return Option(part, room, f"no profile for {part.name}, and no peak figures of {machine.gpu}")
        tokens_s = throughput(profile)
    except StoppedError:
        return Option(part, room, NOT_MEASURED)
    if not (math.isfinite(tokens_s) and tokens_s > 0):
        where = f"{machine.name}, {part.name}"
        raise PlanError(f"{where}: expected a throughput above 0, got {tokens_s}")
    return Option(part, room, "", profile, tokens_s)


def _misfit(cluster: Cluster, machine: Machine, part: Part, room: Memory) -> str:
    """Return the reason why an instance cannot run on a machine; empty if it can."""
    shape, degree = cluster.model.shape, part.tensor_parallel_size
    if part.data_parallel_size > 1:
        return f"does not fit: {room.missing_bytes} bytes missing" if room.missing_bytes else ""
    stated = machine.profiles.get(degree)
    # Experts stay whole if the profile says so, or if vLLM takes this degree in no other way.
    whole = stated is not None and bool(stated.engine.enable_expert_parallel)
    whole = whole or needs_whole_experts(shape, degree)
    if shape is not None and (why := refusal(shape, degree, part.pipeline_parallel_size, whole)):
        return f"vLLM refuses it: {why}"
    if room.missing_bytes:
        return f"does not fit: {room.missing_bytes} bytes missing"
    if degree not in machine.profiles:
        return f"no profile for tensor_parallel_size {degree}"
    return ""


def _profile(cluster: Cluster, machine: Machine, part: Part, tokens: int, mix: Mix) -> Profile | None:
    """Return the profile of an instance with its KV cache; of a pipeline with its bubbles, of ranks of one.

    A data-parallel layout without a profile is estimated; None if its GPU is unknown.
    """
    if part.data_parallel_size > 1:
        return _rank_profile(cluster, machine, part, tokens)
    model, stages, degree = cluster.model, part.pipeline_parallel_size, part.tensor_parallel_size
    measured, link = machine.profiles[degree], activation_link(model, INSIDE_BYTES_PER_S, _LINK_BATCH_S)
    if needs_whole_experts(model.shape, degree):
        engine = msgspec.structs.replace(measured.engine, enable_expert_parallel=True)
        measured = msgspec.structs.replace(measured, engine=engine)
    held = [
        StageProfile(
            measured, float(share), machine.gpu, degree, link if index < stages - 1 else LinkSeconds()
        )
        for index, share in enumerate(_shares(cluster, part))
    ]
    name = f"{measured.name}-pp{stages}" if stages > 1 else measured.name
    return with_bubbles(compose_profile(name, model, held, tokens), mix, engine_stages(held))


def _rank_profile(cluster: Cluster, machine: Machine, part: Part, tokens: int) -> Profile | None:
    """Return the profile of a rank with its KV cache."""
    stated = machine.ranked.get(part.ranks)
    if stated is None:
        peaks, known = (machine.gpu, machine.memory_bytes, machine.roofline), machine.profiles
        found = estimated_profile(cluster.model, *peaks, *part.ranks, known=known)
    else:
        found = stated[1]
    if found is None:
        return None
    engine = msgspec.structs.replace(found.engine, enable_expert_parallel=True)
    held = StageProfile(
        msgspec.structs.replace(found, engine=engine), 1.0, machine.gpu, part.tensor_parallel_size
    )
    return compose_profile(found.name, cluster.model, [held], tokens)
