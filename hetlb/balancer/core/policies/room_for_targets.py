"""Cost of missed targets, for the request and for running ones, and room left for tighter classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hetlb.balancer.core.forecast_errors import normal_quantile
from hetlb.balancer.core.policies.sight import KEPT_FREE, ROOM, SchedulingContext, Sight
from hetlb.balancer.core.protected import Protected

#: Longest wait of a request with targets to leave room for tighter classes, as a share of its TTFT target.
_PATIENCE_SHARE: Final = 0.3
#: Most first tokens of a tighter class that a prompt may be expected to delay, times the squared margin.
_MOST_LATE_TOKENS: Final = 0.25
#: Steps of the search for a batch.
_HALVINGS: Final = 6


def set_loss(ctx: SchedulingContext, each: Sight) -> None:
    """Set the expected loss by missed targets: the request's own, and of requests that run there."""
    lost_s = probability_of_miss(ctx, each) * stake_s(ctx, each) if ctx.request.service.stated else 0.0
    each.loss_s = lost_s + lost_by_others_s(ctx, each) if each.instance.stated_sequences else lost_s


def probability_of_miss(ctx: SchedulingContext, each: Sight) -> float:
    """Return the probability that the request misses a target there."""
    service, waited_s, errors = ctx.request.service, ctx.waited_s, each.instance.errors
    met = 1.0
    if service.ttft_s < math.inf:
        met *= 1.0 - errors.first_token.over((service.ttft_s - waited_s) / each.first_token_s)
    if service.tpot_s < math.inf and ctx.predicted_output > 1.0:
        met *= 1.0 - errors.step.over(service.tpot_s / each.step_s)
    if service.e2e_s < math.inf:
        met *= 1.0 - errors.end.over((service.e2e_s - waited_s) / each.end_s)
    return 1.0 - met


def stake_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds that a missed target costs: the answer's time over the share that may miss."""
    service = ctx.request.service
    first_s = service.ttft_s if service.ttft_s < math.inf else each.first_token_s
    step_s = service.tpot_s if service.tpot_s < math.inf else each.step_s
    return min(service.e2e_s, first_s + ctx.predicted_output * step_s) / (1.0 - service.attainment)


def _tightest(ctx: SchedulingContext) -> Protected | None:
    """Return the tightest class with targets that can be met, None if there is none."""
    for each in ctx.demand.protected:
        if not each.hopeless:
            return each
    return None


