"""`hetlb`, the default policy: late binding to the instance where a request costs all requests least time.

1. Filter: an instance has room if it has a free slot and its KV cache, as expected in use, holds the request;
   where classes have targets, if it also leaves room for tighter ones.
2. Score: the sum of `TERMS`, each in seconds times its weight: what the request takes there, by how much it
   delays those that run there (the externality), what missed targets cost, and once no more requests come by
   how much all is done later.
3. Hold: a slower instance is passed over where the score of a faster one that is full is better, the wait
   until the faster ones are done with all that waits included: a slow-server threshold (Lin, Kumar, Optimal
   control of a queueing system with two heterogeneous servers, 1984).
4. Pick: the least score of those with room, the first in file order of equals.

Scoring reads and changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import size_of
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import Choice, Policy, PolicyParams, paper_work
from hetlb.balancer.core.policies.score_terms import TERMS, long_answer_s, own_s, rate, weights_of
from hetlb.balancer.core.policies.sight import (
    HELD,
    KEPT_FREE,
    NO_MEMORY,
    NO_SLOT,
    RESTRAINED,
    ROOM,
    SchedulingContext,
    Sight,
)
from hetlb.balancer.core.policies.targets import keep_free
from hetlb.balancer.core.throttle import BLOCKED, NORMAL
from hetlb.balancer.core.types import Candidate

#: Reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: Reason of an instance without room.
FULL: Final = "full"
#: Share of the faster instances' speed that is left for what waits, at least, whatever keeps coming.
_LEAST_LEFT: Final = 1.0 / 3.0
#: Standard deviation of a running answer's tokens in the KV cache, as a share of a long answer's. Memory is
#: left free for one deviation of all that run.
_SPREAD: Final = 0.25


@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """The instances for one request, as they were at the time; `candidates` is for people."""

    __slots__ = ("_ctx", "_full", "_sights", "_todo", "fleet", "instances", "weights")

    def __init__(
        self, ctx: SchedulingContext, instances: Sequence[Instance], weights: tuple[float, ...], hold: bool
    ) -> None:
        """Filter and rate `instances`. Without `hold` none is passed over."""
        self._ctx = ctx
        self.weights = weights
        self.fleet = fleet = ctx.demand.mix.fleet(instances)
        self.instances = fleet.members
        #: True if one has no room.
        self._full = False
        self._sights = [self._see(i) for i in range(len(fleet.members))]
        #: Size of all that waits, with the request.
        self._todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
        hold = hold and len(fleet.members) > 1
        self._look_ahead(hold)
        # Without room it is rated for people alone, later: but not where the terms may change until then.
        service, protected = ctx.request.service, ctx.demand.protected
        at_once = service.background or bool(protected) or ctx.adapter_load_s > 0.0
        for each in self._sights:
            if each.state == ROOM or at_once:
                self._rated(each)
        if protected and keep_free(ctx, self._sights):
            self._full = True
        if hold and self._full:
            self._hold()

    @property
    def ratings(self) -> list[Sight]:
        """Every instance with its forecast, terms and score."""
        for each in self._sights:
            self._rated(each)
        return self._sights

    def best(self, among: Sequence[int] | None = None) -> Sight | None:
        """Return the instance with room and the lowest score, the first of several; None if none has room."""
        found: Sight | None = None
        for each in self._sights:
            if each.state != ROOM or (among is not None and each.index not in among):
                continue
            if found is None or each.score < found.score:
                found = each
        return found

    def _rated(self, each: Sight) -> Sight:
        if not each.rated:
            rate(self._ctx, each, self.weights)
        return each

    def _see(self, index: int) -> Sight:
        """Return the sight of an instance, with its state: room for the request beside others, or none."""
        ctx = self._ctx
        each = Sight(ctx, self.fleet.members[index], self.fleet.costs[index])
        each.index = index
        if not each.seen.empty:
            each.state = self._room(each)
            if each.state != ROOM:
                self._full = True
        availabilities = ctx.availabilities
        if availabilities is not None and availabilities[index][0] == BLOCKED and each.state == ROOM:
            each.state = RESTRAINED
        return each

    def _room(self, each: Sight) -> int:
        """Return the state of an instance that is not empty: it needs a slot and KV cache."""
        seen, instance = each.seen, each.instance
        if seen.running - each.ending >= each.load.all_slots:
            return NO_SLOT
        if not instance.explored and seen.running >= instance.explored_sequences(self._ctx.now):
            return NO_SLOT
        spread = _SPREAD * self._ctx.long_output * math.sqrt(seen.running + self._ctx.request.sequences)
        if instance.kv_need is not None:
            spread *= instance.kv_need.grows
        return NO_MEMORY if each.used_tokens + spread > each.load.kv_cache_tokens else ROOM

    def _hold(self) -> None:
        """Pass slower instances over where waiting for a faster one that is full costs all requests less.

        What waits is done at the speed of the faster ones, less what keeps coming: until the queue is empty
        each request to come waits for this one, too (the busy period of a fluid queue).
        """
        ctx, weight, full, coming = self._ctx, self.weights[0] + self.weights[1], math.inf, 0.0
        if ctx.goes_on:
            coming = ctx.demand.rate(ctx.now) * ctx.demand.mix.size
        for each, speed in self._faster():
            if each.state == ROOM:
                if full == math.inf:
                    continue
                left = speed - coming
                left = left if left > _LEAST_LEFT * speed else _LEAST_LEFT * speed
                each.limit = full + weight * self._todo / left if left > 0.0 else math.inf
                if each.limit < each.score:
                    each.state = HELD
            elif full == math.inf and each.state in (NO_SLOT, NO_MEMORY, KEPT_FREE):
                full = self._rated(each).score

    def _faster(self) -> list[tuple[Sight, float]]:
        """Return the instances, the fastest first, with the speed of all that are faster, together."""
        ctx, speed, found = self._ctx, 0.0, []
        for i in self.fleet.order:
            each = self._sights[i]
            found.append((each, speed))
            if ctx.availabilities is None or ctx.availabilities[i][0] == NORMAL:
                speed += each.cost.speed
        return found

    def _look_ahead(self, hold: bool) -> None:
        """See whether more requests come; with `hold`, if none do, when the faster ones are done with all."""
        ctx, fastest = self._ctx, self._sights[self.fleet.order[0]]
        fastest.foresee(ctx)
        ctx.goes_on = ctx.demand.goes_on(own_s(ctx, fastest), ctx.now)
        if hold and not ctx.goes_on:
            long_s = long_answer_s(ctx, fastest)
            for each, speed in self._faster():
                each.done_s = long_s + self._todo / speed if speed > 0.0 else math.inf

    def __call__(self) -> list[Candidate]:
        """Return candidates for people. The instances may have changed meanwhile: only constants are read."""
        return [self._candidate(each) for each in self.ratings]

    def _candidate(self, each: Sight) -> Candidate:
        batch, t_s, workload = paper_work(self._ctx, each.instance)
        return Candidate(
            instance=each.instance.name,
            score=each.score,
            eligible=each.state == ROOM,
            reason=self._reason(each),
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=each.seen.kv_utilization,
            workload=workload,
            terms={term.name: float(getattr(each, term.name)) for term in TERMS},
            weights={term.name: weight for term, weight in zip(TERMS, self.weights, strict=True)},
            forecast=each.document(each.instance.errors),
        )

    def _reason(self, each: Sight) -> str:
        state, availabilities = each.state, self._ctx.availabilities
        if state == NO_SLOT:
            few = "" if each.instance.explored else ", few until its speed is known"
            return f"{FULL}: every slot is taken{few}"
        if state == NO_MEMORY:
            return f"{FULL}: its KV cache would not hold it beside what is expected in use"
        if state == KEPT_FREE:
            return "kept free: requests with targets would miss them beside it"
        if state == HELD:
            return f"{PASSED_OVER}: a faster one that is full scores {each.limit:.3g}, the wait included"
        return "" if availabilities is None else availabilities[each.index][1]


class Hetlb(Policy):
    """`hetlb`, the default."""

    name = "hetlb"
    holds_back = True

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        stated = dict(params.weights)
        if params.worth:
            from hetlb.balancer.core.policies.worth import Worth

            self.worth = Worth(params.worth, params.types)
        self._stated = tuple([stated.get(term.name, term.weight) for term in TERMS])

    def evaluate(self, ctx: SchedulingContext, instances: Sequence[Instance], hold: bool) -> Evaluation:
        """Filter and rate instances for a request. Without `hold` none is passed over."""
        service = ctx.request.service
        weights = weights_of(service, self._stated)
        return Evaluation(ctx, instances, weights, hold)

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        evaluation = self.evaluate(ctx, instances, True)
        found = evaluation.best()
        if found is None:
            return None
        preferred = ctx.request.preferred
        if preferred:  # unless it is too much worse
            among = [i for i, each in enumerate(evaluation.instances) if each.name in preferred]
            other = evaluation.best(among)
            if other is not None and other.score <= (1.0 + ctx.request.preferred_within) * found.score:
                found = other
        work_s = paper_work(ctx, found.instance)[2]
        return Choice(found.index, work_s, evaluation, found)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return self.evaluate(ctx, instances, True)()
