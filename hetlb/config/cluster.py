"""Cluster files of `search`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hetlb.config.plan_tables import Machine, MachineTable, Model, PlanModelTable, read_machines, read_model
from hetlb.config.yaml_file import PositiveInt, load_yaml
from hetlb.errors import ConfigError


class ClusterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The longest request that every instance must be able to hold."""

    max_input_tokens: PositiveInt
    max_output_tokens: PositiveInt

    @property
    def tokens(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.max_input_tokens + self.max_output_tokens


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster file as written."""

    version: Literal[1]
    model: PlanModelTable
    limits: ClusterLimits
    machines: tuple[MachineTable, ...]


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
    model = read_model(file.model, path, "model", ("parameters", "kv_bytes_per_token"))
    return Cluster(path=path, model=model, limits=file.limits, machines=machines)
