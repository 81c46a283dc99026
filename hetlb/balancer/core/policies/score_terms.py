"""Terms of the score of `hetlb`: a function each, in seconds; the score is their sum, each times its weight.

A new term is a function here or in a file of its own, a field of `Sight`, a row of `TERMS` and a line of
`rate`. It reads the sight and the context and changes nothing.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.sight import SchedulingContext, Sight
from hetlb.balancer.core.policies.targets import lost_by_others_s, probability_of_miss, stake_s


class Term(NamedTuple):
    """One term of the score: a field of `Sight` in seconds, its weight, its meaning."""

    name: str
    weight: float
    meaning: str


#: Weight of a second until the first token against one of the whole answer.
FIRST_WEIGHT: Final = 40.0
#: A weight that is not stated: that of a second by which the whole request comes later.
UNSTATED: Final = -1.0
#: `policy.weights` of the fleet file changes a weight.
TERMS: Final = (
    Term("first_token_s", FIRST_WEIGHT, "until the first token"),
    Term("own_s", 1.0, "until the whole answer, at the steps of now"),
    Term("others_s", 1.0, "added to the answers that run there, all together"),
    Term("coming_s", UNSTATED, "by which its prompt delays first tokens of prompts that come there later"),
    Term("loss_s", 1.0, "lost by targets that are missed, its own and those of requests that run there"),
    Term("adapter_s", UNSTATED, "until its LoRA adapter has a slot"),
    Term("finish_s", 80.0, "by which all that waits is done later, once no more requests come"),
    Term("later_s", UNSTATED, "by which an answer that ends well is later: tries are lost, tokens overdue"),
)
#: Index of `finish_s`, for pairs.
FINISH: Final = 6
#: Share of its time that an engine is taken to spend on prompts to come, at most.
_MOST_BUSY: Final = 0.9


def rate(ctx: SchedulingContext, each: Sight, weights: tuple[float, ...]) -> None:
    """Set the forecast, the terms and the score of an instance."""
    each.foresee(ctx)
    each.own_s = own_s(ctx, each)
    each.coming_s = coming_s(ctx, each)
    each.loss_s = loss_s(ctx, each)
    each.adapter_s = adapter_s(ctx, each)
    each.finish_s = finish_s(ctx, each)
    each.later_s = later_s(each)
    each.score = (
        weights[0] * each.first_token_s
        + weights[1] * each.own_s
        + weights[2] * each.others_s
        + weights[3] * each.coming_s
        + weights[4] * each.loss_s
        + weights[5] * each.adapter_s
        + weights[6] * each.finish_s
        + weights[7] * each.later_s
    )
    each.rated = True


def weights_of(service: ServiceClass, stated: tuple[float, ...]) -> tuple[float, ...]:
    """Return the weights for a request of a class.

    With targets its first token has none: they take its place. A class may state it. What is not stated is
    a second by which first token and answer are both later; of adapters and lost tries also where targets
    take the place of the first token.
    """
    first, own = stated[0], stated[1]
    if service.stated or service.background:
        first = 0.0
    elif service.first_token_weight is not None:
        first = service.first_token_weight
    both = first + own
    least = FIRST_WEIGHT + own
    least = both if both > least else least
    coming = both if stated[3] == UNSTATED else stated[3]
    adapter = least if stated[5] == UNSTATED else stated[5]
    later = least if stated[7] == UNSTATED else stated[7]
    return (first, own, stated[2], coming, stated[4], adapter, stated[6], later)


def own_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds until the whole answer, at the steps of the batch that it joins."""
    return each.first_token_s + ctx.predicted_output * each.with_s


def coming_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds by which its prompt delays prompts that come there later, all together.

    A prompt that takes s seconds joins W seconds of others in a queue at which r come per second: all of them
    to come wait longer, by s r (W + s/2) / (1 - r m) in the mean, m being their mean time: what an admission
    costs an M/G/1 queue (Hyytia, Penttinen, Aalto, Size- and state-aware dispatching, EJOR 217, 2012).
    """
    if not ctx.goes_on:
        return 0.0
    new = each.prompts * (ctx.prompt - each.cached)
    read_s, per_s = each.reading_s, each.prompts_per_s
    pending_s = each.seen.unread * read_s / (new if new > 1.0 else 1.0)
    busy = per_s * each.cost.prefill_s
    return read_s * per_s * (pending_s + read_s / 2.0) / (1.0 - (busy if busy < _MOST_BUSY else _MOST_BUSY))


def loss_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the expected loss by missed targets: its own, and of requests with targets that run there."""
    lost_s = 0.0
    if ctx.request.service.stated:
        lost_s = probability_of_miss(ctx, each) * stake_s(ctx, each)
    return lost_s + lost_by_others_s(ctx, each) if each.instance.stated_sequences else lost_s


def adapter_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds until the request's LoRA adapter has a slot there."""
    adapters = each.instance.adapters
    if adapters is None or ctx.adapter_load_s <= 0.0:
        return 0.0
    return adapters.cost_s(ctx.request.model, ctx.adapter_load_s, ctx.mean_output / 2.0 * each.seen.now_s)


def finish_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return by how many seconds one long answer ends later than all that waits; 0 while requests come."""
    if each.done_s == math.inf:
        return 0.0
    late_s = long_answer_s(ctx, each) - each.done_s
    return late_s if late_s > 0.0 else 0.0


def long_answer_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds that one long answer takes on an instance, at the steps of now."""
    load, long = each.load, ctx.long_output
    context = each.seen.context + ctx.prompt + long / 2.0
    return each.first_token_s + long * (load.next_step_s + load.next_token_s * context)


def later_s(each: Sight) -> float:
    """Return the seconds by which an answer that ends well comes later than the forecast, by the account."""
    account = each.instance.account
    return account.later_s(each.end_s) if account.troubled else 0.0
