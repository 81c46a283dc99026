"""Points of a sweep, and its grid within the limits of the server: context, KV cache, number of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, stdev

from hetlb.balancer.core.types import Capacity

#: The default grid, which can be measured at any size: it fits as well as three times as many points.
DEFAULT_PREFILL_GRID = tuple((b, n) for b in (1, 4, 16) for n in (128, 512, 2048, 4096))
#: A step is a straight line in the length at a fixed batch, and bends in the batch: two lengths, six batches.
DEFAULT_DECODE_GRID = tuple((b, n) for b in (1, 4, 16, 32, 64, 128) for n in (256, 4096))
#: Share of the KV cache that a point may fill.
_KV_SHARE = 0.9
#: Tokens an answer may take beyond the cached length that a decode point stands for.
DECODE_ROOM_TOKENS = 128
_MIN_BATCHES = 2
_MOST_LENGTHS = 6
_SHORTEST_TOKENS = 16
#: Tokens of a pass if the engine has not told: vLLM's least default.
_USUAL_BUDGET_TOKENS = 2048


class StepKind(StrEnum):
    """Kinds of points.

    Prefill: one pass over `batch` prompts of `length`; decode: one step of `batch` sequences at `length`
    cached tokens each; mixed: such a step and `prefill_tokens` of one prompt in the same pass.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: seconds that `batch` requests of `length` tokens took.

    A live engine splits what exceeds its token budget: `passes` is how many forward passes a prefill took.
    `prefill_tokens` are the prompt tokens of a mixed step. `uncertainty` is the standard error as a share, 0
    if it is not known.
    """

    phase: StepKind
    batch: int
    length: int
    seconds: float
    passes: int = 1
    prefill_tokens: int = 0
    uncertainty: float = 0.0


#: Samples further from the median, in deviations, do not count.
_FAR_DEVIATIONS = 3.0


def middle(seconds: Sequence[float], clock_s: float = 0.0) -> tuple[float, float]:
    """Return the mean of samples near their median, and its standard error as a share of it.

    `clock_s`: deviation that the clock alone gives a sample. A median would be no better: if a clock counts
    in milliseconds, it takes one of two values. Three samples that agree by chance count as no more exact
    than the clock. The error of a single sample is unknown, returned as 0.
    """
    if len(seconds) == 1:
        return seconds[0], 0.0
    centre = median(seconds)
    spread = 1.48 * median(abs(each - centre) for each in seconds)
    near = [each for each in seconds if abs(each - centre) <= _FAR_DEVIATIONS * max(spread, clock_s)]
    found = fmean(near)
    deviation = max(stdev(near) if len(near) > 1 else 0.0, clock_s)
    return found, deviation / math.sqrt(len(near)) / max(found, 1e-12)


def merge_repeats(points: Iterable[Point], clock_s: float = 0.0) -> list[Point]:
    """Return one point for each phase and size, in sorted order: the middle of its repeats.

    `clock_s`: deviation that the clock gives a time; a decode step is a mean over many times.
    """
    repeats: dict[tuple[StepKind, int, int, int], list[Point]] = {}
    for point in points:
        key = (point.phase, point.batch, point.length, point.prefill_tokens)
        repeats.setdefault(key, []).append(point)
    merged = []
    for _, same in sorted(repeats.items()):
        clock = 0.0 if same[0].phase is StepKind.DECODE else clock_s
        seconds, uncertainty = middle([point.seconds for point in same], clock)
        known = same[0].uncertainty if len(same) == 1 else uncertainty
        merged.append(replace(same[0], seconds=seconds, uncertainty=known))
    return merged


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """A point to measure: `batch` requests of `length` prompt (prefill) or cached (decode, mixed) tokens.

    A mixed step has `prefill_tokens` of another prompt in it.
    """

    phase: StepKind
    batch: int
    length: int
    prefill_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.length + self.prefill_tokens

    def __str__(self) -> str:
        beside = f" beside {self.prefill_tokens}" if self.prefill_tokens else ""
        return f"{self.phase} {self.batch} x {self.length}{beside}"


#: Lengths with and without full tiles, on both sides of the CUDA graphs, alone as beside decodes.
_LIVE_PREFILL = {1: (32, 128, 300, 700, 1500, 3000), 4: (128, 300, 1024, 4096), 16: (100, 400, 1024, 4096)}
#: Corners of a live grid that the other points do not show: one long context, and a large batch.
_LIVE_CORNERS = ((1, 32768), (256, 1024))
#: Prompt tokens, decodes beside them, tokens cached by each. The last is clipped to what the server can run.
_LIVE_MIXED = (
    *((prompt, decodes, cached) for prompt in (300, 1500) for decodes in (4, 32) for cached in (256, 1024)),
    (700, 96, 512),
    *((700, decodes, cached) for decodes, cached in _LIVE_CORNERS),
    (300, 1024, 256),
)

DEFAULT_GRID = (
    *(
        Size(StepKind.PREFILL, batch, length)
        for batch, lengths in _LIVE_PREFILL.items()
        for length in lengths
    ),
    *(Size(StepKind.DECODE, batch, length) for batch, length in (*DEFAULT_DECODE_GRID, *_LIVE_CORNERS)),
    *(Size(StepKind.MIXED, decodes, cached, prompt) for prompt, decodes, cached in _LIVE_MIXED),
)


def clip(grid: Iterable[Size], capacity: Capacity, *, fill: bool = True) -> list[Size]:
    """Return the grid within a server's limits, sorted.

    With `fill`, a phase that lost points gets further lengths between the others, until it has as many as
    before.
    """
    sizes = list(grid)
    clipped: list[Size] = []
    for phase in (StepKind.PREFILL, StepKind.DECODE):
        wanted = [size for size in sizes if size.phase is phase]
        corners = [size for size in wanted if (size.batch, size.length) in _LIVE_CORNERS]
        wanted = [size for size in wanted if size not in corners]
        fitting = _fit_all(wanted, capacity)
        lengths = sorted({size.length for size in fitting})
        batches = sorted({size.batch for size in fitting})
        if len(batches) < _MIN_BATCHES:
            batches = sorted({*batches, 1, 2, 4})
        while fill and lengths and len(fitting) < len(wanted) and len(lengths) < _MOST_LENGTHS:
            more = _one_more(lengths)
            if len(more) == len(lengths):
                break
            lengths = more
            fitting = _fit_all([Size(phase, b, n) for b in batches for n in reversed(lengths)], capacity)
        clipped += _fit_all([*fitting, *corners], capacity)
    return clipped + _clip_mixed([size for size in sizes if size.phase is StepKind.MIXED], capacity)


def _clip_mixed(sizes: Sequence[Size], capacity: Capacity) -> list[Size]:
    """Return mixed points within the limits: a slot for the prompt, and one pass for it and the decodes."""
    slots = (capacity.max_num_seqs or 1 << 20) - 1
    budget = capacity.max_num_batched_tokens or _USUAL_BUDGET_TOKENS
    kept: dict[Size, None] = {}
    for size in sizes:
        batch = min(size.batch, slots)
        if batch < 1:
            continue
        prompt = min(size.prefill_tokens, budget - batch)
        if capacity.max_model_len is not None:
            prompt = min(prompt, capacity.max_model_len - 1)
        room = capacity
        if capacity.kv_cache_tokens is not None:
            room = capacity.updated(Capacity(kv_cache_tokens=max(1, capacity.kv_cache_tokens - prompt)))
        length = min(size.length, longest(StepKind.DECODE, batch, room))
        if length >= _SHORTEST_TOKENS and prompt >= _SHORTEST_TOKENS:
            kept[Size(StepKind.MIXED, batch, length, prompt)] = None
    return sorted(kept)


def _one_more(lengths: Sequence[int]) -> list[int]:
    """Return the lengths and one more in the widest gap (by ratio).

    The first gap begins at the shortest measurable length.
    """
    ends = [_SHORTEST_TOKENS, *lengths]
    low, high = max(pairwise(ends), key=lambda pair: pair[1] / pair[0])
    return sorted({*lengths, round((low * high) ** 0.5)})


def _fit_all(sizes: Sequence[Size], capacity: Capacity) -> list[Size]:
    kept: dict[Size, None] = {}
    for size in sizes:
        batch = min(size.batch, capacity.max_num_seqs or size.batch)
        length = min(size.length, longest(size.phase, batch, capacity))
        if length < _SHORTEST_TOKENS:
            continue
        fitted = Size(size.phase, batch, length)
        # Two points clipped to nearly the same size would say the same.
        near = any(o.batch == batch and 0.8 < o.length / length < 1.25 for o in kept)
        if not near:
            kept[fitted] = None
    return sorted(kept)


def longest(phase: StepKind, batch: int, capacity: Capacity) -> int:
    """Return the most tokens that each of `batch` requests may have at a point."""
    room = DECODE_ROOM_TOKENS if phase is StepKind.DECODE else 1
    limit = 1 << 20
    if capacity.max_model_len is not None:
        limit = capacity.max_model_len - room
    if capacity.kv_cache_tokens is not None:
        block = capacity.block_size or 16
        # Requests take whole blocks.
        blocks = math.floor(_KV_SHARE * capacity.kv_cache_tokens / block / batch)
        limit = min(limit, blocks * block - room)
    return limit


def token_budget(observed: Iterable[tuple[int, int, int]]) -> int | None:
    """Return `max_num_batched_tokens` from prefills of (batch, length, iterations with the end of a prompt).

    A pass takes the next tokens of the prompts in order, up to the budget; an iteration counts if a prompt
    ends in it. The power of two that explains all of them; None if none or several do.
    """
    observed = list(observed)
    candidates = [1 << power for power in range(8, 18)]
    fitting = [
        budget
        for budget in candidates
        if all(
            len({math.ceil(k * length / budget) for k in range(1, batch + 1)}) == iterations
            for batch, length, iterations in observed
        )
    ]
    return fitting[0] if len(fitting) == 1 else None
