"""Measured forms of step times: a prefill pass, a decode step over the batch, mixed steps, split contexts.

`LatencyModel` chooses between these and the paper's terms. Times are seconds, lengths tokens; all is pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.pickle_by_fields import PickleByFields, check_numbers

#: Largest batch found without a search.
_MOST_BATCHES: Final = 1024


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
    """First cells of the axes of a grid, and its least factor. They are derived from the other fields."""

    __slots__ = ("_first_batches", "_first_lengths", "least")

    _first_batches: _Cell
    _first_lengths: _Cell
    least: float

    def _cut(self, batches: tuple[int, ...], lengths: tuple[int, ...], least: float) -> None:
        object.__setattr__(self, "least", least)
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
        self._cut(self.batches, self.lengths, math.exp(min([min(row) for row in self.log_ratio])))

    def factor(self, batch: float, length: float) -> float:
        """Return measured / predicted at a point; beyond the grid, at its edge."""
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
    """Return the cell that holds `value` and how far in it lies (0..1, in logarithms)."""
    if value <= cell.low:
        return 0, 0.0
    # An axis has a dozen points: with plain numbers that is sooner done than a search by halves.
    while cell.high <= value:
        if cell.above is None:
            return cell.index, 1.0
        cell = cell.above
    return cell.index, math.log(value / cell.low) / cell.log_width


def in_tiles(tokens: float, tile: float) -> float:
    """Return the tokens that a dense kernel computes: whole tiles, of half the size where at most two."""
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
        check_numbers(self, 0.0, "floor_s", "token_s", "attention_s")
        check_numbers(self, 1.0, "p")

    def prefill_s(self, batch: float, input_tokens: float) -> float:
        """Return the seconds to prefill `batch` prompts of `input_tokens` tokens each in one forward pass."""
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
        """Return the seconds of a pass over `tokens` of `prompts` prompts, beside `decodes` single tokens.

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

    @property
    def least_token_s(self) -> float:
        """Seconds that each prompt token takes in a pass at least."""
        return self.token_s if self.grid is None else self.token_s * self.grid.least

    @property
    def least_pass_s(self) -> float:
        """Seconds that a pass takes at least, however few tokens it has."""
        return self.floor_s if self.grid is None else self.floor_s * self.grid.least


#: Exponent that joins launching and computing, which overlap but for the ends of kernels. Fitted on passes of
#: two models on B300 (vLLM 0.20.1).
LAUNCH_EXPONENT: Final = 2.4


@dataclass(frozen=True, slots=True)
class LaunchTime(PickleByFields):
    """Seconds of the host to launch the kernels of a pass that prefills.

    Up to `graph_tokens` tokens vLLM replays CUDA graphs of all but attention: `graph_s`. Beyond, each kernel
    is launched by itself: `eager_s`. A pass takes the longer of launching and computing, with a soft corner.
    """

    graph_tokens: float
    graph_s: float
    eager_s: float

    def __post_init__(self) -> None:
        check_numbers(self, 0.0, "graph_tokens", "graph_s", "eager_s")

    def pass_s(self, computing_s: float, tokens: float) -> float:
        """Return the seconds of a pass over `tokens` tokens with kernels of `computing_s`."""
        launching_s = self.graph_s if tokens <= self.graph_tokens else self.eager_s
        low, high = (launching_s, computing_s) if launching_s < computing_s else (computing_s, launching_s)
        if low <= 0.0:
            return high
        return high * math.pow(1.0 + math.pow(low / high, LAUNCH_EXPONENT), 1.0 / LAUNCH_EXPONENT)


@mypyc_attr(acyclic=True)
class _Piece:
    """Line of a `DecodeTable` up to `high`, from `seconds` at `low` by `rise_s` over `width`."""

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
    """Lines of a table: for each whole number up to `_end` the first whose `high` is not below it."""

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
            found += [piece] * (min(batch, _MOST_BATCHES) + 1 - len(found))
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
        check_numbers(self, 0.0, "token_s", "context_s")
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
        """Return the seconds of one step of `batch` sequences, and the seconds more per token they hold."""
        pieces = self._pieces
        piece = pieces[int(batch)] if batch < self._end else pieces[-1]
        while piece.high < batch:  # once at most, as points are whole numbers, but for very large ones
            assert piece.above is not None
            piece = piece.above
        own_s = piece.seconds + (batch - piece.low) * piece.rise_s / piece.width
        return own_s, self.token_s + self.context_s / batch

    def growth_s(self, batch: float) -> float:
        """Return the seconds that one more token for each sequence adds to a step."""
        return self.token_s * batch + self.context_s

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Return the seconds of one step of `batch` sequences that hold `kv_tokens` together."""
        own_s, token_s = self.step_line(batch)
        return own_s + token_s * kv_tokens


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
        check_numbers(self, 0.0, "sequence_s", "pair_s", "token_s", "context_s")

    def seconds(self, tokens: float, batch: float, kv_tokens: float) -> float:
        """Return the seconds for `batch` decodes over `kv_tokens` beside `tokens` prompt tokens."""
        shared_s = self.token_s * kv_tokens
        alone_s = self.context_s * kv_tokens / batch
        return (self.sequence_s + self.pair_s * tokens) * batch + (
            shared_s if shared_s > alone_s else alone_s
        )

    def chain_s(self, tokens: float) -> float:
        """Return the seconds of one block of threads for a context."""
        return self.context_s * tokens


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
        """Return the least seconds of attention in a step of `batch` sequences, the longest of `longest`."""
        padded = math.ceil(batch / 8.0) * 8.0 if batch > 4.0 else math.ceil(batch)
        splits = math.floor(self.blocks / padded)
        return self.context_s * longest / (splits if splits > 1.0 else 1.0)
