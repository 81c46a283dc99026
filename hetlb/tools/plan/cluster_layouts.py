"""Layouts of a cluster by a trace: every machine by itself, all together, and their servers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from hetlb.tools.plan.cluster import Cluster
from hetlb.tools.plan.common.capabilities import Form
from hetlb.tools.plan.common.composition import MOST_STAGES
from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.common.servers import ProfileOf, VllmServer, numbered
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.layouts import (
    Evaluated,
    FleetLayouts,
    LayoutFleet,
    LayoutTarget,
    choose_together,
    counted,
    gpus_of,
    layouts_of,
)
from hetlb.tools.plan.tp_search import NO_LIMITS, Option, Part, Rankings, best_pipelines
from hetlb.tools.plan.trace_throughput import RowSample, Throughputs


@dataclass(frozen=True)
class LayoutsFound:
    """All that a search found; rankings, options that run and their layouts by the kind of machine."""

    cluster: Cluster
    sample: RowSample
    estimate: str
    target: LayoutTarget
    rankings: Rankings
    instances: Mapping[tuple[object, ...], Mapping[Part, Option]]
    evaluated: Mapping[tuple[object, ...], list[Evaluated]]
    choice: FleetLayouts
    one_by_one: FleetLayouts


def lay_out(
    cluster: Cluster,
    sample: RowSample,
    target: LayoutTarget,
    rankings: Rankings,
    throughputs: Throughputs,
    most_stages: int | None,
    limits: SolveLimits = NO_LIMITS,
) -> LayoutsFound:
    """Return the layouts of every machine by itself, then of all of them together."""
    kinds = {machine.kind: machine for machine in cluster.machines}
    instances = {}
    for kind, machine in kinds.items():
        found = {option.part: option for option in rankings[kind] if option.feasible}
        stages = most_stages
        if stages is None:
            # Unasked, pipelines are for GPUs that would be left over without them.
            layouts = layouts_of(machine.gpus, list(found), partly=False)
            whole = any(gpus_of(each) == machine.gpus for each in layouts)
            stages = 1 if whole else min(MOST_STAGES, machine.gpus)
        pipelines = best_pipelines(cluster, machine, throughputs.of, stages, [(1.0, sample.rows)], limits)
        instances[kind] = found | {option.part: option for option in pipelines}
    fleet = LayoutFleet(cluster.machines, instances, sample.rows, target, limits=limits)
    # Each machine gets a share of the rate in proportion to its most.
    most = {kind: _most(machine, instances[kind]) for kind, machine in kinds.items()}
    total = sum(most[machine.kind] for machine in cluster.machines)
    evaluated = {
        kind: fleet.evaluate(machine, target.request_rate * most[kind] / total if total else math.inf)
        for kind, machine in kinds.items()
    }
    # The static estimate needs constants alone; a simulation needs all that an engine has.
    simulated = throughputs.kind == "simulate" or math.isfinite(target.request_rate)
    choice, one_by_one = choose_together(fleet, evaluated, simulated=simulated)
    return LayoutsFound(
        cluster, sample, throughputs.kind, target, rankings, instances, evaluated, choice, one_by_one
    )


def _most(machine: Machine, instances: Mapping[Part, Option]) -> float:
    per_gpu = (each.throughput_tok_s / part.gpus for part, each in instances.items())
    return machine.gpus * max(per_gpu, default=0.0)


def servers_of(found: LayoutsFound, data_parallel: bool) -> list[VllmServer]:
    """Return servers of the chosen layouts by machine; with `data_parallel` equal parts are one server."""
    model, result = found.cluster.model, []
    for machine in found.cluster.machines:
        gpu, index = 0, 0
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            profile = _profile(found, machine, part)
            together = data_parallel and part.data_parallel_size == 1
            for replicas in [count] if together else [1] * count:
                server = VllmServer(
                    name=f"{machine.name}-{part.name}-{index}",
                    model=model.name,
                    form=Form(
                        part.tensor_parallel_size,
                        part.pipeline_parallel_size,
                        data_parallel_size=part.data_parallel_size,
                    ),
                    gpus=[(machine.name, tuple(range(gpu, gpu + replicas * part.gpus)))],
                    utilization=machine.gpu_memory_utilization,
                    replicas=replicas,
                    max_model_len=found.cluster.limits.tokens,
                    engine=found.instances[machine.kind][part].profile,
                    profile=profile,
                )
                result.append(server)
                gpu, index = gpu + replicas * part.gpus, index + 1
    return numbered(result)


def _profile(found: LayoutsFound, machine: Machine, part: Part) -> ProfileOf:
    """Return the file of a profile; a composed one, or one without a cache size, is yet to be written."""
    profile = found.instances[machine.kind][part].profile
    assert profile is not None
    degree = part.tensor_parallel_size
    if part.data_parallel_size > 1:
        stated = machine.ranked.get(part.ranks)
        if stated is not None and stated[1].engine.kv_cache_tokens is not None:
            return found.cluster.path.parent / stated[0]
    elif part.pipeline_parallel_size == 1 and machine.profiles[degree].engine.kv_cache_tokens is not None:
        return found.cluster.path.parent / machine.profile_paths[degree]
    named = msgspec.structs.replace(profile, name=f"{machine.name}-{part.name}")
    return lambda: named
