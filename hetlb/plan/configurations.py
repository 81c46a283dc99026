"""Ways to run one instance: stated ones, or all that offers, memory and profiles allow.

Enumerated (Jiang et al., ICML 2025, section 4.3 and appendix D): tensor parallelism inside a machine, powers
of two; pipelines of such stages, of one kind of GPU or of two, inside a machine where they fit and else
across machines; layers in proportion to a stage's memory or, where stages differ, its speed. An instance
that cannot hold its weights and the longest request goes. Each has the latency profile of the whole instance.

A pipeline of S stages keeps S batches in flight. Such a batch comes round in the time that its stages and
links take together, or S times the slowest stage where that is longer; S of them are one larger iteration
of an instance, so its profile is that of one engine with everything a batch costs divided by S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

import msgspec

from hetlb.config.profile import (
    BetterDecode,
    BetterPrefill,
    DecodeCoefficients,
    EngineInfo,
    Hardware,
    ModelInfo,
    PrefillCoefficients,
    PrefillGridTable,
    Profile,
    Source,
)
from hetlb.core.latency import DecodeTable, LatencyModel, PnormPrefill, PrefillGrid
from hetlb.errors import ConfigError
from hetlb.plan.highs import INFINITY
from hetlb.plan.market import Market, Model, OfferTable
from hetlb.profiler.fit import Point, fit
from hetlb.profiler.sources import Roofline, make_profile
from hetlb.sim.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS

#: The most stages of an enumerated pipeline, and the most GPUs of an instance.
MOST_STAGES = 8
MOST_GPUS = 16
#: The bytes of one value that stages and GPUs send each other.
ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of an instance: GPUs of one kind with tensor parallelism, and their share of the layers."""

    gpu: str
    tensor_parallel_size: int
    layers: Fraction


@dataclass(frozen=True)
class Candidate:
    """A configuration before its throughput is known. `profile` is None where that is stated.

    `origin` says what the profile rests on: measured, roofline, or stated in the file; `across` whether its
    stages are in several machines; `written` the path of its profile in the market file, where it is that.
    """

    name: str
    model: str
    gpus: dict[str, int]
    price_per_hour: float
    stages: tuple[Stage, ...]
    origin: str
    profile: Profile | None = None
    throughput: dict[str, float] | None = None
    across: bool = False
    written: str | None = None


def candidates(market: Market, longest_tokens: dict[str, int]) -> list[Candidate]:
    """The stated configurations, or all enumerated ones; `longest_tokens` is of one request, by model.

    Raises `ConfigError` where what is needed to enumerate is missing.
    """
    if market.file.configurations:
        return _stated(market)
    found = [
        each
        for model in market.models.values()
        for each in _enumerated(market, model, longest_tokens.get(model.name, 1))
    ]
    if not any(each.profile for each in found):
        needs = ", ".join(f"{name} ({_smallest(market, name)})" for name in market.models)
        raise ConfigError(
            f"{market.path}: offers: expected GPUs with a profile or roofline that hold a model, got none "
            f"for {needs}"
        )
    return found


def _smallest(market: Market, name: str) -> str:
    weights = market.models[name].weight_bytes
    return f"{weights / 1e9:.4g} GB of weights" if weights is not None else "parameters not stated"


