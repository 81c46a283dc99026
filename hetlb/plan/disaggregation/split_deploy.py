"""A plan as `vllm serve` commands with their `--kv-transfer-config`, and as a fleet file for hetlb.

GPUs of a machine are given to its groups in the order of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetlb.plan.common.capabilities import NIXL, Form
from hetlb.plan.common.fleet_writer import FleetWriter
from hetlb.plan.common.vllm_server import FILL_IN, FIRST_PORT, VllmServer, host_of
from hetlb.plan.disaggregation.cost import ProfileCost
from hetlb.plan.disaggregation.split_cluster import Role, ServerGroup, SplitCluster, SplitPlan

_FIRST_SIDE_CHANNEL = 5600
#: Seconds that a prefill server keeps the KV cache of a request for its decode server (vLLM's default).
KV_LEASE_S = 30
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


@dataclass(frozen=True, slots=True)
class GroupServer:
    """A group with its name, the GPUs of each machine, and the port of its server."""

    name: str
    group: ServerGroup
    gpus: tuple[tuple[int, tuple[int, ...]], ...]
    port: int
    side_channel: int


def lay_out(cluster: SplitCluster, plan: SplitPlan) -> list[GroupServer]:
    """Every group with its place, in the order of the plan."""
    taken = [0] * len(cluster.machines)
    ports = [FIRST_PORT] * len(cluster.machines)
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
        side_channel = _FIRST_SIDE_CHANNEL + 16 * (ports[first] - FIRST_PORT)
        found.append(GroupServer(f"{group.role}-{number}", group, tuple(held), ports[first], side_channel))
        ports[first] += 1
    return found


def commands(cluster: SplitCluster, plan: SplitPlan, instances: list[GroupServer]) -> list[str]:
    """One `vllm serve` a group; a pipeline across machines runs on a Ray cluster of them."""
    return [server_of(cluster, instance, plan.splits).command() for instance in instances]


def form_of(group: ServerGroup, transfers: bool) -> Form:
    """The form of a group's server."""
    return Form(
        group.tensor_parallel_size,
        len(group.stages),
        len(group.composition),
        NIXL if transfers else None,
        group.role,
    )


def server_of(cluster: SplitCluster, instance: GroupServer, transfers: bool) -> VllmServer:
    """The server of a group; with `transfers` it takes part in KV transfers."""
    group = instance.group
    machines = [cluster.machines[m] for m, _ in instance.gpus]
    config: dict[str, Any] | None = None
    environment = {}
    if transfers:
        config = {"kv_connector": NIXL, "kv_role": _KV_ROLE[group.role]}
        if group.role is not Role.DECODE:
            config["kv_connector_extra_config"] = {"kv_lease_duration": KV_LEASE_S}
        if group.role is not Role.PREFILL:
            config["kv_load_failure_policy"] = "recompute"
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host_of(machines[0].name)
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(instance.side_channel)
    from_trace = len(cluster.workload.rows) > 1  # then the longest request is known
    return VllmServer(
        name=instance.name,
        model=cluster.model.name,
        form=form_of(group, transfers),
        gpus=[(cluster.machines[m].name, gpus) for m, gpus in instance.gpus],
        port=instance.port,
        utilization=min(machine.gpu_memory_utilization for machine in machines),
        layers=[stage.layers for stage in group.stages],
        max_model_len=cluster.workload.longest_tokens if from_trace else "auto",
        kv_transfer=config,
        environment=environment,
    )


def write_fleet(
    path: Path, cluster: SplitCluster, plan: SplitPlan, instances: list[GroupServer], cost: ProfileCost
) -> None:
    """The plan as a fleet file, with estimated and composed profiles in a folder beside it.

    Raises `InputError` where something cannot be written.
    """
    writer = FleetWriter(path)
    entries = []
    for instance in instances:
        group = instance.group
        entry: dict[str, Any] = {
            "name": instance.name,
            "url": server_of(cluster, instance, plan.splits).url,
        }
        entry["profile"] = _profile_reference(cluster, group, cost, writer)
        if plan.splits:
            entry["role"] = str(group.role)
        entries.append(entry)
    model: dict[str, Any] = {"name": cluster.model.name, "instances": entries}
    if plan.splits:
        model["kv_transfer"] = "nixl"
    heading = f"Written by `hetlb split` from {cluster.path.name}. {FILL_IN}"
    writer.write(heading, [model], {"name": "hetlb"})


def _profile_reference(
    cluster: SplitCluster, group: ServerGroup, cost: ProfileCost, writer: FleetWriter
) -> str:
    """The profile of a group as the fleet file names it, written where it is no file yet."""
    degree = group.tensor_parallel_size
    if len(group.stages) == 1:
        machine = cluster.machines[group.stages[0].machine]
        written = (machine.profile_paths or {}).get(degree)
        if written is not None and (machine.profiles or {})[degree].engine.kv_cache_tokens:
            return writer.reference(cluster.path.parent / written)
    profile = cost.profile(group.stages, group.kv_cache_tokens, group.role)
    layers = "-".join(str(stage.layers) for stage in group.stages) if len(group.stages) > 1 else "whole"
    return writer.add_profile(f"{profile.name}-{layers}-{group.kv_cache_tokens}", profile)
