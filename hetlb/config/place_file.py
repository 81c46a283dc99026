"""PLACE.yaml: the file that `hetlb place` reads, with CSV files of a cluster or with machines and profiles.

A file that loads names a whole cluster; anything else is one `ConfigError` line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hetlb.config.mistakes import short
from hetlb.config.plan_tables import (
    LinkTable,
    Machine,
    MachineTable,
    PlanModelTable,
    read_machines,
    read_model,
)
from hetlb.config.yaml_file import Positive, load_yaml
from hetlb.core.paths.stages import SINK, SOURCE, Edge, LinkSpec
from hetlb.errors import ConfigError
from hetlb.plan.placement.machine_kinds import machine_kind
from hetlb.plan.placement.place_cluster import LayeredModel, MachineKind, PlaceCluster, PlaceNode
from hetlb.plan.placement.place_files import ClusterFiles, load_cluster

_TOKEN_BYTES = 4
_ACTIVATION_VALUE_BYTES = 2


class PlaceMachineTable(MachineTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike; every GPU is a node. The latency profile of degree 1 is used, as a stage
    is one GPU. Machines of one `site` are near each other.
    """

    site: str = ""


class PlaceWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of requests, tokens."""

    input_tokens: Positive = 750.0
    output_tokens: Positive = 240.0


class PlaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement file as written: `nodes`, `layer_times`, `limits` and paths under `links` and `model`, or
    `machines`, every GPU of which is a node. Paths are relative to the file.
    """

    version: Literal[1] = 1
    model: str | PlanModelTable
    nodes: str | None = None
    links: str | LinkTable | None = None
    layer_times: str | None = None
    limits: str | None = None
    machines: tuple[PlaceMachineTable, ...] = ()
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
    needed = ("parameters", "kv_bytes_per_token", "layers", "hidden_size")
    model = read_model(file.model, path, "model", needed)
    for m, table in enumerate(file.machines):
        if table.name in (SOURCE, SINK):
            raise ConfigError(
                f"{path}: machines[{m}].name: expected a name other than {SOURCE} and {SINK}, got "
                f"{short(table.name)}"
            )
        if "1" not in table.profiles:
            raise ConfigError(
                f"{path}: machines[{m}].profiles.1: expected a latency profile of one GPU (a stage is one), "
                "got none"
            )
    workload, nodes, homes = file.workload, [], []
    machines = read_machines(path, file.machines)
    kinds: dict[tuple[object, ...], MachineKind] = {}
    tables = [m for m, table in enumerate(file.machines) for _ in range(table.count)]
    for m, machine in zip(tables, machines, strict=True):
        kind = kinds.get(machine.kind_of_gpu)
        if kind is None:
            kind = machine_kind(machine, model, workload.input_tokens, workload.output_tokens)
            if not kind.holdings:
                raise ConfigError(
                    f"{path}: machines[{m}].memory_bytes: expected room for one layer and its KV cache, got "
                    f"{short(file.machines[m].memory_bytes)}"
                )
            kinds[machine.kind_of_gpu] = kind
        for gpu in range(machine.gpus):
            name = machine.name if machine.gpus == 1 else f"{machine.name}-gpu{gpu}"
            most = len(kind.holdings)
            nodes.append(
                PlaceNode(name, kind.name, machine.site, most, math.inf, math.inf, machine.name, gpu)
            )
            homes.append(machine)
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: machines: expected every name once, got {twice!r} again")
    shape = LayeredModel(model.name, model.layers, model.hidden_size * _ACTIVATION_VALUE_BYTES, _TOKEN_BYTES)
    links = _links(path, file.links or LinkTable(), names, homes)
    return PlaceCluster(
        model=shape, nodes=tuple(nodes), kinds={kind.name: kind for kind in kinds.values()}, links=links
    )


def _links(
    path: Path, table: LinkTable, names: Sequence[str], homes: Sequence[Machine]
) -> dict[Edge, LinkSpec]:
    """Build the links between nodes and to the coordinator, which runs on the first machine."""
    matrix, index = table.matrix, {name: m for m, name in enumerate(dict.fromkeys(h.name for h in homes))}
    if matrix is not None and any(len(rows) != len(index) for rows in (matrix, *matrix)):
        raise ConfigError(f"{path}: links.matrix: expected {len(index)} rows and columns, one per machine")
    apart = table.apart
    table.check(path)

    def rate(one: Machine, other: Machine) -> float:
        if matrix is not None:
            return matrix[index[one.name]][index[other.name]]
        if one is other:
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
