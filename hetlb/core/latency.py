"""The latency model of one vLLM instance: seconds for a prefill, a decode step, an iteration, an answer.

This module holds the only latency formulas of hetlb. Policies, speed correction, expectation, `explain`,
simulator and emulator call `LatencyModel`, or hold an inlined copy that a property test equates with it.

Two families of methods:

* `paper_*`: the equations of Xiong et al., arXiv 2504.15303, always from k1..k8. A batch of B requests of I
  input tokens is prefilled in `k1*B*I + k2*B + k3*I + k4`; a decode step of B requests with c cached tokens
  each takes `k5*B*c + k6*B + k7*c + k8`. The policies `paper` and `paper-memory` and static search use them.
* all others: the best form that the profile has, for everything else.

Everything is pure: floats in, floats out, no allocation. Times are seconds, lengths tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.pickle_by_fields import PickleByFields


class IterationRule(StrEnum):
    """Rule by which the times of prefill and decode work in one iteration combine.

    `TOKEN` reads the weights once (5-8 % off measured mixed steps); `SUM` adds the two pure steps
    (21-27 % too long, since it reads them twice) and is kept as the paper's reading.
    """

    TOKEN = "token"
    SUM = "sum"


#: Factor on the attention part of decodes that share an iteration with prefill work (`IterationRule.TOKEN`).
MIXED_DECODE_ATTENTION_FACTOR: Final = 1.5
#: Up to so many parts of a prompt are summed one by one; of more the mean part is taken.
_EXACT_PARTS: Final = 8.0
#: Batches up to this one are found without a search.
_MOST_PIECES: Final = 1024


@mypyc_attr(acyclic=True)
class _Cell:
    """Cell of an axis of a `PrefillGrid`: `index`, ends, logarithm of its width, and the next one."""

    __slots__ = ("above", "high", "index", "log_width", "low")

    def __init__(self, index: int, low: float, high: float, above: _Cell | None) -> None:
        self.index = index
        self.low = low
        self.high = high
        self.log_width = math.log(high / low)
        self.above = above


def _first_cell(axis: tuple[int, ...]) -> _Cell:
    above: _Cell | None = None
    for i in range(len(axis) - 2, -1, -1):
        above = _Cell(i, axis[i], axis[i + 1], above)
    assert above is not None
    return above


class _Cells(PickleByFields):
    """First cells of the axes of a grid, derived from its fields and none themselves."""

    __slots__ = ("_first_batches", "_first_lengths")

    _first_batches: _Cell
    _first_lengths: _Cell

    def _cut(self, batches: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        object.__setattr__(self, "_first_batches", _first_cell(batches))
        object.__setattr__(self, "_first_lengths", _first_cell(lengths))


@dataclass(frozen=True, slots=True)
class PrefillGrid(_Cells):
    """log(measured / predicted) of a form at the points of a grid; bilinear in log(batch), log(length)."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    log_ratio: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("batches", self.batches), ("lengths", self.lengths)):
            rising = all(low < high for low, high in pairwise(axis))
            if len(axis) < 2 or axis[0] < 1 or not rising:
                raise ValueError(f"{name}: expected at least 2 rising numbers from 1, got {list(axis)}")
        shape = [len(row) for row in self.log_ratio]
        if shape != [len(self.lengths)] * len(self.batches):
            raise ValueError(
                f"log_ratio: expected {len(self.batches)} rows of {len(self.lengths)} numbers, "
                f"got rows of {shape}"
            )
        if not all(math.isfinite(value) and abs(value) < 50 for row in self.log_ratio for value in row):
            raise ValueError("log_ratio: expected numbers between -50 and 50")
        self._cut(self.batches, self.lengths)

    def factor(self, batch: float, length: float) -> float:
        """Measured / predicted at a point; beyond the grid that of its edge."""
        i, u = _position(self._first_batches, batch)
        j, v = _position(self._first_lengths, length)
        low = self.log_ratio[i]
        at_low = low[j] + v * (low[j + 1] - low[j])
        if u == 0.0:
            return math.exp(at_low)
        high = self.log_ratio[i + 1]
        at_high = high[j] + v * (high[j + 1] - high[j])
        return math.exp(at_low + u * (at_high - at_low))


