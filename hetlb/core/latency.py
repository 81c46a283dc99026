"""How long an engine takes: the latency model of one vLLM instance, in seconds.

Equations from Xiong et al., arXiv 2504.15303: a batch of B requests of I input tokens is prefilled in
`k1*B*I + k2*B + k3*I + k4`; a decode step of B requests with c cached tokens each takes
`k5*B*c + k6*B + k7*c + k8`. The paper's two formulas are what the scheduler and static search use;
`iteration_s` is what an engine model uses for one iteration that mixes both kinds of work; it, and only
it, uses the better form of prefill where a profile carries one (`PnormPrefill`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from hetlb.core.values import Value


class IterationRule(StrEnum):
    """How the time of an iteration that holds both prefill and decode work is put together.

    `TOKEN` reads the weights once (5-8 % off measured mixed steps); `SUM` adds the two pure steps
    (21-27 % too long, since it reads them twice) and is kept as the paper's reading.
    """

    TOKEN = "token"
    SUM = "sum"


#: Factor on the attention part of decodes that share an iteration with prefill work (`IterationRule.TOKEN`).
MIXED_DECODE_ATTENTION_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True)
class PrefillGrid(Value):
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

    def factor(self, batch: float, length: float) -> float:
        """Measured / predicted at a point; beyond the grid that of its edge."""
        i, u = _position(self.batches, batch)
        j, v = _position(self.lengths, length)
        low, high = self.log_ratio[i], self.log_ratio[i + 1]
        at_low = low[j] + v * (low[j + 1] - low[j])
        at_high = high[j] + v * (high[j + 1] - high[j])
        return math.exp(at_low + u * (at_high - at_low))


def _position(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """The cell that holds `value` and how far in it lies, 0..1 in logarithms."""
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 2, 1.0
    i = bisect_right(axis, value) - 1
    return i, math.log(value / axis[i]) / math.log(axis[i + 1] / axis[i])


@dataclass(frozen=True, slots=True)
class PnormPrefill(Value):
    """Prefill as `(floor^p + (a*N*L)^p)^(1/p) + b*N*L^2`, times a measured correction if there is a grid.

    A pass takes the time to read the weights (`floor_s`) or to compute its tokens (`token_s` = a each),
    whichever is longer, with a soft corner (`p`); attention adds `attention_s` = b per token squared.
    """

    floor_s: float
    token_s: float
    attention_s: float
    p: float
    grid: PrefillGrid | None = None

    def __post_init__(self) -> None:
        for name, least in (("floor_s", 0.0), ("token_s", 0.0), ("attention_s", 0.0), ("p", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}: expected a number from {least:g}, got {value}")

    def prefill_s(self, batch: float, input_tokens: float) -> float:
        """Seconds to prefill `batch` prompts of `input_tokens` tokens each in one forward pass."""
        return self.pass_s(batch * input_tokens, batch, input_tokens)

    def pass_s(
        self, tokens: float, prompts: float, longest: float, decodes: int = 0, floor_s: float = 0.0
    ) -> float:
        """Seconds of a pass over `tokens` prompt tokens of `prompts` prompts, beside `decodes` single tokens.

        It takes `floor_s` at least, where that is more than the form's own floor.
        """
        floor = max(self.floor_s, floor_s)
        rate = self.token_s * (tokens + decodes)
        low, high = (floor, rate) if floor < rate else (rate, floor)
        dense = high * (1.0 + (low / high) ** self.p) ** (1.0 / self.p) if high > 0 else 0.0
        seconds = dense + self.attention_s * tokens * longest
        if self.grid is None:
            return seconds
        return max(floor_s, seconds * self.grid.factor(prompts, tokens / prompts))

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
        return replace(
            self,
            floor_s=self.floor_s * factor,
            token_s=self.token_s * factor,
            attention_s=self.attention_s * factor,
        )


@dataclass(frozen=True, slots=True)
class LatencyModel(Value):
    """The eight constants k1..k8. Units: seconds, tokens, requests.

    `better_prefill` is what `iteration_s` takes for prompts instead of k1..k4, where it is known.
    `prefill_s`, `decode_step_s` and `decode_s` are always k1..k8.
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

    def __post_init__(self) -> None:
        for index in range(1, 9):
            value = getattr(self, f"k{index}")
            if not math.isfinite(value):
                raise ValueError(f"k{index}: expected a finite number, got {value}")

    def prefill_s(self, batch: float, input_tokens: float) -> float:
        """Seconds to prefill `batch` requests of `input_tokens` tokens each in one forward pass."""
        return self.k1 * batch * input_tokens + self.k2 * batch + self.k3 * input_tokens + self.k4

    def decode_step_s(self, batch: float, cached_tokens: float) -> float:
        """Seconds of one decode step of `batch` requests with `cached_tokens` tokens in the cache each."""
        return self.k5 * batch * cached_tokens + self.k6 * batch + self.k7 * cached_tokens + self.k8

    def decode_s(self, batch: float, input_tokens: float, output_tokens: float) -> float:
        """Seconds to decode `output_tokens` tokens for each of `batch` requests of `input_tokens` tokens.

        The closed form of `sum over j = 1..O of decode_step_s(B, I + j)`; O may be fractional, since a
        predicted length is an expectation.
        """
        cached_sum = output_tokens * input_tokens + output_tokens * (output_tokens + 1.0) / 2.0
        return output_tokens * (self.k6 * batch + self.k8) + (self.k5 * batch + self.k7) * cached_sum

    def iteration_s(
        self,
        *,
        prefill_tokens: int,
        prefill_requests: int,
        longest_prefill: int,
        decodes: int,
        cached_tokens: int,
        rule: IterationRule = IterationRule.TOKEN,
    ) -> float:
        """Seconds of one engine iteration.

        It computes `prefill_tokens` prompt tokens of `prefill_requests` prompts (the longest part being
        `longest_prefill`) and one token for each of `decodes` requests, which together hold
        `cached_tokens` tokens in the cache. Pure iterations take what was fitted.
        """
        better = self.better_prefill
        if better is not None and prefill_tokens > 0:
            return self._better_iteration_s(
                better, prefill_tokens, prefill_requests, longest_prefill, decodes, cached_tokens, rule
            )
        prefill = self.k1 * prefill_tokens + self.k2 * prefill_requests + self.k3 * longest_prefill
        if decodes == 0:
            return prefill + self.k4
        attention = self.k5 * cached_tokens + self.k7 * cached_tokens / decodes
        if prefill_tokens == 0:
            return attention + self.k6 * decodes + self.k8
        if rule is IterationRule.SUM:
            return prefill + self.k4 + attention + self.k6 * decodes + self.k8
        return max(self.k4, self.k8) + prefill + self.k6 * decodes + MIXED_DECODE_ATTENTION_FACTOR * attention

    def _better_iteration_s(
        self,
        better: PnormPrefill,
        tokens: int,
        prompts: int,
        longest: int,
        decodes: int,
        cached_tokens: int,
        rule: IterationRule,
    ) -> float:
        """An iteration with prompt tokens, by the better form. `TOKEN`: dense work over all tokens."""
        if decodes == 0:
            return better.pass_s(tokens, prompts, longest)
        attention = self.k5 * cached_tokens + self.k7 * cached_tokens / decodes
        step = self.k6 * decodes + self.k8
        if rule is IterationRule.SUM:
            return better.pass_s(tokens, prompts, longest) + attention + step
        return (
            better.pass_s(tokens, prompts, longest, decodes, step) + MIXED_DECODE_ATTENTION_FACTOR * attention
        )

    def scaled(self, factor: float) -> LatencyModel:
        """The same engine, every duration multiplied by `factor`."""
        better = self.better_prefill
        model = LatencyModel(*(getattr(self, f"k{index}") * factor for index in range(1, 9)))
        return replace(model, better_prefill=better.scaled(factor)) if better is not None else model


