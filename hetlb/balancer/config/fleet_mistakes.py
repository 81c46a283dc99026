"""Mistakes in a fleet file that its types admit: a line each, beginning with the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetlb.addresses import network_of
from hetlb.balancer.config.fleet_tables import OWN_HEADERS, FleetFile, ModelTable, Resume
from hetlb.errors import ConfigError
from hetlb.extras import check_extra
from hetlb.inputs.mistakes import did_you_mean, listed, one_of, short
from hetlb.inputs.urls import check_base

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet


def mistakes_of(fleet: Fleet) -> Iterator[str]:
    """Yield the mistakes of a fleet with known instances, without a file name."""
    file = fleet.file
    yield from _own_mistakes(file)
    yield from _profile_mistakes(fleet)
    yield from _plan_mistakes(fleet)
    yield from _name_mistakes(file)
    if any(
        each.classes or each.canary is not None or any(one.publisher is not None for one in each.instances)
        for each in file.models
    ):
        from hetlb.balancer.config.model_mistakes import model_mistakes

        yield from model_mistakes(fleet)
    yield from _access_mistakes(file)
    yield from _kv_mistakes(file)
    yield from _resume_mistakes(file)
    yield from _tracing_mistakes(file)


def _own_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield the mistakes of models, headers and peers."""
    for h, header in enumerate(file.proxy.forward_headers):
        if header.lower() in OWN_HEADERS or header.lower().startswith("proxy-"):
            yield (
                f"proxy.forward_headers[{h}]: expected one that neither frames, addresses nor authorises a "
                f"message, got {short(header)}"
            )
    if not file.addresses:
        yield "listen: expected at least one address, got none"
    if not file.models and file.discovery is None:
        yield "models: expected at least one model, got none"
    if file.shared is not None and any(
        one.wake is not None for each in file.models for one in each.instances
    ):
        yield "shared: expected none with wake: one machine's processes decide"
    names = [model.name for model in file.models]
    for m, model in enumerate(file.models):
        key = f"models[{m}]"
        yield from _pattern_mistake(model.name, f"{key}.name")
        if model.name in names[:m]:
            yield f"{key}.name: expected a name used once, got {model.name!r} again"
        if not model.instances and file.discovery is None:
            yield f"{key}.instances: expected at least one instance, got none"


def _pattern_mistake(name: str, key: str) -> Iterator[str]:
    """Yield a mistake if a model's name is a pattern, as other balancers allow."""
    if "*" in name:
        yield f"{key}: expected the name of a model, got the pattern {short(name)}: name each"


def _profile_mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each malformed selector, and each missing file."""
    if not fleet.file.profiles:
        return
    from hetlb.balancer.config.fleet_parts import parse_selector

    for text, profile in fleet.file.profiles.items():
        try:
            parse_selector(text, "profiles")
        except ConfigError as error:
            yield str(error)
        if not (fleet.base / profile).exists():
            yield f"profiles.{text}: expected the path of a latency profile, got {profile!r}: no such file"


def _plan_mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each instance that the fleet lacks, and each weight that no term has."""
    policy, known = fleet.file.policy, fleet.listed
    if policy.weights:
        from hetlb.balancer.core.policies.score_terms import TERMS

        terms = [each.name for each in TERMS]
        yield from (f"policy.weights: {one_of(name, terms)}" for name in policy.weights if name not in terms)
    stated = {"worth": policy.worth}
    stated |= {f"types[{t}].instances": each.instances for t, each in enumerate(policy.types)}
    for key, instances in stated.items():
        for name in instances:
            if name not in known:
                yield f"policy.{key}: {one_of(name, known)}"


def _name_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each alias equal to another name, and each fallback to no other model."""
    names = [model.name for model in file.models]
    seen = set(names)
    for m, model in enumerate(file.models):
        key = f"models[{m}]"
        for a, alias in enumerate(model.aliases):
            yield from _pattern_mistake(alias, f"{key}.aliases[{a}]")
            if alias in seen:
                yield f"{key}.aliases: expected names used once, got {alias!r} again"
            seen.add(alias)
        others = sorted({*names} - {model.name})
        if model.fallback is not None and model.fallback not in others:
            among = f", one of {listed(others)}" if others else ""
            got = f"{short(model.fallback)}{did_you_mean(model.fallback, others)}"
            yield f"{key}.fallback: expected another model of this file{among}, got {got}"


def _access_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield the mistakes in the keys and proxies of clients."""
    if file.proxy.passthrough_authorization and file.proxy.api_keys_file is not None:
        yield (
            "proxy.passthrough_authorization: expected false, as proxy.api_keys_file is set, "
            "got true: the engines would see the clients' keys"
        )
    for text in file.proxy.trusted_proxies:
        try:
            network_of(text, "proxy.trusted_proxies")
        except ConfigError as error:
            yield str(error)


def _kv_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each role that keeps the instances of a model from serving requests."""
    for m, model in enumerate(file.models):
        yield from _role_mistakes(model, f"models[{m}]")


def _role_mistakes(model: ModelTable, key: str) -> Iterator[str]:
    roles = [instance.role for instance in model.instances]
    if model.kv_transfer is None:
        for i, role in enumerate(roles):
            if role != "both":
                yield f"{key}.instances[{i}].role: expected both without kv_transfer, got {role!r}"
    elif all(role == "prefill" for role in roles):
        yield f"{key}.instances: expected one with the role decode or both, got none"


def _resume_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each `resume: true`: its type, a boolean, admits it."""
    stated: dict[str, Resume] = {"proxy.resume": file.proxy.resume}
    for m, model in enumerate(file.models):
        key = f"models[{m}]"
        stated |= {f"{key}.resume": model.resume or False}
        stated |= {
            f"{key}.classes.{name}.resume": each.resume or False for name, each in model.classes.items()
        }
    for where, how in stated.items():
        if how is True:
            yield f"{where}: expected ids or false, got true"


def _tracing_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line if the collector's address is malformed."""
    if file.tracing is None:
        return
    try:
        check_base(file.tracing.otlp_endpoint, "tracing.otlp_endpoint", "http://collector:4318")
    except ConfigError as error:
        yield str(error)


def check_extras(fleet: Fleet) -> None:
    """Raise `ConfigError` naming a key if its packages are not installed. Serving needs them."""
    file, where = fleet.file, fleet.where
    if file.tracing is not None:
        check_extra(f"{where}tracing", "opentelemetry.exporter.otlp.proto.http", "otel")
    if file.discovery is not None and file.discovery.dns:
        check_extra(f"{where}discovery.dns", "dns.resolver", "discovery")
    if file.discovery is not None and file.discovery.kubernetes:
        check_extra(f"{where}discovery.kubernetes", "lightkube", "discovery")
