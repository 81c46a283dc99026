"""Fleet files, resolved: the `Fleet`, its instances and their profiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from hetlb.balancer.config.fleet_mistakes import mistakes_of
from hetlb.balancer.config.fleet_tables import (
    FleetFile,
    InstanceTable,
    ModelTable,
    PickTable,
    PolicyTable,
    Resume,
    gpu_of,
)
from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import PREDICTORS, LengthSample
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, InstanceSpec, Role
from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import Mistakes, one_of, short
from hetlb.inputs.urls import Origin, check_url, origin
from hetlb.inputs.yaml_file import load_yaml, with_lines

if TYPE_CHECKING:
    from hetlb.balancer.config.profile_file import Profile


class Listed(msgspec.Struct, frozen=True):
    """An instance of the file, its addresses checked and normalised. `key` names it in errors."""

    key: str
    table: InstanceTable


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved fleet file: instances with their profiles, in file order.

    `file` is in force, flags applied; `written` is the file before flags. Secrets and certificates are not
    read: only serving needs them. `listed` has an entry per instance.
    """

    path: Path | None
    file: FleetFile
    written: FleetFile
    instances: tuple[InstanceSpec, ...]
    profiles: dict[str, Profile] = {}
    listed: dict[str, Listed] = {}
    #: Output lengths of `policy.trace` where it was read: only a start needs them.
    lengths: LengthSample | None = None

    def with_tables(self, **tables: Any) -> Fleet:
        """Copy of the fleet with other tables in force, by their keys in the file."""
        return msgspec.structs.replace(self, file=msgspec.structs.replace(self.file, **tables))

    def resolve_found(self, table: InstanceTable, model: str, cache: dict[Path, Profile]) -> InstanceSpec:
        """Resolve a discovered instance, with the profile its labels select. Raises `InputError`."""
        if table.wake is not None:
            raise ConfigError("wake: expected none, only the fleet file says which servers sleep")
        return resolve_instance(table, model, "", self.base, cache, self.file.profiles)[0]

    @property
    def where(self) -> str:
        """Prefix of errors about this fleet."""
        return f"{self.path}: " if self.path else ""

    @property
    def base(self) -> Path:
        """Folder that paths in the file are relative to."""
        return self.path.parent if self.path else Path()

    @property
    def promised_models(self) -> tuple[str, ...]:
        """Return the names of models in the file and its sources, also of models without an instance."""
        names = [model.name for model in self.file.models]
        if (table := self.file.discovery) is not None:
            names += [each.model or "" for each in table.names]
            names += [each.model or "" for each in table.clusters]
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the further names of models for clients."""
        return tuple([alias for model in self.file.models for alias in model.aliases])

    @property
    def named_files(self) -> list[Path]:
        """Return the fleet file and every file that it names: profiles, keys, tokens, certificates.

        Sources of instances (`discovery`) and the listener of `hetlb pick` read their own files again.
        """
        if self.path is None:
            return []
        tables = msgspec.structs.replace(self.written, discovery=None, pick=PickTable())
        return [self.path, *sorted({self.base / name for name in _file_names(msgspec.to_builtins(tables))})]

    @property
    def policy_params(self) -> PolicyParams:
        """Policy parameters as the scheduler's type."""
        p = self.file.policy
        first = self.file.models[0].name if self.file.models else ""
        types = tuple(each.planned(first) for each in p.types)
        worth, weights = tuple(p.worth.items()), tuple(p.weights.items())
        return PolicyParams(p.theta, p.combine, worth, types, p.adapter_load_s, weights)

    @property
    def token_counters(self) -> dict[str, Callable[[str], int]]:
        """Return the tokenizers of models, as functions from a text to its tokens. Raises `ConfigError`."""
        if all(model.tokenizer is None for model in self.file.models):
            return {}
        from hetlb.balancer.config.fleet_parts import token_counters

        return token_counters(self)

    @property
    def service_classes(self) -> dict[str, dict[str, ServiceClass]]:
        """Service classes by model and name, the default first."""
        return {
            model.name: {name: table.objective(name) for name, table in model.classes.items()}
            for model in self.file.models
        }

    @property
    def resumes(self) -> dict[tuple[str, str], Resume]:
        """The way of resuming answers by model and class ("" without one)."""
        found: dict[tuple[str, str], Resume] = {}
        for model in self.file.models:
            stated: Resume = self.file.proxy.resume if model.resume is None else model.resume
            found[model.name, ""] = stated
            for name, table in model.classes.items():
                found[model.name, name] = stated if table.resume is None else table.resume
        return found

    @property
    def queue_limits(self) -> QueueLimits:
        """Queue limits as the scheduler's type."""
        return QueueLimits(**msgspec.structs.asdict(self.file.queue))

    @property
    def health_params(self) -> HealthParams:
        """Health parameters as the scheduler's type."""
        return HealthParams(**msgspec.structs.asdict(self.file.health))


