"""Latency of an instance with its layers divided over stages (pipeline parallelism), as one engine.

A pipeline of S stages keeps S batches in flight, each a part of the instance's work. A batch comes round in
the time of its stages and links together, or in S times the slowest stage if that is longer. The S batches
are one larger iteration. With equal stages and free links an iteration takes as long as the profile says for
an S-th of its work: the same GPUs as replicas, of one KV cache.

Coefficients are composed one by one, so that an iteration of unequal stages is never shorter than on the
slowest one, and every field of `LatencyModel` is composed or refused (`_FIELDS`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from hetlb.balancer.config.engine_defaults import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
)
from hetlb.balancer.config.gpus import find_gpu, wider
from hetlb.balancer.config.profile_file import Hardware, Profile, ProfileSource, with_latency
from hetlb.balancer.core.latency import LatencyModel, mixed_term
from hetlb.balancer.core.step_times import (
    DecodeTable,
    LaunchTime,
    MixedTerm,
    PnormPrefill,
    PrefillGrid,
    SplitKv,
)
from hetlb.errors import ProfileError
from hetlb.tools.models.model_file import model_info
from hetlb.tools.plan.common.plan_tables import Model, RooflineTable
from hetlb.tools.profiler.sources import ACTIVATION_BYTES, Roofline, profile_of
from hetlb.tools.sim.staged_engine import EngineStage

#: The most stages of an instance, and its most GPUs over machines.
MOST_STAGES, MOST_GPUS = 8, 16
#: The fields of a latency model that `compose_latency` composes.
_FIELDS = {
    *(f"k{i}" for i in range(1, 9)),
    *("better_prefill", "better_decode", "mixed", "split_kv", "launch"),
    *("host_s", "host_sequence_s", "request_s"),
}
assert {field.name for field in fields(LatencyModel)} == _FIELDS, "expected every term to be composed"


@dataclass(frozen=True, slots=True)
class LinkSeconds:
    """Seconds of links between stages: for one token, and for one batch whatever its size."""

    token_s: float = 0.0
    batch_s: float = 0.0


def activation_link(model: Model, bytes_per_s: float, latency_s: float) -> LinkSeconds:
    """Return a link between two stages of a model."""
    return LinkSeconds(model.known.width * ACTIVATION_BYTES / max(bytes_per_s, 1.0), latency_s)


def roofline_of(
    table: RooflineTable,
    model: Model,
    gpu: str | None,
    degree: int,
    data_parallel_size: int = 1,
    link_bytes_s: float | None = None,
) -> Roofline:
    """Return the roofline of a table of a file, at a degree; `link_bytes_s` is between the GPUs.

    The table's peak is of bf16: quantised weights have the GPU's ratio to it. A larger one is of the weights.
    """
    sheet, form = find_gpu(gpu or ""), model.known.weight_format
    if sheet is None or table.flops > 1.1 * sheet.bf16_flops:
        ratio = expert_ratio = 1.0
    else:
        ratio = sheet.flops(form) / sheet.bf16_flops
        expert_ratio = sheet.flops(wider(form)) / sheet.bf16_flops
    return Roofline(
        table.flops,
        table.bandwidth_bytes_per_s,
        model.known,
        degree,
        table.flops_efficiency,
        table.bandwidth_efficiency,
        table.overhead_ms / 1e3,
        ratio * table.flops,
        expert_ratio * table.flops,
        all_reduce_bytes_s=link_bytes_s,
        data_parallel_size=data_parallel_size,
    )


def estimated_profile(
    model: Model,
    gpu: str,
    memory_bytes: int | None,
    table: RooflineTable | None,
    tp: int,
    dp: int = 1,
    *,
    link_bytes_s: float | None = None,
    known: Mapping[int, Profile] | None = None,
) -> Profile | None:
    """Return the profile of a server by peak figures, without its cache; None if its GPU is unknown.

    The figures are of a `table`, with the link between its GPUs, or of the GPU's data sheet. `known` are
    profiles of the same GPUs by tensor-parallel degree: the nearest one scales the estimate.
    """
    sheet, degrees = find_gpu(gpu), f"tp{tp}dp{dp}" if dp > 1 else f"tp{tp}"
    if table is not None:
        roofline = roofline_of(table, model, gpu, tp, dp, link_bytes_s)
    elif sheet is not None:
        roofline = Roofline.of_gpu(sheet, model.known, tp, dp)
    else:
        return None
    base = known[max(known, key=lambda degree: (degree <= tp * dp, degree))] if known else None
    of = "" if base is None else f", times what {base.name} takes of them"
    words = f"{degrees}: estimated by peak figures of {gpu}{of}; a profile of it replaces this"
    found = replace(roofline.measurements(gpu, memory_bytes, base=base), assumed=(words,))
    try:
        return profile_of(found, name=f"{gpu.lower()}-{degrees}-estimated")[0]
    except ProfileError:
        return None


class _Round:
    """Seconds of one round of a batch through all stages, for one coefficient of the whole model.

    Each of S batches is in one stage at a time. A round takes S times the slowest stage, or the sum of all
    stages and links if that is longer.
    """

    def __init__(self, shares: Sequence[float], links: LinkSeconds) -> None:
        self.shares = shares
        self.links = links
        self.stages = len(shares)

    def of(self, values: Sequence[float], link_s: float = 0.0) -> float:
        """Return a coefficient of work that every batch does as a whole."""
        parts = [share * value for share, value in zip(self.shares, values, strict=True)]
        return max(self.stages * max(parts), math.fsum(parts) + link_s)

    def part(self, values: Sequence[float], link_s: float = 0.0) -> float:
        """Return a coefficient of work that is divided over the batches."""
        return self.of(values, link_s) / self.stages


def compose_latency(
    shares: Sequence[float], latencies: Sequence[LatencyModel], links: LinkSeconds
) -> LatencyModel:
    """Return stages as one engine: `latencies` of the whole model on each stage, `shares` of its layers."""
    if len(latencies) == 1 and shares[0] == 1.0 and links == LinkSeconds():
        return latencies[0]
    turn, token_s, batch_s = _Round(shares, links), links.token_s, links.batch_s

    def values(key: str) -> list[float]:
        return [getattr(each, key) for each in latencies]

    return LatencyModel(
        k1=turn.part(values("k1"), token_s),
        k2=turn.part(values("k2")),
        k3=turn.of(values("k3")),
        k4=turn.of(values("k4"), batch_s),
        k5=turn.part(values("k5")),
        k6=turn.part(values("k6"), token_s),
        k7=turn.of(values("k7")),
        k8=turn.of(values("k8"), batch_s),
        better_prefill=_prefill(turn, [each.better_prefill for each in latencies]),
        better_decode=_decode(turn, [each.better_decode for each in latencies]),
        mixed=_mixed(turn, latencies),
        # One scheduler for all stages, which works once for every batch.
        host_s=max(each.host_s for each in latencies),
        host_sequence_s=max(each.host_sequence_s for each in latencies) / turn.stages,
        request_s=max(each.request_s for each in latencies),
        split_kv=_split_kv(turn, [each.split_kv for each in latencies]),
        launch=_launch(turn, [each.launch for each in latencies]),
    )


def _prefill(turn: _Round, forms: Sequence[PnormPrefill | None]) -> PnormPrefill | None:
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return None
    grid = known[0].grid if all(each.grid == known[0].grid for each in known) else None
    return PnormPrefill(
        floor_s=turn.of([each.floor_s for each in known], turn.links.batch_s),
        token_s=turn.part([each.token_s for each in known], turn.links.token_s),
        attention_s=turn.part([each.attention_s for each in known]),
        p=min(each.p for each in known),
        grid=None
        if grid is None
        else PrefillGrid(tuple(batch * turn.stages for batch in grid.batches), grid.lengths, grid.log_ratio),
        tile=turn.stages * min(each.tile for each in known),
    )


def _decode(turn: _Round, tables: Sequence[DecodeTable | None]) -> DecodeTable | None:
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None
    batches = sorted({batch for each in known for batch in each.batches})
    links = turn.links
    return DecodeTable(
        token_s=turn.part([each.token_s for each in known]),
        context_s=turn.of([each.context_s for each in known]),
        batches=tuple(batch * turn.stages for batch in batches),
        seconds=tuple(
            turn.of([each.step_s(batch, 0.0) for each in known], links.batch_s + links.token_s * batch)
            for batch in batches
        ),
    )


def _mixed(turn: _Round, latencies: Sequence[LatencyModel]) -> MixedTerm | None:
    """Return the term of decodes beside prompts for the whole pipeline; None if no stage has one."""
    if all(each.mixed is None for each in latencies):
        return None
    known = [mixed_term(each) for each in latencies]

    def values(key: str) -> list[float]:
        return [getattr(each, key) for each in known]

    return MixedTerm(
        sequence_s=turn.part(values("sequence_s")),
        # Prompt tokens and decodes of a batch are both an S-th of the iteration's.
        pair_s=turn.part(values("pair_s")) / turn.stages,
        token_s=turn.part(values("token_s")),
        context_s=turn.of(values("context_s")),
    )


def _split_kv(turn: _Round, terms: Sequence[SplitKv | None]) -> SplitKv | None:
    """Return the term of split contexts for the whole pipeline; None if a stage has none.

    The stage with the fewest blocks decides.
    """
    known = [term for term in terms if term is not None]
    if len(known) < len(terms):
        return None
    return SplitKv(turn.stages * min(each.blocks for each in known), turn.of([e.context_s for e in known]))


def _launch(turn: _Round, terms: Sequence[LaunchTime | None]) -> LaunchTime | None:
    """Return the launch times of the whole pipeline; None if a stage has none."""
    known = [term for term in terms if term is not None]
    if len(known) < len(terms):
        return None
    tokens = turn.stages * min(each.graph_tokens for each in known)
    return LaunchTime(tokens, turn.of([e.graph_s for e in known]), turn.of([e.eager_s for e in known]))


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage: the profile of the whole model on its GPUs, its share of the layers, the link behind it."""

    profile: Profile
    share: float
    gpu: str
    gpus: int
    link: LinkSeconds = LinkSeconds()