def _position(cell: _Cell, value: float) -> tuple[int, float]:
    """The cell that holds `value`, from the first one on, and how far in it lies, 0..1 in logarithms."""
    if value <= cell.low:
        return 0, 0.0
    # An axis has a dozen points: with plain numbers that is sooner done than a search by halves.
    while cell.high <= value:
        if cell.above is None:
            return cell.index, 1.0
        cell = cell.above
    return cell.index, math.log(value / cell.low) / cell.log_width


def in_tiles(tokens: float, tile: float) -> float:
    """Tokens that a dense kernel computes: whole tiles, of half the size where they are two at most."""
    if tile <= 1.0:
        return tokens
    if tokens <= 2.0 * tile:
        tile /= 2.0
    return math.ceil(tokens / tile) * tile


@dataclass(frozen=True, slots=True)
class PnormPrefill(PickleByFields):
    """Prefill as `(floor^p + (a*N*L)^p)^(1/p) + b*N*L^2`, times a measured correction if there is a grid.

    A pass takes the time to read the weights (`floor_s`) or to compute its tokens (`token_s` = a each),
    whichever is longer, with a soft corner (`p`); attention adds `attention_s` = b per token squared. Dense
    kernels work on tiles of `tile` tokens: the last one takes as long as a full one.
    """

    floor_s: float
    token_s: float
    attention_s: float
    p: float
    grid: PrefillGrid | None = None
    tile: int = 1

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ValueError(f"tile: expected a whole number from 1, got {self.tile}")
        for name, least in (("floor_s", 0.0), ("token_s", 0.0), ("attention_s", 0.0), ("p", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}: expected a number from {least:g}, got {value}")

    def prefill_s(self, batch: float, input_tokens: float) -> float:
        """Seconds to prefill `batch` prompts of `input_tokens` tokens each in one forward pass."""
        return self.pass_s(batch * input_tokens, batch, batch * input_tokens * input_tokens)

    def pass_s(
        self,
        tokens: float,
        prompts: float,
        attended: float,
        decodes: float = 0.0,
        floor_s: float = 0.0,
        decodes_s: float = 0.0,
        least_s: float = 0.0,
    ) -> float:
        """Seconds of a pass over `tokens` prompt tokens of `prompts` prompts, beside `decodes` single tokens.

        `attended` is the sum of length squared over whole prompts; a chunk of c tokens behind o computed
        ones counts c * (c + 2 * o). The dense part takes at least `floor_s`; attention takes `decodes_s` more
        for the single tokens, and at least `least_s`.
        """
        floor = max(self.floor_s, floor_s)
        rate = self.token_s * in_tiles(tokens + decodes, self.tile)
        low, high = (floor, rate) if floor < rate else (rate, floor)
        if high <= 0.0:
            dense_s = 0.0
        else:
            dense_s = high * math.pow(1.0 + math.pow(low / high, self.p), 1.0 / self.p)
        attention_s = self.attention_s * attended
        if self.grid is not None:
            factor = self.grid.factor(prompts, tokens / prompts)
            attention_s *= factor
            dense_s *= factor
            if dense_s < floor_s:
                dense_s = floor_s
        attention_s += decodes_s
        return dense_s + (attention_s if attention_s > least_s else least_s)

    def elasticity(self, batch: float, input_tokens: float) -> tuple[float, float]:
        """d log(seconds) / d log(batch) and / d log(input_tokens) without the grid; both rise with either."""
        rate = self.token_s * batch * input_tokens
        bend = self.attention_s * batch * input_tokens * input_tokens
        high = max(rate, self.floor_s)
        if high <= 0:
            return (1.0, 2.0) if bend > 0 else (0.0, 0.0)
        sum_p = (rate / high) ** self.p + (self.floor_s / high) ** self.p
        dense = high * sum_p ** (1.0 / self.p)
        rising = dense * (rate / high) ** self.p / sum_p
        return (rising + bend) / (dense + bend), (rising + 2 * bend) / (dense + bend)

    def scaled(self, factor: float) -> PnormPrefill:
        """The same form, every duration multiplied by `factor`."""
        return PnormPrefill(
            self.floor_s * factor,
            self.token_s * factor,
            self.attention_s * factor,
            self.p,
            self.grid,
            self.tile,
        )


@mypyc_attr(acyclic=True)
class _Piece:
    """Line between two points of a `DecodeTable`, for batches up to `high`; `above` is the next one.

    A step takes `seconds + (batch - low) * rise_s / width`.
    """

    __slots__ = ("above", "high", "low", "rise_s", "seconds", "width")

    def __init__(
        self, low: float, width: float, seconds: float, rise_s: float, high: float, above: _Piece | None
    ) -> None:
        self.low = low
        self.width = width
        self.seconds = seconds
        self.rise_s = rise_s
        self.high = high
        self.above = above


class _Pieces(PickleByFields):
    """Lines of a table, derived from its fields and none itself.

    `_pieces` has for each whole number from 0 to `_end`, which is at most `_MOST_PIECES`, the first whose
    `high` is not below it.
    """

    __slots__ = ("_end", "_pieces")

    _end: float
    _pieces: list[_Piece]

    def _cut(self, batches: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        above: _Piece | None = None
        last = len(batches) - 1
        pieces: list[_Piece] = []
        for i in range(last, 0, -1):
            low = batches[i - 1]
            high = math.inf if i == last else batches[i]
            above = _Piece(low, batches[i] - low, seconds[i - 1], seconds[i] - seconds[i - 1], high, above)
            pieces.append(above)
        pieces.append(_Piece(0.0, 1.0, seconds[0], 0.0, batches[0], above))
        pieces.reverse()
        found: list[_Piece] = []
        for piece, batch in zip(pieces, batches, strict=True):
            found += [piece] * (min(batch, _MOST_PIECES) + 1 - len(found))
        object.__setattr__(self, "_end", float(len(found) - 1))
        object.__setattr__(self, "_pieces", found)


@dataclass(frozen=True, slots=True)
class DecodeTable(_Pieces):
    """A decode step as `token_s * kv_tokens + context_s * kv_tokens / batch + seconds(batch)`.

    `seconds` stand for `batches`, in between lines; beyond the last the line goes on. What the batch costs
    bends: matrices become matrix products at 2, tiles and the sampler fill up.
    """

    token_s: float
    context_s: float
    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("token_s", "context_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: expected a number from 0, got {value}")
        rising = all(low < high for low, high in pairwise(self.batches))
        if len(self.batches) < 2 or self.batches[0] < 1 or not rising:
            raise ValueError(f"batches: expected at least 2 rising numbers from 1, got {list(self.batches)}")
        if len(self.seconds) != len(self.batches):
            raise ValueError(f"seconds: expected {len(self.batches)} numbers, got {len(self.seconds)}")
        falling = any(high < low for low, high in pairwise(self.seconds))
        if falling or not self.seconds[0] > 0.0 or not math.isfinite(self.seconds[-1]):
            raise ValueError(f"seconds: expected numbers above 0 that do not fall, got {list(self.seconds)}")
        self._cut(self.batches, self.seconds)

    def step_line(self, batch: float) -> tuple[float, float]:
        """Seconds of one step of `batch` sequences, and seconds more per token that they hold together."""
        pieces = self._pieces
        piece = pieces[int(batch)] if batch < self._end else pieces[-1]
        while piece.high < batch:  # once at most, as points are whole numbers, but for very large ones
            assert piece.above is not None
            piece = piece.above
        own_s = piece.seconds + (batch - piece.low) * piece.rise_s / piece.width
        return own_s, self.token_s + self.context_s / batch

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Seconds of one step of `batch` sequences that hold `kv_tokens` together."""
        own_s, token_s = self.step_line(batch)
        return own_s + token_s * kv_tokens

    def scaled(self, factor: float) -> DecodeTable:
        """The same form, every duration multiplied by `factor`."""
        return DecodeTable(
            self.token_s * factor,
            self.context_s * factor,
            self.batches,
            tuple([each * factor for each in self.seconds]),
        )


@dataclass(frozen=True, slots=True)
class MixedTerm(PickleByFields):
    """Seconds that decodes add to a pass over prompt tokens, beyond the dense work of their tokens.

    `sequence_s * D + pair_s * D * P + max(token_s * C, context_s * C / D)`: D decodes over C cached tokens
    beside P prompt tokens. An attention kernel that takes both kinds at once gives every decode a grid
    for the longest part of a prompt, so most of its blocks are empty (`pair_s`, by heads per GPU); it does
    not split a decode's context over blocks, so one runs through it alone (`context_s`), and heads that share
    keys read them several times (`token_s`).
    """

    sequence_s: float
    pair_s: float
    token_s: float
    context_s: float

    def __post_init__(self) -> None:
        for name in ("sequence_s", "pair_s", "token_s", "context_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: expected a number from 0, got {value}")

    def seconds(self, tokens: float, batch: float, kv_tokens: float) -> float:
        """Seconds for `batch` decodes over `kv_tokens` beside `tokens` prompt tokens."""
        shared_s = self.token_s * kv_tokens
        alone_s = self.context_s * kv_tokens / batch
        return (self.sequence_s + self.pair_s * tokens) * batch + (
            shared_s if shared_s > alone_s else alone_s
        )

    def scaled(self, factor: float) -> MixedTerm:
        """The same term, every duration multiplied by `factor`."""
        return MixedTerm(
            self.sequence_s * factor, self.pair_s * factor, self.token_s * factor, self.context_s * factor
        )


@dataclass(frozen=True, slots=True)
class SplitKv(PickleByFields):
    """Attention of a decode step by a kernel that splits every context over equally many blocks of threads.

    `blocks` is how many sequences fill the GPU with one block each (SMs / KV heads of a GPU). A batch, padded
    as CUDA graphs are, leaves `blocks // batch` of them to a sequence, and the step lasts until the longest
    context is through its own: `context_s` seconds per token in one block.
    """

    blocks: float
    context_s: float

    def __post_init__(self) -> None:
        for name in ("blocks", "context_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name}: expected a number above 0, got {value}")

    def seconds(self, batch: float, longest: float) -> float:
        """Least seconds of attention in a step of `batch` sequences, the longest of `longest` tokens."""
        padded = math.ceil(batch / 8.0) * 8.0 if batch > 4.0 else math.ceil(batch)
        splits = math.floor(self.blocks / padded)
        return self.context_s * longest / (splits if splits > 1.0 else 1.0)

    def scaled(self, factor: float) -> SplitKv:
        """The same term, every duration multiplied by `factor`."""
        return SplitKv(self.blocks, self.context_s * factor)


@dataclass(frozen=True, slots=True)
class LatencyModel(PickleByFields):
    """The eight constants k1..k8 and, where the profile has them, better forms.

    `host_s` is what the host adds to every iteration beyond the points that were fitted (0 where these hold
    it already), and `host_sequence_s` more for each sequence in it; `request_s` is what the server does with
    a request before its engine has it (HTTP, tokenizer). Units: seconds, tokens, requests. `batch` counts
    decoding sequences, `kv_tokens` the tokens that they hold in the KV cache together, the one computed in
    this step included.
    """

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    k6: float
    k7: float
    k8: float
    better_prefill: PnormPrefill | None = None
    better_decode: DecodeTable | None = None
    mixed: MixedTerm | None = None
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    request_s: float = 0.0
    split_kv: SplitKv | None = None

    def __post_init__(self) -> None:
        for index in range(1, 9):
            value = getattr(self, f"k{index}")
            if not math.isfinite(value):
                raise ValueError(f"k{index}: expected a finite number, got {value}")
        for name in ("host_s", "host_sequence_s", "request_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: expected a number from 0, got {value}")

    def __hash__(self) -> int:
        """Hash of the constants: models that differ in a better form alone are rare."""
        return hash((self.k1, self.k2, self.k4, self.k5, self.k6, self.k8, self.host_s))

    # --- the paper's equations: k1..k8 ---

    def paper_prefill_s(self, batch: float, input_tokens: float) -> float:
        """Seconds to prefill `batch` requests of `input_tokens` tokens each in one forward pass."""
        return self.k1 * batch * input_tokens + self.k2 * batch + self.k3 * input_tokens + self.k4

    def paper_step_s(self, batch: float, cached_tokens: float) -> float:
        """Seconds of one decode step of `batch` requests with `cached_tokens` tokens in the cache each."""
        return self.k5 * batch * cached_tokens + self.k6 * batch + self.k7 * cached_tokens + self.k8

    def paper_decode_s(self, batch: float, input_tokens: float, output_tokens: float) -> float:
        """Seconds to decode `output_tokens` tokens for each of `batch` requests of `input_tokens` tokens.

        The closed form of `sum over j = 1..O of paper_step_s(B, I + j)`; O may be fractional, since a
        predicted length is an expectation.
        """
        cached_sum = output_tokens * input_tokens + output_tokens * (output_tokens + 1.0) / 2.0
        return output_tokens * (self.k6 * batch + self.k8) + (self.k5 * batch + self.k7) * cached_sum

    # --- one iteration ---

    def host_of_s(self, sequences: float) -> float:
        """Seconds of the host in an iteration with so many sequences, beyond what the points hold."""
        return self.host_s + self.host_sequence_s * sequences

    def step_line(self, batch: float) -> tuple[float, float]:
        """Seconds of one decode step of `batch` sequences, and more of them per token that they hold."""
        if batch <= 0.0:
            return 0.0, 0.0
        host_s = self.host_of_s(batch)
        better = self.better_decode
        if better is not None:
            own_s, token_s = better.step_line(batch)
            return host_s + own_s, token_s
        return host_s + self.k6 * batch + self.k8, self.k5 + self.k7 / batch

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Seconds of one decode step. Affine in `kv_tokens` at a fixed batch."""
        own_s, token_s = self.step_line(batch)
        return own_s + token_s * kv_tokens

    def uneven_s(self, batch: float, kv_tokens: float, longest: float) -> float:
        """Seconds by which a decode step takes longer since one context is of `longest` tokens.

        0 where the kernel is not known to split contexts alike, and of contexts of one length.
        """
        split = self.split_kv
        if split is None or batch <= 0.0:
            return 0.0
        more_s = split.seconds(batch, longest) - self.step_line(batch)[1] * kv_tokens
        return more_s if more_s > 0.0 else 0.0

    def step_growth_s(self, batch: float) -> float:
        """Seconds by which a step gets longer when each of its sequences has one more token in the cache."""
        better = self.better_decode
        if better is not None:
            return better.token_s * batch + better.context_s
        return self.k5 * batch + self.k7

    def mixed_step_s(
        self,
        prefill_tokens: float,
        prompts: float,
        longest: float,
        batch: float,
        kv_tokens: float,
        attended: float = -1.0,
    ) -> float:
        """Seconds of one iteration: prompt tokens, and one token for each of `batch` decoding sequences.

        `prefill_tokens` of `prompts` prompts are computed, at most `longest` of one. `attended` is what
        attention goes over: the sum of c * (c + 2 * o) over the parts of prompts, c tokens behind o
        computed or cached ones; below 0: `prefill_tokens * longest`. Weights are read once. Without prompt
        tokens this is `step_s`; it is never less than that.
        """
        if prefill_tokens <= 0.0:
            return self.step_s(batch, kv_tokens)
        if attended < 0.0:
            attended = prefill_tokens * longest
        better, mixed = self.better_prefill, self.mixed
        host_s = self.host_of_s(prompts + batch)
        # One block of threads runs through a context alone, however few tokens attend to it.
        chain_s = mixed.context_s * (attended / prefill_tokens + longest) / 2.0 if mixed is not None else 0.0
        if batch <= 0.0:
            if better is not None:
                return host_s + better.pass_s(prefill_tokens, prompts, attended, 0.0, 0.0, 0.0, chain_s)
            return host_s + self._paper_pass_s(prefill_tokens, prompts, longest) + self.k4
        if mixed is None:
            # A profile without mixed steps: the attention of decodes is taken to be so many times as long.
            decodes_s = self.k5 * kv_tokens + self.k7 * kv_tokens / batch
            decodes_s *= MIXED_DECODE_ATTENTION_FACTOR
            floor_s = self.k6 * batch + self.k8
        else:
            decodes_s = mixed.seconds(prefill_tokens, batch, kv_tokens)
            floor_s = 0.0
        if better is not None:
            seconds = better.pass_s(prefill_tokens, prompts, attended, batch, floor_s, decodes_s, chain_s)
        else:
            least_s = self.k4 if self.k4 > self.k8 else self.k8
            seconds = least_s + self._paper_pass_s(prefill_tokens, prompts, longest) + decodes_s
            if mixed is None:
                seconds += self.k6 * batch
        seconds += host_s
        if mixed is None:
            return seconds
        step_s = self.step_s(batch, kv_tokens)
        return seconds if seconds > step_s else step_s

    def _paper_pass_s(self, tokens: float, prompts: float, longest: float) -> float:
        """Seconds that prompt tokens add to a pass, by k1..k3."""
        return self.k1 * tokens + self.k2 * prompts + self.k3 * longest

    @property
    def mixed_term(self) -> MixedTerm:
        """The mixed term, or the rule of `mixed_step_s` for a profile without mixed steps, as a term."""
        if self.mixed is not None:
            return self.mixed
        factor = MIXED_DECODE_ATTENTION_FACTOR
        sequence_s = self.k6 if self.better_prefill is None else 0.0
        return MixedTerm(max(0.0, sequence_s), 0.0, max(0.0, factor * self.k5), max(0.0, factor * self.k7))

    def iteration_s(
        self,
        prefill_tokens: float,
        prompts: float,
        longest: float,
        batch: float,
        kv_tokens: float,
        attended: float = -1.0,
        rule: IterationRule = IterationRule.TOKEN,
    ) -> float:
        """Seconds of one engine iteration by `rule`: `mixed_step_s`, or the sum of the two pure steps."""
        if rule is IterationRule.SUM and prefill_tokens > 0.0:
            prefill_s = self.mixed_step_s(prefill_tokens, prompts, longest, 0.0, 0.0, attended)
            step_s = self.step_s(batch, kv_tokens)
            return prefill_s + step_s - self.host_s if step_s > 0.0 else prefill_s
        return self.mixed_step_s(prefill_tokens, prompts, longest, batch, kv_tokens, attended)

    # --- one request ---

    def joining_s(self, running_step_s: float, asynchronous: bool = True) -> float:
        """Expected seconds from when the server gets a request to the iteration that computes its prompt.

        For an engine with room. `running_step_s` is the iteration that runs there, 0 on an idle engine: half
        of it is left on average, and with asynchronous scheduling the next one is already fixed. To this
        `first_token_s` adds the iterations of the prompt itself.
        """
        return self.request_s + (1.5 if asynchronous else 0.5) * running_step_s

    def prefill_s(self, prompt_tokens: float, sequences: float = 1.0, cached_tokens: float = 0.0) -> float:
        """Seconds to prefill `sequences` prompts of `prompt_tokens` tokens each in one pass of their own.

        The first `cached_tokens` of each are in the prefix cache: attended to, not computed.
        """
        new = prompt_tokens - cached_tokens
        attended = sequences * new * (new + 2.0 * cached_tokens)
        return self.mixed_step_s(sequences * new, sequences, new, 0.0, 0.0, attended)

    def first_token_s(
        self,
        prompt_tokens: float,
        cached_tokens: float,
        pending_tokens: float,
        batch: float,
        kv_tokens: float,
        budget: float,
        sequences: float = 1.0,
    ) -> float:
        """Seconds until the first token of `sequences` prompts of `prompt_tokens` tokens each.

        `joining_s` comes before it. `cached_tokens` of each are in the prefix cache. `pending_tokens` of
        other prompts, taken to be like these, are read first; `batch` sequences decode beside them. An
        iteration computes at most `budget` tokens (`max_num_batched_tokens`), decodes included. For one
        prompt on an idle engine this is what `sim.engine_model` takes.
        """
        new = prompt_tokens - cached_tokens
        if new < 1.0:
            new = 1.0
        cached = prompt_tokens - new
        own = sequences * new
        total = pending_tokens + own
        part = budget - batch if budget - batch >= 1.0 else 1.0
        per_token = (own * (new + 2.0 * cached) + pending_tokens * prompt_tokens) / total
        if total <= part:
            return self.mixed_step_s(total, sequences, new, batch, kv_tokens, total * per_token)
        full = math.ceil(total / part) - 1.0
        read = full * part
        # One prompt alone: its parts attend to all before them; the sum over the full parts is exact.
        attended = part * (read + 2.0 * cached) if own >= total and sequences <= 1.0 else part * per_token
        full_s = 0.0
        if self.mixed is not None and full <= _EXACT_PARTS and sequences <= 1.0 and own >= total:
            i = 0.0
            while i < full:
                behind = part * (part + 2.0 * (cached + i * part))
                full_s += self.mixed_step_s(part, 1.0, part, batch, kv_tokens, behind)
                i += 1.0
        else:
            full_s = full * self.mixed_step_s(part, 1.0, part, batch, kv_tokens, attended)
        last = total - read
        attended = (
            last * (last + 2.0 * (cached + read)) if own >= total and sequences <= 1.0 else last * per_token
        )
        prompts = sequences if sequences * new <= last else last / new if last > new else 1.0
        longest = new if new < last else last
        return full_s + self.mixed_step_s(last, prompts, longest, batch, kv_tokens, attended)

    def answer_s(self, prompt_tokens: float, output_tokens: float, batch: float, kv_tokens: float) -> float:
        """Seconds to decode `output_tokens` more tokens of a sequence that holds `prompt_tokens` tokens.

        `batch` others, which hold `kv_tokens` together, decode beside it and stay as they are.
        """
        if output_tokens <= 0.0:
            return 0.0
        mean_context = prompt_tokens + (output_tokens + 1.0) / 2.0
        return output_tokens * self.step_s(batch + 1.0, kv_tokens + mean_context)

    # --- what one more request costs those that run there (the externality) ---

    def read_delay_s(
        self,
        prompt_tokens: float,
        cached_tokens: float,
        batch: float,
        kv_tokens: float,
        budget: float,
        sequences: float = 1.0,
    ) -> float:
        """Seconds by which prefilling these prompts delays each of `batch` decoding sequences."""
        if batch <= 0.0:
            return 0.0
        read_s = self.first_token_s(prompt_tokens, cached_tokens, 0.0, batch, kv_tokens, budget, sequences)
        new = prompt_tokens - cached_tokens
        tokens = sequences * (new if new >= 1.0 else 1.0)
        return delay_of_reading_s(read_s, tokens, batch, self.step_s(batch, kv_tokens), budget)

    def scaled(self, factor: float) -> LatencyModel:
        """The same engine, every duration multiplied by `factor`."""
        prefill, decode, mixed = self.better_prefill, self.better_decode, self.mixed
        return LatencyModel(
            self.k1 * factor,
            self.k2 * factor,
            self.k3 * factor,
            self.k4 * factor,
            self.k5 * factor,
            self.k6 * factor,
            self.k7 * factor,
            self.k8 * factor,
            better_prefill=None if prefill is None else prefill.scaled(factor),
            better_decode=None if decode is None else decode.scaled(factor),
            mixed=None if mixed is None else mixed.scaled(factor),
            host_s=self.host_s * factor,
            host_sequence_s=self.host_sequence_s * factor,
            request_s=self.request_s * factor,
            split_kv=None if self.split_kv is None else self.split_kv.scaled(factor),
        )


def corrected(
    k: LatencyModel,
    prefill: float = 1.0,
    mixed: float = 1.0,
    decode: float = 1.0,
    host_s: float = 0.0,
    request_s: float = 0.0,
) -> LatencyModel:
    """The model with factors on its parts, and seconds more of the host per iteration and request."""
    host_s += k.host_s
    better, table = k.better_prefill, k.better_decode
    if table is not None:
        table = table.scaled(decode)
        if host_s < 0.0:
            # Where the host takes less than the profile says, the steps' own times hold it.
            least_s = 0.1 * table.seconds[0]
            table = replace(table, seconds=tuple([max(least_s, each + host_s) for each in table.seconds]))
    return replace(
        k,
        k1=k.k1 * prefill,
        k2=k.k2 * prefill,
        k3=k.k3 * prefill,
        k4=k.k4 * prefill,
        k5=k.k5 * decode,
        k6=k.k6 * decode,
        k7=k.k7 * decode,
        k8=k.k8 * decode,
        better_prefill=None if better is None else better.scaled(prefill),
        better_decode=table,
        mixed=k.mixed if mixed == 1.0 else k.mixed_term.scaled(mixed),
        host_s=max(0.0, host_s),
        request_s=max(0.0, k.request_s + request_s),
        split_kv=None if k.split_kv is None else k.split_kv.scaled(decode),
    )


def delay_of_reading_s(read_s: float, tokens: float, batch: float, step_s: float, budget: float) -> float:
    """Seconds by which each of `batch` decoding sequences is delayed by prompts that take `read_s` to read.

    In the iterations that compute their `tokens` each sequence makes a step, otherwise of `step_s`.
    """
    part = budget - batch if budget - batch >= 1.0 else 1.0
    delay_s = read_s - math.ceil(tokens / part) * step_s
    return delay_s if delay_s > 0.0 else 0.0


#: Model of an instance without a profile until it has shown its speed: an 8B model at bf16 on
#: one 80 GB card, rounded. Only ratios between instances matter to a placement, and `core.instance`
#: corrects the factor from the first answers on.
DEFAULT_LATENCY = LatencyModel(k1=4e-5, k2=5e-4, k3=0.0, k4=1e-2, k5=3e-8, k6=3e-5, k7=0.0, k8=1e-2)


def ideal_batch(
    kv_cache_tokens: int, input_tokens: float, output_tokens: float, max_num_seqs: int | None
) -> int:
    """Copies of one request that fill the KV cache: `max(1, floor(kv / (I + O)))`, capped.

    Xiong et al., arXiv 2504.15303; the cap `max_num_seqs` is vLLM's own limit on a batch.
    """
    tokens = input_tokens + output_tokens
    fit = int(kv_cache_tokens / tokens) if tokens > 0 else kv_cache_tokens
    if max_num_seqs is not None and fit > max_num_seqs:
        fit = max_num_seqs
    return max(1, fit)


def processing_s(model: LatencyModel, batch: int, input_tokens: float, output_tokens: float) -> float:
    """One request's share of the time its ideal batch takes: `(T_prefill(b) + T_decode(b)) / b`, seconds."""
    total = model.paper_prefill_s(batch, input_tokens)
    if output_tokens > 0:
        total += model.paper_decode_s(batch, input_tokens, output_tokens)
    return total / batch