#: Keys with the path of a file, beside keys that end with `_file`.
_FILE_KEYS = frozenset({"profile", "tokenizer", "cert", "key"})


def _file_names(tables: Any, key: str = "") -> Iterator[str]:
    """Yield the paths in tables of the fleet file, as written."""
    if isinstance(tables, dict):
        for name, value in tables.items():
            yield from _file_names(value, "profile" if key == "profiles" else name)
    elif isinstance(tables, list | tuple):
        for each in tables:
            yield from _file_names(each, key)
    elif isinstance(tables, str) and (key in _FILE_KEYS or key.endswith("_file")):
        yield tables


def _check_secret(file: str | None, env: str | None, key: str) -> None:
    """Raise `ConfigError` where both `{key}_file` and `{key}_env` are stated."""
    if file is not None and env is not None:
        name = key.rpartition(".")[2]
        raise ConfigError(f"{key}_file: expected either {name}_file or {name}_env, got both")


def _check_access(instance: InstanceTable, url: str, key: str) -> None:
    """Check how the key of an instance at `url` and its authorities are stated. Raises `ConfigError`."""
    if instance.ca_file is not None and not url.startswith("https://"):
        raise ConfigError(
            f"{key}.ca_file: expected none unless the url begins with https://, got {short(url)}"
        )
    _check_secret(instance.api_key_file, instance.api_key_env, f"{key}.api_key")


def check_policy(table: PolicyTable, where: str) -> None:
    """Raise `ConfigError` unless policy, combine form and predictor are names that exist."""
    if table.name not in POLICIES:
        raise ConfigError(f"{where}policy.name: {one_of(table.name, tuple(POLICIES))}")
    try:
        POLICIES[table.name]
    except ConfigError as error:
        raise ConfigError(f"{where}policy.name: {error}") from error
    if table.combine != PolicyTable().combine:
        from hetlb.balancer.core.policies.baselines import COMBINE_FORMS

        forms = tuple(COMBINE_FORMS)
        if table.combine not in forms:
            raise ConfigError(f"{where}policy.combine: {one_of(table.combine, forms)}")
    if table.predictor is not None and table.predictor not in PREDICTORS:
        raise ConfigError(f"{where}policy.predictor: {one_of(table.predictor, PREDICTORS)}")


def resolve_instance(
    instance: InstanceTable,
    model: str,
    key: str,
    base: Path,
    cache: dict[Path, Profile],
    profiles: Mapping[str, str] = MappingProxyType({}),
) -> tuple[InstanceSpec, Profile | None]:
    """Check one instance and read its profile, cached by path. Raises `ConfigError` or `ProfileError`.

    `key` is the prefix of its keys in errors, such as `models[0].instances[1].`. `profiles` maps selectors to
    profiles, for instances that name none.
    """
    url = "" if instance.url is None else check_url(instance.url, f"{key}url")
    name = instance.name or urlsplit(url).netloc
    if not name:
        raise ConfigError(f"{key}name: expected a name, but neither name nor url is given")
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,128}", name):
        raise ConfigError(f"{key}name: expected letters, digits and . _ : - (128 at most), got {short(name)}")
    profile: Profile | None = None
    labels = instance.labels if instance.gpu is None else {**instance.labels, "gpu": instance.gpu}
    named = instance.profile
    if named is None and profiles:
        from hetlb.balancer.config.fleet_parts import select_profile

        named = select_profile(labels, profiles)
    if named is not None:
        path = base / named
        if path not in cache:
            from hetlb.balancer.config.profile_file import load_named

            cache[path] = load_named(base, named, f"{key}profile")
        profile = cache[path]
    latency, gpu = profile.latency if profile else None, gpu_of(labels)
    if gpu and profile is None:
        from hetlb.balancer.config.gpus import latency_of

        latency = latency_of(gpu, instance.gpus)
    capacity = profile.capacity if profile else Capacity()
    assumed = profile is not None and profile.host_assumed
    spec = InstanceSpec(
        name=name,
        model=model,
        url=url,
        weight=instance.weight,
        latency=latency,
        capacity=capacity.updated(Capacity(max_num_seqs=instance.max_num_seqs)),
        slots_stated=instance.max_num_seqs is not None,
        gpu=gpu,
        gpu_alone=latency is not None and profile is None,
        host_assumed_in=str(base / named) if assumed and named is not None else "",
    )
    return spec, profile


