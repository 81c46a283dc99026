"""`hetlb`, the default policy: late binding to the instance where a request costs all others least time.

A request is bound only to an instance that has a slot for it; the KV cache decides which instance has room,
not which is fast. Every figure is a time in seconds from the latency model, or says how full an instance is.

Four questions, in this order:

1. Room: fewer sequences than an engine runs at once (and as many as end in one step), KV cache expected in
   use below a mark with one more mean request. What this request itself needs is left out: else a full
   instance would be left with small requests only, and one of many sequences would wait for ever; what does
   not fit at once waits in the engine for a slot.
2. Cost: the request's own time there (its first token counted many times over, since people wait for it, and
   more so where it comes late by the standard of the fleet), and the time by which it delays those that run
   there (the externality): their steps get longer while it runs, and wait while its prompt is read. The own
   seconds of an answer known to be long weigh more: so the longest get the shortest steps.
3. Worth: an instance is passed over where the faster ones can finish all that waits, and what keeps
   arriving meanwhile, before it had finished one long answer, or all that it has. So at the end of a burst
   nothing waits for the slowest, and under load that the fast ones cannot carry all instances work. An
   instance whose first token comes far sooner than that of the best one left is not passed over by a
   request that has just come, unless the whole answer comes much later. Of requests that come at once, a
   long one waits for a faster instance where it would end after all others, and far sooner there. While
   requests keep coming, none goes where its first token comes far later than on a faster one that is full,
   after all that waits.
4. Fit: of the first few in the queue, the one whose prompt and answer cost least on this instance compared
   with what they cost the fleet. A request is overtaken a bounded number of times (see `core.admission`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.admission import Queued
from hetlb.core.demand import Demand, Mix, size_of
from hetlb.core.instance import JOINING_STEPS, EngineLoad, Instance, Occupancy
from hetlb.core.latency import LatencyModel, delay_of_reading_s, ideal_batch, processing_s
from hetlb.core.policies.base import (
    MAX_WORKLOAD_S,
    OWN_READ_TOKENS,
    Choice,
    Policy,
    PolicyParams,
    SchedulingContext,
    SplitChoice,
    cached_at,
)
from hetlb.core.policies.groups import LARGEST_WHOLE, Group, Groups
from hetlb.core.throttle import BLOCKED, DEPRIORITISED, NORMAL
from hetlb.core.transfer import TransferTimes
from hetlb.core.types import Candidate, Role, pair_name

#: An engine has as many requests more than it can run at once as end in so many of its steps: the slot of one
#: is taken in the next iteration and not a round trip later. More would wait where they cannot go elsewhere.
_OVERBOOK_STEPS: Final = 1.0
#: Shorter answers than this count as so many tokens there.
_OVERBOOK_TOKENS: Final = 8.0
#: Of the KV cache, what may be expected in use: above it vLLM begins to preempt.
_KV_MARK: Final = 0.98
#: A second until the first token weighs as many seconds of the whole...
_FIRST_TOKEN_WEIGHT: Final = 20.0
#: ...and as many times more as it takes, beyond so many times what the mean prompt takes the fastest.
_LATE: Final = 8.0
#: Factor by which a batch thins out more slowly than if what is left of answers were spread exponentially:
#: those that have just been admitted have all before them.
_THINNING: Final = 2.0
#: Requests have stopped coming when over so many seconds less than this share of what the fleet can do came.
_LULL_S: Final = 16.0
_LULL_SHARE: Final = 0.05
#: An instance is not passed over where its first token comes so many times sooner than elsewhere; it is where
#: a full one's comes so many times sooner.
_FAR_SOONER: Final = 1.5
#: ...unless decoding takes so many times longer than there.
_MUCH_LATER: Final = 2.5
#: An answer is long if what is left of it, met at a random moment, is so many times that of the mean...
_LONG: Final = 1.25
#: ...and waits for an instance on which it ends so many times sooner.
_ENDS_SOONER: Final = 1.5
#: Grades of knowledge of a score: see `_InstanceScore`.
_GUESSED: Final = 0
_BOUNDED: Final = 1
_EXACT: Final = 2
#: Scores are compared by bounds alone where the others are so many times higher.
_APART: Final = 1.3
#: A lower bound is compared with a score with this allowance for rounding.
_CLOSE: Final = 1.0 + 1e-9
#: A share of a batch is rounded down to so many parts of it for a lower bound: then it seldom changes.
_SHARES: Final = 64.0
#: So many of the queue are looked at for an instance; one must suit it this much better to overtake.
_LOOKAHEAD: Final = 16
_BETTER: Final = 0.95

#: A pair must cost less than this share of what one instance costs: it takes places at two, and may fail.
_WORTH: Final = 0.9
#: Of its time, what a decode instance is taken to spend on prompts at most.
_MOST_READING: Final = 0.95
#: Share of the lease on held KV blocks in which an answer that is no stream is to end.
_LEASE_SHARE: Final = 0.4

#: Weight of a second until the first token, and of one of a decode step in that of a decode leg, in a score.
_FIRST_SHARE: Final = _FIRST_TOKEN_WEIGHT + 1.0
_START_WEIGHT: Final = _FIRST_SHARE * JOINING_STEPS

#: An instance that is to be taken last costs so many seconds more than any request does.
_LAST_S: Final = 1e12

#: The beginning of the reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: And of one that has none.
FULL: Final = "full"
#: The reason of an instance of a large fleet that is in none of the groups looked at.
NOT_LOOKED_AT: Final = "not looked at: the fleet is large, and others were"

#: States of an instance: it can take the request now, or the reason why not.
_ROOM: Final = 0
_NO_SLOT: Final = 1
_NO_MEMORY: Final = 2
_PASSED_OVER: Final = 3
_HELD_BACK: Final = 4
_UNDECIDED: Final = 5  # room, but it may be passed over
_ENDS_LATE: Final = 6
_LATER: Final = 7  # passed over: to wait for a faster one brings the first token sooner


@mypyc_attr(acyclic=True)
class _Group:
    """Instances with equal parameters in one evaluation: their mean load, and the delay of what runs there.

    Per engine: `batch` sequences with `context` tokens, `paid` tokens of the prompt that the request need not
    pay for. A step takes `step_s` with and `now_s` without the request, which is `growth_s` more or 0.
    `others_s` is known to the `grade` of `_InstanceScore`. `load` is that of one of them.
    """

    __slots__ = (
        "batch", "context", "count", "grade", "growth_s", "load", "now_s", "others_s", "paid", "step_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.load: EngineLoad | None = None
        self.count = 0
        self.batch = self.context = self.paid = 0.0
        self.now_s = self.step_s = self.growth_s = self.others_s = 0.0
        self.grade = _GUESSED


@mypyc_attr(acyclic=True)
class _InstanceScore:
    """One instance in one evaluation: its `state`, and its score as far as it is known.

    As it was at the time, per engine: its `load`, `context` tokens of what decodes, `pending` prompt tokens,
    `own` sequences of the request with `prompts` prompts to be read; `cached` tokens of each, and how many it
    need not pay for (`paid`). Seconds: `decode_s` from the first token on and waiting for a slot, `step_s`
    with and `now_s` without the request, `last_s` where it is to be last, `adapter_s` until its LoRA adapter
    has a slot; and, by the `grade`, `first_s` until the first token, `others_s` by which it delays what runs
    there, `charged_s` what of the first counts for it, `late_s` what is added because it is late, `coming_s`
    by which it delays prompts that are yet to come, `score` what it costs in all. `LatencyModel.lower_bound`
    reads the prompt in `early_s`, below 0 while unknown, and what is to be paid for, alone with those that
    run there, in `beside_s`.
    Where it is passed over, the faster ones are done with all (or, `_LATER`, answer) in `done_s` at most.
    Grades: a lower bound of the score alone, by a few additions; lower bounds of all by
    `LatencyModel.lower_bound`; exactly.
    """

    __slots__ = (
        "adapter_s", "beside_s", "cached", "charged_s", "coming_s", "context", "decode_s", "done_s",
        "early_s", "first_s", "grade", "group", "index", "last_s", "late_s", "load", "now_s", "others_s",
        "own", "paid", "pending", "prompts", "score", "seen", "state", "step_s",
    )  # fmt: skip

    def __init__(self, seen: Occupancy) -> None:
        self.index = -1
        self.seen = seen
        self.load = seen.load
        self.pending = seen.pending
        self.group: _Group | None = None
        self.state = _ROOM
        self.grade = _GUESSED
        self.own = self.prompts = 1.0
        self.context = self.now_s = self.step_s = self.decode_s = 0.0
        self.cached = self.paid = self.last_s = self.late_s = self.adapter_s = self.coming_s = 0.0
        self.first_s = self.others_s = self.charged_s = self.score = self.done_s = 0.0
        self.beside_s = 0.0
        self.early_s = -1.0


@mypyc_attr(acyclic=True)
class _Pair:
    """Instances, by index, of which one would read a prompt and the other decode the answer, and their score.

    `start_s`: from the arrival of the KV cache to the first token. `in_time`: see `_Evaluation._in_time`.
    """

    __slots__ = ("in_time", "score", "source", "start_s", "target")

    def __init__(self, source: int, target: int, score: float, start_s: float, in_time: bool) -> None:
        self.source = source
        self.target = target
        self.score = score
        self.start_s = start_s
        self.in_time = in_time


@mypyc_attr(acyclic=True, free_list_len=1)
class _Evaluation:
    """All instances scored for one request. Made for every decision; `candidates` is for people.

    Every instance gets a rough lower bound of its score at first; only those whose bound is below the score
    of the best are rated. What changes with the instances and the demand is kept as it was at the time.
    """

    __slots__ = (
        "_booked", "_by_role", "_chosen", "_ctx", "_explaining", "_fleet", "_half_grown", "_late_s",
        "_late_weight", "_long_context", "_mixed", "_most_rate", "_now", "_output", "_overbooked",
        "_own_context", "_own_weight", "_prompt", "_prompts", "_scores", "_sequences", "_share",
        "_shortest_s", "_thinned", "_thinned_least", "_thinning", "_todo", "instances", "whole_score",
    )  # fmt: skip

    def __init__(
        self,
        ctx: SchedulingContext,
        instances: Sequence[Instance],
        mixed: bool = True,
        share: float = 1.0,
        explaining: bool = False,
    ) -> None:
        """Score `instances`, there for a `share` of what is asked for; `explaining`: nothing is decided.

        `mixed`: all have the role `both`. Otherwise none is passed over.
        """
        self._ctx = ctx
        self._mixed = mixed
        self._explaining = explaining
        #: Decision about a request that may be split: whether it was asked for, and the pair that was chosen.
        self._by_role = False
        self._chosen: _Pair | None = None
        self._now = ctx.now
        self._share = share
        request, mix = ctx.request, ctx.demand.mix
        self._fleet = mix.fleet(instances)
        self.instances = self._fleet.members
        self._sequences = float(request.sequences)
        #: Prompts to be read where samples of one share its blocks.
        self._prompts = self._sequences
        if request.samples > 1:
            self._prompts = float(-(-request.sequences // request.samples))
        self._prompt = float(request.prompt_tokens)
        self._output = output = ctx.predicted_output
        self._own_context = self._prompt + output / 2.0
        # Answers that run there are half-grown on average.
        self._half_grown = half_grown = mix.output / 2.0
        #: Tokens of a KV cache that one more mean request takes.
        self._booked = mix.booked + half_grown
        #: Share of the slots up to which an engine gets requests.
        self._overbooked = 1.0 + _OVERBOOK_STEPS / max(mix.output, _OVERBOOK_TOKENS)
        # The longer an answer by what is known of it, the more its own seconds weigh against those of others.
        long = ctx.residual / mix.residual if mix.residual > 0.0 else 1.0
        weight = long * long
        if weight > _FIRST_TOKEN_WEIGHT:
            weight = _FIRST_TOKEN_WEIGHT
        self._own_weight = weight if weight > 1.0 else 1.0
        #: A first token is late beyond so many seconds, which weigh so much.
        self._late_s = _LATE * self._fleet.first_token_s
        self._late_weight = 0.0 if self._late_s <= 0.0 else _LATE * _FIRST_TOKEN_WEIGHT / self._late_s
        # Known from the first question on whether an instance is to be passed over.
        self._todo = self._thinning = self._thinned = self._thinned_least = self._long_context = 0.0
        self._shortest_s = self._most_rate = -1.0
        room = self._look()
        if ctx.held is not None or ctx.availabilities is not None or ctx.adapter_load_s > 0.0:
            room = self._look_closely()
        if room and mixed and len(self._scores) > 1:
            if long > _LONG and ctx.availabilities is None and not ctx.demand.beginning(ctx.now):
                room = self._pass_over_late_ends()
            if room:
                self._pass_over(room)

    def lowest(self, among: list[int] | None = None) -> int | None:
        """The index of the instance with room and the lowest score, the first of several.

        `among` are the indices of those that count; all where it is None.
        """
        scores = self._scores if among is None else [self._scores[i] for i in among]
        best = self._nearest(scores)
        if best is None:
            for each in scores:
                self._settle(each)
            best = self._nearest(scores)
            if best is None:
                return None
        # Mostly an upper bound of its score is enough to tell that no other is lower.
        least = self._at_most(best, scores)
        for each in scores:
            if each.score <= least and each is not best and self._settle(each) == _ROOM:
                self._rate(each, _BOUNDED)
                if each.score <= least and best.grade < _EXACT:
                    self._rate(best, _EXACT)
                    least = best.score * _CLOSE
                if each.score <= least:
                    self._rate(each, _EXACT)
                    if each.score < best.score or (each.score == best.score and each.index < best.index):
                        best, least = each, each.score * _CLOSE
        return best.index

    def _at_most(self, best: _InstanceScore, scores: list[_InstanceScore]) -> float:
        """An upper bound of the nearest one's score: itself where others are close, below 0 if alone."""
        alone, near = True, best.group is not None
        close = _APART * best.score
        for each in scores:
            if each is not best and (each.state == _ROOM or each.state == _UNDECIDED):
                alone = False
                near = near or each.score < close
                if near:
                    break
        if alone:
            return -1.0
        self._rate(best, _EXACT if near else _BOUNDED)
        most = best.score
        if best.grade == _BOUNDED:
            load = best.load
            more = load.most_over_bound - 1.0
            first_s = best.first_s + more * best.early_s
            most += _FIRST_SHARE * more * best.early_s - best.late_s
            most += self._sequences / best.own * load.batch * more * best.beside_s
            if first_s > self._late_s:
                most += self._late_weight * first_s * (first_s - self._late_s)
        return most * _CLOSE

    def preferred(self, index: int) -> int:
        """The best of the instances that the request prefers, or `index`, the best of all."""
        request, scores = self._ctx.request, self._scores
        among = [i for i, each in enumerate(self.instances) if each.name in request.preferred]
        found = self.lowest(among)
        if found is None:
            return index
        for i in (index, found):
            self._rate(scores[i], _EXACT)
        return (
            index if scores[found].score > (1.0 + request.preferred_within) * scores[index].score else found
        )

    def _nearest(self, scores: list[_InstanceScore]) -> _InstanceScore | None:
        """Of instances that certainly have room the one with the lowest bound."""
        found: _InstanceScore | None = None
        least = math.inf
        for each in scores:
            if each.score < least and each.state == _ROOM:
                found, least = each, each.score
        return found

    def _look(self) -> int:
        """Find who has room, with a lower bound of the score by a few additions; their number."""
        grouped = self._fleet.group_count > 0
        self._scores = scores = [_InstanceScore(instance.occupancy) for instance in self.instances]
        room = 0
        for index, each in enumerate(scores):
            each.index = index
            self._find_steps(each)
            if not each.seen.empty:
                each.state = self._room(each)
            if each.state == _ROOM:
                room += 1
                if not grouped:
                    self._guess(each)
        if grouped:
            self._look_at_groups()
            for each in scores:
                if each.state == _ROOM:
                    self._guess(each)
        return room

    def _find_steps(self, each: _InstanceScore) -> None:
        """Steps now and with the request, seconds of decoding it whole, what it brings to each engine."""
        seen, load, sequences = each.seen, each.load, self._sequences
        each.context = context = (seen.prompt_tokens + seen.running * self._half_grown) * load.context_share
        each.now_s = load.step_s + load.token_s * context
        if sequences <= load.engines:
            own = 1.0
            each.step_s = step_s = load.next_step_s + load.next_token_s * (context + self._own_context)
            over = load.next_over
        else:
            each.own = each.prompts = own = load.own_batch(sequences)
            if self._prompts < sequences and self.instances[each.index].caches_prefixes:
                each.prompts = load.own_batch(self._prompts)
            each.step_s = step_s = load.latency.step_s(load.batch + own, context + own * self._own_context)
            over = load.next_over + own - 1.0
        each.decode_s = decode_s = self._output * step_s
        if over > 0.0:
            # Sequences without a slot wait for one: slots come free at the rate at which answers end.
            each.decode_s = decode_s + over / load.slots * self._output * step_s

    def _room(self, each: _InstanceScore) -> int:
        """Room of an instance that is not empty, apart from what is special about the request."""
        seen, load = each.seen, each.load
        running, booked = seen.running, self._booked
        if seen.incoming > 0.0:
            left = self._left_by_then(each)
            running -= left
            booked -= left * self._booked
        if running >= load.all_slots * self._overbooked:
            return _NO_SLOT
        used = seen.expected_kv_tokens(self._now) + booked
        return _NO_MEMORY if used > _KV_MARK * load.kv_cache_tokens else _ROOM

    def _left_by_then(self, each: _InstanceScore) -> float:
        """Answers that will have ended when a prompt that is prefilled elsewhere from now on comes to decode.

        The oldest of those on their way shows how long that takes; at most as many end as are on their way.
        """
        load, seen = each.load, each.seen
        answer_s = each.now_s * max(1.0, self._ctx.demand.mix.output)
        there = (seen.running - seen.incoming) * load.context_share
        ended = there * (self._now - seen.oldest_at) / answer_s * load.engines
        return ended if ended < seen.incoming else seen.incoming

    def _guess(self, each: _InstanceScore) -> None:
        """Lower bounds by a few additions: the own time, and what steps get longer for those that run there.

        What is known to be read from a cache is not computed.
        """
        load, unread = each.load, self._prompt - each.cached
        fixed_s, floor_s, token_s = load.read_bound
        read_s = token_s * (each.pending + each.prompts * (unread if unread >= 1.0 else 1.0))
        each.charged_s = first_s = fixed_s + (read_s if read_s > floor_s else floor_s) + 0.5 * each.now_s
        bound = _FIRST_SHARE * first_s + self._own_weight * each.decode_s
        if first_s > self._late_s:
            bound += self._late_weight * first_s * (first_s - self._late_s)
        group = each.group
        if group is None:
            batch, growth_s = load.batch, each.step_s - each.now_s
        else:
            batch, growth_s = group.batch, group.growth_s
        if growth_s > 0.0:
            bound += self._sequences / each.own * batch * self._output * growth_s
        each.score = bound

    def _look_closely(self) -> int:
        """Look at what is special about the request, which differs between instances. Number with room."""
        ctx, instances, scores = self._ctx, self.instances, self._scores
        held, availabilities, mix = ctx.held, ctx.availabilities, ctx.demand.mix
        room = 0
        for i, each in enumerate(scores):
            instance = instances[i]
            if held is not None and instance.caches_prefixes:
                cache_id = instance.tree.cache_id
                each.cached = float(held.tokens.get(cache_id, 0))
                each.paid = each.cached + held.credit - held.credits.get(cache_id, 0.0)
            self._guess(each)
            if availabilities is not None:
                availability = availabilities[i][0]
                if availability == BLOCKED and each.state == _ROOM:
                    each.state = _HELD_BACK
                elif availability == DEPRIORITISED:
                    each.last_s = _LAST_S
                    each.score += _LAST_S
            adapters = instance.adapters
            if ctx.adapter_load_s > 0.0 and adapters is not None:
                wait_s = mix.residual * each.now_s
                each.adapter_s = adapters.cost_s(ctx.request.model, ctx.adapter_load_s, wait_s)
                each.score += _FIRST_SHARE * each.adapter_s
            if held is not None and each.group is not None:
                each.group.paid += each.paid / each.group.count
            if each.state == _ROOM:
                room += 1
        for each in scores:
            if each.paid > each.cached:
                self._rate(each, _EXACT)
        return room

    def _look_at_groups(self) -> None:
        """Steps at the mean load of every group, and what they get longer."""
        numbers = self._fleet.groups
        groups = [_Group() for _ in range(self._fleet.group_count)]
        for each in self._scores:
            number = numbers[each.index]
            if number >= 0:
                each.group = group = groups[number]
                group.load = load = each.load
                group.count += 1
                # Sums until all are counted.
                group.batch += load.batch
                group.context += each.context
        for group in groups:
            kind = group.load
            if kind is not None and group.batch > 0.0:
                group.batch = batch = group.batch / group.count
                group.context = context = group.context / group.count
                own, latency = kind.own_batch(self._sequences), kind.latency
                group.now_s = now_s = latency.step_s(batch, context)
                group.step_s = step_s = latency.step_s(batch + own, context + own * self._own_context)
                group.growth_s = step_s - now_s if step_s > now_s else 0.0

    def _rate(self, each: _InstanceScore, grade: int) -> None:
        """Find the score of an instance to a grade, unless it is known to that."""
        # What counts less of the first token than it takes has no bound.
        if each.paid > each.cached:
            grade = _EXACT
        if each.grade >= grade:
            return
        if each.grade == _GUESSED:
            each.coming_s = self._coming_s(each)
        each.grade = grade
        load, prompt = each.load, self._prompt
        if grade == _EXACT:
            latency = load.latency
            read_s = latency.first_token_s(
                prompt, each.cached, each.pending, load.batch, each.context, load.budget, each.prompts
            )
        else:
            latency = load.latency_bound
            read_s = self._early_read_s(each)
        # What is left of the running iteration comes first.
        each.first_s = first_s = read_s + 0.5 * each.now_s
        each.others_s = others_s = self._others_s(each, latency, read_s)
        if each.paid > each.cached:
            first_s += latency.prefill_s(prompt, 1.0, each.paid) - latency.prefill_s(prompt, 1.0, each.cached)
        each.charged_s = first_s
        if first_s > self._late_s:
            each.late_s = self._late_weight * first_s * (first_s - self._late_s)
        each.score = (
            (_FIRST_TOKEN_WEIGHT + 1.0) * (first_s + each.adapter_s)
            + self._own_weight * each.decode_s
            + others_s
            + each.late_s
            + each.coming_s
            + each.last_s
        )

    def _coming_s(self, each: _InstanceScore) -> float:
        """Weighted seconds by which reading the prompt delays first tokens that are yet to come there.

        They come as often as prompts were read there lately, or came from elsewhere. Those that come before
        all that is pending has been read wait as much longer as this one takes; at utilisation rho that lasts
        1 / (1 - rho) times as long (the busy period of an M/G/1 queue). So few prompts are read where many
        answers of prompts from elsewhere begin, unless roles are stated.
        """
        instance, mix = self.instances[each.index], self._ctx.demand.mix
        speed, engines, explaining = instance.speed, instance.engines, self._explaining
        read_per_s = speed.read_per_s(self._now, explaining=explaining) / engines
        joins_per_s = speed.joins_per_s(self._now, explaining=explaining) / engines if self._mixed else 0.0
        if read_per_s <= 0.0 and joins_per_s <= 0.0:
            return 0.0
        token_s = self._fleet.costs[each.index].token_read_s
        read_s = token_s * each.prompts * (self._prompt - each.cached)
        share = read_per_s * token_s
        if share > _MOST_READING:
            share = _MOST_READING
        first_per_s = read_per_s / (mix.read if mix.read > 1.0 else 1.0) + joins_per_s
        waited_s = (each.pending * token_s + 0.5 * read_s) / (1.0 - share)
        return _FIRST_SHARE * first_per_s * waited_s * read_s

    def _others_s(self, each: _InstanceScore, latency: LatencyModel, read_s: float) -> float:
        """Seconds by which the request delays what runs there (the externality).

        Of instances with equal parameters the one of their mean load counts for each. Then the own time alone
        decides among them: else short prompts and long ones would gather on different ones, and long answers
        beside long prompts be late.
        """
        group, load, prompts, prompt = each.group, each.load, each.prompts, self._prompt
        if group is None:
            batch = load.batch
            if batch <= 0.0:
                return 0.0
            if each.pending or each.paid != each.cached:
                read_s = latency.first_token_s(
                    prompt, each.paid, 0.0, batch, each.context, load.budget, prompts
                )
            each.beside_s = read_s
            return self._delay_s(each, batch, each.paid, read_s, each.now_s, each.step_s)
        if group.grade < each.grade and group.batch > 0.0:
            group.grade = each.grade
            batch = group.batch
            read_s = latency.first_token_s(
                prompt, group.paid, 0.0, batch, group.context, load.budget, prompts
            )
            group.others_s = self._delay_s(each, batch, group.paid, read_s, group.now_s, group.step_s)
        return group.others_s

    def _delay_s(
        self, each: _InstanceScore, batch: float, paid: float, read_s: float, now_s: float, step_s: float
    ) -> float:
        """Seconds by which `batch` sequences per engine are delayed in all.

        Reading the prompt, of which `paid` tokens do not count, takes `read_s`; steps take `step_s`
        and not `now_s` for all of its answer: what ends meanwhile is followed by others.
        """
        unread = self._prompt - paid
        tokens = each.prompts * (unread if unread >= 1.0 else 1.0)
        delay_s = delay_of_reading_s(read_s, tokens, batch, now_s, each.load.budget)
        if step_s > now_s:
            delay_s += self._output * (step_s - now_s)
        return self._sequences / each.own * batch * delay_s

    def _pass_over_late_ends(self) -> int:
        """Mark those with room on which this long answer would be the last to end; number of the others.

        It is the last where it ends after all that runs and waits could be done; it ends sooner if it waits
        for the next slot of a faster instance. Where requests come one after the other none is the last.
        """
        fleet = self._fleet
        todo = float(self._ctx.waiting)
        for each in self._scores:
            todo += each.seen.promised_tokens - each.seen.prompt_tokens
        all_done_s = todo / fleet.speed
        room, soonest_s = 0, math.inf
        for i in fleet.order:
            each = self._scores[i]
            if each.state != _ROOM:
                self._guess(each)
            end_s = self._end_s(each)
            if each.state == _ROOM:
                if end_s > all_done_s and end_s > _ENDS_SOONER * soonest_s:
                    each.state, each.done_s = _ENDS_LATE, soonest_s
                else:
                    room += 1
            if end_s < soonest_s:
                soonest_s = end_s
        return room

    def _end_s(self, each: _InstanceScore) -> float:
        """Seconds until the answer would end on an instance, after the next slot comes free where none is.

        What runs there, of mean predicted length t, is taken to end at exponential times: of the batch a
        share of t / L * (1 - exp(-L / t)) runs beside an answer of L tokens in the mean.
        """
        load, seen, output = each.load, each.seen, self._output
        running, own_context = seen.running, self._own_context
        if running <= 0.0:
            return each.charged_s + output * load.latency.step_s(1.0, own_context)
        mean = (seen.promised_tokens - seen.prompt_tokens) / running
        if mean < 1.0:
            mean = 1.0
        left = math.exp(-output / mean)
        share = mean / output * (1.0 - left)
        # The integral of t * exp(-t / mean) up to the output, over the output.
        grown = mean * (mean - (output + mean) * left) / output
        context = load.batch * (seen.prompt_tokens / running * share + grown)
        end_s = each.charged_s + output * load.latency.step_s(load.batch * share + 1.0, context + own_context)
        if each.state != _ROOM:
            end_s += self._ctx.demand.mix.output * each.now_s / running
        return end_s

    def _pass_over(self, room: int) -> None:
        """Mark those with room on which a long answer would end after the faster ones are done with all.

        While requests keep coming this asks only whether it is worth not to wait for a faster one that is
        full, or its first token comes far sooner even after all that waits; once they have stopped coming,
        whether what is left should go to a slower one at all. An instance that is throttled counts as
        doing nothing: nothing waits for it. Lower bounds will do here. Where the answer matters to no other
        instance, it is left open until this one is to be chosen.
        """
        ctx, scores, fleet = self._ctx, self._scores, self._fleet
        demand, now, costs, part = ctx.demand, self._now, fleet.costs, self._share
        ending = demand.ended(_LULL_SHARE * fleet.speed / part, _LULL_S, now)
        if not ending and room == len(scores):
            return
        availabilities = ctx.availabilities
        self._todo = ctx.waiting * part + size_of(ctx.request, ctx.predicted_output)
        # One that waited is not fresh, even as the last of the queue.
        fresh = ctx.waiting == 0 and demand.newest_s == now
        speed = 0.0
        soonest_s = least_decode_s = full_s = math.inf
        for i in fleet.order:
            each = scores[i]
            if each.state == _ROOM:
                # It may count for slower ones, or be kept because of its first token.
                matters = fresh and (each.decode_s < least_decode_s or each.charged_s < soonest_s)
                if ending and speed > 0.0 and availabilities is None and not matters:
                    each.state = _UNDECIDED
                else:
                    kept = speed <= 0.0 or (
                        each.charged_s * _FAR_SOONER < soonest_s < math.inf
                        and each.decode_s <= _MUCH_LATER * least_decode_s
                        and self._early_s(each) * _FAR_SOONER < soonest_s
                    )
                    later = full_s < math.inf and self._later(each, speed, full_s)
                    if not later and (kept or not self._faster_done(each, speed)):
                        if not ending:
                            return  # the fastest with room: the slower ones are as good as their scores
                        if fresh and each.charged_s < soonest_s:
                            soonest_s = min(soonest_s, self._early_s(each))
                        if each.decode_s < least_decode_s:
                            least_decode_s = each.decode_s
            if availabilities is None or availabilities[i][0] == NORMAL:
                speed += costs[i].speed
                if not ending and (each.state == _NO_SLOT or each.state == _NO_MEMORY):
                    full_s = min(full_s, self._early_s(each))

    def _later(self, each: _InstanceScore, speed: float, full_s: float) -> bool:
        """Pass an instance over if its first token comes far later than on a faster one that is full.

        There it comes `full_s` after all that waits is done, by all faster ones, of this `speed` together.
        """
        begun_s = self._todo / speed + full_s
        if self._early_s(each) <= _FAR_SOONER * begun_s:
            return False
        each.done_s = begun_s
        each.state = _LATER
        return True

    def _settle(self, each: _InstanceScore) -> int:
        """State of an instance: room, or the reason why not."""
        if each.state == _UNDECIDED:
            each.state = _ROOM
            self._faster_done(each, self._fleet.faster[each.index])
        return each.state

    def _early_read_s(self, each: _InstanceScore) -> float:
        """Seconds to read the prompt, behind those that wait, by `LatencyModel.lower_bound`."""
        read_s = each.early_s
        if read_s < 0.0:
            load = each.load
            each.early_s = read_s = load.latency_bound.first_token_s(
                self._prompt, each.cached, each.pending, load.batch, each.context, load.budget, each.prompts
            )
        return read_s

    def _early_s(self, each: _InstanceScore) -> float:
        """`first_s` by `LatencyModel.lower_bound`; itself where what counts of it has no bound."""
        if each.paid > each.cached:
            return each.first_s
        return self._early_read_s(each) + 0.5 * each.now_s

    def _look_at_long_answers(self) -> None:
        """Facts about long answers that hold for all instances."""
        ctx = self._ctx
        mix, long = ctx.demand.mix, ctx.long_output
        self._long_context = self._prompt + long / 2.0
        # Nothing comes behind the last one on the fastest.
        fastest = self._scores[self._fleet.order[0]]
        self._thinned = share = _thinned_share(mix, long)
        self._shortest_s = self._early_s(fastest) + self._long_answer_s(fastest, long, share)
        self._thinning = thinning = long if long < mix.long else mix.long
        if thinning < long:
            self._thinned = _thinned_share(mix, thinning)
        self._thinned_least = math.floor(_SHARES * self._thinned) / _SHARES

    def _faster_done(self, each: _InstanceScore, speed: float) -> bool:
        """Pass an instance over if the faster ones, of this `speed`, are done before it: see `_busy_s`."""
        if self._shortest_s < 0.0:
            self._look_at_long_answers()
        # Mostly bounds will do: of what a long answer takes, and of the rate over any horizon.
        long_s = each.charged_s + self._least_long_answer_s(each)
        done_s = self._done_s(speed) * _CLOSE
        if done_s < long_s:
            if self._most_rate < 0.0:
                # It takes longer than the shortest, if it is passed over.
                most_rate = self._ctx.demand.most_rate(self._shortest_s, self._now)
                self._most_rate = most_rate * self._share
            if self._most_rate > 0.0:
                done_s = self._done_s(speed - self._most_rate) * _CLOSE
        if not done_s < long_s:
            ctx, part = self._ctx, self._share
            long_s = self._busy_s(each)
            # The rate is asked for only where it can matter: first at its best, then as it is.
            done_s = self._done_s(speed)
            if done_s < long_s:
                done_s = self._done_s(speed - ctx.demand.bounds(long_s, self._now)[0] * part)
            if done_s < long_s:
                done_s = self._done_s(speed - ctx.demand.rate(long_s, self._now) * part)
            if done_s >= long_s:
                return False
        each.done_s = done_s
        each.state = _PASSED_OVER
        return True

    def _busy_s(self, each: _InstanceScore) -> float:
        """Seconds until an instance is done with one long answer from now on, and with all that it has.

        Of what it has, a request counts half once its prompt is read. Where prompts are read slowly each one
        delays all answers, which the end of its own does not show. The faster ones have half a batch.
        """
        long_s = self._early_s(each) + self._long_answer_s(each, self._thinning, self._thinned)
        seen, mix = each.seen, self._ctx.demand.mix
        unread = seen.pending * seen.load.engines / (mix.read if mix.read > 1.0 else 1.0)
        if unread > seen.running:
            unread = seen.running
        requests = 1.0 + 0.5 * (seen.running + unread)
        fleet = self._fleet
        more_s = requests * mix.size / fleet.costs[each.index].speed
        more_s -= 0.5 * fleet.costs[fleet.order[0]].batch_s
        return more_s if more_s > long_s else long_s

    def _done_s(self, speed: float) -> float:
        """Seconds in which all that waits is done at a speed."""
        return self._todo / speed + self._shortest_s if speed > 0.0 else math.inf

    def _least_long_answer_s(self, each: _InstanceScore) -> float:
        """A lower bound of `_long_answer_s` by figures that are mostly known."""
        load, context, own_context, thinning = each.load, each.context, self._long_context, self._thinning
        if not load.steps_grow:
            return 0.0
        step_s = load.thin_step_s(self._thinned_least)
        step_s += load.next_token_s * (context * self._thinned + own_context)
        full_s = load.next_step_s + load.next_token_s * (context + own_context)
        return thinning * step_s + (self._ctx.long_output - thinning) * full_s

    def _long_answer_s(self, each: _InstanceScore, thinning: float, share: float) -> float:
        """Seconds from its first token that one long answer takes on an instance.

        Where lengths are known (`long_output` differs from request to request) shorter ones keep coming
        behind a longer one, so for what it has beyond `thinning` tokens the batch stays full and prompts are
        read between its steps; then `share` of the batch runs beside it.
        """
        load, mix, long = each.load, self._ctx.demand.mix, self._ctx.long_output
        latency, batch, context = load.latency_bound, load.batch, each.context
        own_context = self._long_context
        seconds = thinning * latency.step_s(batch * share + 1.0, context * share + own_context)
        if long > thinning:
            full_s = load.next_step_s + load.next_token_s * (context + own_context)
            delay_s = latency.read_delay_s(mix.prompt, mix.prompt - mix.read, batch, context, load.budget)
            full_s += batch / (mix.output if mix.output > 1.0 else 1.0) * delay_s
            seconds += (long - thinning) * full_s
        return seconds

    def best_whole(self, mixed: bool) -> int:
        """The index of the instance with room and the lowest score of those that take whole requests, or -1.

        `whole_score` is that score then, with the prompts that will be read there beside the answer. `mixed`:
        all take whole requests.
        """
        whole: list[int] | None = None
        if not mixed:
            prompt = self._ctx.request.prompt_tokens
            whole = [
                i
                for i, instance in enumerate(self.instances)
                if instance.spec.role is Role.BOTH
                or (
                    instance.spec.role is Role.DECODE
                    and prompt - cached_at(self._ctx, instance) <= min(OWN_READ_TOKENS, prompt // 2)
                )
            ]
        index = self.lowest(whole)
        if index is None:
            return -1
        each = self._scores[index]
        self._rate(each, _EXACT)
        slowed_s = self._reading_to_come_s(index)[0]
        delay_s = self._delay_to_come_s(index, each.decode_s + slowed_s)
        self.whole_score = each.score + slowed_s + delay_s
        return index

    def best_pair(self, transfers: TransferTimes, below: float, mixed: bool) -> _Pair | None:
        """The prefill and decode instance with the lowest score together; None if none is `below`.

        The prompt is read by one, transferred but for what the other holds, and decoded there. Of either kind
        only the two best by a lower bound are combined, and the first of these pairs that is good is taken:
        the cost of a decision must not grow with the square of the fleet. Those not in time come last.
        `mixed`: all have the role `both`.
        """
        costs = self._fleet.costs
        if mixed and self._ctx.held is None and self._fleet.reads_alike:
            return None
        instances, output, prompt = self.instances, self._output, self._prompt
        reads = decodes = True
        # Lower bounds of the two best of either kind.
        reading = reading_2 = decoding = decoding_2 = math.inf
        source = source_2 = target = target_2 = -1
        for each in self._scores:
            if self._settle(each) != _ROOM:
                continue
            i = each.index
            if not mixed:
                role = instances[i].spec.role
                reads, decodes = role is not Role.DECODE, role is not Role.PREFILL
            if reads:
                score = _FIRST_SHARE * each.charged_s
                if score < reading:
                    reading_2, source_2 = reading, source
                    reading, source = score, i
                elif score < reading_2:
                    reading_2, source_2 = score, i
            if decodes:
                score = _START_WEIGHT * each.step_s + self._own_weight * each.decode_s
                more_s = each.step_s - each.now_s
                if more_s > 0.0:
                    score += each.load.batch * output * more_s
                # Prompts read there meanwhile come first.
                if each.pending > 0.0:
                    waits_s = each.pending * costs[i].token_read_s - prompt * self._fleet.token_read_s
                    if waits_s > 0.0:
                        score += _FIRST_SHARE * waits_s
                if score < decoding:
                    decoding_2, target_2 = decoding, target
                    decoding, target = score, i
                elif score < decoding_2:
                    decoding_2, target_2 = score, i
        if reading + decoding >= below:
            return None
        late: _Pair | None = None
        for combination in range(4):
            if combination == 2:
                source, reading = source_2, reading_2
            i, j, least = source, target, reading + decoding
            if combination & 1:
                j, least = target_2, reading + decoding_2
            if least < below and i != j and self._suits(i, j, mixed):
                pair = self._pair(transfers, i, j, below)
                if pair is not None:
                    if pair.in_time:
                        return pair
                    if late is None or pair.score < late.score:
                        late = pair
        return late

    def _suits(self, i: int, j: int, mixed: bool) -> bool:
        """True if one instance, idle, reads the prompt faster than another and decodes no faster, or by role.

        Where one is better at both, a transfer would only lighten the load of the moment.
        """
        source, target = self.instances[i], self.instances[j]
        if not mixed and (source.spec.role is Role.PREFILL or target.spec.role is Role.DECODE):
            return True
        costs = self._fleet.costs
        unread = self._prompt - self._scores[i].cached
        if costs[i].token_read_s * unread >= costs[j].token_read_s * (self._prompt - self._scores[j].cached):
            return False
        context = self._own_context
        return target.latency.step_s(1.0, context) <= source.latency.step_s(1.0, context)

    def _pair(self, transfers: TransferTimes, i: int, j: int, below: float) -> _Pair | None:
        """The pair that reads at one instance and decodes at another, None if its score is not `below`."""
        ctx, instances, prompt = self._ctx, self.instances, self._prompt
        source, target = self._scores[i], self._scores[j]
        sent = prompt - cached_at(ctx, instances[j])
        transfer_s = transfers.estimate_s(instances[i], instances[j], sent, ctx.now)
        slowed_s, wait_s = self._reading_to_come_s(j)
        decode_s = target.decode_s + slowed_s
        score = self._own_weight * decode_s + self._joining_s(target) + target.last_s
        score += self._delay_to_come_s(j, decode_s)
        start_s = JOINING_STEPS * target.step_s
        # The time of the source is a lower bound so far.
        if score + _FIRST_SHARE * (source.charged_s + transfer_s + start_s) >= below:
            return None
        self._rate(source, _EXACT)
        ready_s = source.charged_s + transfer_s
        # Prompts read at the target by then, and those still to come.
        reading_s = instances[j].join_s(prompt) - start_s - ready_s
        start_s += wait_s if wait_s > reading_s else reading_s
        first_s = ready_s + start_s
        score += _FIRST_SHARE * first_s + max(0.0, source.others_s - self._joining_s(source))
        usual_s = self._fleet.first_token_s
        if first_s > _LATE * usual_s > 0.0:
            score += _FIRST_TOKEN_WEIGHT * first_s * (first_s - _LATE * usual_s) / usual_s
        if score >= below:
            return None
        return _Pair(i, j, score, start_s, self._in_time(instances[j], first_s + decode_s))

    def _delay_to_come_s(self, i: int, decode_s: float) -> float:
        """Weighted seconds by which an answer that takes `decode_s` delays prompts yet to come there.

        A prompt that comes while others decode waits for half a step and is read in longer iterations. Every
        answer is charged all of that, though one more beside others adds little to it: else answers would
        stay wherever there are some, and no instance would come to read alone.
        """
        each, mix = self._scores[i], self._ctx.demand.mix
        instance = self.instances[i]
        prompts_s = instance.speed.read_per_s(self._ctx.now) / (instance.engines * max(1.0, mix.read))
        return _FIRST_SHARE * prompts_s * decode_s * (0.5 * each.step_s + self._fleet.costs[i].beside_s)

    def _reading_to_come_s(self, i: int) -> tuple[float, float]:
        """Seconds by which prompts that are yet to come slow an answer down, and delay one that joins.

        By what was read there lately: for a share of its time each step takes as long as the mean prompt.
        """
        each, cost = self._scores[i], self._fleet.costs[i]
        instance = self.instances[i]
        share = instance.speed.read_per_s(self._ctx.now) * cost.token_read_s / instance.engines
        read_s, step_s = cost.read_s, each.step_s
        if share <= 0.0 or read_s <= step_s:
            return 0.0, 0.0
        if share > _MOST_READING:
            share = _MOST_READING
        return each.decode_s * (1.0 / (1.0 - share + share * step_s / read_s) - 1.0), share * read_s

    def split(self, pair: _Pair) -> SplitChoice:
        """Bookings of a pair: the prefill alone here, the decoding alone there."""
        source, target, prompt = self.instances[pair.source], self.instances[pair.target], self._prompt
        self._by_role, self._chosen = True, pair
        work_s = source.latency.prefill_s(prompt)
        decode_work_s = target.latency.answer_s(prompt, self._output, 0.0, 0.0)
        return SplitChoice(
            pair.source,
            pair.target,
            work_s if work_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S,
            self,
            decode_work_s=decode_work_s if decode_work_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S,
            first_s=self._scores[pair.source].first_s,
            decode_first_s=pair.start_s,
        )

    def whole(self, index: int) -> SplitChoice:
        """Booking of the whole request at one instance that might have been split."""
        self._by_role = True
        return SplitChoice(index, index, _paper_work(self._ctx, self.instances[index])[2], self)

    def _with_roles(self) -> list[Candidate]:
        """Candidates for people; those that get no whole request by their role are not eligible."""
        candidates = self.candidates()
        for candidate, instance in zip(candidates, self.instances, strict=True):
            if instance.spec.role is not Role.BOTH and candidate.eligible:
                cached = cached_at(self._ctx, instance)
                if instance.spec.role is Role.PREFILL or self._prompt - cached > OWN_READ_TOKENS:
                    candidate.eligible = False
                    candidate.reason = f"its role is {instance.spec.role}"
        pair = self._chosen
        if pair is not None:
            source, target = self.instances[pair.source], self.instances[pair.target]
            candidates.append(Candidate(pair_name(source.name, target.name), pair.score))
        return candidates

    def _joining_s(self, each: _InstanceScore) -> float:
        """Seconds by which one more sequence delays those that decode there."""
        more_s = each.step_s - each.now_s
        return each.load.batch * self._output * more_s if more_s > 0.0 else 0.0

    def _in_time(self, target: Instance, whole_s: float) -> bool:
        """True if an answer comes well before the lease on the KV blocks ends, where that matters.

        The first token of an answer that is sent as a whole is not seen, so nothing else shows that they were
        fetched in time.
        """
        link = target.spec.kv_transfer
        assert link is not None, f"{target.name} takes part in no KV transfer"
        return self._ctx.request.streamed or not link.holds or whole_s <= _LEASE_SHARE * link.lease_s

    def __call__(self) -> list[Candidate]:
        """Candidates of what was decided, as a decision hands them on."""
        return self._with_roles() if self._by_role else self.candidates()

    def candidates(self) -> list[Candidate]:
        """Candidates for people. The instances may have changed meanwhile: only their constants are read."""
        self._explaining = True
        for each in self._scores:
            self._settle(each)
            self._rate(each, _EXACT)
        return [self._candidate(each) for each in self._scores]

    def _candidate(self, each: _InstanceScore) -> Candidate:
        instance, state = self.instances[each.index], each.state
        batch, t_s, workload = _paper_work(self._ctx, instance)
        availabilities = self._ctx.availabilities
        reason = "" if availabilities is None else availabilities[each.index][1]
        if state == _NO_SLOT:
            reason = f"{FULL}: every slot is taken"
        elif state == _NO_MEMORY:
            reason = f"{FULL}: over {_KV_MARK:.2f} of the KV cache expected in use"
        elif state == _PASSED_OVER:
            long_s = self._busy_s(each)
            reason = (
                f"{PASSED_OVER}: a long answer, or all it has, takes {long_s:.3g} s here, "
                f"the faster ones are done with all in {each.done_s:.3g} s"
            )
        elif state == _LATER:
            reason = (
                f"{PASSED_OVER}: the first token takes {self._early_s(each):.3g} s here, "
                f"on a faster one that is full {each.done_s:.3g} s, with all that waits for it"
            )
        elif state == _ENDS_LATE:
            reason = (
                f"{PASSED_OVER}: this answer would be the last to end, after {self._end_s(each):.3g} s here, "
                f"after {each.done_s:.3g} s on a faster one"
            )
        return Candidate(
            instance=instance.name,
            score=each.score,
            eligible=state == _ROOM,
            reason=reason,
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=each.seen.promised_tokens / instance.kv_cache_tokens,
            workload=workload,
            terms=_terms(each, self._own_weight),
            weights={"first_token_s": _FIRST_TOKEN_WEIGHT},
        )


def _terms(each: _InstanceScore, own_weight: float) -> dict[str, float]:
    """Terms of a score, which is `_FIRST_TOKEN_WEIGHT * first_token_s` and the sum of the others.

    `tail_s` is what the seconds of a long answer weigh more, `coming_s` the delay of prompts that are yet
    to come, `shared_s` what other requests pay for (see `core.prefix_index.Held`), `last_s` keeps a busy
    instance last; they are named only where they are not 0.
    """
    terms = {
        "first_token_s": each.first_s,
        "own_s": each.first_s + each.decode_s,
        "others_s": each.others_s,
        "late_s": each.late_s,
    }
    if own_weight > 1.0:
        terms["tail_s"] = (own_weight - 1.0) * each.decode_s
    if each.charged_s < each.first_s:
        terms["shared_s"] = -(_FIRST_TOKEN_WEIGHT + 1.0) * (each.first_s - each.charged_s)
    if each.coming_s:
        terms["coming_s"] = each.coming_s
    if each.adapter_s:
        terms["adapter_s"] = (_FIRST_TOKEN_WEIGHT + 1.0) * each.adapter_s
    if each.last_s:
        terms["last_s"] = each.last_s
    return terms


class Hetlb(Policy):
    """`hetlb`, the default."""

    name = "hetlb"
    reads_demand = True
    holds_back = True
    lookahead = _LOOKAHEAD

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._groups = Groups()

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice:
        if len(instances) > LARGEST_WHOLE and ctx.availabilities is None:
            return self._choose_of_many(ctx, instances)
        evaluation = _Evaluation(ctx, instances)
        index = evaluation.lowest()
        if ctx.request.preferred and index is not None:
            index = evaluation.preferred(index)
        work_s = 0.0 if index is None else _paper_work(ctx, evaluation.instances[index])[2]
        return index, work_s, evaluation

    def _choose_of_many(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice:
        """The best of two groups or three; of the first other one that has room where those have none."""
        groups, looked = self._groups.in_order(instances, ctx.request.id, ctx.held)
        evaluations: list[tuple[Group, _Evaluation]] = []
        index: int | None = None
        least = math.inf
        for n, group in enumerate(groups):
            if n >= looked and index is not None:
                break
            evaluation = _Evaluation(ctx, group.instances, share=group.share)
            evaluations.append((group, evaluation))
            best = evaluation.best_whole(mixed=True)
            if best >= 0 and evaluation.whole_score < least:
                index, least = group.indices[best], evaluation.whole_score
        work_s = 0.0 if index is None else _paper_work(ctx, instances[index])[2]
        return index, work_s, lambda: _of_many(instances, evaluations)

    def choose_split(
        self, ctx: SchedulingContext, instances: Sequence[Instance], transfers: TransferTimes, mixed: bool
    ) -> SplitChoice | None:
        evaluation = _Evaluation(ctx, instances, mixed)
        whole = evaluation.best_whole(mixed)
        below = math.inf if whole < 0 else _WORTH * evaluation.whole_score
        pair = evaluation.best_pair(transfers, below, mixed)
        if pair is not None and pair.in_time:
            return evaluation.split(pair)
        if whole < 0:
            return None if pair is None else SplitChoice(-1, -1, 0.0, evaluation)
        return evaluation.whole(whole)

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
        return _Evaluation(ctx, instances, explaining=True).candidates()


def _of_many(
    instances: Sequence[Instance], evaluations: Sequence[tuple[Group, _Evaluation]]
) -> list[Candidate]:
    """Candidates of a large fleet for people."""
    found = [Candidate(each.name, math.inf, eligible=False, reason=NOT_LOOKED_AT) for each in instances]
    for group, evaluation in evaluations:
        for i, candidate in zip(group.indices, evaluation.candidates(), strict=True):
            found[i] = candidate
    return found


def _thinned_share(mix: Mix, thinning: float) -> float:
    """The share of a batch that runs beside an answer in the mean of its last `thinning` tokens."""
    left = mix.residual if mix.residual > 1.0 else 1.0
    if thinning <= 0.0:
        return 1.0
    share = _THINNING * left / thinning * (1.0 - math.exp(-thinning / left))
    return share if share < 1.0 else 1.0


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
