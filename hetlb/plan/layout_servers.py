"""Servers of the chosen layouts of a cluster."""

from __future__ import annotations

import msgspec

from hetlb.config.plan_tables import Machine
from hetlb.config.profile_file import Profile
from hetlb.plan.cluster_layouts import LayoutsFound
from hetlb.plan.common.capabilities import Form
from hetlb.plan.common.servers import FIRST_PORT, ProfileOf, VllmServer
from hetlb.plan.layouts import Part, counted


def servers_of(found: LayoutsFound, data_parallel: bool) -> list[VllmServer]:
    """Servers of the chosen layouts, machine by machine; with `data_parallel` equal parts are one server."""
    model, result = found.cluster.model, []
    for machine in found.cluster.machines:
        gpu, port = 0, FIRST_PORT
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            for replicas in [count] if data_parallel else [1] * count:
                server = VllmServer(
                    name=f"{machine.name}-{part.name}-{port - FIRST_PORT}",
                    model=model.name,
                    form=Form(part.tensor_parallel_size, part.pipeline_parallel_size),
                    gpus=[(machine.name, tuple(range(gpu, gpu + replicas * part.gpus)))],
                    port=port,
                    utilization=machine.gpu_memory_utilization,
                    replicas=replicas,
                    max_model_len=found.cluster.limits.tokens,
                    max_num_seqs=machine.profiles[part.tensor_parallel_size].engine.max_num_seqs,
                    profile=_profile(found, machine, part),
                )
                result.append(server)
                gpu += replicas * part.gpus
                port += 1
    return result


def _profile(found: LayoutsFound, machine: Machine, part: Part) -> ProfileOf:
    """The file of a profile; that of a pipeline is to be written, being composed."""
    if part.pipeline_parallel_size == 1:
        return found.cluster.path.parent / machine.profile_paths[part.tensor_parallel_size]

    def made() -> tuple[str, Profile]:
        name = f"{machine.name}-{part.name}"
        return name, msgspec.structs.replace(found.instances[machine.kind][part].profile, name=name)

    return made
