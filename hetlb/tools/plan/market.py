"""MARKET.yaml: instances for rent, the requests to serve, and the budget.

Whatever is wrong comes out as one `ConfigError` line that names file, key, value and what was
expected. Shares may be counts: they are divided by their sum. Paths are relative to the file.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hetlb.balancer.config.profile_file import Profile, load_named
from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import NonNegative, Positive, PositiveInt, Share, load_yaml
from hetlb.tools.plan.common.capacity import usable_bytes
from hetlb.tools.plan.common.plan_tables import (
    LinkRates,
    Model,
    PlanModelTable,
    RooflineTable,
    check_degrees,
    check_one_machine,
    read_degrees,
    read_model,
)
from hetlb.tools.plan.common.remarks import check_memory
from hetlb.tools.plan.highs import INFINITY

_NAME = re.compile(r"[A-Za-z0-9._/ +-]{1,100}")


class OfferTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of GPU for rent, price per GPU and hour. `available` missing: as many as the budget buys.

    `profiles` maps a model and a tensor-parallel degree (or `tp1dp8`: 8 data-parallel ranks of one GPU, whole
    experts on each) to a latency profile; `roofline` is for the rest.
    """

    gpu: str
    price_per_hour: NonNegative
    available: Annotated[int, msgspec.Meta(ge=0)] | None = None
    gpus_per_machine: PositiveInt = 8
    memory_bytes: PositiveInt | None = None
    gpu_memory_utilization: Share = 0.9
    reserved_bytes_per_gpu: Annotated[int, msgspec.Meta(ge=0)] = 0
    profiles: dict[str, dict[str, str]] = {}
    roofline: RooflineTable | None = None

    def usable(self, gpus: int) -> Fraction:
        """Return the bytes of `gpus` GPUs for weights and KV cache."""
        memory = self.memory_bytes or 0
        return usable_bytes(gpus, memory, self.gpu_memory_utilization, self.reserved_bytes_per_gpu)


class WorkloadTypeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A type of request: its share (or its number) among all requests."""

    name: str
    share: Positive
    model: str | None = None
    input_tokens: PositiveInt | None = None
    output_tokens: PositiveInt | None = None


class ConfigurationTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of instance: its GPUs with a profile, or the requests/s it serves of each type alone."""

    name: str
    gpus: dict[str, PositiveInt]
    model: str | None = None
    profile: str | None = None
    throughput: dict[str, NonNegative] | None = None
    tensor_parallel_size: PositiveInt | None = None
    pipeline_parallel_size: PositiveInt = 1


class SloTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Latencies that this share of the requests must meet: time to first token, time per output token."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    attainment: Share = 0.95


class TargetTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The load that must be served, at least cost."""

    request_rate: Positive


class MoveCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds to load a model and until the next change, and the share of a plan from scratch to be kept."""

    load_s: NonNegative = 300.0
    horizon_s: Positive = 3600.0
    keep: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95

    @property
    def discount(self) -> float:
        """Return the part of the horizon until a started instance serves."""
        return min(1.0, self.load_s / self.horizon_s)


class MarketFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """MARKET.yaml as written."""

    version: Literal[1]
    offers: tuple[OfferTable, ...]
    models: tuple[PlanModelTable, ...] = ()
    workloads: tuple[WorkloadTypeTable, ...] = ()
    configurations: tuple[ConfigurationTable, ...] = ()
    budget_per_hour: Positive | None = None
    target: TargetTable | None = None
    slo: SloTable | None = None
    requests: PositiveInt | None = None
    links: LinkRates = LinkRates()
    replanning: MoveCost = MoveCost()


