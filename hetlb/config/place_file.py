"""PLACE.yaml: the file that `hetlb place` reads, with CSV files of a cluster or with machines and profiles.

A file that loads names a whole cluster; anything else is one `ConfigError` line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hetlb.config.mistakes import short
from hetlb.config.plan_tables import LinkTable, PlanModelTable, read_model
from hetlb.config.profile_file import Profile, load_named
from hetlb.config.yaml_file import Positive, PositiveInt, Share, load_yaml
from hetlb.core.paths.stages import SINK, SOURCE, Edge, LinkSpec
from hetlb.errors import ConfigError
from hetlb.plan.placement.machines import USUAL_BATCHED_TOKENS, USUAL_SEQS, MachineModel, machine_kind
from hetlb.plan.placement.place_cluster import LayeredModel, MachineKind, PlaceCluster, PlaceNode
from hetlb.plan.placement.place_files import ClusterFiles, load_cluster

_TOKEN_BYTES = 4
_ACTIVATION_VALUE_BYTES = 2


class PlaceMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike; every GPU of it is a node. `profiles` maps a tensor-parallel degree to a
    latency profile of the whole model; that of degree 1 is used, as a stage is one GPU.
    """

    name: str
    gpu: str
    gpus: PositiveInt
    memory_bytes: PositiveInt
    profiles: dict[str, str]
    site: str = ""
    gpu_memory_utilization: Share = 0.9
    reserved_bytes_per_gpu: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: PositiveInt = 1


class PlaceWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of requests, tokens."""

    input_tokens: Positive = 750.0
    output_tokens: Positive = 240.0


class PlaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement file as written: `nodes`, `layer_times`, `limits` and paths under `links` and `model`, or
    `machines`. Paths are relative to the file.
    """

    version: Literal[1] = 1
    model: str | PlanModelTable
    nodes: str | None = None
    links: str | LinkTable | None = None
    layer_times: str | None = None
    limits: str | None = None
    machines: tuple[PlaceMachine, ...] = ()
    workload: PlaceWorkload = PlaceWorkload()


def load_place(path: Path) -> PlaceCluster:
    """Read PLACE.yaml and the files that it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, PlaceFile, ConfigError)
    if file.machines:
        return _from_machines(path, file)
    base = path.parent
    named = {key: getattr(file, key) for key in ("nodes", "links", "layer_times", "limits", "model")}
    for key, value in named.items():
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {key}: expected the path of a file (or machines), got {short(value)}")
    return load_cluster(ClusterFiles(**{key: base / value for key, value in named.items()}))


def _from_machines(path: Path, file: PlaceFile) -> PlaceCluster:
    for key in ("nodes", "layer_times", "limits"):
        if getattr(file, key) is not None:
            raise ConfigError(f"{path}: {key}: expected either {key} or machines, got both")
    if isinstance(file.model, str) or isinstance(file.links, str):
        key = "model" if isinstance(file.model, str) else "links"
        raise ConfigError(f"{path}: {key}: expected a mapping beside machines, got a path")
    table = file.model
    model = read_model(table, path, "model", ("parameters", "kv_bytes_per_token", "layers", "hidden_size"))
    layers, hidden = model.layers or 1, model.hidden_size or 1
    nodes: list[PlaceNode] = []
    homes: list[_Home] = []
    kinds: dict[str, MachineKind] = {}
    for m, machine in enumerate(file.machines):
        key = f"{path}: machines[{m}]"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", machine.name) or machine.name in (SOURCE, SINK):
            raise ConfigError(f"{key}.name: expected letters, digits and . _ -, got {short(machine.name)}")
        profile = _profile(path, key, machine)
        memory = machine.memory_bytes * machine.gpu_memory_utilization - machine.reserved_bytes_per_gpu
        engine = profile.engine
        kind = machine_kind(
            MachineModel(
                kind=machine.name,
                latency=profile.latency,
                memory_bytes=memory,
                layers=layers,
                weight_bytes=model.weight_bytes or 0.0,
                kv_bytes_per_token=model.kv_bytes_per_token or 1,
                max_num_seqs=engine.max_num_seqs or USUAL_SEQS,
                max_num_batched_tokens=engine.max_num_batched_tokens or USUAL_BATCHED_TOKENS,
            ),
            file.workload.input_tokens,
            file.workload.output_tokens,
        )
        if not kind.holdings:
            raise ConfigError(f"{key}.memory_bytes: expected room for one layer and its KV cache")
        kinds[kind.name] = kind
        for copy in range(machine.count):
            index = homes[-1].index + 1 if homes else 0
            own = machine.name if machine.count == 1 else f"{machine.name}-{copy}"
            for gpu in range(machine.gpus):
                name = own if machine.gpus == 1 else f"{own}-gpu{gpu}"
                most = len(kind.holdings)
                nodes.append(PlaceNode(name, kind.name, machine.site, most, math.inf, math.inf, own, gpu))
                homes.append(_Home(index, machine.gpu, machine.site))
    names = [node.name for node in nodes]
    if len(set(names)) < len(names) or len(kinds) < len(file.machines):
        raise ConfigError(f"{path}: machines: expected every name once")
    shape = LayeredModel(table.name, layers, hidden * _ACTIVATION_VALUE_BYTES, _TOKEN_BYTES)
    links = _links(path, file.links or LinkTable(), names, homes)
    return PlaceCluster(model=shape, nodes=tuple(nodes), kinds=kinds, links=links)


@dataclass(frozen=True, slots=True)
class _Home:
    """The machine of a node: its place in the file, its GPUs, its site."""

    index: int
    gpu: str
    site: str


def _profile(path: Path, key: str, machine: PlaceMachine) -> Profile:
    """The profile of one GPU."""
    named = machine.profiles.get("1")
    if named is None:
        raise ConfigError(
            f"{key}.profiles.1: expected a latency profile of one GPU (a stage is one), got none"
        )
    return load_named(path.parent, named, f"{key}.profiles.1")


def _links(
    path: Path, table: LinkTable, names: Sequence[str], homes: Sequence[_Home]
) -> dict[Edge, LinkSpec]:
    """Build the links between nodes and to the coordinator, which runs on the first machine."""
    matrix, machines = table.matrix, homes[-1].index + 1
    if matrix is not None and any(len(rows) != machines for rows in (matrix, *matrix)):
        raise ConfigError(f"{path}: links.matrix: expected {machines} rows and columns, one per machine")
    apart = table.apart
    table.check(path)

    def rate(one: _Home, other: _Home) -> float:
        if matrix is not None:
            return matrix[one.index][other.index]
        if one.index == other.index:
            return table.rate_inside(one.gpu)
        return table.between if one.site == other.site else apart

    links: dict[Edge, LinkSpec] = {}
    for sender, home in zip(names, homes, strict=True):
        for receiver, other in zip(names, homes, strict=True):
            if sender != receiver and (bytes_per_s := rate(home, other)) > 0.0:
                links[sender, receiver] = LinkSpec(bytes_per_s, table.latency_s)
        own = LinkSpec(table.between if home.site == homes[0].site else apart, table.latency_s)
        links[SOURCE, sender] = links[sender, SINK] = own
    return links
