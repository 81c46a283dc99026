"""CLUSTER.yaml of `search` and `split`: a model and the machines to serve it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import Positive, PositiveInt, load_yaml
from hetlb.tools.models.degrees import refusal
from hetlb.tools.plan.common.plan_tables import (
    LinkTable,
    Machine,
    MachineTable,
    Model,
    PlanModelTable,
    read_machines,
    read_model,
)
from hetlb.tools.plan.common.remarks import check_memory
from hetlb.tools.plan.disaggregation.split_cluster import Links, RequestLengths, Slo, SplitCluster


class ClusterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The longest request that every instance must be able to hold."""

    max_input_tokens: PositiveInt
    max_output_tokens: PositiveInt

    @property
    def tokens(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.max_input_tokens + self.max_output_tokens


class LengthsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens of every request."""

    input_tokens: PositiveInt
    output_tokens: PositiveInt


class MeanLimitsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on the mean latencies."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CLUSTER.yaml as written. `search` reads `limits`; `split` reads `workload`, `links` and `slo`."""

    version: Literal[1] = 1
    model: PlanModelTable
    machines: tuple[MachineTable, ...]
    limits: ClusterLimits | None = None
    workload: LengthsTable | None = None
    links: LinkTable = LinkTable()
    slo: MeanLimitsTable = MeanLimitsTable()


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file resolved for `search`."""

    path: Path
    model: Model
    limits: ClusterLimits
    machines: tuple[Machine, ...]


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file for `search` and every profile it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, ClusterFile, ConfigError)
    if file.limits is None:
        raise ConfigError(f"{path}: limits: expected a value, but the key is missing")
    machines = read_machines(path, file.machines)
    for m, table in enumerate(file.machines):
        if not table.profiles:
            raise ConfigError(
                f"{path}: machines[{m}].profiles: expected latency profiles by degree, got none"
            )
    model = read_model(file.model, path, "model", ("parameters", "kv_bytes_per_token"))
    _check_profiles(path, model, machines)
    return Cluster(path=path, model=model, limits=file.limits, machines=machines)


def _check_profiles(path: Path, model: Model, machines: Sequence[Machine]) -> None:
    """Raise `ConfigError` for a profile with more weights and cache than the memory of its GPUs."""
    for m, machine in enumerate(machines):
        for degree, profile in machine.profiles.items():
            check_memory(
                f"{path}: machines[{m}].profiles.{degree}", model, profile, degree, machine.memory_bytes
            )
        for (tp, dp), (_, profile) in machine.ranked.items():
            where = f"{path}: machines[{m}].profiles.tp{tp}dp{dp}"
            if model.shape is not None and (why := refusal(model.shape, tp, expert_parallel=True)):
                raise ConfigError(f"{where}: expected ranks that vLLM takes, got TP {tp}: {why}")
            check_memory(where, model, profile, tp, machine.memory_bytes, dp)


def load_split(path: Path, rows: Sequence[tuple[int, int]] | None = None) -> SplitCluster:
    """Read a cluster file for `split`; `rows` of a trace replace its workload.

    Raises `ConfigError` or `ProfileError`.
    """
    file = load_yaml(path, ClusterFile, ConfigError)
    if rows is None:
        if file.workload is None:
            raise ConfigError(f"{path}: workload: expected a workload, or --trace, got neither")
        rows = [(file.workload.input_tokens, file.workload.output_tokens)]
    machines = read_machines(path, file.machines)
    for m, table in enumerate(file.machines):
        if not table.profiles and table.roofline is None:
            raise ConfigError(f"{path}: machines[{m}].profiles: expected profiles or a roofline, got neither")
    model = read_model(file.model, path, "model", ("parameters", "kv_bytes_per_token", "layers"))
    _check_profiles(path, model, machines)
    slo = Slo(*(math.inf if each is None else each / 1e3 for each in (file.slo.ttft_ms, file.slo.tpot_ms)))
    links = Links(file.links.rates(path, machines), file.links.latency_s)
    return SplitCluster(path, model, machines, links, RequestLengths(tuple(rows)), slo)
