"""How long an engine takes: the linear latency model of one vLLM instance, in seconds.

Equations from Xiong et al., arXiv 2504.15303: a batch of B requests of I input tokens is prefilled in
`k1*B*I + k2*B + k3*I + k4`; a decode step of B requests with c cached tokens each takes
`k5*B*c + k6*B + k7*c + k8`. The paper's two formulas are what the scheduler and static search use;
`iteration_s` is what an engine model uses for one iteration that mixes both kinds of work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class IterationRule(StrEnum):
    """How the time of an iteration that holds both prefill and decode work is put together.

    `TOKEN` reads the weights once (5-8 % off measured mixed steps); `SUM` adds the two pure steps
    (21-27 % too long, since it reads them twice) and is kept as the paper's reading.
    """

    TOKEN = "token"
    SUM = "sum"


#: Factor on the attention part of decodes that share an iteration with prefill work (`IterationRule.TOKEN`).
MIXED_DECODE_ATTENTION_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The eight constants k1..k8. Units: seconds, tokens, requests."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float
    k6: float
    k7: float
    k8: float

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
        prefill = self.k1 * prefill_tokens + self.k2 * prefill_requests + self.k3 * longest_prefill
        if decodes == 0:
            return prefill + self.k4
        attention = self.k5 * cached_tokens + self.k7 * cached_tokens / decodes
        if prefill_tokens == 0:
            return attention + self.k6 * decodes + self.k8
        if rule is IterationRule.SUM:
            return prefill + self.k4 + attention + self.k6 * decodes + self.k8
        return max(self.k4, self.k8) + prefill + self.k6 * decodes + MIXED_DECODE_ATTENTION_FACTOR * attention

    def scaled(self, factor: float) -> LatencyModel:
        """The same engine, every duration multiplied by `factor`."""
        return LatencyModel(*(getattr(self, f"k{index}") * factor for index in range(1, 9)))


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
