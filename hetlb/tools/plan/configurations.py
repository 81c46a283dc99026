"""Ways to run one instance: stated ones, or all that offers, memory and profiles allow.

Enumerated (Jiang et al., ICML 2025, section 4.3 and appendix D): tensor parallelism inside a machine, powers
of two; pipelines of such stages, of one kind of GPU or of two, inside a machine if they fit and else across
machines; layers in proportion to a stage's memory or, if stages differ, its speed. An instance is removed if
vLLM refuses it, or if it cannot hold its weights and the longest request. Each has the latency profile of the
whole instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import msgspec

from hetlb.balancer.config.engine_defaults import DEFAULT_MAX_NUM_BATCHED_TOKENS
from hetlb.balancer.config.profile_file import Profile
from hetlb.errors import ConfigError
from hetlb.tools.models.degrees import refusal
from hetlb.tools.plan.common.capacity import divide_layers, exact, kv_cache_tokens
from hetlb.tools.plan.common.composition import (
    MOST_GPUS,
    MOST_STAGES,
    LinkSeconds,
    StageProfile,
    activation_link,
    compose_profile,
    engine_stages,
    estimated_profile,
)
from hetlb.tools.plan.common.data_parallel import (
    Degrees,
    copies_cache,
    data_parallel_degrees,
    rank_tokens,
)
from hetlb.tools.plan.common.plan_tables import Model, check_one_machine
from hetlb.tools.plan.market import Market, OfferTable
from hetlb.tools.plan.rent_program import Configuration, ConfigurationStage
from hetlb.tools.sim.staged_engine import EngineStage

#: Bytes/s inside a rented machine if the file does not say.
_USUAL_INSIDE_BYTES_PER_S = 60e9


def candidates(market: Market, longest_tokens: dict[str, int]) -> list[Configuration]:
    """Return stated configurations, or all that hold `longest_tokens`. Raises `ConfigError`."""
    if market.file.configurations:
        return _stated(market)
    found = [
        each
        for model in market.models.values()
        for each in _enumerated(market, model, longest_tokens.get(model.name, 1))
    ]
    if not any(each.profile for each in found):
        needs = ", ".join(
            f"{name} ({_smallest(market, name)}, a request of {longest_tokens.get(name, 1)} tokens)"
            for name in market.models
        )
        raise ConfigError(
            f"{market.path}: offers: expected GPUs with a profile or roofline that hold a model, got none "
            f"for {needs}"
        )
    return found


def _smallest(market: Market, name: str) -> str:
    weights = market.models[name].weight_bytes
    return f"{weights / 1e9:.4g} GB of weights" if weights else "parameters not stated"


def _stated(market: Market) -> list[Configuration]:
    found = []
    for index, table in enumerate(market.file.configurations):
        profile = market.profiles[table.profile] if table.profile is not None else None
        gpus = dict(table.gpus)
        total = sum(gpus.values())
        degree = table.tensor_parallel_size
        if degree is None:
            stated = profile.engine.tensor_parallel_size if profile is not None else None
            degree = stated or total // table.pipeline_parallel_size
        ranks = 1 if profile is None else profile.engine.data_parallel_size or 1
        stages = total // (degree * ranks) if degree else 0
        if ranks > 1:
            at = f"{market.path}: configurations[{index}]"
            parts = max(stages, table.pipeline_parallel_size, len(gpus))
            if parts > 1:
                raise ConfigError(
                    f"{at}.profile: expected one stage of {ranks} data-parallel ranks, got {parts}: "
                    "pipelines of ranks are not planned"
                )
            check_one_machine(f"{at}.gpus", total, max(market.offers[gpu].gpus_per_machine for gpu in gpus))
        if stages * degree * ranks != total:
            raise ConfigError(
                f"{market.path}: configurations[{index}].tensor_parallel_size: expected a divisor of its "
                f"{total} GPUs, got {degree}"
            )
        kinds = [gpu for gpu, count in gpus.items() for _ in range(max(1, count // (degree * ranks)))]
        held = tuple(ConfigurationStage(gpu, degree, Fraction(1, len(kinds)), ranks) for gpu in kinds)
        name = market.model_of(table.model, f"configurations[{index}]")
        if profile is not None:
            profile = _with_capacity(market, market.models[name], held, profile)
        found.append(
            Configuration(
                table.name,
                name,
                gpus,
                table.throughput or {},
                stages=held,
                origin="stated" if profile is None else _origin_of(profile),
                profile=profile,
            )
        )
    return found


def _with_capacity(
    market: Market, model: Model, stages: tuple[ConfigurationStage, ...], profile: Profile
) -> Profile:
    """Return the profile with the KV capacity allowed by stated memory, if it states none itself."""
    known = model.weight_bytes and model.kv_bytes_per_token
    memory = all(market.offers[stage.gpu].memory_bytes for stage in stages)
    if profile.engine.kv_cache_tokens is not None or not known or not memory:
        return profile
    tokens = max(1, capacity_of(market, model, stages))
    return msgspec.structs.replace(
        profile, engine=msgspec.structs.replace(profile.engine, kv_cache_tokens=tokens)
    )


def _origin_of(profile: Profile) -> str:
    """Return the origin of the figures of a profile, in a word."""
    if profile.source is None:
        return "profile"
    return "measured" if profile.source.measured else profile.source.kind


# --- enumeration ----------------------------------------------------------------------------------------


def _enumerated(market: Market, model: Model, longest_tokens: int) -> Iterator[Configuration]:
    for key in ("parameters", "kv_bytes_per_token"):
        if not getattr(model, key):
            raise ConfigError(
                f"{market.path}: models.{model.name}.{key}: expected a value to enumerate configurations, "
                "got none"
            )
    for offer in market.file.offers:
        if not offer.memory_bytes:
            where = f"{market.path}: offers.{offer.gpu}.memory_bytes"
            raise ConfigError(f"{where}: expected a value to enumerate configurations")
    profiles = {
        (offer.gpu, degree): profile_on(market, model, offer, degree)
        for offer in market.file.offers
        for degree in _degrees(offer.gpus_per_machine)
    }
    for kinds in _stage_kinds(market, model):
        if model.shape is not None:
            # Profiles of a market state their experts; estimated ones keep them whole if they must.
            whole = any(_experts_whole(profiles[kind]) for kind in kinds)
            if refusal(model.shape, kinds[0][1], len(kinds), whole):
                continue
        for by_speed in (False, True) if len({gpu for gpu, _ in kinds}) > 1 else (False,):
            candidate = _candidate(market, model, kinds, longest_tokens, profiles, by_speed)
            if candidate is not None:
                yield candidate
    for offer in market.file.offers:
        known = {degree: found for (gpu, degree), found in profiles.items() if gpu == offer.gpu and found}
        yield from _ranked(market, model, offer, longest_tokens, known)


def _ranked(
    market: Market, model: Model, offer: OfferTable, longest_tokens: int, known: Mapping[int, Profile]
) -> Iterator[Configuration]:
    """Yield data-parallel servers with whole experts on each GPU of one machine.

    Without a profile a layout is estimated if tensor parallelism over its GPUs keeps copies of the cache.
    """
    for degrees in data_parallel_degrees(model, min(offer.gpus_per_machine, MOST_GPUS)):
        tokens = rank_tokens(model, offer.usable(degrees.tp), degrees)
        if tokens < model.needed(longest_tokens) or degrees.gpus > market.available[offer.gpu]:
            continue
        written = offer.profiles.get(model.name, {}).get(degrees.name)
        profile = None if written is None else market.profiles[written]
        if profile is not None:
            tokens = profile.engine.kv_cache_tokens or tokens
        elif copies_cache(model, degrees.gpus):
            profile = _estimated(market, model, offer, *degrees, known)
        if profile is None:
            continue
        stage = ConfigurationStage(offer.gpu, degrees.tp, Fraction(1), degrees.dp)
        name = _name(market, model, f"{offer.gpu.lower()}-{degrees.name}")
        held = StageProfile(profile, 1.0, offer.gpu, degrees.tp)
        yield Configuration(
            name,
            model.name,
            {offer.gpu: degrees.gpus},
            {},
            stages=(stage,),
            origin=_origin_of(profile),
            profile=compose_profile(name, model, [held], tokens),
        )


def _name(market: Market, model: Model, name: str) -> str:
    """Return the name of a configuration, with the model's if there are several."""
    return name if len(market.models) == 1 else f"{model.name.rpartition('/')[2].lower()}-{name}"


