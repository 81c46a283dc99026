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

from hetlb.addresses import network_of
from hetlb.balancer.config.fleet_tables import (
    OWN_HEADERS,
    FleetFile,
    InstanceTable,
    ModelTable,
    PolicyTable,
    gpu_of,
)
from hetlb.balancer.core.health import HealthParams
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.base import PlannedType, PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import PREDICTORS, LengthSample
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, InstanceSpec, Role
from hetlb.errors import ConfigError
from hetlb.extras import hook
from hetlb.inputs.mistakes import Mistakes, did_you_mean, listed, one_of, short
from hetlb.inputs.option_keys import options_of, stated_keys
from hetlb.inputs.urls import Origin, check_url, origin
from hetlb.inputs.yaml_file import load_yaml, with_lines

if TYPE_CHECKING:
    from hetlb.balancer.interfaces import EngineProfile


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
    profiles: dict[str, EngineProfile] = {}
    listed: dict[str, Listed] = {}
    #: Output lengths of `policy.trace` where it was read: only a start needs them.
    lengths: LengthSample | None = None

    def with_tables(self, **tables: Any) -> Fleet:
        """Copy of the fleet with other tables in force, by their keys in the file."""
        return msgspec.structs.replace(self, file=msgspec.structs.replace(self.file, **tables))

    def resolve_found(
        self, table: InstanceTable, model: str, cache: dict[Path, EngineProfile]
    ) -> InstanceSpec:
        """Resolve a discovered instance, with the profile its labels select. Raises `InputError`."""
        return resolve_instance(table, model, "", self.base, cache, self.file.profiles)[0]

    def uses(self, name: str) -> bool:
        """Return whether the file states a key that an option reads."""
        return any(owner == name for _, owner in stated_keys(self.file))

    @property
    def where(self) -> str:
        """Prefix of errors about this fleet."""
        return f"{self.path}: " if self.path else ""

    @property
    def base(self) -> Path:
        """Folder to which paths in the file are relative."""
        return self.path.parent if self.path else Path()

    @property
    def named_files(self) -> list[Path]:
        """Return the fleet file and every file that it names: profiles, keys, tokens, certificates.

        Sources of instances (`discovery`) and the listener of `hetlb pick` read their own files again.
        """
        if self.path is None:
            return []
        tables = msgspec.structs.replace(self.written, discovery=None, pick=None)
        return [self.path, *sorted({self.base / name for name in _file_names(msgspec.to_builtins(tables))})]

    @property
    def policy_params(self) -> PolicyParams:
        """Policy parameters as the scheduler's type."""
        p = self.file.policy
        first = self.file.models[0].name if self.file.models else ""
        types: tuple[PlannedType, ...] = ()
        if p.types:
            from hetlb.balancer.config.plan_keys import planned_types

            types = planned_types(p.types, first)
        worth, weights = tuple(p.worth.items()), tuple(p.weights.items())
        return PolicyParams(p.theta, p.combine, worth, types, p.adapter_load_s, weights)

    @property
    def token_counters(self) -> dict[str, Callable[[str], int]]:
        """Return what counts the tokens of a text, by model. Raises `ConfigError`."""
        if all(model.tokenizer is None for model in self.file.models):
            return {}
        from hetlb.balancer.config.token_counters import token_counters

        return token_counters(self)

    @property
    def service_classes(self) -> dict[str, dict[str, ServiceClass]]:
        """Service classes by model and name, the default first."""
        if not any(model.classes for model in self.file.models):
            return {model.name: {} for model in self.file.models}
        from hetlb.balancer.config.class_tables import service_classes

        return {model.name: service_classes(model.classes) for model in self.file.models}

    @property
    def queue_limits(self) -> QueueLimits:
        """Queue limits as the scheduler's type."""
        return QueueLimits(**msgspec.structs.asdict(self.file.queue))

    @property
    def health_params(self) -> HealthParams:
        """Health parameters as the scheduler's type."""
        return HealthParams(**msgspec.structs.asdict(self.file.health))


#: Keys whose value is the path of a file, beside keys that end with `_file`.
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
            f"{key}.ca_file: expected one only where the url begins with https://, got {short(url)}"
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
    cache: dict[Path, EngineProfile],
    profiles: Mapping[str, str] = MappingProxyType({}),
) -> tuple[InstanceSpec, EngineProfile | None]:
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
    profile: EngineProfile | None = None
    labels = instance.labels if instance.gpu is None else {**instance.labels, "gpu": instance.gpu}
    named = instance.profile
    if named is None and profiles:
        from hetlb.balancer.config.profile_selectors import select_profile

        named = select_profile(labels, profiles)
    if named is not None:
        path = base / named
        if path not in cache:
            from hetlb.balancer.config.profile_file import load_named

            cache[path] = load_named(base, named, f"{key}profile")
        profile = cache[path]
    capacity = profile.capacity if profile else Capacity()
    assumed = profile is not None and profile.host_assumed
    spec = InstanceSpec(
        name=name,
        model=model,
        url=url,
        weight=instance.weight,
        latency=profile.latency if profile else None,
        capacity=capacity.updated(Capacity(max_num_seqs=instance.max_num_seqs)),
        slots_stated=instance.max_num_seqs is not None,
        gpu=gpu_of(labels),
        host_assumed_in=str(base / named) if assumed and named is not None else "",
    )
    return spec, profile


