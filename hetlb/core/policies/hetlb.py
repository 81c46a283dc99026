"""`hetlb`, the default policy: late binding to the instance where a request costs all requests least time.

1. Filter: an instance has room if it has a free slot and its KV cache, as expected in use, holds the request;
   for a background request, if it also leaves room for requests with targets.
2. Score: the sum of `TERMS`, each in seconds times its weight: what the request takes there, by how much it
   delays those that run there (the externality), what missed targets cost, and once no more requests come by
   how much all is done later. The least wins, the first in file order of equals.
3. Hold: a slower instance is passed over where the score of a faster one that is full is better, the wait
   until the faster ones are done with all that waits included: a slow-server threshold (Lin, Kumar, Optimal
   control of a queueing system with two heterogeneous servers, 1984).

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
from hetlb.core.instance import Instance
from hetlb.core.occupancy import Occupancy
from hetlb.core.policies.base import (
    Choice,
    Policy,
    PolicyParams,
    SchedulingContext,
    SplitChoice,
    cached_at,
    credit_at,
    paper_work,
    prompts_per_s,
)
from hetlb.core.policies.targets import (
    leaves_room,
    lost_by_others_s,
    probability_of_miss,
    shares_of_targets,
    stake_s,
)
from hetlb.core.throttle import BLOCKED, DEPRIORITISED, NORMAL
from hetlb.core.transfer import TransferTimes
from hetlb.core.types import Candidate

#: Reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: Reason of an instance without room.
FULL: Final = "full"

#: A bound counts so much of itself, as its sum may be rounded up.
_ROUNDING: Final = 1.0 - 1e-9

#: States of an instance: room, or the reason why not.
ROOM: Final = 0
NO_SLOT: Final = 1
NO_MEMORY: Final = 2
HELD: Final = 3
RESTRAINED: Final = 4
KEPT_FREE: Final = 5


class Term(NamedTuple):
    """One term of the score: an attribute of `Rating` in seconds, its weight, its meaning."""

    name: str
    weight: float
    meaning: str


#: The score is the sum of weight times seconds; `policy.weights` of the fleet file changes a weight. The
#: first is that of a class without targets (`first_token_weight`), and 0 for requests with targets; that of
#: `shared_s` is at most the first two.
TERMS: Final = (
    Term("first_token_s", 20.0, "until the first token"),
    Term("own_s", 1.0, "until the whole answer, at the steps of now"),
    Term("others_s", 1.0, "added to the answers that run there, all together"),
    Term("loss_s", 1.0, "lost by targets that are missed, its own and those of requests that run there"),
    Term("shared_s", 21.0, "less: of its prefill what others that share the beginning of its prompt pay"),
    Term("adapter_s", 21.0, "until its LoRA adapter has a slot"),
    Term("finish_s", 60.0, "by which all that waits is done later, once no more requests come"),
)


@mypyc_attr(acyclic=True)
class Rating(Forecast):
    """Forecast for the request on one instance, and its score.

    `limit`: the score above which it is passed over. `last`: to be taken only if no other can.
    """

    __slots__ = (
        "adapter_s", "finish_s", "index", "last", "limit", "loss_s", "own_s", "score", "shared_s",
        "state",
    )  # fmt: skip

    index: int
    state: int
    last: bool
    score: float
    own_s: float
    adapter_s: float
    finish_s: float
    shared_s: float
    loss_s: float
    limit: float


@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """The instances for one request, as they were at the time; `candidates` is for people.

    Each is glanced at: has it room, and what is its score at least. Those that this cannot rule out are
    rated in full, the others on demand: the outcome is that of rating all.
    """

    __slots__ = (
        "_booked", "_ctx", "_done_s", "_half_grown", "_kept", "_least", "_limits", "_mean_size", "_output",
        "_prompt", "_prompts", "_seen", "_states", "fleet", "instances", "weights",
    )  # fmt: skip

    def __init__(
        self, ctx: SchedulingContext, instances: Sequence[Instance], weights: tuple[float, ...], hold: bool
    ) -> None:
        """Look at `instances`. Without `hold` none is passed over."""
        mix, request = ctx.demand.mix, ctx.request
        service = request.service
        self._ctx = ctx
        if service.stated or service.background:
            weights = (0.0, *weights[1:])
        elif service.first_token_weight is not None:
            weights = (service.first_token_weight, *weights[1:])
        if weights[4] > weights[0] + weights[1]:  # no more is taken off a prefill than it counts
            weights = (*weights[:4], weights[0] + weights[1], *weights[5:])
        self.weights = weights
        self.fleet = mix.fleet(instances)
        self.instances = members = self.fleet.members
        self._prompt = float(request.prompt_tokens)
        self._output = ctx.predicted_output
        sequences = float(request.sequences)
        self._prompts = prompts = 1.0 if sequences <= 1.0 else float(-(-request.sequences // request.samples))
        #: Tokens of the KV cache that it takes where nothing of it is.
        self._booked = prompts * self._prompt + sequences * self._output / 2.0
        #: Tokens that an answer of the mean request has, half-grown.
        self._half_grown = mix.output / 2.0
        self._mean_size = mix.size
        self._seen: list[Occupancy] = []
        self._states: list[int] = []
        self._kept: list[Rating | None] = [None] * len(members)
        #: Once no more requests come, for each the seconds until the faster ones are done with what waits.
        self._done_s: list[float] | None = None
        #: Each is passed over above this score: that of a faster one that is full, the wait for it included.
        self._limits = [math.inf] * len(members)
        for i, each in enumerate(members):
            seen = each.occupancy
            state = ROOM if seen.empty else self._room(each, seen)
            if ctx.availabilities is not None and ctx.availabilities[i][0] == BLOCKED and state == ROOM:
                state = RESTRAINED
            self._seen.append(seen)
            self._states.append(state)
        self._least = self._least_scores()
        holds = hold and len(members) > 1
        if holds:
            self._done_s = self._done_by_faster()
        if service.background or ctx.demand.protected.count > 0 or ctx.adapter_load_s > 0.0:
            self._rate_all()  # errors and slots, which these go by, may have changed by then
        if holds:
            self._hold()

    @property
    def ratings(self) -> list[Rating]:
        """Every instance rated in full."""
        return [self._rating(i) for i in range(len(self.instances))]

    def best(self, among: Sequence[int] | None = None) -> Rating | None:
        """The rating with room and the lowest score, the first of several; None if none has room.

        Those that are to be taken only if no other can come last.
        """
        least, states = self._least, self._states
        able = [i for i in range(len(states)) if states[i] == ROOM and (among is None or i in among)]
        if not able:
            return None
        first = able[0]
        for i in able:
            if least[i] < least[first]:
                first = i
        found = self._better(first, None)
        for i in able:
            if i != first and (found is None or found.last or least[i] <= found.score):
                found = self._better(i, found)
        return found

    def _better(self, index: int, found: Rating | None) -> Rating | None:
        """The better of an instance, unless it is passed over, and the best so far."""
        each = self._rating(index)
        if each.state != ROOM:
            return found
        if found is None or each.last < found.last:
            return each
        if each.last > found.last or each.score > found.score:
            return found
        return each if each.score < found.score or index < found.index else found

    def _least_scores(self) -> list[float]:
        """For each with room a score that its own is not below; infinite for the others.

        The prompt's tokens count at the least that one takes on such an instance, the delay of those that run
        there by the longer steps alone.
        """
        output, w, states, held = self._output, self.weights, self._states, self._ctx.held
        prompt = self._prompt if self._prompt > 1.0 else 1.0
        first_weight, own_weight, others_weight = w[0] + w[1], w[1] * output, w[2] * output
        context, alone = self._prompt + output / 2.0, self._ctx.request.sequences == 1
        found: list[float] = []
        for i, seen in enumerate(self._seen):
            if states[i] != ROOM:
                found.append(math.inf)
                continue
            if not alone:
                found.append(0.0)
                continue
            load = seen.load
            with_s = load.next_step_s + load.next_token_s * (seen.context + context)
            new = prompt if held is None else self._paid(i)
            least = first_weight * (seen.joining_s + load.prompt_token_s * (seen.unread + new))
            least += own_weight * with_s
            if with_s > seen.now_s:
                least += others_weight * load.batch * (with_s - seen.now_s)
            found.append(least * _ROUNDING)
        return found

    def _paid(self, index: int) -> float:
        """Tokens of the prompt to compute there; others that share its beginning pay for their part."""
        instance = self.instances[index]
        new = self._prompt - cached_at(self._ctx, instance) - credit_at(self._ctx, instance)
        return new if new > 1.0 else 1.0

    def _rating(self, index: int) -> Rating:
        """An instance rated in full."""
        each = self._kept[index]
        if each is None:
            each = self._kept[index] = self._rate(index, self.instances[index])
        return each

    def _rate(self, index: int, instance: Instance) -> Rating:
        ctx, cost, w, seen = self._ctx, self.fleet.costs[index], self.weights, self._seen[index]
        service = ctx.request.service
        prompts_s = prompts_per_s(ctx, seen)
        cached = float(cached_at(ctx, instance))
        each = Rating(seen, ctx.request, self._output, cached, cost, prompts_s, instance.caches_prefixes)
        each.index = index
        each.last = ctx.availabilities is not None and ctx.availabilities[index][0] == DEPRIORITISED
        each.own_s = each.first_token_s + self._output * each.with_s
        each.adapter_s = each.loss_s = each.finish_s = 0.0
        credit = credit_at(ctx, instance)
        each.shared_s = self._first_token_s(each, cached + credit) - each.first_token_s if credit else 0.0
        adapters = instance.adapters
        if adapters is not None and ctx.adapter_load_s > 0.0:
            wait_s = self._half_grown * seen.now_s
            each.adapter_s = adapters.cost_s(ctx.request.model, ctx.adapter_load_s, wait_s)
        if service.stated:
            each.loss_s = probability_of_miss(ctx, each, instance.errors) * stake_s(ctx, each)
        if instance.stated_sequences:
            each.loss_s += lost_by_others_s(ctx, each, instance)
        if self._done_s is not None:
            each.finish_s = max(0.0, self._busy_s(each) - self._done_s[index])
        each.score = (
            w[0] * each.first_token_s
            + w[1] * each.own_s
            + w[2] * each.others_s
            + w[3] * each.loss_s
            + w[4] * each.shared_s
            + w[5] * each.adapter_s
            + w[6] * each.finish_s
        )
        self._judge(each)
        return each

    def _first_token_s(self, each: Rating, cached: float) -> float:
        """Seconds until the first token if so many tokens of the prompt were cached."""
        seen, load = each.seen, each.load
        return seen.joining_s + load.latency.first_token_s(
            self._prompt, cached, seen.unread, load.batch, seen.context, load.budget, each.prompts
        )

    def _judge(self, each: Rating) -> None:
        """Set the state of an instance rated in full."""
        each.state = self._states[each.index]
        each.limit = self._limits[each.index]
        if each.state == ROOM and each.limit < each.score:
            each.state = HELD

    def _rate_all(self) -> None:
        """Rate all, and keep what requests with targets need free of the background."""
        ctx, ratings = self._ctx, self.ratings
        if not ctx.request.service.background:
            return
        shares = shares_of_targets(ctx.demand.protected, self.instances, self.fleet.costs)
        for each, instance, share in zip(ratings, self.instances, shares, strict=True):
            if each.state == ROOM:
                used = self._used_tokens(instance, each.seen, self._ending(each.seen))
                if not leaves_room(ctx, each, instance, used, share):
                    each.state = self._states[each.index] = KEPT_FREE

    def _room(self, instance: Instance, seen: Occupancy) -> int:
        """Room for the request beside others: a slot, and KV cache for what of it is not there."""
        ending = self._ending(seen)
        if seen.running - ending >= seen.load.all_slots:
            return NO_SLOT
        if not instance.explored and seen.running >= instance.explored_sequences(self._ctx.now):
            return NO_SLOT
        return NO_MEMORY if self._used_tokens(instance, seen, ending) > seen.load.kv_cache_tokens else ROOM

    def _ending(self, seen: Occupancy) -> float:
        """Mean answers that will have ended when a prompt that is elsewhere still comes to decode."""
        return seen.ending(seen.now_s * self._half_grown * 2.0, self._ctx.now)

    def _used_tokens(self, instance: Instance, seen: Occupancy, ending: float) -> float:
        """Tokens of its KV cache in use with the request, its answer half-grown."""
        ctx = self._ctx
        used = seen.expected_kv_tokens(ctx.now) + self._booked
        if ctx.held is not None:
            used -= self._prompts * cached_at(ctx, instance)
        return used - ending * (ctx.demand.mix.booked + self._half_grown) if ending > 0.0 else used

    def _hold(self) -> None:
        """Pass slower instances over where waiting for a faster one that is full costs less."""
        states = self._states
        if NO_SLOT not in states and NO_MEMORY not in states:
            return
        limits, wait_weight, full = self._limits, self.weights[0] + self.weights[1], math.inf
        for i, wait_s in self._waits():
            if states[i] == ROOM:
                limits[i] = full + wait_weight * wait_s
                if limits[i] < self._least[i]:
                    states[i] = HELD
            elif full == math.inf and states[i] in (NO_SLOT, NO_MEMORY):
                full = self._rating(i).score
        for each in self._kept:
            if each is not None:
                self._judge(each)

    def _waits(self) -> list[tuple[int, float]]:
        """Instances, the fastest first, with the seconds that all faster ones take for all that waits."""
        ctx, speed, waits = self._ctx, 0.0, []
        todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
        for i in self.fleet.order:
            waits.append((i, todo / speed if speed > 0.0 else math.inf))
            if ctx.availabilities is None or ctx.availabilities[i][0] == NORMAL:
                speed += self.fleet.costs[i].speed
        return waits

    def _done_by_faster(self) -> list[float] | None:
        """Seconds until the faster ones are done with all that waits, for each; None while requests come."""
        fastest = self._rating(self.fleet.order[0])
        if self._ctx.demand.goes_on(fastest.own_s, self._ctx.now):
            return None
        long_s, done_s = self._long_answer_s(fastest), [math.inf] * len(self.instances)
        for i, wait_s in self._waits():
            done_s[i] = long_s + wait_s
        return done_s

    def _busy_s(self, each: Rating) -> float:
        """Seconds until an instance is done with one long answer, and with all that it has at full speed."""
        # Half of all that runs is done in the mean.
        size = size_of(self._ctx.request, self._output) + self._mean_size * each.seen.running / 2.0
        return max(self._long_answer_s(each), size / self.fleet.costs[each.index].speed)

    def _long_answer_s(self, each: Rating) -> float:
        """Seconds that one long answer takes on an instance, at the steps of now."""
        seen, load, long = each.seen, each.load, self._ctx.long_output
        context = seen.context + self._prompt + long / 2.0
        return each.first_token_s + long * (load.next_step_s + load.next_token_s * context)

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
            few = "" if self.instances[each.index].explored else ", few until its speed is known"
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
        self._weights = tuple([stated.get(term.name, term.weight) for term in TERMS])

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        evaluation = Evaluation(ctx, instances, self._weights, True)
        found = evaluation.best()
        if found is None:
            return None
        preferred = ctx.request.preferred
        if preferred:  # unless it is too much worse
            among = [i for i, each in enumerate(evaluation.instances) if each.name in preferred]
            other = evaluation.best(among)
            if other is not None and other.score <= (1.0 + ctx.request.preferred_within) * found.score:
                found = other
        work_s = paper_work(ctx, evaluation.instances[found.index])[2]
        return Choice(found.index, work_s, evaluation, found)

    def choose_split(
        self, ctx: SchedulingContext, instances: Sequence[Instance], transfers: TransferTimes, mixed: bool
    ) -> SplitChoice | None:
        from hetlb.core.policies.pairs import choose_pair

        return choose_pair(ctx, Evaluation(ctx, instances, self._weights, hold=mixed), transfers, mixed)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return Evaluation(ctx, instances, self._weights, True)()
