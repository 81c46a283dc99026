"""CLUSTER.yaml of `hetlb split`: machines with links, a model, a workload.

Whatever is wrong comes out as one `ConfigError` line that names file, key, value and what was
expected. Paths are relative to the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hetlb.config.plan_tables import (
    INSIDE,
    LinkTable,
    Machine,
    MachineTable,
    PlanModelTable,
    RooflineTable,
    read_machines,
    read_model,
)
from hetlb.config.yaml_file import Positive, PositiveInt, load_yaml
from hetlb.errors import ConfigError
from hetlb.plan.disaggregation.split_cluster import Links, RequestLengths, Slo, SplitCluster


class LengthsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens of every request."""

    input_tokens: PositiveInt
    output_tokens: PositiveInt


class MeanLimitsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on the mean latencies."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class SplitMachineTable(MachineTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike. `profiles` maps a tensor-parallel degree to a latency profile of the
    whole model; `roofline` is for the degrees without one. Machines of one `site` are near each other.
    """

    roofline: RooflineTable | None = None
    site: str = ""


class SplitFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """CLUSTER.yaml as written."""

    version: Literal[1] = 1
    model: PlanModelTable
    machines: tuple[SplitMachineTable, ...]
    workload: LengthsTable | None = None
    links: LinkTable = LinkTable()
    slo: MeanLimitsTable = MeanLimitsTable()


def load_split(path: Path, rows: Sequence[tuple[int, int]] | None = None) -> SplitCluster:
    """Read CLUSTER.yaml; `rows` of a trace replace its workload. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, SplitFile, ConfigError)
    if rows is None:
        if file.workload is None:
            raise ConfigError(f"{path}: workload: expected a workload, or --trace, got neither")
        rows = [(file.workload.input_tokens, file.workload.output_tokens)]
    elif not rows:
        raise ConfigError(f"{path}: workload: expected a trace with at least one request, got none")
    machines = read_machines(path, file.machines)
    for m, table in enumerate(file.machines):
        if not table.profiles and table.roofline is None:
            raise ConfigError(f"{path}: machines[{m}].profiles: expected profiles or a roofline, got neither")
    file.links.check(path)
    model = read_model(file.model, path, "model", ("parameters", "kv_bytes_per_token", "layers"))
    slo = Slo(
        *(math.inf if each is None else each / 1e3 for each in (file.slo.ttft_ms, file.slo.tpot_ms)),
    )
    return SplitCluster(
        path,
        model,
        machines,
        _links(path, file, machines),
        RequestLengths(tuple(rows)),
        slo,
    )


def _links(path: Path, file: SplitFile, machines: Sequence[Machine]) -> Links:
    table = file.links
    gpus = {machine.gpu for machine in machines}
    for gpu in table.inside:
        if gpu != "default" and gpu not in gpus:
            raise ConfigError(
                f"{path}: links.inside: expected GPUs out of {', '.join(sorted(gpus))} or default, "
                f"got {gpu!r}"
            )
    if table.matrix is not None:
        if table.inside:
            raise ConfigError(f"{path}: links.inside: expected either inside or matrix, got both")
        return Links(_matrix(path, table.matrix, machines), table.latency_s)
    apart = table.apart
    rates = tuple(
        tuple(
            table.rate_inside(a.gpu) if i == j else (table.between if a.site == b.site else apart)
            for j, b in enumerate(machines)
        )
        for i, a in enumerate(machines)
    )
    return Links(rates, table.latency_s)


def _matrix(
    path: Path, matrix: tuple[tuple[float, ...], ...], machines: Sequence[Machine]
) -> tuple[tuple[float, ...], ...]:
    """A rate per pair of machines. Of a matrix of GPUs, all pairs of two machines must have the same."""
    key, size = f"{path}: links.matrix", len(matrix)
    gpus = sum(machine.gpus for machine in machines)
    if size not in (len(machines), gpus):
        raise ConfigError(f"{key}: expected {len(machines)} rows (machines) or {gpus} (GPUs), got {size}")
    for row, rates in enumerate(matrix):
        if len(rates) != size:
            raise ConfigError(f"{key}[{row}]: expected {size} columns, got {len(rates)}")
        for column, rate in enumerate(rates):
            if not math.isfinite(rate):
                raise ConfigError(f"{key}[{row}][{column}]: expected a finite number, got {rate}")
    if size == len(machines):
        for i, machine in enumerate(machines):
            if machine.gpus > 1 and not matrix[i][i] > 0:
                raise ConfigError(f"{key}[{i}][{i}]: expected the rate inside {machine.name}, got 0")
        return matrix
    owner = [i for i, machine in enumerate(machines) for _ in range(machine.gpus)]
    rates_of: dict[tuple[int, int], float] = {}
    for row, i in enumerate(owner):
        for column, j in enumerate(owner):
            rate = matrix[row][column]
            if row != column and rates_of.setdefault((i, j), rate) != rate:
                raise ConfigError(
                    f"{key}[{row}][{column}]: expected {rates_of[i, j]:g} as between the other GPUs of "
                    f"{machines[i].name} and {machines[j].name}, got {rate:g}: list GPUs that are connected "
                    "differently as machines of their own"
                )
    count = len(machines)
    return tuple(tuple(rates_of.get((i, j), INSIDE) for j in range(count)) for i in range(count))