def compose_profile(name: str, model: Model, parts: Sequence[StageProfile], kv_cache_tokens: int) -> Profile:
    """Return the profile of an instance of these stages; of one stage its own, with its KV cache."""
    profiles = [part.profile for part in parts]
    first = profiles[0].engine
    if len(parts) == 1:
        engine = msgspec.structs.replace(
            first, kv_cache_tokens=kv_cache_tokens, tensor_parallel_size=parts[0].gpus
        )
        # The cache is counted by the facts of the planned model, not of the measured one.
        facts = profiles[0].model if model.facts is None else model_info(model.facts)
        return msgspec.structs.replace(profiles[0], engine=engine, model=facts)
    links = LinkSeconds(*(math.fsum(getattr(p.link, key) for p in parts) for key in ("token_s", "batch_s")))
    latency = compose_latency([part.share for part in parts], [p.latency for p in profiles], links)
    batched = min(p.engine.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS for p in profiles)
    seqs = min(p.engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS for p in profiles)
    whole = Profile(
        version=2,
        name=name,
        prefill=profiles[0].prefill,
        decode=profiles[0].decode,
        assumed=tuple(dict.fromkeys(word for p in profiles for word in p.assumed)),
        hardware=Hardware(
            gpu="+".join(dict.fromkeys(part.gpu for part in parts)), gpus=sum(part.gpus for part in parts)
        ),
        model=model_info(model.known),
        engine=msgspec.structs.replace(
            first,
            tensor_parallel_size=parts[0].gpus,
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched * len(parts),
        ),
        source=ProfileSource(
            kind="pipeline",
            measured=False,
            name=" ".join(dict.fromkeys(p.name for p in profiles)),
            note=f"{len(parts)} stages composed from profiles of the whole model and the links between them",
        ),
    )
    return with_latency(whole, latency)


def engine_stages(parts: Sequence[StageProfile]) -> tuple[EngineStage, ...]:
    """Return the stages for `StagedEngine`; none if a single stage holds all layers."""
    return tuple(
        EngineStage(part.profile.latency, part.share, part.link.token_s, part.link.batch_s)
        for part in parts
        if len(parts) > 1
    )
