"""Requests/s of one saturated engine that prefills, decodes, or does both, by its latency model.

Arithmetic alone (microseconds), and the same rules as `sim.engine_model`, which it is tested against: an
iteration computes at most `max_num_batched_tokens`, a batch holds at most `max_num_seqs` sequences and what
the KV cache has room for. With an SLO a batch is limited so that a token takes at most `tpot_s`, and a load
so that the mean time to first token stays below `ttft_s` (M/D/1: a wait of rho * s / (2 * (1 - rho)) before a
service of s).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.plan.disaggregation.split_cluster import RequestLengths, Role, Slo
from hetlb.tools.sim.engine_limits import EngineLimits


def rate(
    role: Role, latency: LatencyModel, limits: EngineLimits, workload: RequestLengths, slo: Slo
) -> float:
    """Return the requests/s of an engine in this role; 0 if no load meets the SLO."""
    if role is Role.PREFILL:
        return prefill_rate(latency, limits, workload, slo)
    if role is Role.DECODE:
        return decode_rate(latency, limits, workload, slo)
    return both_rate(latency, limits, workload, slo)


def prefill_rate(latency: LatencyModel, limits: EngineLimits, workload: RequestLengths, slo: Slo) -> float:
    """Return the requests/s of an engine that only prefills: full iterations of prompt tokens."""
    prompt, budget = workload.prompt_tokens, limits.max_num_batched_tokens
    tokens = min(float(budget), prompt * limits.max_num_seqs)
    prompts = max(1.0, tokens / prompt)
    attended = tokens * workload.attended / prompt
    full = tokens / prompt / latency.mixed_step_s(tokens, prompts, min(prompt, tokens), 0.0, 0.0, attended)
    service_s = latency.first_token_s(prompt, 0.0, 0.0, 0.0, 0.0, budget)
    return full * _load_within(slo.ttft_s, service_s)


def decode_rate(latency: LatencyModel, limits: EngineLimits, workload: RequestLengths, slo: Slo) -> float:
    """Return the requests/s of an engine that only decodes: a full batch in every step."""
    context = workload.context_tokens

    def step_s(batch: float) -> float:
        return latency.step_s(batch, batch * context)

    batch = _largest_batch(_full_batch(limits, workload), slo.tpot_s, step_s)
    return batch / (workload.output_tokens * step_s(batch)) if batch > 0 else 0.0


def both_rate(latency: LatencyModel, limits: EngineLimits, workload: RequestLengths, slo: Slo) -> float:
    """Return requests/s of an engine that does both: prompts are computed beside the decodes of others."""
    context, output = workload.context_tokens, workload.output_tokens

    def token_s(batch: float) -> float:
        """Return the seconds per output token of each of `batch` sequences."""
        return _request_s(latency, limits, workload, batch) * batch / output

    most = _largest_batch(_full_batch(limits, workload), slo.tpot_s, token_s)
    if most <= 0:
        return 0.0
    throughput = 1.0 / _request_s(latency, limits, workload, most)
    if slo.ttft_s == math.inf:
        return throughput
    service_s = latency.first_token_s(
        workload.prompt_tokens, 0.0, 0.0, most, most * context, limits.max_num_batched_tokens
    )
    return min(throughput, _load_within(slo.ttft_s, service_s) / service_s)


def _request_s(latency: LatencyModel, limits: EngineLimits, workload: RequestLengths, batch: float) -> float:
    """Return the seconds of the engine per request if `batch` sequences decode all the time."""
    prompt, output, budget = workload.prompt_tokens, workload.output_tokens, limits.max_num_batched_tokens
    # What prompts need beside the decodes may be more than fits: then fewer decode.
    batch = min(batch, budget / (1.0 + prompt / output))
    cached, room = batch * workload.context_tokens, max(1.0, budget - batch)
    arriving = batch / output  # prompts per iteration, as many as answers end

    def iteration_s(tokens: float) -> float:
        if tokens <= 0.0:
            return latency.step_s(batch, cached)
        attended = tokens * workload.attended / prompt
        prompts = max(1.0, tokens / prompt)
        return latency.mixed_step_s(tokens, prompts, min(prompt, tokens), batch, cached, attended)

    # Answers end at random: the prompts that begin with an iteration are Poisson, what exceeds the room is
    # left to later ones, and the time is convex in the tokens.
    loads = _token_loads(arriving, prompt, room)
    return math.fsum(share * iteration_s(tokens) for tokens, share in loads) / arriving


def _token_loads(arriving: float, prompt: float, room: float) -> list[tuple[float, float]]:
    """Return the prompt tokens of an iteration with their shares: Poisson prompts, cut at the room."""
    wanted = arriving * prompt
    low, high = arriving, arriving
    while _mean(_cut_poisson(high, prompt, room)) < 0.995 * wanted and high < 64.0:
        low, high = high, high * 1.5 + 0.5
    for _ in range(8):
        middle = (low + high) / 2.0
        if _mean(_cut_poisson(middle, prompt, room)) < 0.995 * wanted:
            low = middle
        else:
            high = middle
    return _cut_poisson(high, prompt, room)


def _cut_poisson(mean: float, prompt: float, room: float) -> list[tuple[float, float]]:
    """Return (tokens, share) for 0, 1, ... prompts; all that would exceed the room in the last entry."""
    found, weight, left, number = [], math.exp(-mean), 1.0, 0
    while number * prompt < room and left > 1e-3:
        found.append((number * prompt, weight))
        left -= weight
        number += 1
        weight *= mean / number
    found.append((min(room, number * prompt), max(0.0, left)))
    return found


def _mean(loads: list[tuple[float, float]]) -> float:
    return math.fsum(tokens * share for tokens, share in loads)


def _full_batch(limits: EngineLimits, workload: RequestLengths) -> float:
    """Return the number of sequences that run at once without preemption: each has room to its end."""
    return limits.batch_of(workload.final_tokens)


def _largest_batch(most: float, limit_s: float, seconds: Callable[[float], float]) -> float:
    """Return the largest batch with at most `limit_s` per token; 0 if even one sequence takes longer."""
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
    """Return the highest load rho, 0..1, such that s + rho * s / (2 * (1 - rho)) stays within the limit."""
    if limit_s == math.inf:
        return 1.0
    if limit_s <= service_s:
        return 0.0
    slack = 2.0 * (limit_s - service_s)
    return slack / (slack + service_s)
