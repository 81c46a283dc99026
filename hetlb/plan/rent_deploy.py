"""A plan in the words of those who start it: machines, `vllm serve` commands, and a fleet file for hetlb.

Instances are put into machines the widest stage first, each into the first machine with room. Machines are
called by their GPU and a number, and these names stand for hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetlb.plan.common.capabilities import Form
from hetlb.plan.common.fleet_writer import FleetWriter
from hetlb.plan.common.vllm_server import FILL_IN, FIRST_PORT, VllmServer
from hetlb.plan.configurations import ConfigurationCandidate
from hetlb.plan.planning import Table, profile_of
from hetlb.plan.rent_program import RentPlan
from hetlb.plan.rent_simulation import instance_names, planned_shares


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs of one machine that hold one stage of an instance."""

    machine: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RentedInstance:
    """One instance of a plan: its configuration, the places of its stages, and the port of its server."""

    name: str
    candidate: ConfigurationCandidate
    places: tuple[Place, ...]
    port: int


def lay_out(table: Table, plan: RentPlan) -> list[RentedInstance]:
    """Every instance with the machines that hold it, in the order of the plan."""
    wanted: list[tuple[int, str, int, str, int]] = []
    names = instance_names(plan)
    for order, (configuration, own) in enumerate(names.items()):
        stages = table.candidates[configuration].stages
        for name in own:
            wanted += [
                (-stage.tensor_parallel_size, stage.gpu, order, name, s) for s, stage in enumerate(stages)
            ]
    machines: dict[str, list[int]] = {}  # GPU -> GPUs taken in each machine
    places: dict[tuple[str, int], Place] = {}
    for negative, gpu, _, name, stage in sorted(wanted):
        degree, size = -negative, table.market.offers[gpu].gpus_per_machine
        taken = machines.setdefault(gpu, [])
        index = next((i for i, used in enumerate(taken) if used + degree <= size), len(taken))
        if index == len(taken):
            taken.append(0)
        first = taken[index]
        taken[index] += degree
        places[name, stage] = Place(f"{gpu.lower()}-{index}", tuple(range(first, first + degree)))
    ports: dict[str, int] = {}
    found = []
    for configuration, own in names.items():
        candidate = table.candidates[configuration]
        for name in own:
            held = tuple(places[name, s] for s in range(len(candidate.stages)))
            port = ports[held[0].machine] = ports.get(held[0].machine, FIRST_PORT - 1) + 1
            found.append(RentedInstance(name, candidate, held, port))
    return found


def commands(table: Table, instances: list[RentedInstance]) -> list[str]:
    """One `vllm serve` an instance; a pipeline across machines runs on a Ray cluster of them."""
    return [server_of(table, instance).command() for instance in instances]


def server_of(table: Table, instance: RentedInstance) -> VllmServer:
    """The server of an instance."""
    market, candidate = table.market, instance.candidate
    stages = candidate.stages
    engine = candidate.profile.engine if candidate.profile is not None else None
    layers = market.models[candidate.model].layers
    gpus: dict[str, tuple[int, ...]] = {}
    for place in instance.places:
        gpus[place.machine] = gpus.get(place.machine, ()) + place.gpus
    return VllmServer(
        name=instance.name,
        model=candidate.model,
        form=Form(stages[0].tensor_parallel_size, len(stages), len(gpus)),
        gpus=list(gpus.items()),
        port=instance.port,
        utilization=min(market.offers[stage.gpu].gpu_memory_utilization for stage in stages),
        layers=[] if layers is None else [int(stage.layers * layers) for stage in stages],
        max_model_len=table.longest_tokens or "auto",
        max_num_seqs=None if engine is None else engine.max_num_seqs,
    )


def write_fleet(
    path: Path, table: Table, plan: RentPlan, instances: list[RentedInstance], policy: str
) -> None:
    """The plan as a fleet file under a policy, with the plan's shares for `planned`.

    Profiles that are no file yet (pipelines, rooflines) are written into a folder beside it. Raises
    `InputError` where something cannot be written.
    """
    writer = FleetWriter(path)
    models = []
    for model in table.market.models:
        entries = []
        for instance in instances:
            if instance.candidate.model != model:
                continue
            entry = {"name": instance.name, "url": server_of(table, instance).url}
            if (profile := _profile_reference(table, plan, instance.candidate, writer)) is not None:
                entry["profile"] = profile
            entries.append(entry)
        if entries:
            models.append({"name": model, "instances": entries})
    shares = [
        {
            "type": each.name,
            "model": each.model,
            "share": each.share,
            "input_tokens": each.input_tokens,
            "output_tokens": each.output_tokens,
            "instances": dict(each.instances),
        }
        for each in planned_shares(plan, table.types)
        if table.lengths_known
    ]
    heading = f"Written by `hetlb rent` from {table.market.path.name}. {FILL_IN}"
    writer.write(heading, models, {"name": policy, "shares": shares})


def _profile_reference(
    table: Table, plan: RentPlan, candidate: ConfigurationCandidate, writer: FleetWriter
) -> str | None:
    """The profile of a configuration as the fleet file names it, written where it is no file yet."""
    if candidate.written is not None:
        return writer.reference(table.market.path.parent / candidate.written)
    profile = profile_of(table, plan, candidate.name)
    if profile is None:
        return None
    return writer.add_profile(candidate.name.replace("/", "-").replace(" ", "-"), profile)
