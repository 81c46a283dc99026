"""`hetlb`, the default policy: late binding to the instance with the least cost in time for all requests.

1. Room: an instance has a free slot, and its KV cache, as expected in use, holds the request. While all
   instances have work, one with many prompts to read takes no more: see `leave_unread`.
2. Score: the sum of `TERMS`, each in seconds times its weight: the time of the request there, the
   delay of requests running there (the externality), the delay of prompts that come there later.
3. Hold: a slower instance is passed over if a faster, full one has the better score, its wait until the
   queue is done included: a slow-server threshold (Lin, Kumar, Optimal control of a queueing system with two
   heterogeneous servers, 1984).
4. Pick: the least score among instances with room; of equals the one that showed more speed.

This file has these four. A feature is a step of its own that is asked if the fleet uses it: `restraints`
(doubt), `room_for_targets`, `rules` (conversations, the end of a burst), `tries` (no profile), LoRA adapters
in `score_terms`. Scoring reads and changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import size_of
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import Choice, Policy, PolicyParams, paper_work
from hetlb.balancer.core.policies.candidates import candidate_of
from hetlb.balancer.core.policies.rules import (
    end_burst,
    keep_together,
    leave_unread,
    most_cached,
    precedes,
    wait_beside,
)
from hetlb.balancer.core.policies.score_terms import TERMS, Weights, set_score, weights_of
from hetlb.balancer.core.policies.sight import HELD, KEPT_FREE, ROOM, SchedulingContext, Sight, foreseen
from hetlb.balancer.core.policies.tries import tried_of
from hetlb.balancer.core.types import Candidate

if TYPE_CHECKING:
    from hetlb.balancer.core.policies.glance import Glance

#: Least share of the faster instances' speed left for waiting requests, at any arrival rate
#: (`front.py`: with 1, nothing taken off, mean TTFT of a 70B fleet at 95 % is 10 s in place of 3.6).
_LEAST_LEFT_SHARE: Final = 1.0 / 3.0


@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """The instances for one request, as they were at the time of the decision."""

    __slots__ = ("_ctx", "_ratings", "_set_loss", "_sights", "fleet", "glance", "instances", "weights")

    def __init__(
        self, ctx: SchedulingContext, instances: Sequence[Instance], stated: Weights, hold: bool
    ) -> None:
        """Filter and rate `instances` by `stated` weights. Without `hold` none is passed over."""
        self._ctx = ctx
        self.fleet = ctx.demand.mix.fleet(instances)
        self.instances = self.fleet.members
        self._ratings: list[Sight] | None = None
        self._set_loss: Callable[[SchedulingContext, Sight], None] | None = None
        self._sights: list[Sight] = []
        #: The choice without a look at each instance, None if each was looked at.
        self.glance: Glance | None = None
        if hold and self.fleet.blocks is not None:
            from hetlb.balancer.core.policies.glance import Glance, may_glance

            if may_glance(ctx):
                self.weights = weights_of(ctx, stated)
                glance = Glance(ctx, self.fleet, self.weights)
                if glance.found is not None:
                    self.glance = glance
                    return
        self._decide(stated, hold)

    @property
    def sights(self) -> list[Sight]:
        """The instances in the order of speed."""
        if not self._sights and self.glance is not None:
            self._sights = self.glance.all()
        return self._sights

    def _decide(self, stated: Weights, hold: bool) -> None:
        """Room, score, hold; `best` picks."""
        # Room.
        ctx, instances, costs = self._ctx, self.instances, self.fleet.costs
        self._sights = sights = [Sight(ctx, instances[i], costs[i], i) for i in self.fleet.order]
        full: Sight | None = None
        speed = 0.0
        for each in leave_unread(ctx, sights, hold):
            each.faster, speed = speed, speed + each.speed
            if full is None and each.state >= KEPT_FREE:
                full = each
        # Score.
        todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
        sights[0].foresee(ctx)
        ctx.answer_s, ctx.goes_on = sights[0].own_s, ctx.demand.goes_on(ctx.now)
        if not ctx.goes_on:
            end_burst(ctx, sights, todo, hold)
        self.weights = weights_of(ctx, stated)
        holder = None if ctx.held is None else most_cached(sights)
        kept_free = self._score(full, holder)
        # Hold.
        if hold and (full is not None or kept_free):
            self._hold(todo)
            if holder is not None and holder.state >= KEPT_FREE:
                keep_together(ctx, sights, holder, self.weights[0] + self.weights[1])

    def best(self, among: Sequence[int] | None = None) -> Sight | None:
        """Return the instance with room and the lowest score, of equals the faster; None if none has room."""
        found: Sight | None = None
        for each in self.sights:
            if each.state != ROOM or (among is not None and each.index not in among):
                continue
            if not each.rated and len(self.sights) > 1:
                continue  # its score is above the lowest
            if found is None or (each.score <= found.score and precedes(each, found)):
                found = each
        return found

    def _hold(self, todo: float) -> None:
        """Pass slower instances over if the wait for a faster, full one costs all requests less.

        The queue drains at the faster instances' speed minus the arrival rate.
        """
        weight, full, coming = self.weights[0] + self.weights[1], math.inf, 0.0
        for each in self.sights:
            if each.state == ROOM and full < math.inf:
                left = max(each.faster - coming, _LEAST_LEFT_SHARE * each.faster)
                each.limit = full + weight * todo / left if left > 0.0 else math.inf
                if each.limit < each.score:
                    each.state = HELD
            elif full == math.inf and each.state >= KEPT_FREE:
                full = each.score
                todo, coming = wait_beside(self._ctx, each, todo)

    def _score(self, full: Sight | None, holder: Sight | None) -> bool:
        """Rate the instances that may get the request. Return True if targets keep an instance free.

        The others are rated later, for display, unless their terms may have changed by then.
        """
        ctx, request = self._ctx, self._ctx.request
        targets = bool(ctx.demand.protected) or request.service.stated
        if targets:
            from hetlb.balancer.core.policies.room_for_targets import keep_free, set_loss

            self._set_loss = set_loss
        every = targets or request.service.background or ctx.adapter_load_s > 0.0
        if not every and full is None and request.sequences <= 1 and not request.places.preferred:
            if len(self.sights) > 1:  # there is nothing to compare the only one with
                self._rate_best()
            return False
        for each in self.sights:
            if every or each.state == ROOM or each is full or each is holder:
                self.rate(each)
        return targets and keep_free(ctx, self.sights)

    def rate(self, each: Sight) -> None:
        """Forecast the request on an instance and rate it, unless it is rated already."""
        if each.rated:
            return
        if each.end_s <= 0.0:  # the fastest one has its forecast
            each.foresee(self._ctx)
        if self._set_loss is not None:
            self._set_loss(self._ctx, each)
        set_score(self._ctx, each, self.weights)

    def _rate_best(self) -> None:
        """Rate the instances that may have the lowest score for one sequence.

        The lower bound of a score: the least time of the prompt's tokens, plus the longer steps of the
        running requests.
        """
        ctx, output, least = self._ctx, self._ctx.predicted_output, math.inf
        both, own, others = self.weights[0] + self.weights[1], self.weights[1], self.weights[2]
        for each in self.sights:
            seen, load, new = each.seen, each.load, ctx.prompt - each.cached
            unread = seen.behind + (new if new > 1.0 else 1.0)
            bound = both * (seen.joining_s + load.prompt_token_s * unread)
            bound += output * (own * each.with_s + others * load.batch * (each.with_s - seen.now_s))
            if bound <= least:
                if each.end_s <= 0.0:
                    each.foresee(ctx)
                set_score(ctx, each, self.weights)
                if each.state == ROOM and each.score < least:
                    least = each.score

    def tried(self, found: Sight) -> Sight:
        """Return an instance that is worth a try, else the found one."""
        if self.glance is not None:
            return self.glance.tried(found)
        return tried_of(self.sights, self.rate, found)

    @property
    def ratings(self) -> list[Sight]:
        """Every instance with its forecast, terms and score, in the order of the file."""
        ratings = self._ratings
        if ratings is None:
            for each in self.sights:
                self.rate(each)
            ratings = self._ratings = sorted(self.sights, key=lambda each: each.index)
        return ratings

    def __call__(self) -> list[Candidate]:
        """Return every instance with its terms and score, as pages and logs show them."""
        return [candidate_of(self._ctx, each, self.weights) for each in self.ratings]


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
        first, own, others, coming, loss, adapter, finish, later = [
            stated.get(term.name, term.weight) for term in TERMS
        ]
        self._stated: Weights = (first, own, others, coming, loss, adapter, finish, later)

    def evaluate(self, ctx: SchedulingContext, instances: Sequence[Instance], hold: bool) -> Evaluation:
        """Filter and rate instances for a request. Without `hold` none is passed over."""
        return Evaluation(ctx, instances, self._stated, hold)

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        ctx.shares = ctx.held is not None
        evaluation = self.evaluate(ctx, instances, True)
        found = evaluation.best() if evaluation.glance is None else evaluation.glance.found
        if found is None:
            return None
        if found.instance.spec.latency is None and found.instance.speed.seen:
            found = evaluation.tried(found)
        places = ctx.request.places
        if places.preferred:  # unless it is too much worse
            among = [i for i, each in enumerate(evaluation.instances) if each.name in places.preferred]
            other = evaluation.best(among)
            if other is not None and other.score <= (1.0 + places.preferred_within) * found.score:
                found = other
        work_s, forecast = paper_work(found.instance, ctx.request, ctx.predicted_output)[2], found
        if ctx.held is not None and ctx.held.paid_tokens(found.instance.tree.cache_id) > 0.0:
            ctx.shares = False  # the request waits for all of its prompt
            forecast = foreseen(ctx, found.instance)
        return Choice(found.index, work_s, evaluation, forecast)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        ctx.shares = ctx.held is not None
        return self.evaluate(ctx, instances, True)()