def lost_by_others_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds lost by requests with targets that run there and miss them because of this one."""
    protected, now_s = _tightest(ctx), each.seen.now_s
    # Requests with targets may run there for other models, or since before this process.
    if protected is None or protected.tpot_s == math.inf or now_s <= 0.0:
        return 0.0
    batch, output = each.load.batch, max(1.0, protected.output)
    sequences = ctx.request.sequences / each.own * batch
    # Half-grown in the mean, they are delayed by its prompt and by longer steps for the rest of their tokens.
    prompt_s = (each.others_s - each.slower_s) / sequences if sequences > 0.0 else 0.0
    left = min(ctx.predicted_output, output / 2.0)
    more_s = (max(0.0, prompt_s) + left * max(0.0, each.with_s - now_s)) / output
    step_s = now_s * each.step_s / each.with_s
    over = each.instance.errors.step.over
    missed = over(protected.tpot_s / (step_s + more_s)) - over(protected.tpot_s / step_s)
    lost_s = protected.output * protected.tpot_s / (1.0 - protected.attainment)
    return each.instance.stated_sequences * missed * lost_s


def keep_free(ctx: SchedulingContext, sights: Sequence[Sight]) -> bool:
    """Keep instances with room free for tighter classes, by their state. Return True if any is kept.

    The tightest class comes first. A request with targets leaves room only while it has time to wait.
    Background requests always leave room. A request without targets that is no background leaves none.
    """
    service, kept, rate = ctx.request.service, False, 0.0
    if not service.background and not service.stated:
        return False
    targets = min(service.ttft_s, service.e2e_s), service.tpot_s, service.e2e_s
    for protected in ctx.demand.protected:
        if not service.background and protected.tightness() >= targets:
            break
        if protected.hopeless or (not service.background and ctx.waited_s > _PATIENCE_SHARE * targets[0]):
            continue
        rate += protected.rate(ctx.now)
        if rate > 0.0:
            kept = _keep_free(ctx, sights, protected, rate) or kept
    return kept


def _keep_free(ctx: SchedulingContext, sights: Sequence[Sight], protected: Protected, rate: float) -> bool:
    """Keep instances free for `rate` requests/s of a class. Return True if any is kept.

    An instance is kept in either of two cases. First: with this request, all instances together would serve
    fewer requests of the class in time than are wanted. Wanted is the rate plus one deviation of the running
    answers, times the class's margin. Second: the request would be expected to delay more first tokens than
    `_MOST_LATE_TOKENS`.
    """
    answer_s = protected.output * protected.step_s
    wanted = rate
    if 0.0 < answer_s < math.inf:
        wanted += max(0.0, normal_quantile(protected.attainment)) * math.sqrt(rate / answer_s)
    wanted *= protected.margin
    served = [
        _served(each, protected, each.load.batch, each.seen.context, each.seen.kv_tokens) for each in sights
    ]
    total, kept = math.fsum(served), False
    for each, per_s in zip(sights, served, strict=True):
        # No request of the class comes while this one runs, or none is served here in time.
        if (
            each.state != ROOM
            or rate * each.end_s < 1.0 - protected.attainment
            or _served(each, protected, 0.0, 0.0, 0.0) <= 0.0
        ):
            continue
        tokens = each.seen.context + each.own * (ctx.prompt + ctx.predicted_output / 2.0)
        left = total - per_s
        left += _served(each, protected, each.load.batch + each.own, tokens, each.used_tokens)
        late_s = _first_token_beside_s(ctx, each, protected) - protected.ttft_s
        late = rate * late_s * (per_s / total if total > 0.0 else 1.0)
        if left < wanted or late * protected.margin * protected.margin > _MOST_LATE_TOKENS:
            each.state, kept = KEPT_FREE, True
    return kept


def _first_token_beside_s(ctx: SchedulingContext, each: Sight, protected: Protected) -> float:
    """Return the seconds until the first token of a request of a class that comes right after this one."""
    load = each.load
    pending = each.seen.unread + each.prompts * (ctx.prompt - each.cached)
    tokens = each.seen.context + each.own * ctx.prompt
    own_s = load.latency.first_token_s(
        protected.prompt, 0.0, pending, load.batch + each.own, tokens, load.budget
    )
    late = each.instance.errors.first_token.quantile(protected.attainment)
    return load.latency.joining_s(each.with_s, load.asynchronous) + own_s * late


def _served(each: Sight, protected: Protected, batch: float, tokens: float, used: float) -> float:
    """Return the requests/s of a class that an instance serves in time, given an engine's batch.

    All running requests with targets count as members of the class. The batch holds `tokens`; `used` tokens
    of the KV cache are taken. First tokens wait for a step and for prompts: if prompts of s seconds take a
    share rho of the time, a share rho exp(-2 (1 - rho) t / s) of them waits longer than t (heavy traffic,
    service times alike; Kingman 1961).
    """
    load, latency = each.load, each.load.latency
    context = max(1.0, protected.prompt + protected.output / 2.0)
    prefill_s = latency.prefill_s(max(1.0, protected.prompt))
    if prefill_s > protected.ttft_s:
        return 0.0
    own = each.instance.stated_sequences / load.engines
    own = own if own < batch else batch
    base, held = batch - own, tokens - own * context
    held = held if held > 0.0 else 0.0
    most = load.slots - base
    room = (load.kv_cache_tokens - used) / (load.engines * each.instance.capacity.needed(context)) + own
    most = room if room < most else most
    decoding = each.with_s / each.step_s if batch > 0.0 else 1.0  # the rest of its time goes to prompts
    limit_s = protected.step_s * decoding
    if batch > 0.0:  # errors seen beside background do not hold for an idle instance
        limit_s /= each.instance.errors.step.quantile(protected.attainment)
    low, high, late = 0.0, max(0.0, most), 1.0 - protected.attainment
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        step_s = latency.step_s(base + middle, held + middle * context)
        rho = middle * prefill_s / (protected.output * step_s / decoding + prefill_s)
        slack = (protected.ttft_s - step_s / decoding) / prefill_s - 1.0
        first_in_time = rho < 1.0 and slack >= 0.0 and rho * math.exp(2.0 * (rho - 1.0) * slack) <= late
        if first_in_time and step_s <= limit_s:
            low = middle
        else:
            high = middle
    step_s = latency.step_s(base + low, held + low * context) / decoding
    return load.engines * low / (protected.output * step_s + prefill_s)
