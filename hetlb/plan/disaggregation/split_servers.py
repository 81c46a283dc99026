"""Servers of a plan of groups, with their `--kv-transfer-config`.

GPUs of a machine are given to its groups in the order of the plan.
"""

from __future__ import annotations

from typing import Any

from hetlb.config.profile_file import Profile
from hetlb.plan.common.capabilities import NIXL, Form
from hetlb.plan.common.servers import FIRST_PORT, ProfileOf, VllmServer, host_of
from hetlb.plan.disaggregation.cost import ProfileCost
from hetlb.plan.disaggregation.split_cluster import Role, ServerGroup, SplitCluster, SplitPlan

_FIRST_SIDE_CHANNEL = 5600
#: Seconds that a prefill server keeps the KV cache of a request for its decode server (vLLM's default).
KV_LEASE_S = 30
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def group_names(plan: SplitPlan) -> list[str]:
    """Names of the groups, in their order: role and number."""
    numbers = dict.fromkeys(Role, -1)
    names = []
    for group in plan.groups:
        numbers[group.role] += 1
        names.append(f"{group.role}-{numbers[group.role]}")
    return names


def servers_of(cluster: SplitCluster, plan: SplitPlan) -> list[VllmServer]:
    """One server a group, in the order of the plan; a pipeline across machines runs on a Ray cluster."""
    taken = [0] * len(cluster.machines)
    ports = [FIRST_PORT] * len(cluster.machines)
    from_trace = len(cluster.workload.rows) > 1  # then the longest request is known
    cost = ProfileCost(cluster)
    found = []
    for name, group in zip(group_names(plan), plan.groups, strict=True):
        machines = [cluster.machines[m] for m, _ in group.composition]
        gpus = []
        for m, n in group.composition:
            gpus.append((cluster.machines[m].name, tuple(range(taken[m], taken[m] + n))))
            taken[m] += n
        first = group.stages[0].machine
        transfer: dict[str, Any] | None = None
        environment = {}
        if plan.splits:
            transfer = _kv_transfer(group.role)
            # A side channel per rank: the next server's begins behind those of this one.
            side_channel = _FIRST_SIDE_CHANNEL + 16 * (ports[first] - FIRST_PORT)
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host_of(machines[0].name)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
        found.append(
            VllmServer(
                name=name,
                model=cluster.model.name,
                form=Form(
                    group.tensor_parallel_size,
                    len(group.stages),
                    len(group.composition),
                    NIXL if plan.splits else None,
                    group.role,
                ),
                gpus=gpus,
                port=ports[first],
                utilization=min(machine.gpu_memory_utilization for machine in machines),
                layers=[stage.layers for stage in group.stages],
                max_model_len=cluster.workload.longest_tokens if from_trace else "auto",
                kv_transfer=transfer,
                environment=environment,
                profile=_profile(cluster, group, cost),
            )
        )
        ports[first] += 1
    return found


def _kv_transfer(role: Role) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": NIXL, "kv_role": _KV_ROLE[role]}
    if role is not Role.DECODE:
        config["kv_connector_extra_config"] = {"kv_lease_duration": KV_LEASE_S}
    if role is not Role.PREFILL:
        config["kv_load_failure_policy"] = "recompute"
    return config


def _profile(cluster: SplitCluster, group: ServerGroup, cost: ProfileCost) -> ProfileOf:
    """The file of a profile; estimated and composed ones are to be written."""
    degree = group.tensor_parallel_size
    if len(group.stages) == 1:
        machine = cluster.machines[group.stages[0].machine]
        written = machine.profile_paths.get(degree)
        if written is not None and machine.profiles[degree].engine.kv_cache_tokens:
            return cluster.path.parent / written

    def made() -> tuple[str, Profile]:
        profile = cost.profile(group.stages, group.kv_cache_tokens, group.role)
        layers = "-".join(str(stage.layers) for stage in group.stages) if len(group.stages) > 1 else "whole"
        return f"{profile.name}-{layers}-{group.kv_cache_tokens}", profile

    return made
