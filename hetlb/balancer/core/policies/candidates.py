"""Candidates of `hetlb` for pages and logs: each instance, its terms, and why it does not get the request."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.core.policies.base import paper_work
from hetlb.balancer.core.policies.score_terms import TERMS, Weights
from hetlb.balancer.core.policies.sight import (
    HELD,
    KEPT_FREE,
    NO_MEMORY,
    NO_SLOT,
    ROOM,
    UNREAD,
    SchedulingContext,
    Sight,
)
from hetlb.balancer.core.types import Candidate

#: Reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: Reason of an instance without room.
FULL: Final = "full"


def candidate_of(ctx: SchedulingContext, each: Sight, weights: Weights) -> Candidate:
    """Return a rated instance. It may have changed meanwhile: only constants are read."""
    batch, t_s, workload = paper_work(each.instance, ctx.request, ctx.predicted_output)
    return Candidate(
        instance=each.instance.name,
        score=each.score,
        eligible=each.state == ROOM,
        reason=_reason(ctx, each),
        ideal_batch=batch,
        processing_s=t_s,
        kv_utilization=each.seen.kv_utilization,
        workload=workload,
        terms={term.name: float(getattr(each, term.name)) for term in TERMS},
        weights={term.name: weight for term, weight in zip(TERMS, weights, strict=True)},
        forecast=each.instance.errors.corrected(each.first_token_s, each.step_s, each.end_s),
    )


def _reason(ctx: SchedulingContext, each: Sight) -> str:
    state, restraints = each.state, ctx.restraints
    if state == NO_SLOT:
        few = "" if each.instance.exploring is None else ", few until its speed is known"
        return f"{FULL}: every slot is taken{few}"
    if state == UNREAD:
        return f"{FULL}: it has more prompts to read than it reads soon"
    if state == NO_MEMORY:
        return f"{FULL}: its KV cache would not hold it beside what is expected in use"
    if state == KEPT_FREE:
        return "kept free: requests with targets would miss them beside it"
    if state == HELD:
        return f"{PASSED_OVER}: a better one that is full scores {each.limit:.3g}, the wait included"
    return "" if restraints is None else restraints.get(each.instance.name, "")
