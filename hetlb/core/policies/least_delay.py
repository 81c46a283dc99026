"""`hetlb`, the default policy: late binding to the instance where a request costs all others least time.

A request is bound only to an instance that has a slot for it; the KV cache decides which instance has room,
not which is fast. Every figure is a time in seconds from the latency model, or says how full an instance is.

Four questions, in this order:

1. Room: fewer sequences than an engine runs at once (and an eighth), KV cache expected in use below a mark
   with one more mean request. What this request itself needs is left out: else a full instance would be left
   with small requests only, and one of many sequences would wait for ever; what does not fit at once waits in
   the engine for a slot.
2. Cost: the request's own time there (its first token counted many times over, since people wait for it, and
   more so where it comes late by the standard of the fleet), and the time by which it delays those that run
   there already (the externality): their steps get longer while both run, and wait while its prompt is read.
3. Worth: an instance is passed over where the faster ones can finish all that waits, and what keeps arriving
   meanwhile, before it had finished one long answer. So at the end of a burst nothing waits for the slowest,
   and under load that the fast ones cannot carry all instances work. An instance whose first token comes
   far sooner than that of the best one left is not passed over by a request that has just come, unless the
   whole answer comes much later.
4. Fit: of the first few in the queue, the one whose prompt and answer cost least on this instance compared
   with
   what they cost the fleet. A request is overtaken a bounded number of times (see `core.admission`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.admission import Queued
from hetlb.core.demand import Demand, size_of
from hetlb.core.instance import BLOCKED, DEPRIORITISED, NORMAL, Instance
from hetlb.core.latency import ideal_batch, processing_s
from hetlb.core.policies.base import MAX_WORKLOAD_S, Choice, Policy, SchedulingContext
from hetlb.core.types import Candidate

#: An engine is kept this much fuller than it can run at once, so that a slot that frees is taken in the
#: same iteration and not a round trip later.
_OVERBOOK: Final = 1.125
#: Of the KV cache, what may be expected to be in use: above it vLLM begins to preempt.
_KV_MARK: Final = 0.9
#: A second until the first token weighs as many seconds of the whole...
_FIRST_TOKEN_WEIGHT: Final = 20.0
#: ...and as many times more as it takes, beyond so many times what the mean prompt takes the fastest.
_LATE: Final = 8.0
#: How much slower a batch thins out than if what is left of its answers were spread exponentially: those
#: that have just been admitted have all before them.
_THINNING: Final = 2.0
#: Requests have stopped coming when over so many seconds less than this share of what the fleet can do came.
_LULL_S: Final = 16.0
_LULL_SHARE: Final = 0.05
#: An instance is not passed over where its first token comes so many times sooner than elsewhere.
_FAR_SOONER: Final = 1.5
#: ...unless decoding takes so many times longer than there.
_MUCH_LATER: Final = 2.5
#: So many of the queue are looked at for an instance; one must suit it this much better to overtake.
_LOOKAHEAD: Final = 16
_BETTER: Final = 0.95

#: An instance that is to be taken last costs so many seconds more than any request does.
_LAST_S: Final = 1e12

#: The beginning of the reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: And of one that has none.
FULL: Final = "full"

#: Why an instance cannot take the request now, or that it can.
_ROOM: Final = 0
_NO_SLOT: Final = 1
_NO_MEMORY: Final = 2
_PASSED_OVER: Final = 3
_HELD_BACK: Final = 4


@mypyc_attr(acyclic=True)
class _InstanceScore:
    """One instance in one evaluation.

    Seconds: `first_s` until the first token, `own_s` for the whole request, `others_s` by which it delays
    those that run there, `charged_s` what of the first counts for it, `late_s` what is added because it is
    late, `score` what it costs in all. `state` is whether there is room, `kv` the promised share of the KV
    cache."""

    __slots__ = ("charged_s", "first_s", "kv", "late_s", "others_s", "own_s", "score", "state")

    def __init__(self, first_s: float, own_s: float, others_s: float, state: int, kv: float) -> None:
        self.kv = kv
        self.late_s = 0.0
        self.first_s = first_s
        self.own_s = own_s
        self.others_s = others_s
        self.score = _FIRST_TOKEN_WEIGHT * first_s + own_s + others_s
        self.charged_s = first_s
        self.state = state

    def charge(self, first_s: float) -> None:
        """Let the request pay for less of its first token than it will take."""
        self.score -= (_FIRST_TOKEN_WEIGHT + 1.0) * (self.charged_s - first_s)
        self.charged_s = first_s


@mypyc_attr(acyclic=True)
class _Evaluation:
    """All instances scored for one request. Made for every decision; `candidates` is for people."""

    __slots__ = ("_passed_over", "_question", "_scores", "instances")

    def __init__(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> None:
        self._question = ctx
        self.instances = instances
        #: Seconds that a long answer takes there, and in which the faster ones are done with all.
        self._passed_over: dict[int, tuple[float, float]] | None = None
        self._scores: list[_InstanceScore] = []
        self._score_all()
        if len(instances) > 1:
            self._pass_over()

    def lowest(self) -> int | None:
        """The index of the instance with room and the lowest score, the first of several."""
        index = -1
        least = math.inf
        for i, each in enumerate(self._scores):
            if each.state == _ROOM and each.score < least:
                index, least = i, each.score
        return None if index < 0 else index

    def _score_all(self) -> None:
        """Room and cost of every instance."""
        ctx = self._question
        request, mix = ctx.request, ctx.demand.mix
        sequences, prompt, output = request.sequences, request.prompt_tokens, ctx.predicted_output
        own_context = prompt + output / 2.0
        # Those that run are on average half-grown, and run for what is left of an answer.
        half_grown = mix.output / 2.0
        together = min(output, mix.residual)
        held = ctx.held
        usual_s = math.inf
        scores = self._scores
        for instance in self.instances:
            latency = instance.latency
            slots, budget, engines = instance.max_num_seqs, instance.token_budget, instance.engines
            batch = float(instance.sequences)
            state = _ROOM
            context = 0.0
            if batch or instance.kv_tokens:
                if batch >= slots * _OVERBOOK:
                    state = _NO_SLOT
                elif (
                    instance.expected_kv_tokens(ctx.now) + mix.booked + half_grown
                    > _KV_MARK * instance.kv_cache_tokens
                ):
                    state = _NO_MEMORY
                context = instance.prompt_tokens + batch * half_grown
                if batch > slots:
                    context *= slots / batch
                    batch = float(slots)
            # Data-parallel engines have equal parts of the load; the request's sequences are spread, too.
            share = 1.0 / engines
            own = 1.0 if sequences <= engines else sequences * share
            batch *= share
            context *= share
            pending = instance.pending_prompt_tokens * share
            cached = 0
            paid: float = 0.0  # tokens that this request need not pay for
            if held is not None and instance.caches_prefixes:
                cache_id = instance.tree.cache_id
                cached = held.tokens.get(cache_id, 0)
                paid = cached + held.credit - held.credits.get(cache_id, 0.0)
            step_s = latency.step_s(batch + own, context + own * own_context)
            first_s = latency.first_token_s(prompt, cached, pending, batch, context, budget, own)
            others_s = 0.0
            if batch:
                first_s += 0.5 * latency.step_s(batch, context)  # what is left of the running iteration
                others_s = (
                    (sequences / own)
                    * batch
                    * (
                        latency.read_delay_s(prompt, paid, batch, context, budget, own)
                        + together * latency.step_delay_s(batch, context, own_context, own)
                    )
                )
            costs = mix.costs(instance)
            own_s = first_s + output * step_s
            over = batch + own - slots * share
            if over > 0.0:
                # What has no slot waits for one: they come free at the rate at which answers end.
                own_s += over / (slots * share) * output * step_s
            each = _InstanceScore(first_s, own_s, others_s, state, instance.kv_utilization)
            scores.append(each)
            if paid > cached:
                each.charge(
                    first_s - latency.prefill_s(prompt, 1.0, cached) + latency.prefill_s(prompt, 1.0, paid)
                )
            if costs.first_token_s < usual_s:
                usual_s = costs.first_token_s
        if mix.has_twins(self.instances):
            self._share_externality()
        if usual_s > 0.0:
            late_s = _LATE * usual_s
            for each in scores:
                first_s = each.charged_s
                if first_s > late_s:
                    each.late_s = _FIRST_TOKEN_WEIGHT * first_s * (first_s - late_s) / usual_s
                    each.score += each.late_s
        if ctx.availabilities is not None:
            for i, (availability, _) in enumerate(ctx.availabilities):
                if availability == BLOCKED and scores[i].state == _ROOM:
                    scores[i].state = _HELD_BACK
                elif availability == DEPRIORITISED:
                    scores[i].score += _LAST_S

    def _share_externality(self) -> None:
        """Give instances of one kind the mean of their externalities.

        Then the own time alone decides among them: with the externality, short prompts and long ones would
        gather on different ones, and long answers beside long prompts be late.
        """
        kinds = self._question.demand.mix.kinds(self.instances)
        sums = [0.0] * len(kinds)
        counts = [0] * len(kinds)
        for kind, each in zip(kinds, self._scores, strict=True):
            sums[kind] += each.others_s
            counts[kind] += 1
        for kind, each in zip(kinds, self._scores, strict=True):
            others_s = sums[kind] / counts[kind]
            each.score += others_s - each.others_s
            each.others_s = others_s

    def _pass_over(self) -> None:
        """Mark those with room on which a long answer would end after the faster ones are done with all.

        While requests keep coming this asks only whether it is worth not to wait for a faster one that is
        full; once they have stopped coming, whether what is left should go to a slower one at all. An
        instance that is throttled counts as doing nothing: nothing waits for it.
        """
        ctx, scores = self._question, self._scores
        room = 0
        for each in scores:
            if each.state == _ROOM:
                room += 1
        if not room:
            return
        mix, demand, now = ctx.demand.mix, ctx.demand, ctx.now
        instances = self.instances
        total, order = mix.fleet(instances)
        ending = demand.below(_LULL_SHARE * total, _LULL_S, now)
        if not ending and room == len(scores):
            return
        availabilities = ctx.availabilities
        todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
        fresh = ctx.waiting == 0
        shortest_s = -1.0
        speed = 0.0
        soonest_s = least_own_s = math.inf
        for i in order:
            each = scores[i]
            if each.state == _ROOM:
                sooner = fresh and each.first_s * _FAR_SOONER < soonest_s < math.inf
                if speed > 0.0 and not (sooner and each.own_s - each.first_s <= _MUCH_LATER * least_own_s):
                    if shortest_s < 0.0:
                        shortest_s = _long_answer_s(ctx, instances[order[0]], last=True)
                    long_s = _long_answer_s(ctx, instances[i])
                    # The rate is asked for only where it can matter: first at its best, then as it is.
                    done_s = _done_s(todo, speed, shortest_s)
                    if done_s < long_s:
                        spare = speed - demand.bounds(long_s, now)[0]
                        done_s = _done_s(todo, spare, shortest_s)
                    if done_s < long_s:
                        done_s = _done_s(todo, speed - demand.rate(long_s, now), shortest_s)
                    if done_s < long_s:
                        if self._passed_over is None:
                            self._passed_over = {}
                        self._passed_over[i] = (long_s, done_s)
                        each.state = _PASSED_OVER
                if each.state == _ROOM:
                    if not ending:
                        return  # the fastest with room: the slower ones are as good as their scores
                    if each.first_s < soonest_s:
                        soonest_s = each.first_s
                    if each.own_s - each.first_s < least_own_s:
                        least_own_s = each.own_s - each.first_s
            if availabilities is None or availabilities[i][0] == NORMAL:
                speed += mix.speed(instances[i])

    def candidates(self) -> list[Candidate]:
        """Candidates for people. The instances may have changed meanwhile: only their constants are read."""
        return [self._candidate(i) for i in range(len(self.instances))]

    def _candidate(self, i: int) -> Candidate:
        instance, each = self.instances[i], self._scores[i]
        batch, t_s, workload = _paper_work(self._question, instance)
        availabilities = self._question.availabilities
        availability, reason = (NORMAL, "") if availabilities is None else availabilities[i]
        if each.state == _NO_SLOT:
            reason = f"{FULL}: every slot is taken"
        elif each.state == _NO_MEMORY:
            reason = f"{FULL}: over {_KV_MARK:.2f} of the KV cache expected in use"
        elif each.state == _PASSED_OVER and self._passed_over is not None:
            long_s, done_s = self._passed_over[i]
            reason = (
                f"{PASSED_OVER}: a long answer takes {long_s:.3g} s here, "
                f"the faster ones are done with all in {done_s:.3g} s"
            )
        return Candidate(
            instance=instance.name,
            score=each.score,
            eligible=each.state == _ROOM,
            reason=reason,
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=each.kv,
            workload=workload,
            terms=_terms(each, availability),
            weights={"first_token_s": _FIRST_TOKEN_WEIGHT},
        )


def _terms(each: _InstanceScore, availability: int) -> dict[str, float]:
    """Terms of a score, which is `_FIRST_TOKEN_WEIGHT * first_token_s` and the sum of the others.

    `shared_s` is what other requests pay for (see `core.prefix_index.Held`), `last_s` keeps a busy instance
    last; both are named only where they are not 0.
    """
    terms = {
        "first_token_s": each.first_s,
        "own_s": each.own_s,
        "others_s": each.others_s,
        "late_s": each.late_s,
    }
    if each.charged_s < each.first_s:
        terms["shared_s"] = -(_FIRST_TOKEN_WEIGHT + 1.0) * (each.first_s - each.charged_s)
    if availability == DEPRIORITISED:
        terms["last_s"] = _LAST_S
    return terms


class Hetlb(Policy):
    """`hetlb`, the default."""

    name = "hetlb"
    reads_demand = True
    holds_back = True
    lookahead = _LOOKAHEAD

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice:
        evaluation = _Evaluation(ctx, instances)
        index = evaluation.lowest()
        work_s = 0.0 if index is None else _paper_work(ctx, instances[index])[2]
        return index, work_s, evaluation.candidates

    def suited(
        self, chosen: Instance, entries: Sequence[Queued], demand: Demand, instances: Sequence[Instance]
    ) -> Queued:
        mix = demand.mix
        fleet_prompt = fleet_output = 0.0
        for instance in instances:
            costs = mix.costs(instance)
            fleet_prompt += costs.speed * costs.prompt_s
            fleet_output += costs.speed * costs.output_s
        costs = mix.costs(chosen)
        prompt_s, output_s = costs.prompt_s, costs.output_s
        found = entries[0]
        least = math.inf
        for entry in entries:
            prompt, output = entry.request.prompt_tokens, entry.predicted_output
            everywhere = fleet_prompt * prompt + fleet_output * output
            share = (prompt_s * prompt + output_s * output) / everywhere if everywhere > 0.0 else math.inf
            if share < least:
                found = entry
                least = share if least < math.inf else share * _BETTER
        return found

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return _Evaluation(ctx, instances).candidates()


def _done_s(todo: float, speed: float, shortest_s: float) -> float:
    return todo / speed + shortest_s if speed > 0.0 else math.inf


def _long_answer_s(ctx: SchedulingContext, instance: Instance, last: bool = False) -> float:
    """Seconds that one long answer takes on an instance from now on.

    The prompts that wait there are read first. Where lengths are known (`long` differs from request to
    request) shorter ones keep coming behind a longer one, so for what it has more than the mean one the
    batch stays full and prompts are read between its steps; then the batch thins out. `last`: none comes
    behind it.
    """
    latency, mix, request = instance.latency, ctx.demand.mix, ctx.request
    long, engines = ctx.long_output, instance.engines
    sequences, budget = instance.sequences, instance.token_budget
    running = (instance.max_num_seqs if sequences > instance.max_num_seqs else sequences) / engines
    thinning = long if last or long < mix.long else mix.long
    share = 1.0
    if running and thinning > 0.0:
        left = mix.residual if mix.residual > 1.0 else 1.0
        share = min(1.0, _THINNING * left / thinning * (1.0 - math.exp(-thinning / left)))
    own_context = request.prompt_tokens + long / 2.0
    output = mix.output if mix.output > 1.0 else 1.0
    context = instance.prompt_tokens / (sequences or 1) + output / 2.0
    thin_s = latency.step_s(running * share + 1.0, running * share * context + own_context)
    full_s = 0.0
    if long > thinning:
        full_s = latency.step_s(running + 1.0, running * context + own_context)
        reading_s = latency.read_delay_s(
            mix.prompt, mix.prompt - mix.read, running, running * context, budget
        )
        full_s += running / output * reading_s
    pending = instance.pending_prompt_tokens / engines
    read_s = latency.first_token_s(request.prompt_tokens, 0.0, pending, running, running * context, budget)
    return read_s + (long - thinning) * full_s + thinning * thin_s


def _paper_work(ctx: SchedulingContext, instance: Instance) -> tuple[int, float, float]:
    """Ideal batch, processing time and workload (booked in the ledger), as the paper defines them."""
    request, predicted = ctx.request, ctx.predicted_output
    prompt = request.prompt_tokens
    engines = instance.engines
    cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines
    batch = ideal_batch(cache, prompt, predicted, slots)
    t_s = processing_s(instance.latency, batch, prompt, predicted) / engines
    workload_s = t_s * request.sequences
    return batch * engines, t_s, workload_s if workload_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S
