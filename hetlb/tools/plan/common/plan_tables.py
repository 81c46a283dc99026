"""Tables that the files of all planners share: the model, machines, peak figures of a GPU, links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import msgspec

from hetlb.balancer.config.profile_file import Profile, load_named
from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import short
from hetlb.inputs.yaml_file import NonNegative, Positive, PositiveInt, Share
from hetlb.tools.models.degrees import ModelShape
from hetlb.tools.models.model_facts import ModelFacts, stated_facts
from hetlb.tools.models.model_file import load_facts
from hetlb.tools.plan.common.capacity import usable_bytes
from hetlb.tools.plan.common.quantities import Quantity, read_bytes, read_memory, read_parameters, read_rate

#: Bytes/s between GPUs of one machine and between machines if the file does not say: PCIe 4 x16, 5 Gbit/s.
INSIDE_BYTES_PER_S, BETWEEN_BYTES_PER_S = 25e9, 0.625e9
#: Largest error of a stated size without a note: beyond, the size may be of another model.
_MOST_OFF_SHARE = 0.1


# --- the model ------------------------------------------------------------------------------------------


class PlanModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model. `config` is its `config.json`; keys stated beside it win."""

    name: str
    parameters: Quantity | None = None
    bytes_per_parameter: Positive | None = None
    kv_bytes_per_token: Quantity | None = None
    kv_bytes_per_value: Positive | None = None
    config: str | None = None
    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    attention_heads: PositiveInt | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model with the facts for planning; sizes in bytes, 0 if not stated.

    `kv_bytes_per_token` is the sum over all layers with a cache, windows too: the unit of a cache's tokens,
    as in vLLM. `facts` are of its `config.json`, with stated values in their place. They are None without
    one; then degrees are not checked. `notes` name stated sizes far from `config.json`.
    """

    name: str
    parameters: float = 0.0
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: int = 0
    layers: int = 0
    hidden_size: int = 0
    attention_heads: int = 0
    facts: ModelFacts | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape | None:
        """Return the sizes that decide on degrees."""
        return None if self.facts is None else self.facts.shape

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all weights."""
        return self.parameters * self.bytes_per_parameter

    def kv_bytes_at(self, tensor_parallel_size: int) -> float:
        """Return the bytes of a token on all GPUs of a group: GPUs with too few KV heads keep copies."""
        return self.kv_bytes_per_token * self.known.replication(tensor_parallel_size)

    def needed(self, tokens: float) -> float:
        """Return the tokens of a KV cache that a sequence of `tokens` needs."""
        need = self.known.kv_need
        return tokens if need is None else need.tokens(tokens)

    @property
    def known(self) -> ModelFacts:
        """Return the facts; without a `config.json`, of a dense model that attends in full."""
        if self.facts is not None:
            return self.facts
        return stated_facts(
            self.name,
            self.parameters,
            self.kv_bytes_per_token,
            self.bytes_per_parameter,
            self.layers,
            self.hidden_size,
            self.attention_heads,
        )


def read_model(table: PlanModelTable, path: Path, where: str, needed: Sequence[str] = ()) -> Model:
    """Resolve the model of the table at key `where`; `needed` keys must be known. Raises `ConfigError`."""
    parameters, kv_bytes = 0.0, 0
    if table.parameters is not None:
        parameters = read_parameters(table.parameters, f"{path}: {where}.parameters")
    if table.kv_bytes_per_token is not None:
        kv_bytes = read_bytes(table.kv_bytes_per_token, f"{path}: {where}.kv_bytes_per_token")
    model = Model(
        name=table.name,
        parameters=parameters,
        bytes_per_parameter=table.bytes_per_parameter or 2.0,
        kv_bytes_per_token=kv_bytes,
        layers=table.layers or 0,
        hidden_size=table.hidden_size or 0,
        attention_heads=table.attention_heads or 0,
    )
    if table.config is not None:
        if not (path.parent / table.config).exists():
            got = f"got {short(table.config)}: no such file"
            raise ConfigError(f"{path}: {where}.config: expected the path of a config.json, {got}")
        facts = load_facts(path.parent / table.config, table.name)
        model = _with_facts(model, table, facts, f"{path}: {where}")
    for key in needed:
        if not getattr(model, key):
            if table.config is not None:
                raise ConfigError(f"{path}: {where}.{key}: expected a value, got none")
            raise ConfigError(f"{path}: {where}.{key}: expected a value or {where}.config, got neither")
    return model


