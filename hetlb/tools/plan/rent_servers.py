"""Servers of a plan of instances to rent. Machines are called by GPU and number: names that stand for hosts.

Instances are put into machines the widest stage first, each into the first machine with room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.plan.common.capabilities import Form
from hetlb.tools.plan.common.servers import ProfileOf, VllmServer, numbered, write_servers
from hetlb.tools.plan.planning import Table
from hetlb.tools.plan.rent_program import Configuration, RentPlan
from hetlb.tools.plan.rent_simulation import instance_names, planned_types, profile_of, worth_of


def _places(table: Table, plan: RentPlan) -> dict[tuple[str, int], tuple[str, tuple[int, ...]]]:
    """Return the machine and GPUs of every stage, by the instance's name and the stage's number."""
    wanted = [
        (-stage.gpus, stage.gpu, order, name, s)
        for order, (configuration, own) in enumerate(instance_names(plan).items())
        for name in own
        for s, stage in enumerate(table.problem.by_name[configuration].stages)
    ]
    machines: dict[str, list[int]] = {}  # GPU -> GPUs taken in each machine
    places: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for negative, gpu, _, name, stage in sorted(wanted):
        degree, size = -negative, table.market.offers[gpu].gpus_per_machine
        taken = machines.setdefault(gpu, [])
        index = next((i for i, used in enumerate(taken) if used + degree <= size), len(taken))
        if index == len(taken):
            taken.append(0)
        first = taken[index]
        taken[index] += degree
        places[name, stage] = f"{gpu.lower()}-{index}", tuple(range(first, first + degree))
    return places


def servers_of(table: Table, plan: RentPlan) -> list[VllmServer]:
    """Return one server an instance, in the plan's order; a pipeline across machines runs on Ray."""
    market, places = table.market, _places(table, plan)
    found = []
    for configuration, own in instance_names(plan).items():
        candidate = table.problem.by_name[configuration]
        stages, layers = candidate.stages, market.models[candidate.model].layers
        profile = _profile(table, plan, candidate)
        for name in own:
            gpus: dict[str, tuple[int, ...]] = {}
            for s in range(len(stages)):
                machine, held = places[name, s]
                gpus[machine] = gpus.get(machine, ()) + held
            found.append(
                VllmServer(
                    name=name,
                    model=candidate.model,
                    form=Form(
                        stages[0].tensor_parallel_size,
                        len(stages),
                        len(gpus),
                        data_parallel_size=stages[0].data_parallel_size,
                    ),
                    gpus=list(gpus.items()),
                    utilization=min(market.offers[stage.gpu].gpu_memory_utilization for stage in stages),
                    layers=[] if not layers else [int(stage.layers * layers) for stage in stages],
                    max_model_len=table.longest_tokens or "auto",
                    engine=candidate.profile,
                    profile=profile,
                )
            )
    return numbered(found)


def _profile(table: Table, plan: RentPlan, candidate: Configuration) -> ProfileOf | None:
    """Return the file of a profile that the market names, else its maker."""
    if candidate.profile is None:
        return None
    for written, profile in table.market.profiles.items():
        if profile == candidate.profile:
            return table.market.path.parent / written

    def made() -> Profile:
        composed = profile_of(plan, candidate, table.problem.workloads)
        assert composed is not None
        return msgspec.structs.replace(composed, name=candidate.name)

    return made


def write_fleet(
    path: Path, table: Table, plan: RentPlan, servers: list[VllmServer], *, divided: bool = True
) -> None:
    """Write a fleet file for `hetlb`, `divided` with the worth of instances and the types.

    Raises `InputError`.
    """
    policy: dict[str, Any] = {"name": "hetlb"}
    if divided and table.lengths_known and table.simulated:
        policy["worth"] = dict(worth_of(table.problem, plan))
        policy["types"] = [
            {
                "type": each.name,
                "model": each.model,
                "share": each.share,
                "input_tokens": each.input_tokens,
                "output_tokens": each.output_tokens,
                "instances": dict(planned.instances),
            }
            for each, planned in zip(
                table.problem.workloads, planned_types(plan, table.problem.workloads), strict=True
            )
        ]
    order = list(table.market.models)
    heading = f"Written by `hetlb rent` from {table.market.path.name}."
    by_model = sorted(servers, key=lambda server: order.index(server.model))
    write_servers(path, heading, by_model, policy)
