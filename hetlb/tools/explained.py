"""Decision about one request in numbers: every instance of its model with all terms, for `hetlb explain`."""

from __future__ import annotations

from hetlb.balancer.core.policies.base import best
from hetlb.balancer.core.policies.baselines import paper_terms
from hetlb.balancer.core.policies.sight import foreseen
from hetlb.balancer.core.ready import with_excluded
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Candidate, Request


def explained(
    scheduler: Scheduler, request: Request, predicted: float, now: float
) -> tuple[list[Candidate], str | None]:
    """Return every instance of the request's model with all its terms, in file order, and the chosen one.

    Terms that the policy does not use are filled with the paper's. Policies that draw draw here too.
    """
    placement, ready = scheduler.placement, scheduler.fleet.ready.get(request.model)
    if ready is None:
        return [], None
    choices = placement.able(request, ready, now)
    ctx = placement.context(request, predicted, scheduler.queue.waiting(request.model), now)
    ctx.restraints = choices.restraints
    ctx.burst = 1.0 if ready.idle else ctx.burst + 1.0
    scored = placement.policy.score(ctx, choices.instances) if choices.instances else []
    candidates = with_excluded(scored, ready.instances, choices.excluded)
    for instance, candidate in zip(ready.instances, candidates, strict=True):
        if candidate.forecast is None:
            candidate.forecast = instance.errors.corrected(foreseen(ctx, instance))
        if candidate.ideal_batch is None:
            terms = paper_terms(instance, request, predicted, placement.policy.params)
            candidate.ideal_batch, candidate.processing_s = terms.ideal_batch, terms.processing_s
            candidate.kv_utilization, candidate.workload = terms.kv_utilization, terms.workload
    chosen = best(candidates)
    return candidates, None if chosen is None else candidates[chosen].instance
