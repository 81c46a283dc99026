"""A plan as `vllm serve` commands with their `--kv-transfer-config`, and as a fleet file for hetlb.

Machine names stand for hosts. GPUs of a machine are given to its groups in the order of the plan.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetlb.plan.disaggregation.cluster import Cluster, Group, Plan, Role
from hetlb.plan.disaggregation.cost import ProfileCost
from hetlb.plan.fleet_file import FleetWriter

_FIRST_PORT = 8000
_FIRST_SIDE_CHANNEL = 5600
#: Seconds that a prefill server keeps the KV cache of a request for its decode server (vLLM's default).
KV_LEASE_S = 30
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


@dataclass(frozen=True, slots=True)
class Instance:
    """A group with its name, the GPUs of each machine, and the port of its server."""

    name: str
    group: Group
    gpus: tuple[tuple[int, tuple[int, ...]], ...]
    port: int
    side_channel: int


def lay_out(cluster: Cluster, plan: Plan) -> list[Instance]:
    """Every group with its place, in the order of the plan."""
    taken = [0] * len(cluster.machines)
    ports = [_FIRST_PORT] * len(cluster.machines)
    numbers: dict[Role, int] = {}
    found = []
    for group in plan.groups:
        held = []
        for m, n in group.composition:
            held.append((m, tuple(range(taken[m], taken[m] + n))))
            taken[m] += n
        first = group.stages[0].machine
        number = numbers[group.role] = numbers.get(group.role, -1) + 1
        # A side channel per rank: the next server's begins behind those of this one.
        side_channel = _FIRST_SIDE_CHANNEL + 16 * (ports[first] - _FIRST_PORT)
        found.append(Instance(f"{group.role}-{number}", group, tuple(held), ports[first], side_channel))
        ports[first] += 1
    return found


def commands(cluster: Cluster, plan: Plan, instances: list[Instance]) -> list[str]:
    """One `vllm serve` a group; a pipeline across machines runs on a Ray cluster of them."""
    return [_command(cluster, instance, plan.splits) for instance in instances]


def _command(cluster: Cluster, instance: Instance, transfers: bool) -> str:
    group = instance.group
    stages = group.stages
    words = ["vllm", "serve", cluster.model.name, "--tensor-parallel-size", str(group.tensor_parallel_size)]
    if len(stages) > 1:
        words += ["--pipeline-parallel-size", str(len(stages))]
    machines = [cluster.machines[m] for m, _ in instance.gpus]
    words += ["--gpu-memory-utilization", f"{min(m.gpu_memory_utilization for m in machines):g}"]
    if len(cluster.workload.rows) > 1:  # of a trace: the longest request is known
        words += ["--max-model-len", str(cluster.workload.longest_tokens)]
    words += ["--port", str(instance.port)]
    variables = {}
    layers = [stage.layers for stage in stages]
    if len(set(layers)) > 1:
        variables["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers))
    if transfers:
        config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLE[group.role]}
        if group.role is not Role.DECODE:
            config["kv_connector_extra_config"] = {"kv_lease_duration": KV_LEASE_S}
        if group.role is not Role.PREFILL:
            config["kv_load_failure_policy"] = "recompute"
        words += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = machines[0].name
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(instance.side_channel)
    if len(machines) > 1:
        words += ["--distributed-executor-backend", "ray"]
        where = " and ".join(
            f"{cluster.machines[m].name} (GPUs {','.join(map(str, gpus))})" for m, gpus in instance.gpus
        )
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, instance.gpus[0][1]))
        where = machines[0].name
    prefix = "".join(f"{key}={value} " for key, value in variables.items())
    return f"{prefix}{shlex.join(words)}  # {instance.name} on {where}"


def write_fleet(
    path: Path, cluster: Cluster, plan: Plan, instances: list[Instance], cost: ProfileCost
) -> None:
    """The plan as a fleet file, with estimated and composed profiles in a folder beside it.

    Raises `InputError` where something cannot be written.
    """
    writer = FleetWriter(path)
    entries = []
    for instance in instances:
        group, host = instance.group, cluster.machines[instance.gpus[0][0]].name
        entry: dict[str, Any] = {"name": instance.name, "url": f"http://{host}:{instance.port}"}
        entry["profile"] = _profile_reference(cluster, group, cost, writer)
        if plan.splits:
            entry["role"] = str(group.role)
        entries.append(entry)
    model: dict[str, Any] = {"name": cluster.model.name, "instances": entries}
    if plan.splits:
        model["kv_transfer"] = "nixl"
    heading = f"Written by `hetlb split` from {cluster.path.name}: machine names stand for hosts."
    writer.write(heading, [model], {"name": "hetlb"})


def _profile_reference(cluster: Cluster, group: Group, cost: ProfileCost, writer: FleetWriter) -> str:
    """The profile of a group as the fleet file names it, written where it is no file yet."""
    degree = group.tensor_parallel_size
    if len(group.stages) == 1:
        machine = cluster.machines[group.stages[0].machine]
        written = (machine.profile_paths or {}).get(degree)
        if written is not None and (machine.profiles or {})[degree].engine.kv_cache_tokens:
            return writer.reference(cluster.path.parent / written)
    profile = cost.profile(group.stages, group.kv_cache_tokens)
    layers = "-".join(str(stage.layers) for stage in group.stages) if len(group.stages) > 1 else "whole"
    return writer.add_profile(f"{profile.name}-{layers}-{group.kv_cache_tokens}", profile)