def _stated(market: Market) -> list[Candidate]:
    found = []
    offers = market.offers
    for index, table in enumerate(market.file.configurations):
        profile = market.profiles[table.profile] if table.profile is not None else None
        gpus = dict(table.gpus)
        total = sum(gpus.values())
        degree = table.tensor_parallel_size
        if degree is None:
            stated = profile.engine.tensor_parallel_size if profile is not None else None
            degree = stated or total // table.pipeline_parallel_size
        stages = total // degree if degree else 0
        if stages * degree != total:
            raise ConfigError(
                f"{market.path}: configurations[{index}].tensor_parallel_size: expected a divisor of its "
                f"{total} GPUs, got {degree}"
            )
        kinds = [gpu for gpu, count in gpus.items() for _ in range(max(1, count // degree))]
        held = tuple(Stage(gpu, degree, Fraction(1, len(kinds))) for gpu in kinds)
        name = market.model_of(table.model, f"configurations[{index}]")
        if profile is not None:
            profile = _with_capacity(market, market.models[name], held, profile)
        found.append(
            Candidate(
                table.name,
                name,
                gpus,
                math.fsum(offers[gpu].price_per_hour * count for gpu, count in gpus.items()),
                held,
                "stated" if profile is None else origin_of(profile),
                profile,
                None if table.throughput is None else dict(table.throughput),
                written=None
                if profile is None or profile != market.profiles[table.profile or ""]
                else table.profile,
            )
        )
    return found


def _with_capacity(market: Market, model: Model, stages: tuple[Stage, ...], profile: Profile) -> Profile:
    """The profile with the KV capacity that stated memory allows, where it states none itself."""
    known = model.weight_bytes is not None and model.kv_bytes_per_token is not None
    memory = all(market.offers[stage.gpu].memory_bytes for stage in stages)
    if profile.engine.kv_cache_tokens is not None or not known or not memory:
        return profile
    tokens = max(1, kv_cache_tokens(market, model, stages))
    return msgspec.structs.replace(
        profile, engine=msgspec.structs.replace(profile.engine, kv_cache_tokens=tokens)
    )


def origin_of(profile: Profile) -> str:
    """Origin of the figures of a profile, in a word."""
    if profile.source is None:
        return "profile"
    return "measured" if profile.source.measured else profile.source.kind


# --- enumeration ----------------------------------------------------------------------------------------


def _enumerated(market: Market, model: Model, longest_tokens: int) -> Iterator[Candidate]:
    for key in ("parameters", "kv_bytes_per_token"):
        if getattr(model, key) is None:
            raise ConfigError(
                f"{market.path}: models.{model.name}.{key}: expected a value to enumerate configurations, "
                "got none"
            )
    profiles = {
        (offer.gpu, degree): _profile(market, model, offer, degree)
        for offer in market.file.offers
        for degree in _degrees(offer.gpus_per_machine)
    }
    for kinds in _stage_kinds(market, model):
        for by_speed in (False, True) if len({gpu for gpu, _ in kinds}) > 1 else (False,):
            candidate = _candidate(market, model, kinds, longest_tokens, profiles, by_speed)
            if candidate is not None:
                yield candidate


def _stage_kinds(market: Market, model: Model) -> Iterator[tuple[tuple[str, int], ...]]:
    """GPU and tensor-parallel degree of every stage."""
    offers = list(market.file.offers)
    stages = range(1, min(MOST_STAGES, model.layers or 1) + 1)
    for offer in offers:
        for degree in _degrees(offer.gpus_per_machine):
            for count in stages:
                if _even(count, model) and count * degree <= min(MOST_GPUS, _most(offer)):
                    yield ((offer.gpu, degree),) * count
    for first, second in combinations(offers, 2):
        for degree in _degrees(min(first.gpus_per_machine, second.gpus_per_machine)):
            for count in (1, 2):
                fits = count * degree <= min(MOST_GPUS // 2, _most(first), _most(second))
                if fits and 2 * count in stages:
                    yield ((first.gpu, degree),) * count + ((second.gpu, degree),) * count


def _even(stages: int, model: Model) -> bool:
    return model.layers is None or model.layers % stages == 0


def _most(offer: OfferTable) -> float:
    return INFINITY if offer.available is None else offer.available


def _degrees(gpus_per_machine: int) -> list[int]:
    return [1 << power for power in range(gpus_per_machine.bit_length())]


def _candidate(
    market: Market,
    model: Model,
    kinds: tuple[tuple[str, int], ...],
    longest_tokens: int,
    by_degree: Mapping[tuple[str, int], tuple[Profile | None, str | None]],
    by_speed: bool,
) -> Candidate | None:
    offers = market.offers
    memory = [Fraction(degree * (offers[gpu].memory_bytes or 0)) for gpu, degree in kinds]
    for (gpu, _), size in zip(kinds, memory, strict=True):
        if size > 0:
            continue
        raise ConfigError(
            f"{market.path}: offers.{gpu}.memory_bytes: expected a value to enumerate configurations"
        )
    profiles = [by_degree[kind] for kind in kinds]
    known = [profile for profile, _ in profiles if profile is not None]
    if len(known) < len(kinds):
        return None
    weights = [speed_of(profile) for profile in known] if by_speed else memory
    stages = tuple(
        Stage(gpu, degree, share)
        for (gpu, degree), share in zip(kinds, divide_layers(weights, model), strict=True)
    )
    tokens = kv_cache_tokens(market, model, stages)
    if tokens < longest_tokens:
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
    name = name if len(market.models) == 1 else f"{model.name.rpartition('/')[2].lower()}-{name}"
    if len(stages) == 1:
        profile, written = profiles[0]
        assert profile is not None
        stated = profile.engine.kv_cache_tokens
        engine = msgspec.structs.replace(
            profile.engine,
            kv_cache_tokens=tokens if stated is None else stated,
            tensor_parallel_size=stages[0].tensor_parallel_size,
        )
        if (engine.kv_cache_tokens or 0) < longest_tokens:
            return None
        written = written if stated is not None and engine == profile.engine else None
        profile = msgspec.structs.replace(profile, engine=engine)
    else:
        written = None
        profile = pipeline_profile(
            name, model, stages, known, tokens, _link_seconds(market, model, stages, across)
        )
    return Candidate(
        name,
        model.name,
        gpus,
        math.fsum(offers[gpu].price_per_hour * number for gpu, number in gpus.items()),
        stages,
        " and ".join(dict.fromkeys(origin_of(each) for each in known)),
        profile,
        across=across,
        written=written,
    )


def speed_of(profile: Profile) -> Fraction:
    """Speed of the GPUs of a profile: one full iteration of prompts and one of decodes, per second."""
    latency, tokens = profile.latency, DEFAULT_MAX_NUM_BATCHED_TOKENS
    seconds = latency.prefill_s(tokens // 2, 2) + latency.step_s(64, 64 * 1024)
    return Fraction(1.0 / seconds)


def divide_layers(weights: Sequence[Fraction], model: Model) -> list[Fraction]:
    """Shares of the layers in proportion to weights, whole layers where their number is known.

    What rounding leaves goes to the largest remainders.
    """
    total = sum(weights)
    shares = [each / total for each in weights]
    layers = model.layers
    if layers is None:
        return shares
    whole = [max(1, math.floor(share * layers)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: shares[s] * layers - whole[s], reverse=True)
    for s in by_remainder[: max(0, layers - sum(whole))]:
        whole[s] += 1
    return [Fraction(each, layers) for each in whole]


def kv_cache_tokens(market: Market, model: Model, stages: Sequence[Stage]) -> int:
    """Tokens that the KV cache of an instance holds: that of the stage with the least room for its layers."""
    assert model.weight_bytes is not None
    assert model.kv_bytes_per_token is not None
    least: float = INFINITY
    kv_bytes = model.kv_bytes_per_token
    for stage in stages:
        offer = market.offers[stage.gpu]
        per_gpu = (
            Fraction(repr(offer.gpu_memory_utilization)) * (offer.memory_bytes or 0)
            - offer.reserved_bytes_per_gpu
        )
        room = stage.tensor_parallel_size * per_gpu - Fraction(repr(model.weight_bytes)) * stage.layers
        least = min(least, math.floor(room / (kv_bytes * stage.layers)))
    return max(0, int(least))


def _profile(
    market: Market, model: Model, offer: OfferTable, degree: int
) -> tuple[Profile | None, str | None]:
    """The latency profile of the whole model on so many GPUs, and its path, None if unknown."""
    written = offer.profiles.get(model.name, {}).get(str(degree))
    if written is not None:
        return market.profiles[written], written
    if offer.roofline is None:
        return None, None
    return roofline_profile(market, model, offer, degree), None


def _inside(market: Market, gpu: str) -> float:
    inside = market.file.links.inside
    return inside.get(gpu, inside.get("default", 60e9))


def hidden_size(model: Model) -> float:
    """Values of one token between layers: stated, or from parameters = 12 * layers * hidden^2."""
    if model.hidden_size is not None:
        return float(model.hidden_size)
    layers = model.layers or 32
    return math.sqrt((model.parameters or 0.0) / (12.0 * layers))


def roofline_profile(market: Market, model: Model, offer: OfferTable, degree: int) -> Profile:
    """An estimated profile: peak figures of the GPU, and two all-reduces a layer over the machine's links."""
    assert offer.roofline is not None
    assert model.parameters is not None
    assert model.kv_bytes_per_token is not None
    table = offer.roofline
    roofline = Roofline(
        peak_flops=table.flops,
        bandwidth_bytes_s=table.bandwidth_bytes_per_s,
        parameters=model.parameters,
        bytes_per_parameter=model.bytes_per_parameter,
        kv_bytes_per_token=model.kv_bytes_per_token,
        tensor_parallel_size=degree,
        flops_efficiency=table.flops_efficiency,
        bandwidth_efficiency=table.bandwidth_efficiency,
        step_overhead_s=table.overhead_ms / 1e3,
    )
    per_token = 2.0 * (model.layers or 32) * 2.0 * (degree - 1) / degree
    per_token *= hidden_size(model) * ACTIVATION_BYTES / _inside(market, offer.gpu)
    points = tuple(
        Point(
            point.phase,
            point.batch,
            point.length,
            point.seconds + per_token * point.batch * (point.length if point.phase.value == "prefill" else 1),
        )
        for point in roofline.points()
    )
    return make_profile(
        f"{offer.gpu}-{model.name}-tp{degree}-roofline",
        points,
        fit(points),
        source=Source(
            kind="roofline",
            measured=False,
            system=offer.gpu,
            note=f"estimated, not measured: {table.flops:g} FLOP/s at {table.flops_efficiency:g}, "
            f"{table.bandwidth_bytes_per_s:g} bytes/s at {table.bandwidth_efficiency:g}",
        ),
        hardware=Hardware(gpu=offer.gpu, gpus=degree, memory_bytes=offer.memory_bytes),
        model=ModelInfo(name=model.name, kv_bytes_per_token=model.kv_bytes_per_token),
        engine=EngineInfo(tensor_parallel_size=degree),
    )


def compose(market: Market, model: Model, stages: Sequence[Stage], *, across: bool) -> Profile:
    """The profile of given stages, one or several. Raises `ConfigError` where one has no profile."""
    profiles = []
    for stage in stages:
        profile, _ = _profile(market, model, market.offers[stage.gpu], stage.tensor_parallel_size)
        if profile is None:
            raise ConfigError(
                f"{market.path}: offers.{stage.gpu}.profiles: expected one of degree "
                f"{stage.tensor_parallel_size} for {model.name}, or a roofline"
            )
        profiles.append(profile)
    tokens = kv_cache_tokens(market, model, stages)
    return pipeline_profile(
        "composed", model, stages, profiles, tokens, _link_seconds(market, model, stages, across)
    )


# --- pipelines ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkSeconds:
    """Seconds that all hand-overs between stages take: for one token, and for one batch whatever its size."""

    token_s: float
    batch_s: float


def _link_seconds(market: Market, model: Model, stages: Sequence[Stage], across: bool) -> LinkSeconds:
    links = market.file.links
    size = hidden_size(model) * ACTIVATION_BYTES
    token_s = batch_s = 0.0
    for stage, following in pairwise(stages):
        # Across machines, stages of one kind share a machine as far as it reaches: the slow link is counted
        # at every hand-over, since which one crosses is not planned.
        bandwidth = links.between if across or stage.gpu != following.gpu else _inside(market, stage.gpu)
        token_s += size / bandwidth
        batch_s += links.latency_s
    return LinkSeconds(token_s, batch_s)


def pipeline_latency(
    shares: Sequence[float], latencies: Sequence[LatencyModel], links: LinkSeconds
) -> LatencyModel:
    """The latency model of a pipeline as one engine; `latencies` are of the whole model on each stage."""
    count = len(shares)

    def round_s(values: Sequence[float], link_s: float = 0.0) -> float:
        """Seconds that one batch takes to come round, of one coefficient."""
        parts = [share * value for share, value in zip(shares, values, strict=True)]
        return max(count * max(parts), math.fsum(parts) + link_s)

    def whole(key: str, link_s: float = 0.0) -> float:
        return round_s([getattr(each, key) for each in latencies], link_s)

    token_s, batch_s = links.token_s, links.batch_s
    better = [each.better_prefill for each in latencies]
    form: PnormPrefill | None = None
    if all(each is not None for each in better):
        known = [each for each in better if each is not None]
        grid = known[0].grid if all(each.grid == known[0].grid for each in known) else None
        form = PnormPrefill(
            floor_s=round_s([each.floor_s for each in known], batch_s),
            token_s=round_s([each.token_s for each in known], token_s) / count,
            attention_s=round_s([each.attention_s for each in known]) / count,
            p=min(each.p for each in known),
            grid=None
            if grid is None
            else PrefillGrid(tuple(batch * count for batch in grid.batches), grid.lengths, grid.log_ratio),
            tile=count * min(each.tile for each in known),
        )
    tables = [each.better_decode for each in latencies]
    decode: DecodeTable | None = None
    if all(each is not None for each in tables):
        bending = [each for each in tables if each is not None]
        batches = sorted({batch for each in bending for batch in each.batches})
        decode = DecodeTable(
            token_s=round_s([each.token_s for each in bending]) / count,
            context_s=round_s([each.context_s for each in bending]),
            batches=tuple(batch * count for batch in batches),
            seconds=tuple(
                round_s([each.step_s(batch, 0.0) for each in bending], batch_s + token_s * batch)
                for batch in batches
            ),
        )
    return LatencyModel(
        k1=whole("k1", token_s) / count,
        k2=whole("k2") / count,
        k3=whole("k3"),
        k4=whole("k4", batch_s),
        k5=whole("k5") / count,
        k6=whole("k6", token_s) / count,
        k7=whole("k7"),
        k8=whole("k8", batch_s),
        better_prefill=form,
        better_decode=decode,
    )


def pipeline_profile(
    name: str,
    model: Model,
    stages: Sequence[Stage],
    profiles: Sequence[Profile],
    tokens: int,
    links: LinkSeconds,
) -> Profile:
    """The profile of a pipeline as one engine; `profiles`: the whole model on the GPUs of each stage."""
    count = len(stages)
    latency = pipeline_latency([float(s.layers) for s in stages], [p.latency for p in profiles], links)
    form = latency.better_prefill
    grid = None if form is None else form.grid
    decode = latency.better_decode
    batched = min(p.engine.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS for p in profiles)
    seqs = min(p.engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS for p in profiles)
    return Profile(
        version=1 if decode is None else 2,
        name=name,
        prefill=PrefillCoefficients(k1=latency.k1, k2=latency.k2, k3=latency.k3, k4=latency.k4),
        decode=DecodeCoefficients(k5=latency.k5, k6=latency.k6, k7=latency.k7, k8=latency.k8),
        better_prefill=None
        if form is None
        else BetterPrefill(
            floor_s=form.floor_s,
            token_s=form.token_s,
            attention_s=form.attention_s,
            p=form.p,
            grid=None
            if grid is None
            else PrefillGridTable(batches=grid.batches, lengths=grid.lengths, log_ratio=grid.log_ratio),
            tile=form.tile,
        ),
        better_decode=None
        if decode is None
        else BetterDecode(
            token_s=decode.token_s, context_s=decode.context_s, batches=decode.batches, seconds=decode.seconds
        ),
        hardware=Hardware(
            gpu="+".join(dict.fromkeys(stage.gpu for stage in stages)),
            gpus=sum(stage.tensor_parallel_size for stage in stages),
        ),
        model=ModelInfo(name=model.name, kv_bytes_per_token=model.kv_bytes_per_token),
        engine=EngineInfo(
            tensor_parallel_size=stages[0].tensor_parallel_size,
            kv_cache_tokens=tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched * count,
        ),
        source=Source(
            kind="pipeline",
            measured=False,
            name=" ".join(dict.fromkeys(p.name for p in profiles)),
            note=f"{count} stages composed from profiles of the whole model and the links between them",
        ),
    )
