"""Data-parallel servers with whole experts on each GPU (`--data-parallel-size`, `--enable-expert-parallel`).

Each of `dp` ranks has `tp` GPUs, the attention of its own requests and a KV cache of its own. The experts
lie on the GPUs of all ranks. A latent cache is kept once a rank, not on each GPU. Without a profile a layout
is estimated: by the peak figures of its GPU, times what a profile of the same GPU takes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import msgspec

from hetlb.balancer.config.gpus import find_gpu
from hetlb.balancer.config.profile_file import EngineInfo, Hardware, Profile, ProfileSource
from hetlb.errors import ProfileError
from hetlb.tools.models.degrees import refusal
from hetlb.tools.models.model_file import model_info
from hetlb.tools.plan.common.capacity import exact
from hetlb.tools.plan.common.composition import roofline_of
from hetlb.tools.plan.common.plan_tables import Model, RooflineTable
from hetlb.tools.profiler.fit import StepKind
from hetlb.tools.profiler.sources import Measurements, Roofline, assumed_launch, profile_of

#: A usual prompt, and a usual decode step: (batch, tokens).
_USUAL = {StepKind.PREFILL: (1, 4096), StepKind.DECODE: (32, 2048)}


class Degrees(NamedTuple):
    """GPUs of a rank, and ranks."""

    tp: int
    dp: int

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        return f"tp{self.tp}dp{self.dp}"


def data_parallel_degrees(model: Model, gpus: int) -> Iterator[Degrees]:
    """Yield the data-parallel layouts on powers of two of GPUs that vLLM takes for a model with experts."""
    if model.shape is None or not model.known.expert_parallel:
        return
    for total in (1 << power for power in range(1, gpus.bit_length())):
        for tp in (1 << power for power in range(total.bit_length() - 1)):
            if not refusal(model.shape, tp, expert_parallel=True):
                yield Degrees(tp, total // tp)


def copies_cache(model: Model, gpus: int) -> bool:
    """Return True if tensor parallelism over these GPUs keeps copies of the cache."""
    return model.known.replication(gpus) > 1.0


def rank_bytes(model: Model, usable: Fraction, degrees: Degrees) -> Fraction:
    """Return the bytes that the weights leave of a rank with `usable` bytes; below 0 if they do not fit."""
    experts = exact(model.weight_bytes) * model.known.expert_bytes / model.known.weight_bytes
    return usable - (exact(model.weight_bytes) - experts) - experts / degrees.dp


def rank_tokens(model: Model, usable: Fraction, degrees: Degrees) -> int:
    """Return the tokens of the KV cache of one rank, 0 if it has no room."""
    return max(0, math.floor(rank_bytes(model, usable, degrees) / exact(model.kv_bytes_at(degrees.tp))))


def estimated_rank(
    model: Model,
    gpu: str,
    memory_bytes: int | None,
    table: RooflineTable | None,
    known: Mapping[int, Profile],
    degrees: Degrees,
    link_bytes_s: float | None = None,
) -> Profile | None:
    """Return the profile of a rank without its cache; None if neither GPU nor model is known well enough.

    `known` are profiles of the same GPUs by tensor-parallel degree: the nearest one scales the estimate.
    `link_bytes_s` is between the GPUs of a `table`.
    """
    sheet = find_gpu(gpu)
    if model.facts is None or (table is None and sheet is None):
        return None

    def roofline(tp: int, dp: int = 1) -> Roofline:
        if table is not None:
            return roofline_of(table, model, gpu, tp, dp, link_bytes_s)
        assert sheet is not None
        return Roofline.of_gpu(sheet, model.known, tp, dp)

    base = known[max(known, key=lambda tp: (tp <= degrees.gpus, tp))] if known else None
    factor = dict.fromkeys(_USUAL, 1.0) if base is None else _factors(base, roofline)
    points = [
        replace(each, seconds=each.seconds * factor[each.phase]) for each in roofline(*degrees).points()
    ]
    of = "" if base is None else f", times what {base.name} takes of them"
    engine = EngineInfo() if base is None else base.engine
    found = Measurements(
        points=tuple(points),
        source=ProfileSource(
            kind="roofline", measured=False, system=gpu, note=f"estimated, not measured: peak figures{of}"
        ),
        engine=msgspec.structs.replace(
            engine,
            tensor_parallel_size=degrees.tp,
            data_parallel_size=degrees.dp,
            enable_expert_parallel=True,
            kv_cache_tokens=None,
        ),
        hardware=Hardware(gpu=gpu, gpus=degrees.gpus, memory_bytes=memory_bytes),
        model=model_info(model.known),
        host=None if base is None else base.host,
        launch=assumed_launch(model.known, degrees.gpus),
        assumed=(f"{degrees.name}: estimated by peak figures of {gpu}{of}; a profile of it replaces this",),
    )
    try:
        return profile_of(found, name=f"{gpu.lower()}-{degrees.name}-estimated")[0]
    except ProfileError:
        return None


def _factors(base: Profile, roofline: Callable[[int], Roofline]) -> dict[StepKind, float]:
    """Return the times of a profile over its roofline, for prompts and for decode steps."""
    latency, own = base.latency, roofline(base.engine.tensor_parallel_size or 1)
    prompts, tokens = _USUAL[StepKind.PREFILL]
    batch, context = _USUAL[StepKind.DECODE]
    seconds = {
        StepKind.PREFILL: latency.prefill_s(tokens, prompts),
        StepKind.DECODE: latency.step_s(batch, batch * context),
    }
    return {phase: seconds[phase] / own.seconds(phase, *_USUAL[phase]) for phase in _USUAL}
