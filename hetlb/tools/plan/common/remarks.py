"""Remarks on a plan's model: stated sizes far from its `config.json`, profiles of another model."""

from __future__ import annotations

from collections.abc import Iterable

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.profile_file import Profile, profiles_of
from hetlb.errors import ConfigError
from hetlb.tools.plan.common.plan_tables import Machine, Model

#: Largest relative difference of a token's cache for a profile of the plan's own model.
_MOST_OFF_SHARE = 0.02


def _same_name(one: str, other: str) -> bool:
    """Return True if two names may be of one model: publishers' names are often left out."""
    short, long = sorted((each.rpartition("/")[2].lower() for each in (one, other)), key=len)
    return long == short or long.endswith(f"-{short}")


def other_model(model: Model, profile: Profile) -> bool:
    """Return True if a profile states another model than the plan, or its cache is of other bytes."""
    own = profile.model
    if own is None:
        return False
    if not _same_name(own.name, model.name):
        return True
    bytes_each, facts = own.kv_bytes_per_token, model.known
    return bytes_each is not None and all(
        known > 0 and abs(bytes_each - known) > _MOST_OFF_SHARE * known
        for known in (facts.kv_bytes_per_token, facts.allocated.per_token)
    )


def remarks(model: Model, found: Iterable[Profile]) -> list[str]:
    """Return a line for each stated size with a large error, and for each profile of another model."""
    others: dict[tuple[str, int | None], list[str]] = {}
    profiles = {each.name: each for each in found}
    for profile in profiles.values():
        if profile.model is not None and other_model(model, profile):
            key = profile.model.name, profile.model.kv_bytes_per_token
            others.setdefault(key, []).append(profile.name)
    lines, cache = list(model.notes), model.known.allocated
    if model.known.kv_cache_dtype and cache != model.known.needed:
        rows = f"vLLM's --kv-cache-dtype {model.known.kv_cache_dtype}, its default"
        lines.append(f"KV cache of {model.name}: {cache.per_token:,.0f} bytes a token, the rows of {rows}")
    for (name, size), own in others.items():
        held = f", {size:,} bytes of cache a token" if size else ""
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        lines.append(f"{own[0]}{more}: a profile of {name}{held}, not of {model.name}")
    lines += dict.fromkeys(each.other_discipline for each in profiles.values() if each.other_discipline)
    return lines


def remarks_on_machines(model: Model, machines: Iterable[Machine]) -> list[str]:
    """Return the remarks on the profiles of machines."""
    return remarks(model, (profile for machine in machines for profile in machine.profiles.values()))


def remarks_on_fleet(fleet: Fleet) -> list[str]:
    """Return a line for each profile of another model than is served under a name of a hub."""
    found, profiles = [], profiles_of(fleet)
    for instance in fleet.instances:
        profile = profiles.get(instance.name)
        model = None if profile is None else profile.model
        if model is not None and "/" in instance.model and not _same_name(model.name, instance.model):
            found.append(f"{instance.name}: a profile of {model.name}, not of {instance.model}")
    return found + [line for each in profiles.values() if (line := each.other_discipline)]


def check_memory(
    where: str, model: Model, profile: Profile, gpus: int, memory_bytes: float | None, ranks: int = 1
) -> None:
    """Raise `ConfigError` if weights and the KV cache of a profile are more than its GPUs have.

    Of `ranks` data-parallel engines each has `gpus` GPUs and a part of the experts.
    """
    tokens = profile.engine.kv_cache_tokens
    if tokens is None or memory_bytes is None or not model.weight_bytes or other_model(model, profile):
        return
    known = model.known
    experts = model.weight_bytes * known.expert_bytes / known.weight_bytes if known.weight_bytes else 0.0
    weights = model.weight_bytes - experts * (1.0 - 1.0 / ranks)
    need, room = weights + tokens * model.kv_bytes_at(gpus), gpus * memory_bytes
    if need > room > weights:  # a model that does not fit is no mistake of its profile
        raise ConfigError(
            f"{where}: expected a profile whose weights and KV cache {gpus} GPUs of {memory_bytes:g} bytes "
            f"hold, got {profile.name} with {tokens} tokens: {need:.4g} bytes"
        )