def _with_facts(model: Model, table: PlanModelTable, found: ModelFacts, where: str) -> Model:
    """Return the model with its facts; stated sizes win. Raises `ConfigError` for another model's facts."""
    for key in ("layers", "hidden_size", "attention_heads"):
        stated, own = getattr(table, key), getattr(found, key)
        if stated is not None and stated != own:
            raise ConfigError(f"{where}.{key}: expected {own} as its config.json has, got {stated}")
    scale = 1.0 if table.kv_bytes_per_value is None else table.kv_bytes_per_value / found.kv_bytes_per_value
    needed, given = found.needed.times(scale), found.allocated.times(scale)
    if found.kv_cache_dtype and (table.kv_bytes_per_value or model.kv_bytes_per_token):
        given = needed  # stated sizes are in force, not vLLM's default rows
    if model.kv_bytes_per_token:
        more = given.per_token / needed.per_token if needed.per_token else 1.0
        needed = replace(needed, per_token=model.kv_bytes_per_token)
        given = replace(given, per_token=model.kv_bytes_per_token * more)
    facts = replace(found, kv_bytes_per_token=needed.per_token, kv_windows=needed.windows, set_aside=given)
    each = table.bytes_per_parameter
    if model.parameters or each is not None:
        facts = facts.with_weights(model.parameters or found.parameters, each)
    notes = tuple(
        f"{where}.{key}: {stated:g} was stated, its config.json gives {own:g}"
        for key, stated, own in (
            ("parameters", model.parameters, found.parameters),
            ("bytes_per_parameter", each or 0.0, found.weight_bytes / found.parameters),
            ("kv_bytes_per_token", model.kv_bytes_per_token, found.kv_bytes_per_token),
        )
        if stated and abs(stated - own) > _MOST_OFF_SHARE * own
    )
    notes += tuple(
        f"weights of {table.name} without {name}: its sizes are not known" for name in found.uncounted
    )
    return msgspec.structs.replace(
        model,
        parameters=float(facts.parameters),
        bytes_per_parameter=facts.weight_bytes / facts.parameters,
        kv_bytes_per_token=math.ceil(facts.cached_token_bytes),
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        attention_heads=facts.attention_heads,
        facts=facts,
        notes=notes,
    )


# --- machines -------------------------------------------------------------------------------------------


class RooflineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Peak figures of one GPU, and the reached shares of them: an estimate, never measured."""

    flops: Positive
    bandwidth_bytes_per_s: Positive
    flops_efficiency: Share = 0.5
    bandwidth_efficiency: Share = 0.7
    overhead_ms: NonNegative = 2.0


class MachineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike. Machines of one `site` are near each other.

    `profiles` maps a tensor-parallel degree to a latency profile of the whole model; one of a degree that
    does not divide `gpus` is for layouts of unequal instances. One of `tp1dp8` is for a server of 8
    data-parallel ranks of one GPU, whole experts on each. `place` reads degree 1, as a stage is one GPU;
    `split` takes `roofline` for degrees without one.
    """

    name: str
    gpu: str
    gpus: PositiveInt
    memory_bytes: Quantity
    profiles: dict[str, str] = {}
    roofline: RooflineTable | None = None
    gpu_memory_utilization: Share = 0.9
    reserved_bytes_per_gpu: Quantity = 0
    price_per_gpu_hour: NonNegative | None = None
    site: str = ""
    count: PositiveInt = 1


