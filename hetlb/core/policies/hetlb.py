"""`hetlb`, the default policy: late binding to the instance where a request costs all requests least time.

1. Filter: an instance has room if it has a free slot and its KV cache, as expected in use, holds the request;
   for a background request, if it also leaves room for requests with targets.
2. Score: the sum of `TERMS`, each in seconds times its weight: what the request takes there, by how much it
   delays those that run there (the externality), and what missed targets cost. The least wins, the first in
   file order of equals.
3. Hold: a slower instance is passed over where the faster ones, one of which is full (or no more requests
   come), would be done with all that waits before it were done with one long answer: a slow-server threshold
   (Lin, Kumar, Optimal control of a queueing system with two heterogeneous servers, 1984); while requests
   come, only where the score of the full one is better, the wait for it included. A request with targets
   waits for a full instance that can meet them while those with room cannot.

Scoring reads and changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from hetlb.core.demand import size_of
from hetlb.core.forecast import Forecast
from hetlb.core.forecast_errors import normal_quantile
from hetlb.core.instance import Instance
from hetlb.core.policies.base import (
    Choice,
    Policy,
    PolicyParams,
    SchedulingContext,
    SplitChoice,
    cached_at,
    paper_work,
    prompts_per_s,
)
from hetlb.core.policies.groups import LARGEST_WHOLE, Group, Groups
from hetlb.core.throttle import BLOCKED, DEPRIORITISED, NORMAL
from hetlb.core.transfer import TransferTimes
from hetlb.core.types import Candidate

#: Reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: Reason of an instance without room.
FULL: Final = "full"
#: Reason of an instance of a large fleet that is in none of the groups looked at.
NOT_LOOKED_AT: Final = "not looked at: the fleet is large, and others were"

#: States of an instance: room, or the reason why not.
ROOM: Final = 0
NO_SLOT: Final = 1
NO_MEMORY: Final = 2
HELD: Final = 3
RESTRAINED: Final = 4
KEPT_FREE: Final = 5
MISSES: Final = 6


class Term(NamedTuple):
    """One term of the score: an attribute of `Rating` in seconds, its weight, its meaning."""

    name: str
    weight: float
    meaning: str


#: The score is the sum of weight times seconds; `policy.weights` of the fleet file changes a weight. The
#: first is that of a class without targets (`first_token_weight`), and 0 for requests with targets.
TERMS: Final = (
    Term("first_token_s", 20.0, "until the first token"),
    Term("own_s", 1.0, "until the whole answer, at the steps of now"),
    Term("others_s", 1.0, "added to the answers that run there, all together"),
    Term("loss_s", 1.0, "lost by targets that are missed, its own and those of requests that run there"),
    Term("adapter_s", 21.0, "until its LoRA adapter has a slot"),
)


@mypyc_attr(acyclic=True)
class Rating(Forecast):
    """Forecast for the request on one instance, and its score.

    `miss` is the probability that a target of its own is missed. `done_s`: where it is passed over, seconds
    until the faster instances have done all that waits. `last`: to be taken only if no other can.
    """

    __slots__ = ("adapter_s", "done_s", "index", "last", "loss_s", "miss", "own_s", "score", "state")

    index: int
    state: int
    last: bool
    score: float
    own_s: float
    adapter_s: float
    loss_s: float
    miss: float
    done_s: float

    @property
    def has_room(self) -> bool:
        """True if the request can go there now."""
        return self.state == ROOM


@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """Every instance rated for one request, as it was at the time; `candidates` is for people."""

    __slots__ = (
        "_ctx", "_half_grown", "_output", "_prompt", "_share", "fleet", "instances", "ratings", "weights",
    )  # fmt: skip

    def __init__(
        self,
        ctx: SchedulingContext,
        instances: Sequence[Instance],
        weights: tuple[float, ...],
        share: float = 1.0,
        hold: bool = True,
    ) -> None:
        """Rate `instances`, there for a `share` of the demand. Without `hold` none is passed over."""
        mix, service = ctx.demand.mix, ctx.request.service
        self._ctx = ctx
        self._share = share
        if service.stated or service.background:
            weights = (0.0, *weights[1:])
        elif service.first_token_weight is not None:
            weights = (service.first_token_weight, *weights[1:])
        self.weights = weights
        self.fleet = mix.fleet(instances)
        self.instances = self.fleet.members
        self._prompt = float(ctx.request.prompt_tokens)
        self._output = ctx.predicted_output
        #: Tokens that an answer of the mean request has, half-grown.
        self._half_grown = mix.output / 2.0
        self.ratings = [self._rate(i, each) for i, each in enumerate(self.instances)]
        if ctx.availabilities is not None:
            self._heed(ctx.availabilities)
        if hold and len(self.ratings) > 1:
            if service.stated:
                self._wait_for_targets()
            self._hold()

    def best(self, among: Sequence[int] | None = None) -> Rating | None:
        """The rating with room and the lowest score, the first of several; None if none has room."""
        found: Rating | None = None
        for each in self.ratings:
            if each.state != ROOM or (among is not None and each.index not in among):
                continue
            if (
                found is None
                or each.last < found.last
                or (each.last == found.last and each.score < found.score)
            ):
                found = each
        return found

    def _rate(self, index: int, instance: Instance) -> Rating:
        ctx, cost, w = self._ctx, self.fleet.costs[index], self.weights
        prompts_s = prompts_per_s(ctx, instance)
        cached = float(cached_at(ctx, instance))
        each = Rating(instance, ctx.request, self._output, cached, cost, prompts_s)
        each.index = index
        each.last = False
        each.own_s = each.first_token_s + self._output * each.with_s
        each.done_s = each.adapter_s = each.loss_s = each.miss = 0.0
        adapters = instance.adapters
        if adapters is not None and ctx.adapter_load_s > 0.0:
            wait_s = self._half_grown * each.now_s
            each.adapter_s = adapters.cost_s(ctx.request.model, ctx.adapter_load_s, wait_s)
        if ctx.request.service.stated:
            each.miss = self._miss(each, instance)
            each.loss_s = each.miss * self._stake_s(each)
        if instance.stated_sequences:
            each.loss_s += self._lost_by_others_s(each, instance)
        each.state = self._room(each, instance)
        each.score = (
            w[0] * each.first_token_s
            + w[1] * each.own_s
            + w[2] * each.others_s
            + w[3] * each.loss_s
            + w[4] * each.adapter_s
        )
        return each

    # --- filter ---

    def _room(self, each: Rating, instance: Instance) -> int:
        """Room for the request: a slot, and KV cache for what of it is not there, its answer half-grown."""
        seen, load, request = each.seen, each.load, self._ctx.request
        if seen.empty:
            return ROOM
        ending = seen.ending(each.now_s * self._half_grown * 2.0, self._ctx.now)
        if seen.running - ending >= load.all_slots:
            return NO_SLOT
        if not instance.tried and seen.running >= instance.untried_sequences(self._ctx.now):
            return NO_SLOT
        prompts = float(-(-request.sequences // request.samples))
        own = prompts * (self._prompt - each.cached) + request.sequences * self._output / 2.0
        used = seen.expected_kv_tokens(self._ctx.now) + own
        used -= ending * (self._ctx.demand.mix.booked + self._half_grown)
        if used > load.kv_cache_tokens:
            return NO_MEMORY
        if request.service.background and not self._leaves_room(each, instance, used):
            return KEPT_FREE
        return ROOM

    def _leaves_room(self, each: Rating, instance: Instance, used: float) -> bool:
        """True if requests with targets will still meet them there beside this one of the background.

        They are taken to come to the instances that can meet their targets as fast as these are, and to be as
        many at once as all but a share of 1 - attainment of Poisson arrivals make. Forecasts count at the
        quantile of their errors at that attainment.
        """
        demand, load, latency = self._ctx.demand, each.load, each.load.latency
        protected, now = demand.protected, self._ctx.now
        rate = protected.rate(now) * self._share
        # None is expected while this one runs.
        if not instance.stated_sequences and rate * each.end_s < 1.0 - protected.attainment:
            return True
        slow = instance.errors.step.quantile(protected.attainment)
        late = instance.errors.first_token.quantile(protected.attainment)
        context = protected.prompt + protected.output / 2.0
        speed = 0.0
        for other, cost in zip(self.instances, self.fleet.costs, strict=True):
            if other.latency.step_s(1.0, context) <= protected.tpot_s:
                speed += cost.speed
        if latency.step_s(1.0, context) * slow > protected.tpot_s or speed <= 0.0:
            return True  # no request with targets is served here in time
        rate *= self.fleet.costs[each.index].speed / speed / load.engines
        z = normal_quantile(protected.attainment)

        def most(mean: float) -> float:
            return mean + z * math.sqrt(mean)

        step_s = protected.tpot_s / slow if protected.tpot_s < math.inf else each.step_s
        to_come = max(0.0, most(rate * protected.output * step_s) - instance.stated_sequences / load.engines)
        batch = load.batch + each.own + to_come
        if batch > load.slots or used + to_come * load.engines * context > load.kv_cache_tokens:
            return False
        tokens = each.context + each.own * (self._prompt + self._output / 2.0) + to_come * context
        share = each.with_s / each.step_s
        if latency.step_s(batch, tokens) / share * slow > protected.tpot_s:
            return False
        pending = each.seen.pending + each.prompts * (self._prompt - each.cached)
        if protected.ttft_s < math.inf:
            pending += max(0.0, most(rate * protected.ttft_s) - 1.0) * protected.prompt
            first_s = latency.joining_s(each.with_s, load.asynchronous) + latency.first_token_s(
                protected.prompt, 0.0, pending, batch, tokens, load.budget
            )
            return first_s * late <= protected.ttft_s
        return True

    def _heed(self, availabilities: Sequence[tuple[int, str]]) -> None:
        """Restrain instances by their availability: later, or not now."""
        for each in self.ratings:
            availability = availabilities[each.index][0]
            each.last = availability == DEPRIORITISED
            if availability == BLOCKED and each.state == ROOM:
                each.state = RESTRAINED

    # --- targets ---

    def _miss(self, each: Rating, instance: Instance) -> float:
        """Probability that the request misses a target on an instance."""
        service, waited_s, errors = self._ctx.request.service, self._ctx.waited_s, instance.errors
        met = 1.0
        if service.ttft_s < math.inf:
            met *= 1.0 - errors.first_token.over((service.ttft_s - waited_s) / each.first_token_s)
        if service.tpot_s < math.inf and self._output > 1.0:
            met *= 1.0 - errors.step.over(service.tpot_s / each.step_s)
        if service.e2e_s < math.inf:
            met *= 1.0 - errors.end.over((service.e2e_s - waited_s) / each.end_s)
        return 1.0 - met

    def _stake_s(self, each: Rating) -> float:
        """Seconds that a missed target costs: those of the answer, at the attainment as many as it takes."""
        service = self._ctx.request.service
        first_s = service.ttft_s if service.ttft_s < math.inf else each.first_token_s
        step_s = service.tpot_s if service.tpot_s < math.inf else each.step_s
        return min(service.e2e_s, first_s + self._output * step_s) / (1.0 - service.attainment)

    def _lost_by_others_s(self, each: Rating, instance: Instance) -> float:
        """Seconds lost by requests with targets that run there and miss them because of this one."""
        protected = self._ctx.demand.protected
        if protected.tpot_s == math.inf or each.now_s <= 0.0:
            return 0.0
        batch, output = each.load.batch, max(1.0, protected.output)
        sequences = self._ctx.request.sequences / each.own * batch
        # Half-grown in the mean, they are delayed by its prompt and by longer steps for what is left.
        prompt_s = (each.others_s - each.joining_s(self._output)) / sequences if sequences > 0.0 else 0.0
        left = min(self._output, output / 2.0)
        more_s = (max(0.0, prompt_s) + left * max(0.0, each.with_s - each.now_s)) / output
        step_s = each.now_s * each.step_s / each.with_s
        over = instance.errors.step.over
        missed = over(protected.tpot_s / (step_s + more_s)) - over(protected.tpot_s / step_s)
        stake_s = protected.output * protected.tpot_s / (1.0 - protected.attainment)
        return instance.stated_sequences * missed * stake_s

    def _wait_for_targets(self) -> None:
        """Leave out instances that most likely miss a target, if a full one most likely would not."""
        full = [each.miss for each in self.ratings if each.state == NO_SLOT or each.state == NO_MEMORY]
        if full and min(full) < 0.5:
            for each in self.ratings:
                if each.state == ROOM and each.miss > 0.5:
                    each.state = MISSES

    # --- hold ---

    def _hold(self) -> None:
        """Pass slower instances over where waiting for the faster ones is sooner, waiting included."""
        ctx, fleet = self._ctx, self.fleet
        availabilities = ctx.availabilities
        fastest = self.ratings[fleet.order[0]]
        least_s = self._long_answer_s(fastest)
        rate = ctx.demand.rate(fastest.own_s, ctx.now) * self._share
        ended = rate <= 0.0
        speed, full_score = 0.0, math.inf
        todo = ctx.waiting * self._share + size_of(ctx.request, ctx.predicted_output)
        wait_weight = self.weights[0] + self.weights[1]
        for i in fleet.order:
            each = self.ratings[i]
            full = full_score < math.inf
            if (ended or full) and speed > rate and each.state == ROOM:
                done_s = todo / (speed - rate) + least_s
                sooner = ended or full_score + wait_weight * todo / speed < each.score
                if sooner and done_s < self._long_answer_s(each):
                    each.state, each.done_s = HELD, done_s
            if availabilities is None or availabilities[i][0] == NORMAL:
                speed += fleet.costs[i].speed
            if not full and (each.state == NO_SLOT or each.state == NO_MEMORY):
                full_score = each.score

    def _long_answer_s(self, each: Rating) -> float:
        """Seconds that one long answer takes on an instance, half of what runs there beside it."""
        long = self._ctx.long_output
        context = each.context * 0.5 + self._prompt + long / 2.0
        return each.first_token_s + long * each.load.latency.step_s(each.load.batch * 0.5 + 1.0, context)

    # --- for people ---

    def __call__(self) -> list[Candidate]:
        """Candidates for people. The instances may have changed meanwhile: only their constants are read."""
        return [self._candidate(each) for each in self.ratings]

    def _candidate(self, each: Rating) -> Candidate:
        instance = self.instances[each.index]
        batch, t_s, workload = paper_work(self._ctx, instance)
        return Candidate(
            instance=instance.name,
            score=each.score,
            eligible=each.state == ROOM,
            reason=self._reason(each),
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=each.seen.kv_utilization,
            workload=workload,
            terms={term.name: float(getattr(each, term.name)) for term in TERMS},
            weights={term.name: weight for term, weight in zip(TERMS, self.weights, strict=True)},
            forecast=each.document(instance.errors),
        )

    def _reason(self, each: Rating) -> str:
        state, availabilities = each.state, self._ctx.availabilities
        if state == NO_SLOT:
            few = "" if self.instances[each.index].tried else ", few until its speed is known"
            return f"{FULL}: every slot is taken{few}"
        if state == NO_MEMORY:
            return f"{FULL}: its KV cache would not hold it beside what is expected in use"
        if state == KEPT_FREE:
            return "kept free: requests with targets would miss them beside it"
        if state == MISSES:
            return f"{PASSED_OVER}: it would miss a target here with probability {each.miss:.2f}"
        if state == HELD:
            return (
                f"{PASSED_OVER}: one long answer takes {self._long_answer_s(each):.3g} s here, "
                f"the faster ones are done with all in {each.done_s:.3g} s"
            )
        return "" if availabilities is None else availabilities[each.index][1]


class Hetlb(Policy):
    """`hetlb`, the default."""

    name = "hetlb"
    holds_back = True

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._groups = Groups()
        stated = dict(params.weights)
        self._weights = tuple([stated.get(term.name, term.weight) for term in TERMS])

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        if len(instances) > LARGEST_WHOLE and ctx.availabilities is None:
            return self._choose_of_many(ctx, instances)
        evaluation = Evaluation(ctx, instances, self._weights)
        found = evaluation.best()
        if found is None:
            return None
        if ctx.request.preferred:
            found = _preferred(ctx, evaluation, found)
        work_s = paper_work(ctx, evaluation.instances[found.index])[2]
        return Choice(found.index, work_s, evaluation, found)

    def _choose_of_many(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        """The best of two groups or three; of the first other one that has room where those have none."""
        groups, looked = self._groups.in_order(instances, ctx.request.id, ctx.held)
        evaluations: list[tuple[Group, Evaluation]] = []
        best: Rating | None = None
        index = 0
        for n, group in enumerate(groups):
            if n >= looked and best is not None:
                break
            evaluation = Evaluation(ctx, group.instances, self._weights, share=group.share)
            evaluations.append((group, evaluation))
            found = evaluation.best()
            if found is not None and (best is None or found.score < best.score):
                index, best = group.indices[found.index], found
        if best is None:
            return None
        work_s = paper_work(ctx, instances[index])[2]
        return Choice(index, work_s, lambda: _of_many(instances, evaluations), best)

    def choose_split(
        self, ctx: SchedulingContext, instances: Sequence[Instance], transfers: TransferTimes, mixed: bool
    ) -> SplitChoice | None:
        from hetlb.core.policies.pairs import choose_pair

        return choose_pair(ctx, Evaluation(ctx, instances, self._weights, hold=mixed), transfers, mixed)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return Evaluation(ctx, instances, self._weights)()


def _preferred(ctx: SchedulingContext, evaluation: Evaluation, best: Rating) -> Rating:
    """The best of the instances that the request prefers, unless that is too much worse than `best`."""
    request = ctx.request
    among = [i for i, each in enumerate(evaluation.instances) if each.name in request.preferred]
    found = evaluation.best(among)
    if found is None or found.score > (1.0 + request.preferred_within) * best.score:
        return best
    return found


def _of_many(
    instances: Sequence[Instance], evaluations: Sequence[tuple[Group, Evaluation]]
) -> list[Candidate]:
    """Candidates of a large fleet for people."""
    found = [Candidate(each.name, math.inf, eligible=False, reason=NOT_LOOKED_AT) for each in instances]
    for group, evaluation in evaluations:
        for i, candidate in zip(group.indices, evaluation(), strict=True):
            found[i] = candidate
    return found
