"""`hetlb`, the default policy: late binding to the instance with the least cost in time for all requests.

1. Filter: an instance has room if it has a free slot and its KV cache, as expected in use, holds the request.
   If classes have targets, it must also leave room for tighter ones.
2. Score: the sum of `TERMS`, each in seconds times its weight: the time of the request there, the
   delay of requests running there (the externality), the cost of missed targets, and, once no more requests
   come, the delay of all work.
3. Hold: a slower instance is passed over if a faster, full one has the better score, its wait until the
   queue is done included: a slow-server threshold (Lin, Kumar, Optimal control of a queueing system with two
   heterogeneous servers, 1984). So is an instance without the prompt's cached prefix, if the wait for the
   next slot of a full instance with that prefix costs less.
4. Pick: the least score among instances with room; of equals the one that showed more speed.

Scoring reads and changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import size_of
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import Choice, Policy, PolicyParams
from hetlb.balancer.core.policies.candidates import candidate_of
from hetlb.balancer.core.policies.score_terms import TERMS, Weights, set_score, weights_of
from hetlb.balancer.core.policies.sight import (
    HELD,
    KEPT_FREE,
    RESTRAINED,
    ROOM,
    SchedulingContext,
    Sight,
    foreseen,
)
from hetlb.balancer.core.types import Candidate

#: Least share of the faster instances' speed left for waiting requests, at any arrival rate
#: (`front.py`: with 1, nothing taken off, mean TTFT of a 70B fleet at 95 % is 10 s in place of 3.6).
_LEAST_LEFT_SHARE: Final = 1.0 / 3.0
#: Largest score of an idle instance with assumed speed to be tried, in scores of the best one, if it were as
#: fast as the fastest one.
_GUESS_FACTOR: Final = 2.0


@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """The instances for one request, as they were at the time; `candidates` is for people."""

    __slots__ = (
        "_ctx", "_fastest", "_set_loss", "fleet", "instances", "sights", "weights",
    )  # fmt: skip

    def __init__(
        self, ctx: SchedulingContext, instances: Sequence[Instance], stated: Weights, hold: bool
    ) -> None:
        """Filter and rate `instances` by `stated` weights. Without `hold` none is passed over."""
        self._ctx = ctx
        self.fleet = fleet = ctx.demand.mix.fleet(instances)
        self.instances = members = fleet.members
        self.sights = sights = [Sight(ctx, members[i], fleet.costs[i], i) for i in range(len(members))]
        service, restraints = ctx.request.service, ctx.restraints
        targets = bool(ctx.demand.protected) or service.stated
        self._set_loss: Callable[[SchedulingContext, Sight], None] | None = None
        if targets:
            from hetlb.balancer.core.policies.room_for_targets import keep_free, set_loss

            self._set_loss = set_loss
        # The rest is rated later, for people alone, unless the terms may change until then.
        at_once = targets or service.background or ctx.adapter_load_s > 0.0
        needed: list[Sight] = []
        holder: Sight | None = None
        full, speed, unread, most_cached = False, 0.0, 0.0, 0.0
        for i in fleet.order:
            each = sights[i]
            each.faster = speed
            unread += each.seen.unread
            if each.cached > most_cached:
                most_cached, holder = each.cached, each
            if restraints is None or not restraints[i]:
                speed += each.cost.speed
            elif each.state == ROOM:
                each.state = RESTRAINED
            if each.state == ROOM or at_once or not full:
                needed.append(each)
            if each.state >= KEPT_FREE:
                full = True
        if holder is not None and holder not in needed:
            needed.append(holder)
        ctx.most_cached = most_cached
        ctx.unread = unread / float(len(sights))
        #: Size of all waiting requests and this one.
        todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
        if ctx.waiting:
            size = ctx.demand.mix.size
            ctx.burst = max(ctx.burst, 1.0 + ctx.waiting / (size if size > 1.0 else 1.0))
        self._fastest = fastest = sights[fleet.order[0]]
        fastest.foresee(ctx)
        ctx.goes_on = ctx.demand.goes_on(ctx.now)
        ctx.answer_s = fastest.own_s
        if hold and not ctx.goes_on:
            for each in sights:
                each.done_s = fastest.long_s + todo / each.faster if each.faster > 0.0 else math.inf
        self.weights = weights_of(ctx, stated)
        if at_once or full or ctx.request.sequences > 1 or ctx.request.preferred:
            for each in needed:
                self.rate(each)
        else:
            self._rate_best(needed)
        if targets:
            full = keep_free(ctx, sights) or full
        if hold and full:
            self._hold(todo)
            if holder is not None and holder.state >= KEPT_FREE:
                self._keep_together(holder)

    def rate(self, each: Sight) -> None:
        """Foresee and rate an instance, unless it is rated."""
        if each.rated:
            return
        if each is not self._fastest:  # has its forecast
            each.foresee(self._ctx)
        if self._set_loss is not None:
            self._set_loss(self._ctx, each)
        set_score(self._ctx, each, self.weights)

    def _rate_best(self, needed: Sequence[Sight]) -> None:
        """Rate the instances that may have the lowest score for one sequence.

        The lower bound of a score: the least time of the prompt's tokens, plus the longer steps of the
        running requests.
        """
        ctx, output, least = self._ctx, self._ctx.predicted_output, math.inf
        both, own, others = self.weights[0] + self.weights[1], self.weights[1], self.weights[2]
        for each in needed:
            seen, load, new = each.seen, each.load, ctx.prompt - each.cached
            unread = seen.unread + (new if new > 1.0 else 1.0)
            bound = both * (seen.joining_s + load.prompt_token_s * unread)
            bound += output * (own * each.with_s + others * load.batch * (each.with_s - seen.now_s))
            if bound <= least:
                if each is not self._fastest:
                    each.foresee(ctx)
                set_score(ctx, each, self.weights)
                if each.state == ROOM and each.score < least:
                    least = each.score

    @property
    def ratings(self) -> list[Sight]:
        """Every instance with its forecast, terms and score."""
        for each in self.sights:
            self.rate(each)
        return self.sights

    def best(self, among: Sequence[int] | None = None) -> Sight | None:
        """Return the instance with room and the lowest score, the first of several; None if none has room."""
        found: Sight | None = None
        for each in self.sights:
            if each.state != ROOM or not each.rated or (among is not None and each.index not in among):
                continue
            if found is None or each.score < found.score or _first_of_equals(each, found):
                found = each
        return found

    def _hold(self, todo: float) -> None:
        """Pass slower instances over if the wait for a faster, full one costs all requests less.

        The queue drains at the faster instances' speed minus the arrival rate. Every request that arrives
        before it is empty waits for this one (the busy period of a fluid queue).
        """
        ctx, weight, full, coming = self._ctx, self.weights[0] + self.weights[1], math.inf, 0.0
        if ctx.goes_on:
            coming = ctx.demand.rate.per_s(ctx.now) * ctx.demand.mix.size
        for i in self.fleet.order:
            each = self.sights[i]
            if each.state == ROOM:
                if full == math.inf:
                    continue
                left = each.faster - coming
                left = left if left > _LEAST_LEFT_SHARE * each.faster else _LEAST_LEFT_SHARE * each.faster
                each.limit = full + weight * todo / left if left > 0.0 else math.inf
                if each.limit < each.score:
                    each.state = HELD
            elif full == math.inf and each.state >= KEPT_FREE:
                full = each.score

    def _keep_together(self, there: Sight) -> None:
        """Pass instances with less of the prompt cached over if the wait for a full one with more costs less.

        Until its next slot is free, requests with room now wait, too: half of the gap in the mean.
        """
        ctx, mix, room = self._ctx, self._ctx.demand.mix, 1.0
        size, need = max(1.0, mix.size), max(1.0, mix.booked + mix.output / 2.0)
        for each in self.sights:
            if each.state == ROOM:
                left = 1.0 + (each.load.kv_cache_tokens - each.used_tokens) / need
                room += min(left, each.load.all_slots - each.seen.running)
        delay_s = size / there.cost.speed * min(room, 1.0 + ctx.waiting / size) / 2.0
        limit = there.score + (self.weights[0] + self.weights[1]) * delay_s
        for each in self.sights:
            if each.state == ROOM and each.cached < there.cached and limit < each.score:
                each.limit, each.state = limit, HELD

    def __call__(self) -> list[Candidate]:
        """Return candidates for people."""
        return [candidate_of(self._ctx, each, self.weights) for each in self.ratings]


def _first_of_equals(each: Sight, found: Sight) -> bool:
    """Return True if an instance has the best score so far, and showed more speed than the best one.

    Speeds that were shown without a profile are averaged if they are near. Of equal ones the instance with
    the fewest requests is first.
    """
    if each.score != found.score:
        return False
    one, other = each.instance, found.instance
    if one.speed.seen and other.speed.seen and one.speed.shown != other.speed.shown:
        return one.speed.shown < other.speed.shown
    return one.booked < other.booked


def _unknown(evaluation: Evaluation, found: Sight) -> Sight:
    """Return an idle instance of assumed speed if it may be about as good as the one found, else that one.

    It may be as fast as the fastest one that is known. Its answer will show its speed.
    """
    fastest, guessed = math.inf, []
    for each in evaluation.sights:
        instance = each.instance
        if instance.spec.latency is not None:
            continue
        if instance.speed.seen:
            fastest = instance.speed.shown if instance.speed.shown < fastest else fastest
        elif not instance.in_flight and each.state == ROOM:
            guessed.append(each)
    chosen = found
    for each in guessed:
        instance, most = each.instance, _GUESS_FACTOR * found.score
        evaluation.rate(each)
        if each.score * min(1.0, fastest / instance.speed.factor) <= most and (
            chosen is found or instance.booked < chosen.instance.booked
        ):
            chosen = each
    return chosen


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
        found = evaluation.best()
        if found is None:
            return None
        if found.instance.spec.latency is None and found.instance.speed.seen:
            found = _unknown(evaluation, found)
        preferred = ctx.request.preferred
        if preferred:  # unless it is too much worse
            among = [i for i, each in enumerate(evaluation.instances) if each.name in preferred]
            other = evaluation.best(among)
            if other is not None and other.score <= (1.0 + ctx.request.preferred_within) * found.score:
                found = other
        work_s, forecast = found.instance.paper_work(ctx.request, ctx.predicted_output)[2], found
        if ctx.held is not None and ctx.held.paid_tokens(found.instance.tree.cache_id) > 0.0:
            ctx.shares = False  # the request waits for all of its prompt
            forecast = foreseen(ctx, found.instance)
        return Choice(found.index, work_s, evaluation, forecast)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        ctx.shares = ctx.held is not None
        return self.evaluate(ctx, instances, True)()