def resolve_fleet(file: FleetFile, path: Path | None) -> Fleet:
    """Check a whole fleet and read its profiles. Raises one `ConfigError` with all mistakes."""
    where = f"{path}: " if path else ""
    mistakes = Mistakes()
    fleet = Fleet(path=path, file=file, written=file, instances=())
    resolved = _Resolved(fleet, mistakes)
    with mistakes.here():
        check_policy(file.policy, where)
    with mistakes.here():
        _check_secret(file.admin.token_file, file.admin.token_env, f"{where}admin.token")
    for m, model in enumerate(file.models):
        resolved.add_model(model, f"{where}models[{m}]")
    mistakes.add(ConfigError(where + line) for line in mistakes_of(fleet))
    if mistakes.found:
        raise with_lines(path, mistakes.found) if path else mistakes.found[0]
    return msgspec.structs.replace(fleet, instances=tuple(resolved.specs))


class _Resolved:
    """Resolver that adds models one by one to the tables of `fleet`."""

    def __init__(self, fleet: Fleet, mistakes: Mistakes) -> None:
        self._fleet = fleet
        self._mistakes = mistakes
        #: Names of the instances at each address.
        self._origins: dict[Origin, str] = {}
        self._cache: dict[Path, Profile] = {}
        self.specs: list[InstanceSpec] = []

    def add_model(self, model: ModelTable, key: str) -> None:
        """Resolve one model and its instances; `key` names it in errors."""
        with self._mistakes.here():
            _check_secret(model.api_key_file, model.api_key_env, f"{key}.api_key")
        for i, instance in enumerate(model.instances):
            with self._mistakes.here():
                self._add_instance(instance, model, f"{key}.instances[{i}]")

    def _add_instance(self, instance: InstanceTable, model: ModelTable, key: str) -> None:
        fleet = self._fleet
        spec, profile = resolve_instance(
            instance, model.name, f"{key}.", fleet.base, self._cache, fleet.file.profiles
        )
        link = None
        if model.kv_transfer is not None:
            known = None if profile is None else profile.kv_bytes_per_token
            from hetlb.balancer.config.fleet_parts import kv_link

            link = kv_link(model.kv_transfer, instance, key, known)
        spec = replace(spec, role=Role(instance.role), kv_transfer=link)
        _check_access(instance, spec.url, key)
        self._add(spec, instance, key)
        if profile is not None:
            fleet.profiles[spec.name] = profile

    def _add(self, spec: InstanceSpec, table: InstanceTable, key: str) -> None:
        known = self._fleet.listed
        if spec.name in known:
            raise ConfigError(f"{key}.name: expected a name used once in the fleet, got {spec.name!r} again")
        if spec.url:
            taken = self._origins.setdefault(origin(spec.url), spec.name)
            if taken != spec.name:
                raise ConfigError(
                    f"{key}.url: expected an address used once in the fleet, got the address of {taken} again"
                )
        self.specs.append(spec)
        known[spec.name] = Listed(key, table)


def load_fleet(path: Path) -> Fleet:
    """Read a fleet file and every profile it names. Raises `ConfigError` or `ProfileError`."""
    return resolve_fleet(load_yaml(path, FleetFile, ConfigError), path)


def fleet_from_urls(urls: list[str], flag: str = "--instance") -> Fleet:
    """Return the fleet of URLs without a file; models and speeds are learnt from the engines."""
    specs: dict[str, InstanceSpec] = {}
    for url in urls:
        clean = check_url(url, flag)
        name = urlsplit(clean).netloc
        if name in specs:
            raise ConfigError(f"{flag}: expected every URL once, got {url!r} again")
        specs[name] = InstanceSpec(name=name, model="", url=clean)
    defaults = FleetFile(version=1, models=())
    known = {name: Listed(f"--instance {spec.url}", InstanceTable()) for name, spec in specs.items()}
    return Fleet(path=None, file=defaults, written=defaults, instances=tuple(specs.values()), listed=known)