def _experts_whole(profile: Profile | None) -> bool:
    return profile is not None and bool(profile.engine.enable_expert_parallel)


def _stage_kinds(market: Market, model: Model) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the GPU and tensor-parallel degree of every stage, for each kind of instance."""
    offers, most = market.file.offers, market.available
    stages = range(1, min(MOST_STAGES, model.layers or 1) + 1)
    for offer in offers:
        for degree in _degrees(offer.gpus_per_machine):
            for count in stages:
                if model.layers % count == 0 and count * degree <= min(MOST_GPUS, most[offer.gpu]):
                    yield ((offer.gpu, degree),) * count
    for first, second in combinations(offers, 2):
        for degree in _degrees(min(first.gpus_per_machine, second.gpus_per_machine)):
            for count in (1, 2):
                fits = count * degree <= min(MOST_GPUS // 2, most[first.gpu], most[second.gpu])
                if fits and 2 * count in stages:
                    yield ((first.gpu, degree),) * count + ((second.gpu, degree),) * count


def _degrees(gpus_per_machine: int) -> list[int]:
    return [1 << power for power in range(gpus_per_machine.bit_length())]


def _candidate(
    market: Market,
    model: Model,
    kinds: tuple[tuple[str, int], ...],
    longest_tokens: int,
    by_degree: Mapping[tuple[str, int], Profile | None],
    by_speed: bool,
) -> Configuration | None:
    offers = market.offers
    known = [profile for kind in kinds if (profile := by_degree[kind]) is not None]
    if len(known) < len(kinds):
        return None
    memory = [Fraction(degree * (offers[gpu].memory_bytes or 0)) for gpu, degree in kinds]
    weights = [speed_of(profile) for profile in known] if by_speed else memory
    stages = tuple(
        ConfigurationStage(gpu, degree, share)
        for (gpu, degree), share in zip(kinds, divide_layers(weights, model.layers or None), strict=True)
    )
    tokens = capacity_of(market, model, stages)
    if tokens < model.needed(longest_tokens):
        return None
    count = sum(stage.tensor_parallel_size for stage in stages)
    one_kind = len({stage.gpu for stage in stages}) == 1
    across = len(stages) > 1 and not (one_kind and count <= offers[stages[0].gpu].gpus_per_machine)
    gpus: dict[str, int] = {}
    for stage in stages:
        gpus[stage.gpu] = gpus.get(stage.gpu, 0) + stage.tensor_parallel_size
    name = "-".join([*(g.lower() for g in gpus), f"tp{stages[0].tensor_parallel_size}"])
    name += f"-pp{len(stages)}" if len(stages) > 1 else ""
    name += "-by-speed" if by_speed else ""
    name = _name(market, model, name)
    if len(stages) == 1:
        tokens = known[0].engine.kv_cache_tokens or tokens
        if tokens < model.needed(longest_tokens):
            return None
    profile, own_stages = compose(market, model, name, stages, known, tokens, across=across)
    return Configuration(
        name,
        model.name,
        gpus,
        {},
        stages=stages,
        origin=("composed: " if len(stages) > 1 else "")
        + " and ".join(dict.fromkeys(_origin_of(each) for each in known)),
        profile=profile,
        engine_stages=own_stages,
    )


def speed_of(profile: Profile) -> Fraction:
    """Return the speed of a profile's GPUs: full iterations per second, one of prompts and one of decodes."""
    latency, tokens = profile.latency, DEFAULT_MAX_NUM_BATCHED_TOKENS
    seconds = latency.prefill_s(tokens // 2, 2) + latency.step_s(64, 64 * 1024)
    return Fraction(1.0 / seconds)


def capacity_of(market: Market, model: Model, stages: Sequence[ConfigurationStage]) -> int:
    """Return the tokens that the KV cache of an instance of these stages, or of one of its ranks, holds."""
    first = stages[0]
    if first.data_parallel_size > 1:
        usable = market.offers[first.gpu].usable(first.tensor_parallel_size)
        return rank_tokens(model, usable, Degrees(first.tensor_parallel_size, first.data_parallel_size))
    room = [(market.offers[stage.gpu].usable(stage.tensor_parallel_size), stage.layers) for stage in stages]
    each = model.kv_bytes_at(first.tensor_parallel_size)
    return kv_cache_tokens(room, exact(model.weight_bytes), exact(each))


def profile_on(market: Market, model: Model, offer: OfferTable, degree: int) -> Profile | None:
    """Return the latency profile of the whole model on `degree` GPUs, None if unknown."""
    written = offer.profiles.get(model.name, {}).get(str(degree))
    if written is not None:
        return market.profiles[written]
    if offer.roofline is None:
        return None
    return _estimated(market, model, offer, degree)


def _estimated(
    market: Market, model: Model, offer: OfferTable, tp: int, dp: int = 1, known: Mapping[int, Profile] = {}
) -> Profile | None:
    peaks, link = offer.roofline, _inside(market, offer.gpu)
    return estimated_profile(
        model, offer.gpu, offer.memory_bytes, peaks, tp, dp, link_bytes_s=link, known=known
    )


def _inside(market: Market, gpu: str) -> float:
    return market.file.links.rate_inside(gpu, _USUAL_INSIDE_BYTES_PER_S)


def compose(
    market: Market,
    model: Model,
    name: str,
    stages: Sequence[ConfigurationStage],
    profiles: Sequence[Profile],
    tokens: int,
    *,
    across: bool,
) -> tuple[Profile, tuple[EngineStage, ...]]:
    """Compose a profile and its stages from `profiles`: each runs the whole model on the GPU of its stage."""
    links = market.file.links
    parts = []
    for stage, following, profile in zip(stages, [*stages[1:], None], profiles, strict=True):
        link = LinkSeconds()
        if following is not None:
            # Across machines the slow link is counted at every boundary: which one crosses is not planned.
            slow = across or stage.gpu != following.gpu
            link = activation_link(
                model, links.between if slow else _inside(market, stage.gpu), links.latency_s
            )
        parts.append(StageProfile(profile, float(stage.layers), stage.gpu, stage.tensor_parallel_size, link))
    return compose_profile(name, model, parts, tokens), engine_stages(parts)