#: What an instance without a profile is taken for until it has shown its speed: an 8B model at bf16 on
#: one 80 GB card, rounded. Only ratios between instances matter to a placement, and `core.instance`
#: corrects the factor from the first answers on.
DEFAULT_LATENCY = LatencyModel(k1=4e-5, k2=5e-4, k3=0.0, k4=1e-2, k5=3e-8, k6=3e-5, k7=0.0, k8=1e-2)


def ideal_batch(
    kv_cache_tokens: int, input_tokens: float, output_tokens: float, max_num_seqs: int | None
) -> int:
    """How many copies of one request fill the KV cache: `max(1, floor(kv / (I + O)))`, capped.

    Xiong et al., arXiv 2504.15303; the cap `max_num_seqs` is vLLM's own limit on a batch.
    """
    tokens = input_tokens + output_tokens
    fit = int(kv_cache_tokens / tokens) if tokens > 0 else kv_cache_tokens
    if max_num_seqs is not None and fit > max_num_seqs:
        fit = max_num_seqs
    return max(1, fit)


def processing_s(model: LatencyModel, batch: int, input_tokens: float, output_tokens: float) -> float:
    """One request's share of the time its ideal batch takes: `(T_prefill(b) + T_decode(b)) / b`, seconds."""
    total = model.prefill_s(batch, input_tokens)
    if output_tokens > 0:
        total += model.decode_s(batch, input_tokens, output_tokens)
    return total / batch
