"""Cost of missed targets: the request's own, those of requests that run, and the room kept free for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetlb.balancer.core.demand import Costs, Protected
from hetlb.balancer.core.forecast_errors import normal_quantile
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.sight import SchedulingContext, Sight


def probability_of_miss(ctx: SchedulingContext, each: Sight) -> float:
    """Probability that the request misses a target there."""
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
    """Seconds that a missed target costs: those of the answer, at the attainment as many as it takes."""
    service = ctx.request.service
    first_s = service.ttft_s if service.ttft_s < math.inf else each.first_token_s
    step_s = service.tpot_s if service.tpot_s < math.inf else each.step_s
    return min(service.e2e_s, first_s + ctx.predicted_output * step_s) / (1.0 - service.attainment)


def lost_by_others_s(ctx: SchedulingContext, each: Sight) -> float:
    """Seconds lost by requests with targets that run there and miss them because of this one."""
    protected = ctx.demand.protected
    now_s = each.seen.now_s
    if protected.tpot_s == math.inf or now_s <= 0.0:
        return 0.0
    batch, output = each.load.batch, max(1.0, protected.output)
    sequences = ctx.request.sequences / each.own * batch
    # Half-grown in the mean, they are delayed by its prompt and by longer steps for what is left.
    prompt_s = (each.others_s - each.joining_s(ctx.predicted_output)) / sequences if sequences > 0.0 else 0.0
    left = min(ctx.predicted_output, output / 2.0)
    more_s = (max(0.0, prompt_s) + left * max(0.0, each.with_s - now_s)) / output
    step_s = now_s * each.step_s / each.with_s
    over = each.instance.errors.step.over
    missed = over(protected.tpot_s / (step_s + more_s)) - over(protected.tpot_s / step_s)
    lost_s = protected.output * protected.tpot_s / (1.0 - protected.attainment)
    return each.instance.stated_sequences * missed * lost_s


def shares_of_targets(
    protected: Protected, instances: Sequence[Instance], costs: Sequence[Costs]
) -> list[float]:
    """Share of the requests with targets that come to each instance, by its speed among those in time."""
    context = protected.prompt + protected.output / 2.0
    speed = 0.0
    for instance, cost in zip(instances, costs, strict=True):
        latency = instance.latency
        in_time = latency.prefill_s(max(1.0, protected.prompt)) <= protected.ttft_s
        if in_time and latency.step_s(1.0, context) <= protected.tpot_s:
            speed += cost.speed
    return [cost.speed / speed if speed > 0.0 else 0.0 for cost in costs]


def leaves_room(ctx: SchedulingContext, each: Sight, share: float) -> bool:
    """Return True if requests with targets still meet them there beside this one of the background.

    A `share` of them comes, as many at once as all but a part of 1 - attainment of Poisson arrivals make.
    Forecasts count at the quantile of their errors at that attainment.
    """
    load, latency, seen = each.load, each.load.latency, each.seen
    protected, now = ctx.demand.protected, ctx.now
    rate = protected.rate(now)
    # None is expected while this one runs.
    if not each.instance.stated_sequences and rate * each.end_s < 1.0 - protected.attainment:
        return True
    slow = each.instance.errors.step.quantile(protected.attainment)
    late = each.instance.errors.first_token.quantile(protected.attainment)
    context = protected.prompt + protected.output / 2.0
    idle_s = latency.joining_s(0.0, load.asynchronous) + latency.prefill_s(max(1.0, protected.prompt))
    never = latency.step_s(1.0, context) * slow > protected.tpot_s or idle_s * late > protected.ttft_s
    if never or share <= 0.0:
        return True  # no request with targets is served here in time
    rate *= share / load.engines
    z = normal_quantile(protected.attainment)

    def most(mean: float) -> float:
        return mean + z * math.sqrt(mean)

    step_s = protected.tpot_s / slow if protected.tpot_s < math.inf else each.step_s
    to_come = max(0.0, most(rate * protected.output * step_s) - each.instance.stated_sequences / load.engines)
    batch = load.batch + each.own + to_come
    used = each.used_tokens + to_come * load.engines * each.instance.needed(context)
    if batch > load.slots or used > load.kv_cache_tokens:
        return False
    prompt = float(ctx.request.prompt_tokens)
    tokens = seen.context + each.own * (prompt + ctx.predicted_output / 2.0) + to_come * context
    decoding = each.with_s / each.step_s  # the rest of its time goes to prompts to come
    if latency.step_s(batch, tokens) / decoding * slow > protected.tpot_s:
        return False
    if protected.ttft_s == math.inf:
        return True
    pending = seen.pending + each.prompts * (prompt - each.cached)
    pending += max(0.0, most(rate * protected.ttft_s) - 1.0) * protected.prompt
    first_s = latency.joining_s(each.with_s, load.asynchronous) + latency.first_token_s(
        protected.prompt, 0.0, pending, batch, tokens, load.budget
    )
    return first_s * late <= protected.ttft_s
