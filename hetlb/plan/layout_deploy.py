"""Chosen layouts in the words of those who start them: `vllm serve` commands, and a fleet file for hetlb."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hetlb.plan.cluster_layouts import LayoutsFound
from hetlb.plan.common.capabilities import Form
from hetlb.plan.common.fleet_writer import FleetWriter
from hetlb.plan.common.vllm_server import FILL_IN, FIRST_PORT, VllmServer
from hetlb.plan.layouts import Part, counted
from hetlb.plan.tp_search import Machine


def servers(found: LayoutsFound, data_parallel: bool) -> list[tuple[Machine, Part, VllmServer]]:
    """Servers of the chosen layouts, machine by machine; with `data_parallel` equal parts are one server."""
    model, result = found.cluster.model, []
    for machine in found.cluster.machines:
        gpu, port = 0, FIRST_PORT
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            profile = found.cluster.profiles[dict(machine.profiles)[part.tensor_parallel_size]]
            for replicas in [count] if data_parallel else [1] * count:
                server = VllmServer(
                    name=f"{machine.name}-{part.name}-{port - FIRST_PORT}",
                    model=model.name,
                    form=Form(part.tensor_parallel_size, part.pipeline_parallel_size),
                    gpus=[(machine.name, tuple(range(gpu, gpu + replicas * part.gpus)))],
                    port=port,
                    utilization=machine.gpu_memory_utilization,
                    replicas=replicas,
                    max_model_len=model.max_input_tokens + model.max_output_tokens,
                    max_num_seqs=profile.engine.max_num_seqs,
                )
                result.append((machine, part, server))
                gpu += replicas * part.gpus
                port += 1
    return result


def commands(found: LayoutsFound, data_parallel: bool = False) -> list[str]:
    """One `vllm serve` per server of the chosen layouts."""
    return [server.command() for _, _, server in servers(found, data_parallel)]


def write_fleet(path: Path, found: LayoutsFound, data_parallel: bool) -> None:
    """The chosen layouts as a fleet file. Raises `InputError`."""
    writer = FleetWriter(path)
    instances = [
        {
            "name": server.name,
            "url": server.url,
            "profile": _profile_reference(found, machine, part, writer),
        }
        for machine, part, server in servers(found, data_parallel)
    ]
    heading = f"Written by `hetlb search` from {found.cluster.path.name}. {FILL_IN}"
    writer.write(heading, [{"name": found.cluster.model.name, "instances": instances}])


def _profile_reference(found: LayoutsFound, machine: Machine, part: Part, writer: FleetWriter) -> str:
    """The profile of a server as the fleet file names it; one of a pipeline is written, being composed."""
    if part.pipeline_parallel_size == 1:
        written = dict(machine.profiles)[part.tensor_parallel_size]
        return writer.reference(found.cluster.path.parent / written)
    name = f"{machine.name}-{part.name}"
    profile = found.instances[machine.kind][part].profile
    return writer.add_profile(name, msgspec.structs.replace(profile, name=name))
