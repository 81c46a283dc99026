"""Capacity of a group of GPUs in a role: the cost models, and the search for its parallelism.

`ProfileCost`: the latency profile of every stage (or one estimated from a roofline), composed to that of a
pipeline, and the rates of `rates`; what the simulator takes, so planned and simulated figures are comparable.

`PaperCost`: appendix A of HexGen-2 (ICLR 2025), with the true size of a layer and of its KV cache where the
paper has 12 H^2 weights a layer and one KV head per query head (true for OPT, not for models with
grouped-query attention: Llama-2-70B has an eighth of that KV cache). docs/evidence-planning.md lists every
difference.

Every tensor-parallel degree that divides the group's GPUs in each of its machines is tried, with several
divisions of the layers over the stages. Groups that look alike are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

from hetlb.config.plan_tables import Machine
from hetlb.config.profile_file import (
    BetterPrefill,
    DecodeCoefficients,
    EngineInfo,
    Hardware,
    ModelInfo,
    PrefillCoefficients,
    Profile,
    ProfileSource,
)
from hetlb.core.latency import LatencyModel
from hetlb.plan.common.capabilities import NIXL, Form, refused
from hetlb.plan.common.capacity import divide_layers, exact, kv_cache_tokens
from hetlb.plan.common.composition import (
    ACTIVATION_BYTES,
    LinkSeconds,
    StageProfile,
    compose_profile,
    engine_stages,
)
from hetlb.plan.configurations import hidden_size
from hetlb.plan.disaggregation.rates import rate
from hetlb.plan.disaggregation.split_cluster import (
    Composition,
    GroupStage,
    Role,
    ServerGroup,
    SplitCluster,
)
from hetlb.plan.throughput import bubbles, engine_spec, slowed
from hetlb.sim.fleet_engine import EngineSpec

#: The most GPUs and stages of one group.
MOST_GPUS = 16
MOST_STAGES = 8
#: Divisions of the layers: shares of proportion to speed, the rest to memory.
_BLENDS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: Latency of a transfer inside a machine; `links.latency_s` is that between machines.
_INSIDE_LATENCY_S = 5e-6
#: Corner between reading weights and computing tokens in an estimated profile: near the larger of both.
_CORNER = 8.0
#: Layers' time of the whole model is taken at this batch and context to say how fast GPUs decode.
_SPEED_BATCH, _SPEED_CONTEXT = 32, 1024
#: A KV cache below this holds nothing; rows of the workload that the bubbles of a pipeline are found on.
_FEWEST_TOKENS = 16
_BUBBLE_ROWS = 100


class CostModel(Protocol):
    """Cost model of stages. Seconds, requests/s, tokens."""

    def degrees(self, machine: int) -> frozenset[int]:
        """Tensor-parallel degrees for which a machine's speed is known."""
        ...

    def layer_s(self, machine: int, degree: int, role: Role) -> float:
        """Relative time of a layer on such a stage."""
        ...

    def most(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s that a group cannot exceed, computed in microseconds."""
        ...

    def capacity(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s of a group."""
        ...


def capacity_of(cluster: SplitCluster, stages: Sequence[GroupStage]) -> int:
    """Tokens that the KV cache of a group holds."""
    room = [(cluster.machines[s.machine].usable(s.gpus), Fraction(s.layers, cluster.layers)) for s in stages]
    return kv_cache_tokens(room, exact(cluster.weight_bytes), cluster.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Stages of a composition: (place of the machine in it, GPUs, layers), and the most that they serve."""

    stages: tuple[tuple[int, int, int], ...]
    most: float
    kv_cache_tokens: int

    def group(self, composition: Composition, role: Role, capacity: float) -> ServerGroup:
        """The layout on the machines of a composition."""
        stages = tuple(GroupStage(composition[at][0], gpus, layers) for at, gpus, layers in self.stages)
        return ServerGroup(role, stages, capacity, self.kv_cache_tokens)


class GroupTable:
    """The best group of every composition and role, computed when it is asked for.

    `promised` and `most` are before the bubbles of pipelines, whose simulation takes nearly all the time: a
    search asks for `group` and `capacity` where these would be good enough.
    """

    def __init__(self, cluster: SplitCluster, cost: CostModel) -> None:
        self.cluster = cluster
        self._cost = cost
        self._alike: dict[Composition, object] = {}
        self._known: dict[tuple[object, Role], list[_Layout]] = {}
        self._best: dict[tuple[object, Role], tuple[_Layout, float] | None] = {}
        self._groups: dict[tuple[Composition, Role], ServerGroup | None] = {}

    def group(self, composition: Composition, role: Role) -> ServerGroup | None:
        """The group with the most requests/s; None where the model or a request does not fit."""
        key = composition, role
        if key not in self._groups:
            same = self._kind(composition), role
            if same not in self._best:
                self._best[same] = self._find(composition, role)
            found = self._best[same]
            self._groups[key] = None if found is None else found[0].group(composition, role, found[1])
        return self._groups[key]

    def capacity(self, composition: Composition, role: Role) -> float:
        """Requests/s of the best group, 0 without one."""
        group = self.group(composition, role)
        return 0.0 if group is None else group.capacity

    def promised(self, composition: Composition, role: Role) -> ServerGroup | None:
        """A group that no group of these GPUs serves more than; it may serve less itself."""
        layouts = self._ranked(composition, role)
        return layouts[0].group(composition, role, layouts[0].most) if layouts else None

    def most(self, composition: Composition, role: Role) -> float:
        """Requests/s that no group of these GPUs exceeds."""
        layouts = self._ranked(composition, role)
        return layouts[0].most if layouts else 0.0

    def _kind(self, composition: Composition) -> object:
        """Likeness of compositions: kinds of machines, GPUs in each, links between them."""
        if composition not in self._alike:
            kinds, rates = self.cluster.kinds, self.cluster.links.bytes_per_s
            self._alike[composition] = (
                tuple((kinds[m], n) for m, n in composition),
                tuple(rates[a][b] for (a, _), (b, _) in pairwise(composition)),
            )
        return self._alike[composition]

    def _ranked(self, composition: Composition, role: Role) -> list[_Layout]:
        """All layouts that hold the model and a request, those that promise the most first."""
        key = self._kind(composition), role
        if key not in self._known:
            self._known[key] = []
            position = {m: at for at, (m, _) in enumerate(composition)}
            workload = self.cluster.workload
            need = workload.longest_prompt + 1 if role is Role.PREFILL else workload.longest_tokens
            for stages in self._layouts(composition, role):
                tokens = capacity_of(self.cluster, stages)
                most = self._cost.most(stages, role, tokens) if tokens >= need else 0.0
                if most > 0.0:
                    placed = tuple((position[s.machine], s.gpus, s.layers) for s in stages)
                    self._known[key].append(_Layout(placed, most, tokens))
            self._known[key].sort(key=lambda each: -each.most)
        return self._known[key]

    def _find(self, composition: Composition, role: Role) -> tuple[_Layout, float] | None:
        """The best layout with its requests/s."""
        best: tuple[_Layout, float] | None = None
        for layout in self._ranked(composition, role):
            if best is not None and layout.most <= best[1] * (1.0 + 1e-12):
                break
            stages = layout.group(composition, role, 0.0).stages
            capacity = self._cost.capacity(stages, role, layout.kv_cache_tokens)
            if capacity > (0.0 if best is None else best[1] * (1.0 + 1e-12)):
                best = layout, capacity
        return best

    def _layouts(self, composition: Composition, role: Role) -> Iterator[tuple[GroupStage, ...]]:
        """Every degree and division of the layers. Stages stand in the order of the machines."""
        cluster, cost = self.cluster, self._cost
        if sum(n for _, n in composition) > MOST_GPUS:
            return
        for degree in range(1, math.gcd(*(n for _, n in composition)) + 1):
            if any(n % degree or degree not in cost.degrees(m) for m, n in composition):
                continue
            if cluster.model.attention_heads % degree:
                continue
            machines = [m for m, n in composition for _ in range(n // degree)]
            if len(machines) > min(MOST_STAGES, cluster.layers):
                continue
            form = Form(degree, len(machines), len(composition), NIXL, role)
            if role is not Role.BOTH and refused(form):
                continue
            seen = set()
            speeds = [1.0 / cost.layer_s(m, degree, role) for m in machines]
            memory = [degree * cluster.machines[m].usable_bytes for m in machines]
            if min(memory) <= 0.0:
                continue
            for blend in _BLENDS if len(machines) > 1 else (1.0,):
                weights = [
                    blend * s / sum(speeds) + (1.0 - blend) * b / sum(memory)
                    for s, b in zip(speeds, memory, strict=True)
                ]
                layers = tuple(int(s * cluster.layers) for s in divide_layers(weights, cluster.layers))
                if layers not in seen:
                    seen.add(layers)
                    yield tuple(GroupStage(m, degree, own) for m, own in zip(machines, layers, strict=True))


# --- latency profiles -----------------------------------------------------------------------------------


class ProfileCost:
    """Rates by latency profiles; those of GPUs without one are estimated from their peak figures."""

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster
        self._profiles: dict[tuple[int, int], tuple[Profile, LatencyModel] | None] = {}
        self._degrees: dict[int, frozenset[int]] = {}
        self._layer_s: dict[tuple[int, int, Role], float] = {}
        self._shares: dict[object, float] = {}

    def degrees(self, machine: int) -> frozenset[int]:
        """Degrees with a profile; any power of two where peak figures are known."""
        if machine not in self._degrees:
            of = self._cluster.machines[machine]
            found = {degree for degree in of.profiles if degree <= of.gpus}
            if of.roofline is not None:
                found |= {1 << power for power in range(of.gpus.bit_length())}
            self._degrees[machine] = frozenset(found)
        return self._degrees[machine]

    def _whole(self, stage: GroupStage) -> tuple[Profile, LatencyModel]:
        """The whole model on the GPUs of a stage."""
        key = self._cluster.kinds[stage.machine], stage.gpus
        found = self._profiles.get(key)
        if found is None:
            machine = self._cluster.machines[stage.machine]
            profile = machine.profiles.get(stage.gpus)
            if profile is None:
                link = self._cluster.links.bytes_per_s[stage.machine][stage.machine]
                profile = estimated_profile(self._cluster, machine, stage.gpus, link)
            found = self._profiles[key] = profile, profile.latency
        return found

    def layer_s(self, machine: int, degree: int, role: Role) -> float:
        """Time of one request's prefill, its decode steps, or both, by the whole model."""
        key = self._cluster.kinds[machine], degree, role
        if key not in self._layer_s:
            latency, workload = self._whole(GroupStage(machine, degree, 1))[1], self._cluster.workload
            seconds = 0.0
            if role is not Role.DECODE:
                seconds += latency.prefill_s(workload.prompt_tokens)
            if role is not Role.PREFILL:
                steps = workload.output_tokens / _SPEED_BATCH
                seconds += steps * latency.step_s(_SPEED_BATCH, _SPEED_BATCH * _SPEED_CONTEXT)
            self._layer_s[key] = seconds
        return self._layer_s[key]

    def _links(self, stages: Sequence[GroupStage]) -> list[LinkSeconds]:
        """The links behind all stages but the last."""
        links, size = self._cluster.links, hidden_size(self._cluster.model) * ACTIVATION_BYTES
        return [
            LinkSeconds(
                size / max(links.bytes_per_s[a.machine][b.machine], 1.0),
                links.latency_s if a.machine != b.machine else 0.0,
            )
            for a, b in pairwise(stages)
        ]

    def most(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s by the composed latency model, without bubbles; 0 where its limits hold no request."""
        if kv_cache_tokens < _FEWEST_TOKENS:
            return 0.0
        spec = engine_spec(self._composed(stages, kv_cache_tokens))
        return rate(role, spec.latency, spec.limits, self._cluster.workload, self._cluster.slo)

    def capacity(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s by the composed latency model and the bubbles of its pipeline."""
        most = self.most(stages, role, kv_cache_tokens)
        if most == 0.0 or role is not Role.BOTH or len(stages) == 1:
            return most
        return most * self._bubbles(stages, engine_spec(self._composed(stages, kv_cache_tokens)))

    def _bubbles(self, stages: Sequence[GroupStage], spec: EngineSpec) -> float:
        """Prompts and answers in one pipeline; groups of one role have batches that are alike."""
        if len(stages) < 2:
            return 1.0
        key = tuple((self._cluster.kinds[s.machine], s.gpus, s.layers) for s in stages), spec.limits
        if key not in self._shares:
            rows = self._cluster.workload.rows
            sample = rows[:: max(1, len(rows) // _BUBBLE_ROWS)]
            own = engine_stages(self._parts(stages), self._links(stages))
            self._shares[key] = bubbles(spec, [(1.0, sample)], own)
        return self._shares[key]

    def profile(self, stages: Sequence[GroupStage], kv_cache_tokens: int, role: Role) -> Profile:
        """The latency profile of a group, for the simulator and for a fleet file."""
        profile = self._composed(stages, kv_cache_tokens)
        if role is not Role.BOTH:
            return profile
        return slowed(profile, self._bubbles(stages, engine_spec(profile)))

    def _parts(self, stages: Sequence[GroupStage]) -> list[StageProfile]:
        cluster = self._cluster
        return [
            StageProfile(
                self._whole(stage)[0],
                stage.layers / cluster.layers,
                cluster.machines[stage.machine].gpu,
                stage.gpus,
            )
            for stage in stages
        ]

    def _composed(self, stages: Sequence[GroupStage], kv_cache_tokens: int) -> Profile:
        cluster, parts = self._cluster, self._parts(stages)
        name = "-".join([*dict.fromkeys(part.gpu.lower() for part in parts), f"tp{stages[0].gpus}"])
        if len(stages) == 1:
            stated = parts[0].profile.engine.kv_cache_tokens
            kv_cache_tokens = kv_cache_tokens if stated is None else min(stated, kv_cache_tokens)
        info = ModelInfo(name=cluster.model.name, kv_bytes_per_token=cluster.kv_bytes_per_token)
        return compose_profile(f"{name}-pp{len(stages)}", info, parts, kv_cache_tokens, self._links(stages))


def estimated_profile(
    cluster: SplitCluster, machine: Machine, degree: int, link_bytes_per_s: float
) -> Profile:
    """The terms of appendix A as a latency profile: weights read or tokens computed, KV read, all-reduces."""
    table, model = machine.roofline, cluster.model
    assert table is not None, "expected a machine with a profile of this degree or peak figures"
    flops = degree * table.flops * table.flops_efficiency
    bandwidth = degree * table.bandwidth_bytes_per_s * table.bandwidth_efficiency
    overhead_s = table.overhead_ms / 1e3
    size = hidden_size(model) * ACTIVATION_BYTES
    exchanged_s = 4.0 * cluster.layers * (degree - 1) / degree * size / (link_bytes_per_s or math.inf)
    token_s = 2.0 * model.parameters / flops + exchanged_s
    floor_s = cluster.weight_bytes / bandwidth + overhead_s
    return Profile(
        version=2,
        name=f"{machine.gpu.lower()}-tp{degree}-estimated",
        prefill=PrefillCoefficients(k1=token_s, k2=0.0, k3=0.0, k4=floor_s),
        decode=DecodeCoefficients(
            k5=cluster.kv_bytes_per_token / bandwidth, k6=exchanged_s, k7=0.0, k8=floor_s
        ),
        better_prefill=BetterPrefill(floor_s=floor_s, token_s=token_s, attention_s=0.0, p=_CORNER),
        hardware=Hardware(gpu=machine.gpu, gpus=degree, memory_bytes=machine.memory_bytes),
        model=ModelInfo(name=model.name, kv_bytes_per_token=model.kv_bytes_per_token),
        engine=EngineInfo(tensor_parallel_size=degree),
        source=ProfileSource(
            kind="roofline",
            measured=False,
            system=machine.gpu,
            note=f"estimated, not measured: {table.flops:g} FLOP/s at {table.flops_efficiency:g}, "
            f"{table.bandwidth_bytes_per_s:g} bytes/s at {table.bandwidth_efficiency:g}",
        ),
    )


# --- appendix A -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gpu:
    flops: float
    bytes_per_s: float


class PaperCost:
    """Appendix A of HexGen-2, for clusters whose machines all have a roofline (peak figures).

    A group computes one batch at a time: stages are not pipelined, as in the paper. Prefill capacity is one
    request over its latency, decode capacity the largest batch over its latency; a group that does both takes
    the sum of both times per request (the paper has no such group).
    """

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster
        self._hidden = hidden_size(cluster.model)
        self._layer_weights = cluster.model.parameters / cluster.layers
        self._layer_bytes = cluster.weight_bytes / cluster.layers

    def degrees(self, machine: int) -> frozenset[int]:
        """Any power of two."""
        return frozenset(1 << power for power in range(self._cluster.machines[machine].gpus.bit_length()))

    def _gpu(self, machine: int) -> _Gpu:
        table = self._cluster.machines[machine].roofline
        assert table is not None
        return _Gpu(
            table.flops * table.flops_efficiency, table.bandwidth_bytes_per_s * table.bandwidth_efficiency
        )

    def layer_s(self, machine: int, degree: int, role: Role) -> float:
        """Seconds of one layer's computation for one request."""
        workload = self._cluster.workload
        return self._compute_s(GroupStage(machine, degree, 1), role, 1.0, workload.prompt_tokens)

    def _compute_s(self, stage: GroupStage, role: Role, batch: float, prompt: float) -> float:
        gpu, output = self._gpu(stage.machine), self._cluster.workload.output_tokens
        seconds = 0.0
        if role is not Role.DECODE:
            seconds += 2.0 * self._layer_weights * batch * prompt / (stage.gpus * gpu.flops)
        if role is not Role.PREFILL:
            seconds += self._layer_bytes * output / (stage.gpus * gpu.bytes_per_s)
            seconds += 2.0 * self._layer_weights * batch * output / (stage.gpus * gpu.flops)
        return seconds * stage.layers

    def _tp_s(self, stage: GroupStage, tokens: float, times: float) -> float:
        """Four exchanges a layer between the GPUs of a stage, each of `tokens` activations."""
        if stage.gpus == 1:
            return 0.0
        links = self._cluster.links
        size = tokens * self._hidden * ACTIVATION_BYTES
        each = _INSIDE_LATENCY_S + size / (stage.gpus * links.bytes_per_s[stage.machine][stage.machine])
        return (stage.gpus - 1) * each * 4.0 * stage.layers * times

    def _pp_s(self, stages: Sequence[GroupStage], tokens: float, times: float) -> float:
        links, size = self._cluster.links, tokens * self._hidden * ACTIVATION_BYTES
        return times * math.fsum(
            (links.latency_s if a.machine != b.machine else _INSIDE_LATENCY_S)
            + size / max(links.bytes_per_s[a.machine][b.machine], 1.0)
            for a, b in pairwise(stages)
        )

    def _prefill_s(self, stages: Sequence[GroupStage], prompt: float) -> float:
        seconds = math.fsum(
            self._compute_s(stage, Role.PREFILL, 1.0, prompt) + self._tp_s(stage, prompt, 1.0)
            for stage in stages
        )
        return seconds + self._pp_s(stages, prompt, 1.0)

    def _decode_s(self, stages: Sequence[GroupStage], batch: float) -> float:
        output = self._cluster.workload.output_tokens
        seconds = math.fsum(
            self._compute_s(stage, Role.DECODE, batch, 0.0) + self._tp_s(stage, batch, output)
            for stage in stages
        )
        return seconds + self._pp_s(stages, batch, output)

    def most(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s: nothing is simulated."""
        return self.capacity(stages, role, kv_cache_tokens)

    def capacity(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Requests/s."""
        workload = self._cluster.workload
        prefill_s = self._prefill_s(stages, workload.prompt_tokens)
        if role is Role.PREFILL:
            return 1.0 / prefill_s
        batch = math.floor(kv_cache_tokens / (workload.prompt_tokens + workload.output_tokens))
        if batch < 1:
            return 0.0
        decode_s = self._decode_s(stages, batch) / batch
        return 1.0 / decode_s if role is Role.DECODE else 1.0 / (prefill_s + decode_s)