@dataclass(frozen=True)
class Machine:
    """`gpus` alike GPUs of `memory_bytes` each, and the profiles of the whole model by degree.

    `profile_paths` are as written in the file. The price of one GPU is in whatever currency.
    """

    name: str
    gpu: str
    gpus: int
    memory_bytes: int
    gpu_memory_utilization: float = 0.9
    reserved_bytes_per_gpu: int = 0
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    profile_paths: Mapping[int, str] = field(default_factory=dict)
    #: Profiles of data-parallel servers, by (TP of a rank, ranks), with their files.
    ranked: Mapping[tuple[int, int], tuple[str, Profile]] = field(default_factory=dict)
    roofline: RooflineTable | None = None
    site: str = ""
    price_per_gpu_hour: float | None = None

    def usable(self, gpus: int) -> Fraction:
        """Return the bytes of `gpus` GPUs for weights and KV cache."""
        return usable_bytes(gpus, self.memory_bytes, self.gpu_memory_utilization, self.reserved_bytes_per_gpu)

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes of one GPU for weights and KV cache."""
        return float(self.usable(1))

    @cached_property
    def kind_of_gpu(self) -> tuple[object, ...]:
        """Key that is equal for machines with the same GPUs."""
        return (
            self.gpu,
            self.memory_bytes,
            self.gpu_memory_utilization,
            self.reserved_bytes_per_gpu,
            tuple((degree, profile.name) for degree, profile in sorted(self.profiles.items())),
            tuple(sorted(self.profile_paths.items())),
            tuple(sorted((key, written) for key, (written, _) in self.ranked.items())),
            self.roofline,
        )

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for machines that differ in name and site alone."""
        return self.gpus, self.price_per_gpu_hour, *self.kind_of_gpu


def read_machines(path: Path, tables: Sequence[MachineTable]) -> tuple[Machine, ...]:
    """Resolve machines with their profiles. Raises `ConfigError` or `ProfileError`."""
    if not tables:
        raise ConfigError(f"{path}: machines: expected at least one machine, got none")
    loaded: dict[str, Profile] = {}
    machines: list[Machine] = []
    for m, table in enumerate(tables):
        key = f"{path}: machines[{m}]"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", table.name):
            raise ConfigError(f"{key}.name: expected letters, digits and . _ -, got {short(table.name)}")
        paths = _profile_paths(path, table, key, loaded)
        by_degree = {tp: written for (tp, dp), written in sorted(paths.items()) if dp == 1}
        reserved = table.reserved_bytes_per_gpu
        machines += [
            Machine(
                name=table.name if table.count == 1 else f"{table.name}-{copy}",
                gpu=table.gpu,
                gpus=table.gpus,
                memory_bytes=read_memory(table.memory_bytes, f"{key}.memory_bytes"),
                gpu_memory_utilization=table.gpu_memory_utilization,
                reserved_bytes_per_gpu=read_bytes(reserved, f"{key}.reserved_bytes_per_gpu")
                if reserved
                else 0,
                profiles={tp: loaded[written] for tp, written in by_degree.items()},
                profile_paths=by_degree,
                ranked={each: (written, loaded[written]) for each, written in paths.items() if each[1] > 1},
                roofline=table.roofline,
                site=table.site,
                price_per_gpu_hour=table.price_per_gpu_hour,
            )
            for copy in range(table.count)
        ]
    names = [table.name for table in tables if table.count > 1] + [machine.name for machine in machines]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: machines: expected every name once, got {twice!r} again")
    return tuple(machines)


def _profile_paths(
    path: Path, table: MachineTable, key: str, loaded: dict[str, Profile]
) -> dict[tuple[int, int], str]:
    """Load the profiles of a machine; return their paths by (TP, ranks). Raises `ConfigError`."""
    found: dict[tuple[int, int], str] = {}
    for text, written in table.profiles.items():
        where = f"{key}.profiles.{text}"
        tp, dp = found_key = read_degrees(text, where)
        found[found_key] = written
        if dp > 1:
            check_one_machine(where, tp * dp, table.gpus)
        if tp > table.gpus:
            raise ConfigError(f"{where}: expected a degree of at most the {table.gpus} GPUs, got {tp}")
        if written not in loaded:
            loaded[written] = load_named(path.parent, written, where)
        check_degrees(where, loaded[written], tp, dp)
    return found


def read_degrees(text: str, where: str) -> tuple[int, int]:
    """Return the TP and the data-parallel ranks of a key such as `8` or `tp1dp8`. Raises `ConfigError`."""
    found = re.fullmatch(r"([1-9][0-9]{0,3})|tp([1-9][0-9]{0,3})dp([1-9][0-9]{0,3})", text, re.ASCII)
    if found is None:
        raise ConfigError(
            f"{where}: expected a tensor-parallel degree or tp1dp8 as the key, got {short(text)}"
        )
    return (int(found[1]), 1) if found[1] else (int(found[2]), int(found[3]))