def resolve_fleet(file: FleetFile, path: Path | None) -> Fleet:
    """Check a whole fleet and read its profiles. Raises one `ConfigError` with all mistakes."""
    where = f"{path}: " if path else ""
    mistakes = Mistakes()
    fleet = Fleet(path=path, file=file, written=file, instances=())
    resolved = _Resolved(fleet, mistakes)
    try:
        options = options_of(file)
    except ConfigError as error:
        missing = ConfigError(f"{where}{error}")
        raise with_lines(path, [missing]) if path else missing from None
    with mistakes.here():
        check_policy(file.policy, where)
    with mistakes.here():
        _check_secret(file.admin.token_file, file.admin.token_env, f"{where}admin.token")
    mistakes.add(ConfigError(where + each) for each in _mistakes_across(file))
    for m, model in enumerate(file.models):
        resolved.add_model(model, f"{where}models[{m}]")
    mistakes.add(ConfigError(where + line) for line in _key_mistakes(fleet))
    for each in options.values():
        if (of_option := getattr(each, "mistakes", None)) is not None:
            mistakes.add(ConfigError(where + line) for line in of_option(fleet))
    if mistakes.found:
        raise with_lines(path, mistakes.found) if path else mistakes.found[0]
    return msgspec.structs.replace(fleet, instances=tuple(resolved.specs))


def _key_mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield the mistakes in keys that some fleets have, of a fleet whose instances are known."""
    file = fleet.file
    if any(model.classes for model in file.models):
        from hetlb.balancer.config import class_tables

        yield from class_tables.mistakes(fleet)
    if file.profiles:
        from hetlb.balancer.config import profile_selectors

        yield from profile_selectors.mistakes(fleet)
    if file.policy.worth or file.policy.types:
        from hetlb.balancer.config import plan_keys

        yield from plan_keys.mistakes(fleet)
    yield from _name_mistakes(file)
    if file.proxy.passthrough_authorization and file.proxy.api_keys_file is not None:
        yield (
            "proxy.passthrough_authorization: expected false where proxy.api_keys_file is set, "
            "got true: the engines would see the clients' keys"
        )
    for text in file.proxy.trusted_proxies:
        try:
            network_of(text, "proxy.trusted_proxies")
        except ConfigError as error:
            yield str(error)


def _name_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each alias that is another name too, and each fallback that is no other model."""
    names = [model.name for model in file.models]
    seen = set(names)
    for m, model in enumerate(file.models):
        key = f"models[{m}]"
        for a, alias in enumerate(model.aliases):
            yield from pattern_mistake(alias, f"{key}.aliases[{a}]")
            if alias in seen:
                yield f"{key}.aliases: expected names used once, got {alias!r} again"
            seen.add(alias)
        others = sorted({*names} - {model.name})
        if model.fallback is not None and model.fallback not in others:
            among = f", one of {listed(others)}" if others else ""
            got = f"{short(model.fallback)}{did_you_mean(model.fallback, others)}"
            yield f"{key}.fallback: expected another model of this file{among}, got {got}"


def _mistakes_across(file: FleetFile) -> Iterator[str]:
    """Yield the mistakes in the balancer's own keys that need no instance resolved, without a file name."""
    for h, header in enumerate(file.proxy.forward_headers):
        if header.lower() in OWN_HEADERS or header.lower().startswith("proxy-"):
            yield (
                f"proxy.forward_headers[{h}]: expected one that neither frames, addresses nor authorises a "
                f"message, got {short(header)}"
            )
    if not file.models and file.discovery is None:
        yield "models: expected at least one model, got none"
    names = [model.name for model in file.models]
    for m, model in enumerate(file.models):
        key = f"models[{m}]"
        yield from pattern_mistake(model.name, f"{key}.name")
        if model.name in names[:m]:
            yield f"{key}.name: expected a name used once, got {model.name!r} again"
        if not model.instances and file.discovery is None:
            yield f"{key}.instances: expected at least one instance, got none"


def pattern_mistake(name: str, key: str) -> Iterator[str]:
    """Yield the mistake of a model's name that is a pattern, as other balancers know them."""
    if "*" in name:
        yield f"{key}: expected the name of a model, got the pattern {short(name)}: name each"


class _Resolved:
    """Resolver that adds models one by one to the tables of `fleet`."""

    def __init__(self, fleet: Fleet, mistakes: Mistakes) -> None:
        self._fleet = fleet
        self._mistakes = mistakes
        #: Names of the instances at each address.
        self._origins: dict[Origin, str] = {}
        self._cache: dict[Path, EngineProfile] = {}
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
            link = hook("split.kv_tables", model.kv_transfer, instance, key, known)
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


def fleet_from_urls(urls: list[str]) -> Fleet:
    """Return the fleet of URLs without a file; models and speeds are learnt from the engines."""
    specs: dict[str, InstanceSpec] = {}
    for url in urls:
        clean = check_url(url, "--instance")
        name = urlsplit(clean).netloc
        if name in specs:
            raise ConfigError(f"--instance: expected every URL once, got {url!r} again")
        specs[name] = InstanceSpec(name=name, model="", url=clean)
    defaults = FleetFile(version=1, models=())
    known = {name: Listed(f"--instance {spec.url}", InstanceTable()) for name, spec in specs.items()}
    return Fleet(path=None, file=defaults, written=defaults, instances=tuple(specs.values()), listed=known)
