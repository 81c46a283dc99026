"""Terms of the score of `hetlb`, in seconds; the score is their sum, each times its weight.

A new term is a field of `Sight`, a row of `TERMS` and a line of `set_score`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from hetlb.balancer.core.policies.sight import SchedulingContext, Sight


class Term(NamedTuple):
    """One term of the score: a field of `Sight` in seconds, its weight, its meaning."""

    name: str
    weight: float
    meaning: str


#: A weight for each term: of fixed length, which compiled code keeps without an object for each.
Weights: TypeAlias = tuple[float, float, float, float, float, float, float, float]
#: Weight of a second until the first token against one of the whole answer (`ordinary.py`: agents' E2E 1.08,
#: 1.14, 1.17 of the best other's with 40, 30, 24; TTFT of waves 1.13, 1.12, 1.10).
FIRST_WEIGHT: Final = 30.0
#: Weight of a second that later first tokens are delayed, over a second of the request's own first token and
#: answer.
_COMING_FACTOR: Final = 4.0 / 3.0
#: An unstated weight: the weight of a second that the whole request is later.
UNSTATED: Final = -1.0
#: `policy.weights` of the fleet file changes a weight.
TERMS: Final = (
    Term("first_token_s", FIRST_WEIGHT, "until the first token"),
    Term("own_s", 1.0, "until the whole answer, at the steps of now"),
    Term("others_s", 1.0, "added to the answers that run there, all together"),
    Term("coming_s", UNSTATED, "delay that its prompt adds to the first tokens of prompts to come there"),
    Term("loss_s", 1.0, "cost of missed targets, its own and of requests that run there"),
    Term("adapter_s", UNSTATED, "until its LoRA adapter has a slot"),
    Term("finish_s", 0.2, "delay of the end of all waiting work, for each request of a burst"),
    Term("later_s", UNSTATED, "expected delay by lost tries and overdue tokens"),
)
#: Index of `finish_s`, for pairs.
FINISH_INDEX: Final = 6


def set_score(ctx: SchedulingContext, each: Sight, weights: Weights) -> None:
    """Set the terms and the score of a foreseen instance; `targets` has set what targets cost."""
    first, own, others, coming, loss, adapter, finish, later = weights
    each.coming_s = coming_s(ctx, each)
    if ctx.adapter_load_s > 0.0:
        each.adapter_s = adapter_s(ctx, each)
    if each.done_s < each.long_s:
        each.finish_s = each.long_s - each.done_s
    if each.seen.troubled:
        each.later_s = each.instance.evidence.later_s(each.end_s)
    each.score = (
        first * each.first_token_s
        + own * each.own_s
        + others * each.others_s
        + coming * each.coming_s
        + loss * each.loss_s
        + adapter * each.adapter_s
        + finish * each.finish_s
        + later * each.later_s
    )
    each.rated = True


def weights_of(ctx: SchedulingContext, stated: Weights) -> Weights:
    """Return the weights for a request.

    If the request has targets, their cost replaces the weight of its first token. A service class may state
    that weight. An unstated weight is the weight of one second that delays both the first token and the
    answer; for adapters and lost tries this holds with targets, too. The end of a burst weighs as much as all
    requests of the burst.
    """
    service = ctx.request.service
    first, own = stated[0], stated[1]
    if service.stated or service.background:
        first = 0.0
    elif service.first_token_weight is not None:
        first = service.first_token_weight
    both = first + own
    least = FIRST_WEIGHT + own
    least = both if both > least else least
    coming = _COMING_FACTOR * both if stated[3] == UNSTATED else stated[3]
    adapter = least if stated[5] == UNSTATED else stated[5]
    later = least if stated[7] == UNSTATED else stated[7]
    return (first, own, stated[2], coming, stated[4], adapter, stated[6] * ctx.burst, later)


def coming_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the total delay of later prompts at this instance by the prompt of the request, in seconds.

    While requests keep coming: a prompt that takes s seconds joins W seconds of other prompts; r prompts come
    per second. The prompts that come until it is computed wait s r (W + s/2) seconds longer in all. An M/G/1
    queue has 1 / (1 - r m) times as much for a mean prompt of m seconds (Hyytia et al., Size- and state-aware
    dispatching, EJOR 217, 2012). That factor is left out, as later requests are sent elsewhere
    (`ordinary.py`: p99 of one token 0.69 of the best other with this term, 0.94 without).

    While no more requests are expected: as many prompts come as wait to be computed. Their number is taken to
    be the same at each instance. If each instance counted its own, long prompts would stay where many short
    ones wait. Tokens that another instance has in its cache delay the prompts that wait here.
    """
    if not ctx.goes_on:
        again_s = each.prompts * (ctx.most_cached - each.cached) * each.cost.token_prefill_s
        new_s = each.reading_s - again_s if each.reading_s > again_s else 0.0
        mean = ctx.mean_prefill if ctx.mean_prefill > 1.0 else 1.0
        return (new_s * ctx.unread + again_s * each.seen.unread) / mean
    new = each.prompts * (ctx.prompt - each.cached)
    read_s, per_s = each.reading_s, each.prompts_per_s
    pending_s = each.seen.unread * read_s / (new if new > 1.0 else 1.0)
    return read_s * per_s * (pending_s + read_s / 2.0)


def adapter_s(ctx: SchedulingContext, each: Sight) -> float:
    """Return the seconds until the request's LoRA adapter has a slot there."""
    adapters = each.instance.adapters
    if adapters is None:
        return 0.0
    return adapters.cost_s(ctx.request.model, ctx.adapter_load_s, ctx.mean_output / 2.0 * each.seen.now_s)
