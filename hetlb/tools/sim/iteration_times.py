"""Seconds of an iteration of the simulated engine beyond what a scheduler asks of a latency model."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hetlb.balancer.core.latency import LatencyModel


class IterationRule(StrEnum):
    """Rule to combine the times of prefill and decode work in one iteration.

    `TOKEN` reads the weights once (5-8 % off measured mixed steps); `SUM` adds the two pure steps
    (21-27 % too long, since it reads them twice) and is kept as the paper's reading.
    """

    TOKEN = "token"
    SUM = "sum"


_SUM: Final = IterationRule.SUM


def iteration_s(
    latency: LatencyModel,
    rule: IterationRule,
    prefill_tokens: float,
    prompts: float,
    longest: float,
    batch: float,
    kv_tokens: float,
    attended: float = -1.0,
) -> float:
    """Return the seconds of one iteration by `rule`: `mixed_step_s`, or the sum of the two pure steps."""
    if rule is _SUM and prefill_tokens > 0.0:
        prefill_s = latency.mixed_step_s(prefill_tokens, prompts, longest, 0.0, 0.0, attended)
        step_s = latency.step_s(batch, kv_tokens)
        return prefill_s + step_s - latency.host_s if step_s > 0.0 else prefill_s
    return latency.mixed_step_s(prefill_tokens, prompts, longest, batch, kv_tokens, attended)


def growth_s(latency: LatencyModel, batch: float) -> float:
    """Return the seconds that one more token in the cache of each sequence adds to a step."""
    table = latency.better_decode
    return latency.k5 * batch + latency.k7 if table is None else table.growth_s(batch)


def uneven_s(latency: LatencyModel, batch: float, kv_tokens: float, longest: float) -> float:
    """Return the seconds that one context of `longest` tokens adds to a step, if known."""
    split = latency.split_kv
    if split is None or batch <= 0.0:
        return 0.0
    more_s = split.seconds(batch, longest) - latency.step_line(batch)[1] * kv_tokens
    return more_s if more_s > 0.0 else 0.0
