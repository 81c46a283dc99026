"""Terms of the score of `hetlb`: a function each, in seconds; the score is their sum, each times its weight.

A new term is a function here or in a file of its own, a field of `Sight`, a row of `TERMS` and a line of
`rate`. It reads the sight and the context and changes nothing.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from hetlb.core.demand import size_of
from hetlb.core.policies.answered import later_s
from hetlb.core.policies.sight import SchedulingContext, Sight
from hetlb.core.policies.targets import lost_by_others_s, probability_of_miss, stake_s


class Term(NamedTuple):
    """One term of the score: a field of `Sight` in seconds, its weight, its meaning."""

    name: str
    weight: float
    meaning: str


#: `policy.weights` of the fleet file changes a weight. The first is that of a class without targets
#: (`first_token_weight`), and 0 for requests with targets; that of `shared_s` is at most the first two.
TERMS: Final = (
    Term("first_token_s", 20.0, "until the first token"),
    Term("own_s", 1.0, "until the whole answer, at the steps of now"),
    Term("others_s", 1.0, "added to the answers that run there, all together"),
    Term("loss_s", 1.0, "lost by targets that are missed, its own and those of requests that run there"),
    Term("shared_s", 21.0, "less: of its prefill what others that share the beginning of its prompt pay"),
    Term("adapter_s", 21.0, "until its LoRA adapter has a slot"),
    Term("finish_s", 60.0, "by which all that waits is done later, once no more requests come"),
    Term("later_s", 21.0, "by which an answer that ends well is later: tries are lost, tokens overdue"),
)


def rate(ctx: SchedulingContext, each: Sight, weights: tuple[float, ...]) -> None:
    """Set the forecast, the terms and the score of an instance."""
    each.foresee(ctx)
    each.own_s = own_s(ctx, each)
    each.loss_s = loss_s(ctx, each)
    each.shared_s = shared_s(ctx, each)
    each.adapter_s = adapter_s(ctx, each)
    each.finish_s = finish_s(ctx, each)
    each.later_s = later_s(each)
    each.score = (
        weights[0] * each.first_token_s
        + weights[1] * each.own_s
        + weights[2] * each.others_s
        + weights[3] * each.loss_s
        + weights[4] * each.shared_s
        + weights[5] * each.adapter_s
        + weights[6] * each.finish_s
        + weights[7] * each.later_s
    )
    each.rated = True


def weights_of(ctx: SchedulingContext, weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return the weights for a request: targets take the place of the first, a class may state it."""
    service = ctx.request.service
    if service.stated or service.background:
        weights = (0.0, *weights[1:])
    elif service.first_token_weight is not None:
        weights = (service.first_token_weight, *weights[1:])
    if weights[4] > weights[0] + weights[1]:  # no more is taken off a prefill than it counts
        weights = (*weights[:4], weights[0] + weights[1], *weights[5:])
    return weights


def own_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds until the whole answer, at the steps of the batch that it joins."""
    return each.first_token_s + ctx.predicted_output * each.with_s


def loss_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the expected loss by missed targets: its own, and of requests with targets that run there."""
    lost_s = 0.0
    if ctx.request.service.stated:
        lost_s = probability_of_miss(ctx, each) * stake_s(ctx, each)
    return lost_s + lost_by_others_s(ctx, each) if each.instance.stated_sequences else lost_s


def shared_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return what others pay of its prefill that share the beginning of its prompt, as less than 0."""
    if not each.credit:
        return 0.0
    seen, load = each.seen, each.load
    paid_s = seen.joining_s + load.latency.first_token_s(
        ctx.prompt,
        each.cached + each.credit,
        seen.unread,
        load.batch,
        seen.context,
        load.budget,
        each.prompts,
    )
    return paid_s - each.first_token_s


def adapter_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds until the request's LoRA adapter has a slot there."""
    adapters = each.instance.adapters
    if adapters is None or ctx.adapter_load_s <= 0.0:
        return 0.0
    return adapters.cost_s(ctx.request.model, ctx.adapter_load_s, ctx.mean_output / 2.0 * each.seen.now_s)


def finish_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds by which the faster instances are done before this one, 0 while requests come.

    This one is done with one long answer, and with all that it has, half of it done, at full speed.
    """
    if each.done_s == math.inf:
        return 0.0
    busy_s = long_answer_s(ctx, each)
    size = size_of(ctx.request, ctx.predicted_output) + ctx.demand.mix.size * each.seen.running / 2.0
    all_s = size / each.cost.speed
    late_s = (busy_s if busy_s > all_s else all_s) - each.done_s
    return late_s if late_s > 0.0 else 0.0


def long_answer_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds that one long answer takes on an instance, at the steps of now."""
    load, long = each.load, ctx.long_output
    context = each.seen.context + ctx.prompt + long / 2.0
    return each.first_token_s + long * (load.next_step_s + load.next_token_s * context)
