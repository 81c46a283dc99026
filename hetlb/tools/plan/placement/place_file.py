"""PLACE.yaml, the file that `hetlb place` reads: CSV files of a cluster, or machines with profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import short
from hetlb.inputs.yaml_file import Positive, load_yaml
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, LinkSpec
from hetlb.tools.plan.common.plan_tables import (
    LinkTable,
    Machine,
    MachineTable,
    PlanModelTable,
    read_machines,
    read_model,
)
from hetlb.tools.plan.common.remarks import remarks_on_machines
from hetlb.tools.plan.placement.place_cluster import (
    LayeredModel,
    MachineKind,
    PlaceCluster,
    PlaceNode,
    machine_kind,
)
from hetlb.tools.plan.placement.place_files import load_cluster
from hetlb.tools.stage.checkpoint import load_config

_TOKEN_BYTES = 4
_ACTIVATION_VALUE_BYTES = 2


class PlaceWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of requests, tokens."""

    input_tokens: Positive = 750.0
    output_tokens: Positive = 240.0


class PlaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement file as written: `nodes`, `layer_times`, `limits` and paths under `links` and `model`, or
    `machines`: each of their GPUs is a node. Paths are relative to the file.
    """

    version: Literal[1] = 1
    model: str | PlanModelTable
    nodes: str | None = None
    links: str | LinkTable | None = None
    layer_times: str | None = None
    limits: str | None = None
    machines: tuple[MachineTable, ...] = ()
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
            got = "none" if value is None else short(value)
            raise ConfigError(f"{path}: {key}: expected the path of a file (or machines), got {got}")
    return load_cluster({key: base / value for key, value in named.items()})


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
        for key in ("roofline", "price_per_gpu_hour"):
            if getattr(table, key) is not None:
                raise ConfigError(f"{path}: machines[{m}].{key}: unknown key, `place` does not read it")
        if "1" not in table.profiles:
            raise ConfigError(
                f"{path}: machines[{m}].profiles.1: expected a latency profile of one GPU (a stage is one), "
                "got none"
            )
    workload, nodes = file.workload, []
    machines = read_machines(path, file.machines)
    kinds: dict[tuple[object, ...], MachineKind] = {}
    homes: dict[str, int] = {}
    tables = [m for m, table in enumerate(file.machines) for _ in range(table.count)]
    for home, (m, machine) in enumerate(zip(tables, machines, strict=True)):
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
            if name in homes:
                raise ConfigError(f"{path}: machines: expected every name once, got {name!r} again")
            homes[name] = home
    shape = LayeredModel(model.name, model.layers, model.hidden_size * _ACTIVATION_VALUE_BYTES, _TOKEN_BYTES)
    links = _links(path, file.links or LinkTable(), machines, homes)
    return PlaceCluster(
        model=shape,
        nodes=tuple(nodes),
        kinds={kind.name: kind for kind in kinds.values()},
        links=links,
        source=model,
        remarks=tuple(remarks_on_machines(model, machines)),
        unstaged=_unstaged(path, file.model),
    )


def _unstaged(path: Path, table: PlanModelTable) -> str:
    """Return the reason for which `hetlb stage` does not compute a model with a config.json."""
    if table.config is None:
        return ""
    try:
        load_config(path.parent / table.config)
    except ConfigError as error:
        return str(error)
    return ""


def _links(
    path: Path, table: LinkTable, machines: Sequence[Machine], homes: Mapping[str, int]
) -> dict[Edge, LinkSpec]:
    """Build the links between nodes and to the coordinator, which runs on the first machine.

    `homes` is the machine of each node, by its place among `machines`.
    """
    rates = table.rates(path, machines)
    links: dict[Edge, LinkSpec] = {}
    for sender, home in homes.items():
        for receiver, other in homes.items():
            if sender != receiver and rates[home][other] > 0.0:
                links[sender, receiver] = LinkSpec(rates[home][other], table.latency_s)
        near = machines[home].site == machines[0].site
        own = LinkSpec(table.between if near else table.apart, table.latency_s)
        links[SOURCE, sender] = links[sender, SINK] = own
    return links
