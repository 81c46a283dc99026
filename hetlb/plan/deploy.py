"""A plan in the words of those who start it: machines, `vllm serve` commands, and a fleet file for hetlb.

Instances are put into machines the widest stage first, each into the first machine with room. Machines are
called by their GPU and a number, and these names stand for hosts.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from hetlb.plan.configurations import Candidate
from hetlb.plan.fleet_file import FleetWriter
from hetlb.plan.market import Market
from hetlb.plan.planning import Table
from hetlb.plan.rent import Plan
from hetlb.plan.simulation import instance_names, planned_shares

_FIRST_PORT = 8000


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs of one machine that hold one stage of an instance."""

    machine: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a plan: its configuration, the places of its stages, and the port of its server."""

    name: str
    candidate: Candidate
    places: tuple[Place, ...]
    port: int

    @property
    def url(self) -> str:
        """The address of its server, a machine's name standing for the host."""
        return f"http://{self.places[0].machine}:{self.port}"


def lay_out(table: Table, plan: Plan) -> list[Instance]:
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
            port = ports[held[0].machine] = ports.get(held[0].machine, _FIRST_PORT - 1) + 1
            found.append(Instance(name, candidate, held, port))
    return found


def commands(table: Table, instances: list[Instance]) -> list[str]:
    """One `vllm serve` an instance; a pipeline across machines runs on a Ray cluster of them."""
    longest: dict[str, int] = {}
    for kind in table.types:
        longest[kind.model] = max(longest.get(kind.model, 1), kind.longest_tokens)
    return [_command(table.market, instance, longest) for instance in instances]


def _command(market: Market, instance: Instance, longest: dict[str, int]) -> str:
    candidate = instance.candidate
    stages = candidate.stages
    words = ["vllm", "serve", candidate.model]
    words += ["--tensor-parallel-size", str(stages[0].tensor_parallel_size)]
    if len(stages) > 1:
        words += ["--pipeline-parallel-size", str(len(stages))]
    utilization = min(market.offers[stage.gpu].gpu_memory_utilization for stage in stages)
    words += ["--gpu-memory-utilization", f"{utilization:g}"]
    if (tokens := longest.get(candidate.model, 1)) > 2:
        words += ["--max-model-len", str(tokens)]
    engine = candidate.profile.engine if candidate.profile is not None else None
    if engine is not None and engine.max_num_seqs is not None:
        words += ["--max-num-seqs", str(engine.max_num_seqs)]
    words += ["--port", str(instance.port)]
    prefix = ""
    layers = market.models[candidate.model].layers
    if layers is not None and len({stage.layers for stage in stages}) > 1:
        prefix = f"VLLM_PP_LAYER_PARTITION={','.join(str(int(s.layers * layers)) for s in stages)} "
    machines = dict.fromkeys(place.machine for place in instance.places)
    if len(machines) > 1:
        words += ["--distributed-executor-backend", "ray"]
        where = " and ".join(
            f"{place.machine} (GPUs {','.join(map(str, place.gpus))})" for place in instance.places
        )
    else:
        gpus = ",".join(str(gpu) for place in instance.places for gpu in place.gpus)
        prefix = f"CUDA_VISIBLE_DEVICES={gpus} {prefix}"
        where = next(iter(machines))
    return f"{prefix}{shlex.join(words)}  # {instance.name} on {where}"


def write_fleet(path: Path, table: Table, plan: Plan, instances: list[Instance]) -> None:
    """The plan as a fleet file, with the plan's shares for the policy `planned`.

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
            entry = {"name": instance.name, "url": instance.url}
            if (profile := _profile_reference(table, instance.candidate, writer)) is not None:
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
    heading = f"Written by `hetlb rent` from {table.market.path.name}: machine names stand for hosts."
    writer.write(heading, models, {"name": "hetlb", "shares": shares})


def _profile_reference(table: Table, candidate: Candidate, writer: FleetWriter) -> str | None:
    """The profile of a configuration as the fleet file names it, written where it is no file yet."""
    if candidate.profile is None:
        return None
    if candidate.written is not None:
        return writer.reference(table.market.path.parent / candidate.written)
    return writer.add_profile(candidate.name.replace("/", "-").replace(" ", "-"), candidate.profile)