def check_one_machine(where: str, gpus: int, most: int) -> None:
    """Raise `ConfigError` for data-parallel ranks on more GPUs than a machine has."""
    if gpus > most:
        raise ConfigError(
            f"{where}: expected at most the {most} GPUs of a machine for data-parallel ranks, got {gpus}: "
            "ranks over machines are not planned"
        )


def check_degrees(where: str, profile: Profile, tp: int, dp: int) -> None:
    """Raise `ConfigError` if a profile states other degrees."""
    engine = profile.engine
    if engine.tensor_parallel_size not in (None, tp):
        raise ConfigError(
            f"{where}: expected a profile of degree {tp}, got one of degree {engine.tensor_parallel_size}"
        )
    if (engine.data_parallel_size or 1) != dp:
        raise ConfigError(
            f"{where}: expected a profile of {dp} data-parallel ranks, got one of "
            f"{engine.data_parallel_size or 1}: its key is tp{tp}dp{engine.data_parallel_size or 1}"
        )


# --- links ----------------------------------------------------------------------------------------------


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes/s between GPUs inside a machine, by kind of GPU (or `default`), and between machines."""

    inside: dict[str, Positive] = {}
    between: Positive = BETWEEN_BYTES_PER_S
    latency_s: NonNegative = 2e-4

    def rate_inside(self, gpu: str, usual: float = INSIDE_BYTES_PER_S) -> float:
        """Return the bytes/s inside a machine of these GPUs."""
        return self.inside.get(gpu, self.inside.get("default", usual))

    def check(self, path: Path) -> None:
        """Raise `ConfigError` for a rate so small that its unit must be missing."""
        for gpu, rate in self.inside.items():
            read_rate(rate, f"{path}: links.inside.{gpu}")
        read_rate(self.between, f"{path}: links.between")


class LinkTable(LinkRates, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Link rates with sites, or a matrix of all.

    A matrix has a row per machine or per GPU, in file order; its diagonal is the rate inside.
    """

    between_sites: Positive | None = None
    matrix: tuple[tuple[NonNegative, ...], ...] | None = None

    @property
    def apart(self) -> float:
        """Bytes/s between machines of two sites."""
        return self.between if self.between_sites is None else self.between_sites

    def rates(self, path: Path, machines: Sequence[Machine]) -> tuple[tuple[float, ...], ...]:
        """Return the bytes/s from each machine to each. Raises `ConfigError`."""
        self.check(path)
        gpus = {machine.gpu for machine in machines}
        for gpu in self.inside:
            if gpu != "default" and gpu not in gpus:
                raise ConfigError(
                    f"{path}: links.inside: expected GPUs out of {', '.join(sorted(gpus))} or default, "
                    f"got {gpu!r}"
                )
        if self.matrix is not None:
            if self.inside:
                raise ConfigError(f"{path}: links.inside: expected either inside or matrix, got both")
            return _rates_of_matrix(path, self.matrix, machines)
        return tuple(
            tuple(
                self.rate_inside(a.gpu) if a is b else self.between if a.site == b.site else self.apart
                for b in machines
            )
            for a in machines
        )

    def check(self, path: Path) -> None:
        """Raise `ConfigError` for a rate so small that its unit must be missing."""
        super().check(path)
        read_rate(self.apart, f"{path}: links.between_sites")
        for i, row in enumerate(self.matrix or ()):
            for j, rate in enumerate(row):
                read_rate(rate, f"{path}: links.matrix[{i}][{j}]")


def _rates_of_matrix(
    path: Path, matrix: tuple[tuple[float, ...], ...], machines: Sequence[Machine]
) -> tuple[tuple[float, ...], ...]:
    """Return a rate per pair of machines. In a matrix of GPUs, pairs of two machines agree."""
    key, size = f"{path}: links.matrix", len(matrix)
    gpus = sum(machine.gpus for machine in machines)
    if size not in (len(machines), gpus):
        raise ConfigError(f"{key}: expected {len(machines)} rows (machines) or {gpus} (GPUs), got {size}")
    for row, rates in enumerate(matrix):
        if len(rates) != size:
            raise ConfigError(f"{key}[{row}]: expected {size} columns, got {len(rates)}")
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
    return tuple(tuple(rates_of.get((i, j), INSIDE_BYTES_PER_S) for j in range(count)) for i in range(count))