class Market(msgspec.Struct, frozen=True, kw_only=True):
    """MARKET.yaml resolved: models by name, and the profile of every path it names."""

    path: Path
    file: MarketFile
    models: dict[str, Model]
    profiles: dict[str, Profile]

    @property
    def offers(self) -> dict[str, OfferTable]:
        return {offer.gpu: offer for offer in self.file.offers}

    @property
    def prices(self) -> dict[str, float]:
        return {offer.gpu: offer.price_per_hour for offer in self.file.offers}

    @property
    def available(self) -> dict[str, float]:
        """GPUs of each kind, infinite if the file does not say."""
        return {
            offer.gpu: INFINITY if offer.available is None else float(offer.available)
            for offer in self.file.offers
        }

    @property
    def budget(self) -> float:
        return INFINITY if self.file.budget_per_hour is None else self.file.budget_per_hour

    def model_of(self, stated: str | None, where: str) -> str:
        """Return the model that a workload or a configuration is for. Raises `ConfigError`."""
        if stated is None and len(self.models) == 1:
            return next(iter(self.models))
        if stated not in self.models:
            got = "none" if stated is None else repr(stated)
            raise ConfigError(
                f"{self.path}: {where}.model: expected one of {', '.join(self.models)}, got {got}"
            )
        return stated


def load_market(path: Path) -> Market:
    """Read MARKET.yaml and every profile it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, MarketFile, ConfigError)
    file.links.check(path)
    if not file.offers:
        raise ConfigError(f"{path}: offers: expected at least one offer, got none")
    if (file.budget_per_hour is None) == (file.target is None):
        got = "neither" if file.target is None else "both"
        raise ConfigError(f"{path}: budget_per_hour: expected either budget_per_hour or target, got {got}")
    if file.slo is not None and file.slo.ttft_ms is None and file.slo.tpot_ms is None:
        raise ConfigError(f"{path}: slo: expected ttft_ms or tpot_ms, got neither")
    _check_names(path, "offers", "gpu", [offer.gpu for offer in file.offers])
    for kind in ("models", "workloads", "configurations"):
        _check_names(path, kind, "name", [each.name for each in getattr(file, kind)])
    models = {table.name: read_model(table, path, f"models[{m}]") for m, table in enumerate(file.models)} or {
        "model": read_model(PlanModelTable(name="model"), path, "models")
    }
    market = Market(path=path, file=file, models=models, profiles=_profiles(file, path, models))
    gpus = market.offers
    for o, offer in enumerate(file.offers):
        for name, by_degree in offer.profiles.items():
            for degree, written in by_degree.items():
                profile, place = market.profiles[written], f"{path}: offers[{o}].profiles.{name}.{degree}"
                tp, dp = read_degrees(degree, place)
                if dp > 1:
                    check_one_machine(place, tp * dp, offer.gpus_per_machine)
                    check_degrees(place, profile, tp, dp)
                check_memory(place, models[name], profile, tp, offer.memory_bytes, dp)
    for index, table in enumerate(file.configurations):
        where = f"configurations[{index}]"
        market.model_of(table.model, where)
        for gpu in table.gpus:
            if gpu not in gpus:
                raise ConfigError(
                    f"{path}: {where}.gpus: expected GPUs out of {', '.join(gpus)}, got {gpu!r}"
                )
        if not table.gpus:
            raise ConfigError(f"{path}: {where}.gpus: expected at least one GPU, got none")
        if (table.profile is None) == (table.throughput is None):
            raise ConfigError(f"{path}: {where}: expected either profile or throughput")
    return market


def _check_names(path: Path, table: str, key: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: {table}[{index}].{key}: expected letters, digits and . _ / + - (100 at most), "
                f"got {name!r}"
            )
        if name in names[:index]:
            raise ConfigError(f"{path}: {table}[{index}].{key}: expected every name once, got {name!r} again")


def _profiles(file: MarketFile, path: Path, models: dict[str, Model]) -> dict[str, Profile]:
    named = [
        (f"configurations[{i}].profile", each.profile)
        for i, each in enumerate(file.configurations)
        if each.profile is not None
    ]
    for o, offer in enumerate(file.offers):
        for model, by_degree in offer.profiles.items():
            if model not in models:
                raise ConfigError(
                    f"{path}: offers[{o}].profiles: expected models out of {', '.join(models)}, got {model!r}"
                )
            for degree, written in by_degree.items():
                where = f"offers[{o}].profiles.{model}.{degree}"
                read_degrees(degree, f"{path}: {where}")
                named.append((where, written))
    loaded: dict[str, Profile] = {}
    for where, written in named:
        if written not in loaded:
            loaded[written] = load_named(path.parent, written, f"{path}: {where}")
    return loaded
