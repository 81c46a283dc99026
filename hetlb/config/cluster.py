"""Cluster files of `search`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hetlb.config.plan_tables import Machine, MachineTable, Model, WholeModelTable, read_machines, read_model
from hetlb.config.yaml_file import NonNegative, PositiveInt, load_yaml
from hetlb.errors import ConfigError


class ClusterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The longest request that every instance must be able to hold."""

    max_input_tokens: PositiveInt
    max_output_tokens: PositiveInt

    @property
    def tokens(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.max_input_tokens + self.max_output_tokens


class ClusterMachineTable(MachineTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike. `profiles` maps a tensor-parallel degree to a latency profile.

    A profile of a degree that does not divide `gpus` is for layouts of unequal instances.
    """

    price_per_gpu_hour: NonNegative | None = None


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster file as written."""

    version: Literal[1]
    model: WholeModelTable
    limits: ClusterLimits
    machines: tuple[ClusterMachineTable, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file resolved."""

    path: Path
    model: Model
    limits: ClusterLimits
    machines: tuple[Machine, ...]


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file and every profile it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, ClusterFile, ConfigError)
    machines = read_machines(path, file.machines)
    for m, table in enumerate(file.machines):
        if not table.profiles:
            raise ConfigError(
                f"{path}: machines[{m}].profiles: expected latency profiles by degree, got none"
            )
    model = read_model(file.model, path, "model", ("parameters", "kv_bytes_per_token"))
    return Cluster(path=path, model=model, limits=file.limits, machines=machines)
