"""Capacity of a group of GPUs in a role: the cost models, and the search for its parallelism.

`ProfileCost`: the latency profile of every stage (or one estimated from a roofline), composed to one of a
pipeline, and the rates of `rates`. The simulator takes the same, so planned and simulated figures are
comparable.

`PaperCost`: appendix A of HexGen-2 (ICLR 2025), with the true size of a layer and of its KV cache. The paper
has 12 H^2 weights a layer and one KV head per query head. That is true for OPT, not for models with
grouped-query attention: Llama-2-70B has an eighth of that KV cache. bench/PLANNING.md lists every difference.

Every tensor-parallel degree that divides the group's GPUs in each of its machines is tried, with several
divisions of the layers over the stages. Groups that look alike are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.plan.common.capabilities import NIXL, Form, refused
from hetlb.tools.plan.common.capacity import divide_layers, exact, kv_cache_tokens
from hetlb.tools.plan.common.composition import (
    MOST_GPUS,
    MOST_STAGES,
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
    rank_tokens,
)
from hetlb.tools.plan.disaggregation.rates import rate
from hetlb.tools.plan.disaggregation.split_cluster import (
    Composition,
    GroupStage,
    Role,
    ServerGroup,
    SplitCluster,
)
from hetlb.tools.plan.throughput import bubbles, slowed
from hetlb.tools.profiler.sources import ACTIVATION_BYTES
from hetlb.tools.sim.deadline import StoppedError
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.study import engine_of

#: Divisions of the layers over unlike machines. This share is in proportion to speed, the rest to memory.
_BLEND_SHARES = (1.0, 0.5, 0.0)
#: Latency of a transfer inside a machine; `links.latency_s` holds between machines.
_INSIDE_LATENCY_S = 5e-6
#: Batch and context at which GPUs' decode speeds are compared.
_SPEED_BATCH, _SPEED_CONTEXT = 32, 1024
#: Least tokens of a usable KV cache; rows of the workload that the bubbles of a pipeline are found on.
_FEWEST_TOKENS = 16
_BUBBLE_ROWS = 100


def capacity_of(cluster: SplitCluster, stages: Sequence[GroupStage]) -> int:
    first = stages[0]
    if first.ranks > 1:
        usable = cluster.machines[first.machine].usable(first.degrees.tp)
        return rank_tokens(cluster.model, usable, first.degrees)
    room = [
        (cluster.machines[s.machine].usable(s.gpus), Fraction(s.layers, cluster.model.layers)) for s in stages
    ]
    each = cluster.model.kv_bytes_at(stages[0].gpus)
    return kv_cache_tokens(room, exact(cluster.model.weight_bytes), exact(each))


class GroupTable:
    """The best group of every composition and role, computed on demand.

    A `promised` group has a rate without the bubbles of its pipeline. Simulating bubbles takes nearly all the
    time.
    """

    def __init__(self, cluster: SplitCluster, cost: CostModel) -> None:
        self.cluster = cluster
        self._cost = cost
        #: The first of each set of similar compositions, used to find groups: by likeness, by composition.
        self._first: dict[object, Composition] = {}
        self._like: dict[Composition, Composition] = {}
        self._ranked: dict[tuple[Composition, Role], list[ServerGroup]] = {}
        self._best: dict[tuple[Composition, Role], ServerGroup | None] = {}

    def group(self, composition: Composition, role: Role) -> ServerGroup | None:
        return self._moved(self._find(composition, role), composition)

    def promised(self, composition: Composition, role: Role) -> ServerGroup | None:
        """Return the group with the highest rate before bubbles.

        No group of these GPUs serves more than that rate; this one may serve less.
        """
        return self._moved(next(iter(self._promising(composition, role)), None), composition)

    def sure(self, composition: Composition, role: Role) -> ServerGroup | None:
        """Return the best of the groups without bubbles, which serve exactly their promised rate."""
        found = (each for each in self._promising(composition, role) if each.is_exact)
        return self._moved(next(found, None), composition)

    def _alike(self, composition: Composition) -> Composition:
        """Return the first composition with the same kinds of machines, GPUs in each and links."""
        if composition not in self._like:
            kinds, rates = self.cluster.kinds, self.cluster.links.bytes_per_s
            machines = tuple((kinds[m], n) for m, n in composition)
            links = tuple(rates[a][b] for (a, _), (b, _) in pairwise(composition))
            self._like[composition] = self._first.setdefault((machines, links), composition)
        return self._like[composition]

    def _moved(self, group: ServerGroup | None, composition: Composition) -> ServerGroup | None:
        """Return a group of the first composition, on the machines of this one."""
        first = self._alike(composition)
        if group is None or composition == first:
            return group
        target = {m: other for (m, _), (other, _) in zip(first, composition, strict=True)}
        stages = tuple(replace(s, machine=target[s.machine]) for s in group.stages)
        return replace(group, stages=stages)

    def _promising(self, composition: Composition, role: Role) -> list[ServerGroup]:
        """Return all groups that hold the model and a request, the most promising first."""
        key = self._alike(composition), role
        if key not in self._ranked:
            found = []
            workload = self.cluster.workload
            need = workload.longest_prompt + 1 if role is Role.PREFILL else workload.longest_tokens
            for stages in self._layouts(*key):
                tokens = capacity_of(self.cluster, stages)
                most = self._cost.most(stages, role, tokens) if tokens >= need else 0.0
                if most > 0.0:
                    found.append(ServerGroup(role, stages, most, tokens))
            self._ranked[key] = sorted(found, key=lambda each: -each.capacity)
        return self._ranked[key]

    def _find(self, composition: Composition, role: Role) -> ServerGroup | None:
        """Return the best group of the first similar composition; after the deadline the best known one."""
        key = self._alike(composition), role
        if key not in self._best:
            best, most = None, 0.0
            for group in self._promising(*key):
                if group.capacity <= most:
                    break
                try:
                    capacity = self._cost.capacity(group.stages, role, group.kv_cache_tokens)
                except StoppedError:
                    return best
                if capacity > most:
                    best, most = replace(group, capacity=capacity), capacity * (1.0 + 1e-12)
            self._best[key] = best
        return self._best[key]

    def _layouts(self, composition: Composition, role: Role) -> Iterator[tuple[GroupStage, ...]]:
        """Yield every degree, with the divisions of the layers; stages stand in the order of the machines."""
        cluster, cost = self.cluster, self._cost
        if sum(n for _, n in composition) > MOST_GPUS:
            return
        if len(composition) == 1:
            yield from self._data_parallel(*composition[0], role)
        for degree in range(1, math.gcd(*(n for _, n in composition)) + 1):
            if any(n % degree or degree not in cost.degrees(m) for m, n in composition):
                continue
            if cluster.model.attention_heads % degree:
                continue
            machines = [m for m, n in composition for _ in range(n // degree)]
            form = Form(degree, len(machines), len(composition), NIXL, role)
            if len(machines) > min(MOST_STAGES, cluster.model.layers) or (
                role is not Role.BOTH and refused(form)
            ):
                continue
            speeds = [1.0 / cost.layer_s(m, degree, role) for m in machines]
            memory = [cluster.machines[m].usable_bytes for m in machines]
            if min(memory) <= 0.0:
                continue
            for blend in _BLEND_SHARES if len(set(machines)) > 1 else (1.0,):
                weights = [
                    blend * s / sum(speeds) + (1.0 - blend) * b / sum(memory)
                    for s, b in zip(speeds, memory, strict=True)
                ]
                layers = divide_layers(weights, cluster.model.layers)
                yield tuple(
                    GroupStage(m, degree, int(share * cluster.model.layers))
                    for m, share in zip(machines, layers, strict=True)
                )

    def _data_parallel(self, machine: int, gpus: int, role: Role) -> Iterator[tuple[GroupStage, ...]]:
        """Yield data-parallel engines on all GPUs of a group."""
        cluster = self.cluster
        for degrees in data_parallel_degrees(cluster.model, gpus):
            form = Form(degrees.tp, 1, 1, NIXL, role, degrees.dp)
            stage = GroupStage(machine, gpus, cluster.model.layers, degrees.dp)
            if (
                degrees.gpus == gpus
                and (role is Role.BOTH or not refused(form))
                and capacity_of(cluster, [stage])
                and self._cost.has_ranks(machine, degrees)
            ):
                yield (stage,)


# --- latency profiles -----------------------------------------------------------------------------------


class ProfileCost:
    """Rates by latency profiles; missing profiles are estimated from the GPUs' peak figures."""

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster
        self._profiles: dict[tuple[int, Degrees], Profile | None] = {}
        self._layer_s: dict[tuple[int, int, Role], float] = {}
        self._shares: dict[object, float] = {}

    def degrees(self, machine: int) -> frozenset[int]:
        of = self._cluster.machines[machine]
        found = {degree for degree in of.profiles if degree <= of.gpus}
        if of.roofline is not None:
            found |= {1 << power for power in range(of.gpus.bit_length())}
        return frozenset(found)

    def has_ranks(self, machine: int, degrees: Degrees) -> bool:
        """Return True if the profile of such data-parallel engines is known, or can be estimated."""
        return self._profile(machine, degrees) is not None

    def _profile(self, m: int, degrees: Degrees) -> Profile | None:
        """Return the profile of the whole model: stated, else estimated if it can be and is needed."""
        key = self._cluster.kinds[m], degrees
        if key not in self._profiles:
            machine, model = self._cluster.machines[m], self._cluster.model
            peaks, link = machine.roofline, self._cluster.links.bytes_per_s[m][m] or None
            stated, known = machine.profiles.get(degrees.tp), None
            if degrees.dp > 1:
                ranked, known = machine.ranked.get(degrees), machine.profiles
                stated = None if ranked is None else ranked[1]
            if stated is None and (degrees.dp == 1 or copies_cache(model, degrees.gpus)):
                gpu = machine.gpu, machine.memory_bytes
                stated = estimated_profile(model, *gpu, peaks, *degrees, link_bytes_s=link, known=known)
            self._profiles[key] = stated
        return self._profiles[key]

    def _whole(self, stage: GroupStage) -> Profile:
        found = self._profile(stage.machine, stage.degrees)
        assert found is not None, "expected engines with a profile"
        return found

    def layer_s(self, machine: int, degree: int, role: Role) -> float:
        """Return the time of one request's prefill, its decode steps, or both, by the whole model."""
        key = self._cluster.kinds[machine], degree, role
        if key not in self._layer_s:
            latency = self._whole(GroupStage(machine, degree, 1)).latency
            workload = self._cluster.workload
            seconds = 0.0
            if role is not Role.DECODE:
                seconds += latency.prefill_s(workload.prompt_tokens)
            if role is not Role.PREFILL:
                steps = workload.output_tokens / _SPEED_BATCH
                seconds += steps * latency.step_s(_SPEED_BATCH, _SPEED_BATCH * _SPEED_CONTEXT)
            self._layer_s[key] = seconds
        return self._layer_s[key]

    def most(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Return requests/s by the composed latency model, without bubbles; 0 if no request fits."""
        if kv_cache_tokens < _FEWEST_TOKENS:
            return 0.0
        spec = engine_of(self._composed(stages, kv_cache_tokens))
        workload, slo = self._cluster.workload, self._cluster.slo
        return spec.ranks * rate(role, spec.latency, spec.limits, workload, slo)

    def capacity(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        """Return the requests/s by the composed latency model and the bubbles of its pipeline."""
        most = self.most(stages, role, kv_cache_tokens)
        if most == 0.0 or role is not Role.BOTH or len(stages) == 1:
            return most
        return most * self._bubbles(stages, engine_of(self._composed(stages, kv_cache_tokens)))

    def _bubbles(self, stages: Sequence[GroupStage], spec: EngineSpec) -> float:
        """Return the share of the composed throughput that a pipeline reaches with its bubbles.

        It is simulated once for each pipeline and KV capacity, as groups of one role have similar batches.
        """
        key = tuple((self._cluster.kinds[s.machine], s.gpus, s.layers) for s in stages), spec.limits
        if key not in self._shares:
            rows = self._cluster.workload.rows
            sample = rows[:: max(1, len(rows) // _BUBBLE_ROWS)]
            self._shares[key] = bubbles(spec, [(1.0, sample)], engine_stages(self._parts(stages)))
        return self._shares[key]

    def profile(self, stages: Sequence[GroupStage], kv_cache_tokens: int, role: Role) -> Profile:
        """Return the latency profile of a group, for the simulator and for a fleet file."""
        profile = self._composed(stages, kv_cache_tokens)
        if role is not Role.BOTH:
            return profile
        return slowed(profile, self._bubbles(stages, engine_of(profile)))

    def _parts(self, stages: Sequence[GroupStage]) -> list[StageProfile]:
        cluster, links, parts = self._cluster, self._cluster.links, []
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            link = LinkSeconds()
            if following is not None:
                apart = stage.machine != following.machine
                speed = links.bytes_per_s[stage.machine][following.machine]
                link = activation_link(cluster.model, speed, links.latency_s if apart else 0.0)
            share, gpu = stage.layers / cluster.model.layers, cluster.machines[stage.machine].gpu
            parts.append(StageProfile(self._whole(stage), share, gpu, stage.degrees.tp, link))
        return parts

    def _composed(self, stages: Sequence[GroupStage], kv_cache_tokens: int) -> Profile:
        cluster, parts = self._cluster, self._parts(stages)
        name = "-".join([*dict.fromkeys(part.gpu.lower() for part in parts), f"tp{stages[0].degrees.tp}"])
        if len(stages) == 1:
            stated = parts[0].profile.engine.kv_cache_tokens
            kv_cache_tokens = kv_cache_tokens if stated is None else min(stated, kv_cache_tokens)
        return compose_profile(f"{name}-pp{len(stages)}", cluster.model, parts, kv_cache_tokens)


# --- appendix A -----------------------------------------------------------------------------------------


class PaperCost:
    """Appendix A of HexGen-2, for clusters with a roofline (peak figures) for every machine.

    A group computes one batch at a time: stages are not pipelined, as in the paper. Prefill capacity is one
    request over its latency, decode capacity the largest batch over its latency. A group for both phases
    takes the sum of both times per request (the paper has no such group).
    """

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster
        self._hidden = cluster.model.known.width
        self._layer_weights = cluster.model.parameters / cluster.model.layers
        self._layer_bytes = cluster.model.weight_bytes / cluster.model.layers

    def degrees(self, machine: int) -> frozenset[int]:
        return frozenset(1 << power for power in range(self._cluster.machines[machine].gpus.bit_length()))

    def has_ranks(self, machine: int, degrees: Degrees) -> bool:
        """Return False: the paper has no data-parallel engines."""
        return False

    def layer_s(self, machine: int, degree: int, role: Role) -> float:
        """Return the seconds of one layer's computation for one request."""
        workload = self._cluster.workload
        return self._compute_s(GroupStage(machine, degree, 1), role, 1.0, workload.prompt_tokens)

    def _compute_s(self, stage: GroupStage, role: Role, batch: float, prompt: float) -> float:
        table, output = self._cluster.machines[stage.machine].roofline, self._cluster.workload.output_tokens
        assert table is not None
        flops = stage.gpus * table.flops * table.flops_efficiency
        bytes_per_s = stage.gpus * table.bandwidth_bytes_per_s * table.bandwidth_efficiency
        seconds = 0.0
        if role is not Role.DECODE:
            seconds += 2.0 * self._layer_weights * batch * prompt / flops
        if role is not Role.PREFILL:
            seconds += self._layer_bytes * output / bytes_per_s
            seconds += 2.0 * self._layer_weights * batch * output / flops
        return seconds * stage.layers

    def _tp_s(self, stage: GroupStage, tokens: float, times: float) -> float:
        """Return the seconds of four exchanges a layer between the GPUs of a stage, `times` times.

        Each exchange sends the activations of `tokens` tokens.
        """
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
        return self.capacity(stages, role, kv_cache_tokens)

    def capacity(self, stages: Sequence[GroupStage], role: Role, kv_cache_tokens: int) -> float:
        workload = self._cluster.workload
        prefill_s = self._prefill_s(stages, workload.prompt_tokens)
        if role is Role.PREFILL:
            return 1.0 / prefill_s
        batch = math.floor(kv_cache_tokens / (workload.prompt_tokens + workload.output_tokens))
        if batch < 1:
            return 0.0
        decode_s = self._decode_s(stages, batch) / batch
        return 1.0 / decode_s if role is Role.DECODE else 1.0 / (prefill_s + decode_s)


#: Degrees of a machine, relative times of layers, and requests/s of stages in a role: at most, and exactly.
CostModel: TypeAlias = ProfileCost | PaperCost
