"""Servers of a plan of groups, with their `--kv-transfer-config`.

GPUs of a machine are given to its groups in the order of the plan.
"""

from __future__ import annotations

import msgspec

from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.plan.common.capabilities import NIXL
from hetlb.tools.plan.common.servers import ProfileOf, VllmServer, numbered
from hetlb.tools.plan.disaggregation.cost import ProfileCost
from hetlb.tools.plan.disaggregation.split_cluster import ServerGroup, SplitCluster, SplitPlan


def servers_of(cluster: SplitCluster, plan: SplitPlan) -> list[VllmServer]:
    """Return one server a group, in the order of the plan, with the limits that its capacity rests on.

    A pipeline across machines runs on a Ray cluster. vLLM's limit of tokens is the limit of a stage's batch.
    """
    taken = [0] * len(cluster.machines)
    from_trace = len(cluster.workload.rows) > 1  # then the longest request is known
    cost = ProfileCost(cluster)
    found = []
    for name, group in zip(plan.names, plan.groups, strict=True):
        gpus = []
        for m, n in group.composition:
            gpus.append((cluster.machines[m].name, tuple(range(taken[m], taken[m] + n))))
            taken[m] += n
        found.append(
            VllmServer(
                name=name,
                model=cluster.model.name,
                form=group.form(NIXL if plan.splits else None),
                gpus=gpus,
                utilization=min(cluster.machines[m].gpu_memory_utilization for m, _ in group.composition),
                layers=[stage.layers for stage in group.stages],
                max_model_len=cluster.workload.longest_tokens if from_trace else "auto",
                engine=cost.profile(group.stages, group.kv_cache_tokens, group.role),
                profile=_profile(cluster, group, cost),
            )
        )
    return numbered(found)


def _profile(cluster: SplitCluster, group: ServerGroup, cost: ProfileCost) -> ProfileOf:
    """Return the file of a profile; estimated and composed ones are to be written."""
    degree = group.tensor_parallel_size
    if len(group.stages) == 1:
        machine = cluster.machines[group.stages[0].machine]
        stated = machine.ranked.get(group.stages[0].degrees)
        if group.ranks == 1 and (written := machine.profile_paths.get(degree)) is not None:
            stated = written, machine.profiles[degree]
        if stated is not None and stated[1].engine.kv_cache_tokens:
            return cluster.path.parent / stated[0]

    def made() -> Profile:
        profile = cost.profile(group.stages, group.kv_cache_tokens, group.role)
        layers = "-".join(str(stage.layers) for stage in group.stages) if len(group.stages) > 1 else "whole"
        return msgspec.structs.replace(profile, name=f"{profile.name}-{layers}-{group.kv_cache_tokens}")

    return made
