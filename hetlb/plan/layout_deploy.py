"""Chosen layouts in the words of those who start them: `vllm serve` commands, and a fleet file for hetlb."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetlb.plan.cluster_layouts import Found
from hetlb.plan.fleet_file import FleetWriter
from hetlb.plan.layouts import Part, counted
from hetlb.plan.tp_search import Machine

_FIRST_PORT = 8000


@dataclass(frozen=True)
class _Server:
    """One `vllm serve`: `replicas` data-parallel engines of a part."""

    machine: Machine
    part: Part
    replicas: int
    first_gpu: int
    port: int

    @property
    def name(self) -> str:
        return f"{self.machine.name}-{self.part.name}-{self.port - _FIRST_PORT}"


def servers(found: Found, data_parallel: bool) -> list[_Server]:
    """Servers of the chosen layouts, machine by machine."""
    result = []
    for machine in found.cluster.machines:
        gpu, port = 0, _FIRST_PORT
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            for replicas in [count] if data_parallel else [1] * count:
                result.append(_Server(machine, part, replicas, gpu, port))
                gpu += replicas * part.gpus
                port += 1
    return result


def commands(found: Found, data_parallel: bool = False) -> list[str]:
    """One `vllm serve` per server of the chosen layouts."""
    model, lines = found.cluster.model, []
    for server in servers(found, data_parallel):
        machine, part = server.machine, server.part
        profile = found.cluster.profiles[dict(machine.profiles)[part.tensor_parallel_size]]
        gpus = range(server.first_gpu, server.first_gpu + server.replicas * part.gpus)
        words = ["vllm", "serve", model.name, "--tensor-parallel-size", str(part.tensor_parallel_size)]
        if part.pipeline_parallel_size > 1:
            words += ["--pipeline-parallel-size", str(part.pipeline_parallel_size)]
        if server.replicas > 1:
            words += ["--data-parallel-size", str(server.replicas)]
        words += ["--gpu-memory-utilization", f"{machine.gpu_memory_utilization:g}"]
        words += ["--max-model-len", str(model.max_input_tokens + model.max_output_tokens)]
        seqs = profile.engine.max_num_seqs
        words += ["--max-num-seqs", str(seqs)] if seqs is not None else []
        words += ["--port", str(server.port)]
        visible = ",".join(map(str, gpus))
        lines.append(f"CUDA_VISIBLE_DEVICES={visible} {shlex.join(words)}  # on {machine.name}")
    return lines


def write_fleet(path: Path, found: Found, data_parallel: bool) -> None:
    """The chosen layouts as a fleet file: machine names are taken as host names. Raises `InputError`."""
    writer = FleetWriter(path)
    instances = [
        {
            "name": server.name,
            "url": f"http://{server.machine.name}:{server.port}",
            "profile": _profile_reference(found, server, writer),
        }
        for server in servers(found, data_parallel)
    ]
    heading = f"Written by `hetlb search` from {found.cluster.path.name}: machine names stand for hosts."
    writer.write(heading, [{"name": found.cluster.model.name, "instances": instances}])


def _profile_reference(found: Found, server: _Server, writer: FleetWriter) -> str:
    """The profile of a server as the fleet file names it; one of a pipeline is written, being composed."""
    part = server.part
    if part.pipeline_parallel_size == 1:
        written = dict(server.machine.profiles)[part.tensor_parallel_size]
        return writer.reference(found.cluster.path.parent / written)
    name = f"{server.machine.name}-{part.name}"
    profile = found.instances[server.machine.kind][part].profile
    return writer.add_profile(name, msgspec.structs.replace(profile, name=name))
