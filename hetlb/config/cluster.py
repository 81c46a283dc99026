"""Cluster files of `search`, and the KV cache that a model's `config.json` implies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hetlb.config.mistakes import short
from hetlb.config.profile_file import Profile, load_named
from hetlb.config.quantities import Quantity, read_bytes, read_memory, read_parameters
from hetlb.config.yaml_file import NonNegative, Positive, PositiveInt, Share, load_yaml, read_object
from hetlb.errors import ConfigError
from hetlb.plan.model_shape import read_shape
from hetlb.plan.tp_search import Machine, PlanModel

_T = TypeVar("_T")


class ClusterModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model to serve. `config` is its `config.json`, which gives the KV size where it is not stated."""

    name: str
    parameters: Quantity
    bytes_per_parameter: Positive = 2.0
    kv_bytes_per_token: Quantity | None = None
    kv_bytes_per_value: Positive = 2.0
    config: str | None = None


class ClusterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The longest request that every instance must be able to hold."""

    max_input_tokens: PositiveInt
    max_output_tokens: PositiveInt


class ClusterMachineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike. `profiles` maps a tensor-parallel degree to a latency profile.

    A profile of a degree that does not divide `gpus` is for layouts of unequal instances.
    """

    name: str
    gpu: str
    gpus: PositiveInt
    memory_bytes: Quantity
    profiles: dict[str, str]
    gpu_memory_utilization: Share = 0.9
    reserved_bytes_per_gpu: Quantity = 0
    count: PositiveInt = 1
    price_per_gpu_hour: NonNegative | None = None


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster file as written."""

    version: Literal[1]
    model: ClusterModel
    limits: ClusterLimits
    machines: tuple[ClusterMachineTable, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file resolved: the planner's machines and the profile of every path they name."""

    path: Path
    file: ClusterFile
    model: PlanModel
    machines: tuple[Machine, ...]
    profiles: dict[str, Profile]


def kv_bytes_per_token(config: Mapping[str, Any], bytes_per_value: float) -> int:
    """KV bytes of one token from a model's `config.json`: 2 * layers * kv_heads * head_dim * bytes.

    Grouped-query attention counts its KV heads, not its query heads. Raises `ConfigError`.
    """
    shape = read_shape(config)
    if not shape.kv_heads:
        raise ConfigError(
            "kv_lora_rank: expected a model whose cache holds keys and values per head; "
            "give model.kv_bytes_per_token for this one"
        )
    return math.ceil(2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_per_value)


def model_kv_bytes(
    path: Path, where: str, stated: int | None, config: str | None, bytes_per_value: float
) -> int:
    """KV bytes of one token as stated in a file, or from the `config.json` it names. Raises `ConfigError`."""
    if stated is not None:
        if config is not None:
            raise ConfigError(
                f"{path}: {where}config: expected either config or kv_bytes_per_token, got both"
            )
        return stated
    if config is None:
        raise ConfigError(
            f"{path}: {where}kv_bytes_per_token: expected a value or {where}config, got neither"
        )
    return _of_config(path.parent / config, lambda raw: kv_bytes_per_token(raw, bytes_per_value))


def _of_config(path: Path, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Read a part of a `config.json`. Raises `ConfigError`."""
    raw = read_object(path)
    try:
        return read(raw)
    except ConfigError as caught:
        raise ConfigError(f"{path}: {caught}") from caught


def _read_profiles(
    base: Path, table: ClusterMachineTable, key: str, profiles: dict[str, Profile]
) -> dict[int, str]:
    """Add the profiles of a machine to `profiles`; returns their paths by degree. Raises `ConfigError`."""
    by_degree: dict[int, str] = {}
    for text, written in table.profiles.items():
        where = f"{key}.profiles.{text}"
        if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
            raise ConfigError(f"{where}: expected a tensor-parallel degree as the key, got {short(text)}")
        degree = int(text)
        by_degree[degree] = written
        if degree > table.gpus:
            raise ConfigError(f"{where}: expected a degree of at most the {table.gpus} GPUs, got {degree}")
        if written not in profiles:
            profiles[written] = load_named(base, written, where)
        measured = profiles[written].engine.tensor_parallel_size
        if measured is not None and measured != degree:
            raise ConfigError(f"{where}: expected a profile of degree {degree}, got one of degree {measured}")
    return by_degree


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file and every profile it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, ClusterFile, ConfigError)
    if not file.machines:
        raise ConfigError(f"{path}: machines: expected at least one machine, got none")
    stated = file.model.kv_bytes_per_token
    model = PlanModel(
        file.model.name,
        read_parameters(file.model.parameters, f"{path}: model.parameters"),
        file.model.bytes_per_parameter,
        model_kv_bytes(
            path,
            "model.",
            None if stated is None else read_bytes(stated, f"{path}: model.kv_bytes_per_token"),
            file.model.config,
            file.model.kv_bytes_per_value,
        ),
        file.limits.max_input_tokens,
        file.limits.max_output_tokens,
        None if file.model.config is None else _of_config(path.parent / file.model.config, read_shape),
    )
    profiles: dict[str, Profile] = {}
    machines: list[Machine] = []
    for m, table in enumerate(file.machines):
        key = f"{path}: machines[{m}]"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", table.name):
            raise ConfigError(f"{key}.name: expected letters, digits and . _ -, got {short(table.name)}")
        by_degree = _read_profiles(path.parent, table, key, profiles)
        machines += [
            Machine(
                name=table.name if table.count == 1 else f"{table.name}-{copy}",
                gpu=table.gpu,
                gpus=table.gpus,
                memory_bytes=read_memory(table.memory_bytes, f"{key}.memory_bytes"),
                gpu_memory_utilization=table.gpu_memory_utilization,
                reserved_bytes_per_gpu=read_bytes(reserved, f"{key}.reserved_bytes_per_gpu")
                if (reserved := table.reserved_bytes_per_gpu)
                else 0,
                profiles=tuple(sorted(by_degree.items())),
                price_per_gpu_hour=table.price_per_gpu_hour,
            )
            for copy in range(table.count)
        ]
    names = [machine.name for machine in machines]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: machines: expected every name once, got {twice!r} again")
    return Cluster(path=path, file=file, model=model, machines=tuple(machines), profiles=profiles)
