"""Requests/s of one saturated engine that prefills, decodes, or does both, by its latency model.

Arithmetic alone (microseconds), and the same rules as `sim.engine`, which it is tested against: an
iteration computes at most `max_num_batched_tokens`, a batch holds at most `max_num_seqs` sequences and what
the KV cache has room for. With an SLO a batch is limited so that a token takes at most `tpot_s`, and a load
so that the mean time to first token stays below `ttft_s` (M/D/1: a wait of rho * s / (2 * (1 - rho)) before a
service of s).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hetlb.core.latency import LatencyModel
from hetlb.plan.disaggregation.cluster import Role, Slo, Workload
from hetlb.sim.engine import EngineLimits

#: Share of the KV cache that running sequences use on average: admission stops at the first that finds no
#: room.
_KV_SHARE = 0.97


def rate(role: Role, latency: LatencyModel, limits: EngineLimits, workload: Workload, slo: Slo) -> float:
    """Requests/s of an engine in this role; 0 where no load meets the SLO."""
    if role is Role.PREFILL:
        return prefill_rate(latency, limits, workload, slo)
    if role is Role.DECODE:
        return decode_rate(latency, limits, workload, slo)
    return both_rate(latency, limits, workload, slo)


def prefill_rate(latency: LatencyModel, limits: EngineLimits, workload: Workload, slo: Slo) -> float:
    """Requests/s of an engine that only prefills: full iterations of prompt tokens."""
    prompt, budget = workload.prompt_tokens, limits.max_num_batched_tokens
    tokens = min(float(budget), prompt * limits.max_num_seqs)
    prompts = max(1.0, tokens / prompt)
    attended = tokens * workload.attended / prompt
    full = tokens / prompt / latency.mixed_step_s(tokens, prompts, min(prompt, tokens), 0.0, 0.0, attended)
    service_s = latency.first_token_s(prompt, 0.0, 0.0, 0.0, 0.0, budget)
    return full * _load_within(slo.ttft_s, service_s)


def decode_rate(latency: LatencyModel, limits: EngineLimits, workload: Workload, slo: Slo) -> float:
    """Requests/s of an engine that only decodes: a full batch in every step."""
    context = workload.context_tokens

    def step_s(batch: float) -> float:
        return latency.step_s(batch, batch * context)

    batch = _largest_batch(_full_batch(limits, context), slo.tpot_s, step_s)
    return batch / (workload.output_tokens * step_s(batch)) if batch > 0 else 0.0


def both_rate(latency: LatencyModel, limits: EngineLimits, workload: Workload, slo: Slo) -> float:
    """Requests/s of an engine that does both: prompts are computed beside the decodes of others."""
    context, output = workload.context_tokens, workload.output_tokens

    def token_s(batch: float) -> float:
        """Seconds per output token of each of `batch` sequences."""
        return _request_s(latency, limits, workload, batch) * batch / output

    most = _largest_batch(_full_batch(limits, context), slo.tpot_s, token_s)
    if most <= 0:
        return 0.0
    throughput = 1.0 / _request_s(latency, limits, workload, most)
    if slo.ttft_s == math.inf:
        return throughput
    service_s = latency.first_token_s(
        workload.prompt_tokens, 0.0, 0.0, most, most * context, limits.max_num_batched_tokens
    )
    return min(throughput, _load_within(slo.ttft_s, service_s) / service_s)


def _request_s(latency: LatencyModel, limits: EngineLimits, workload: Workload, batch: float) -> float:
    """Seconds of the engine per request where `batch` sequences decode all the time."""
    prompt, output, budget = workload.prompt_tokens, workload.output_tokens, limits.max_num_batched_tokens
    # What prompts need beside the decodes may be more than fits: then fewer decode.
    batch = min(batch, budget / (1.0 + prompt / output))
    cached = batch * workload.context_tokens
    steps = output / batch
    room = max(1.0, budget - batch)
    parts = max(1.0, math.ceil(prompt / room)) if prompt / room > 1.0 else 1.0
    if parts <= steps:
        part = prompt / parts
        mixed_s = latency.mixed_step_s(part, 1.0, part, batch, cached, workload.attended / parts)
        return parts * mixed_s + (steps - parts) * latency.step_s(batch, cached)
    tokens = prompt / steps
    mixed_s = latency.mixed_step_s(
        tokens,
        max(1.0, 1.0 / steps),
        min(prompt, tokens),
        batch,
        cached,
        tokens * workload.attended / prompt,
    )
    return steps * mixed_s


def _full_batch(limits: EngineLimits, context: float) -> float:
    return min(float(limits.max_num_seqs), _KV_SHARE * limits.kv_cache_tokens / context)


def _largest_batch(most: float, limit_s: float, seconds: Callable[[float], float]) -> float:
    """The largest batch whose token takes at most `limit_s`; 0 where not even one does."""
    if most < 1.0:
        return 0.0
    if seconds(most) <= limit_s:
        return most
    if seconds(1.0) > limit_s:
        return 0.0
    low, high = 1.0, most
    for _ in range(12):
        middle = (low + high) / 2.0
        low, high = (middle, high) if seconds(middle) <= limit_s else (low, middle)
    return low


def _load_within(limit_s: float, service_s: float) -> float:
    """The highest load rho at which s + rho * s / (2 * (1 - rho)) stays within the limit, 0..1."""
    if limit_s == math.inf:
        return 1.0
    if limit_s <= service_s:
        return 0.0
    slack = 2.0 * (limit_s - service_s)
    return slack / (slack + service_s)
