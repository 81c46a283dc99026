"""`hetlb`, the default policy: late binding to where a request costs everybody the least time.

Promise: a request is bound only to an instance that has a place for it; the KV cache decides who has room,
not who is fast. Every figure is a time in seconds from the latency model, or says how full an instance is.

Four questions, in this order:

1. Who has room? Fewer sequences than an engine runs at once (and an eighth), KV cache expected in use below
   a mark with one more mean request. What this request itself needs is left out: else a full instance would
   be left with small requests only, whatever it is good at.
2. Who costs least? The request's own time there (its first token counted many times over, since people wait
   for it, and more so where it comes late by the standard of the fleet), and the time by which it delays
   those who run there already: their steps get longer while it decodes, and wait while its prompt is read.
3. Is it worth it? An instance is passed over where the faster ones can finish all that waits, and what keeps
   arriving meanwhile, before it had finished one long answer. So at the end of a burst nobody waits for the
   slowest, and under load that the fast ones cannot carry everybody works.
4. Who waits that suits this instance better? Of the first few in the queue, the one whose prompt and answer
   cost least here compared with what they cost the fleet: a machine that is slow at reading gets those with
   much to write. The head of the queue is overtaken a bounded number of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.admission import Queued
from hetlb.core.demand import Demand, size_of
from hetlb.core.instance import HELD, LAST, OPEN, Instance
from hetlb.core.latency import ideal_batch, processing_s
from hetlb.core.policy import MAX_WORKLOAD_S, Choice, Policy, Question
from hetlb.core.types import Candidate

#: An engine is kept this much fuller than it can run at once, so that a place that frees is taken in the
#: same iteration and not a round trip later.
_OVERBOOK: Final = 1.125
#: Of the KV cache, what may be expected to be in use: above it vLLM begins to preempt.
_KV_MARK: Final = 0.9
#: A second until the first token weighs as many seconds of the whole...
_FIRST_TOKEN_WEIGHT: Final = 20.0
#: ...and as many times more as it takes, beyond so many times what the mean prompt takes the fastest.
_LATE: Final = 8.0
#: How much slower a batch thins out than if what is left of its answers were spread exponentially: those
#: who have just been admitted have all before them.
_THINNING: Final = 2.0
#: Requests have stopped coming when over so many seconds less than this share of what the fleet can do came.
_LULL_S: Final = 16.0
_LULL_SHARE: Final = 0.05
#: So many of those who wait are looked at for an instance; one must suit it this much better to overtake.
_LOOKAHEAD: Final = 16
_BETTER: Final = 0.95

#: Who is to be taken last costs so many seconds more than any request does.
_LAST_S: Final = 1e12

#: The beginning of the reason of an instance that has room and is left to wait for a faster one.
PASSED_OVER: Final = "passed over"
#: And of one that has none.
FULL: Final = "full"

#: How an instance stands to one request.
_ROOM: Final = 0
_NO_PLACE: Final = 1
_NO_MEMORY: Final = 2
_PASSED_OVER: Final = 3
_HELD_BACK: Final = 4


@mypyc_attr(acyclic=True)
class _Seen:
    """One instance as one decision sees it.

    `first_s` until the first token, `own_s` for the whole request, `others_s` by which it delays those who
    run there, and `score`, what it costs: seconds. `kv_tokens` are promised, before it. `state` is how the
    instance stands to it.
    """

    __slots__ = ("first_s", "kv_tokens", "others_s", "own_s", "score", "state")

    def __init__(self, first_s: float, own_s: float, others_s: float, kv_tokens: int, state: int) -> None:
        self.first_s = first_s
        self.own_s = own_s
        self.others_s = others_s
        self.kv_tokens = kv_tokens
        self.score = _FIRST_TOKEN_WEIGHT * first_s + own_s + others_s
        self.state = state


@mypyc_attr(acyclic=True)
class _View:
    """What one decision rests on. Made for every request; people get `candidates`."""

    __slots__ = ("_passed_over", "_question", "_seen", "instances")

    def __init__(self, question: Question, instances: Sequence[Instance]) -> None:
        self._question = question
        self.instances = instances
        #: Seconds that a long answer takes there, and in which the faster ones are done with all.
        self._passed_over: dict[int, tuple[float, float]] | None = None
        self._seen: list[_Seen] = []
        self._weigh()
        if len(instances) > 1:
            self._pass_over()

    def lowest(self) -> int | None:
        """The index of the instance with room and the lowest score, the first of several."""
        index = -1
        least = math.inf
        for i, seen in enumerate(self._seen):
            if seen.state == _ROOM and seen.score < least:
                index, least = i, seen.score
        return None if index < 0 else index

    def _weigh(self) -> None:
        """Who has room, and what the request would cost there: one flat loop over all instances."""
        question = self._question
        request, mix = question.request, question.demand.mix
        sequences = request.sequences
        prompt, output = request.prompt_tokens, question.predicted_output
        own_context = prompt + output / 2.0
        # Of those who run there: they are on average half-grown.
        half_grown = mix.output / 2.0
        mean_prompt, mean_tokens = mix.prompt, 2.0 * (mix.prompt + half_grown)
        usual_s = math.inf
        kv_mark = 2.0 * _KV_MARK
        all_seen = self._seen
        for instance in self.instances:
            k1, k2, k4, k5, k6, k7, k8, budget, places, cache, engines = instance.figures
            batch, tokens, pending = instance.sequences, instance.kv_tokens, instance.pending_prompt_tokens
            state = _ROOM
            cached = 0.0
            if batch or tokens:
                prompts = instance.prompt_tokens
                if batch + sequences >= places * _OVERBOOK + 1.0:
                    state = _NO_PLACE
                elif tokens + prompts + mean_tokens > kv_mark * cache:
                    # Every answer is on average half-grown: half of what is promised beyond the prompts.
                    state = _NO_MEMORY
                cached = prompts + batch * half_grown
                if batch > places:
                    cached *= places / batch
                    batch = places
            # Data-parallel engines have equal parts of the load; the request's sequences are spread, too.
            share = 1.0 / engines
            own = 1.0 if sequences <= engines else sequences * share
            before = pending * share
            # What one more request makes a step longer, and reading its prompt.
            more_s = (k5 * own_context + k6) * own
            read_s = (k1 * prompt + k2) * own
            step_s = (k5 * cached + k6 * batch) * share + k7 * own_context + k8 + more_s
            # The prompts before it are read first, in iterations in which everybody decodes too.
            first_s = k1 * before + read_s + k4 + (1.0 + (before + prompt * own) / budget) * step_s
            own_s = first_s + output * step_s
            others_s = batch * share * (sequences / own) * (read_s + output * more_s)
            all_seen.append(_Seen(first_s, own_s, others_s, tokens, state))
            mean_s = k1 * mean_prompt + k2 + k4 + k8
            if mean_s < usual_s:
                usual_s = mean_s
        if question.held:
            self._spare_reading()
        if usual_s > 0.0:
            late_s = _LATE * usual_s
            for seen in all_seen:
                first_s = seen.first_s
                if first_s > late_s:
                    seen.score += _FIRST_TOKEN_WEIGHT * first_s * (first_s - late_s) / usual_s
        if question.standings is not None:
            for i, (standing, _) in enumerate(question.standings):
                if standing == HELD and all_seen[i].state == _ROOM:
                    all_seen[i].state = _HELD_BACK
                elif standing == LAST:
                    all_seen[i].score += _LAST_S

    def _spare_reading(self) -> None:
        """Take off the seconds of reading what an instance may hold already."""
        held, sequences = self._question.held, self._question.request.sequences
        for i, instance in enumerate(self.instances):
            tokens = held.get(instance.cache_id)
            if tokens is not None:
                seen = self._seen[i]
                own = instance.own_batch(sequences)
                spared_s = instance.latency.k1 * tokens * own
                touched = sequences / own / instance.engines
                running = min(instance.sequences, instance.max_num_seqs) * touched
                self._seen[i] = _Seen(
                    seen.first_s - spared_s,
                    seen.own_s - spared_s,
                    seen.others_s - running * spared_s,
                    seen.kv_tokens,
                    seen.state,
                )

    def _pass_over(self) -> None:
        """Mark those with room on which a long answer would end after the faster ones are done with all.

        While requests keep coming this asks only whether it is worth not to wait for a faster one that is
        full; once they have stopped coming, whether what is left should go to a slower one at all. Who is
        restrained counts as doing nothing: nobody waits for it.
        """
        question, all_seen = self._question, self._seen
        room = 0
        for seen in all_seen:
            if seen.state == _ROOM:
                room += 1
        if not room:
            return
        mix, demand, now = question.demand.mix, question.demand, question.now
        instances = self.instances
        total, order = mix.fleet(instances)
        ending = demand.below(_LULL_SHARE * total, _LULL_S, now)
        if not ending and room == len(all_seen):
            return
        standings = question.standings
        todo = question.waiting + size_of(question.request, question.predicted_output)
        shortest_s = -1.0
        speed = 0.0
        for i in order:
            seen = all_seen[i]
            if seen.state == _ROOM:
                if speed > 0.0:
                    if shortest_s < 0.0:
                        shortest_s = _long_answer_s(question, instances[order[0]], last=True)
                    long_s = _long_answer_s(question, instances[i])
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
                        seen.state = _PASSED_OVER
                if seen.state == _ROOM and not ending:
                    return  # the fastest with room: the slower ones are as good as their scores
            if standings is None or standings[i][0] == OPEN:
                speed += mix.speed(instances[i])

    def candidates(self) -> list[Candidate]:
        """For people. The instances may have changed meanwhile: only their constants are read."""
        return [self._candidate(i) for i in range(len(self.instances))]

    def _candidate(self, i: int) -> Candidate:
        instance, seen = self.instances[i], self._seen[i]
        batch, t_s, workload = _paper_work(self._question, instance)
        terms = {"first_token_s": seen.first_s, "own_s": seen.own_s, "others_s": seen.others_s}
        standings = self._question.standings
        reason = "" if standings is None else standings[i][1]
        if seen.state == _NO_PLACE:
            reason = f"{FULL}: every place is taken"
        elif seen.state == _NO_MEMORY:
            reason = f"{FULL}: over {_KV_MARK:.2f} of the KV cache expected in use"
        elif seen.state == _PASSED_OVER and self._passed_over is not None:
            long_s, done_s = self._passed_over[i]
            reason = (
                f"{PASSED_OVER}: a long answer takes {long_s:.3g} s here, "
                f"the faster ones are done with all in {done_s:.3g} s"
            )
        return Candidate(
            instance=instance.name,
            score=seen.score,
            eligible=seen.state == _ROOM,
            reason=reason,
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=seen.kv_tokens / instance.kv_cache_tokens,
            workload=workload,
            terms=terms,
        )


class Hetlb(Policy):
    """`hetlb`, the default."""

    name = "hetlb"
    reads_demand = True
    holds_back = True
    lookahead = _LOOKAHEAD

    def choose(self, question: Question, instances: Sequence[Instance]) -> Choice:
        view = _View(question, instances)
        index = view.lowest()
        work_s = 0.0 if index is None else _paper_work(question, instances[index])[2]
        return index, work_s, view.candidates

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

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return _View(question, instances).candidates()


def _done_s(todo: float, speed: float, shortest_s: float) -> float:
    return todo / speed + shortest_s if speed > 0.0 else math.inf


def _long_answer_s(question: Question, instance: Instance, last: bool = False) -> float:
    """Seconds that one long answer takes on an instance from now on.

    The prompts that wait there are read first. Where lengths are known (`long` differs from request to
    request) shorter ones keep coming behind a longer one, so for what it has more than the mean one the
    batch stays full and prompts are read between its steps; then the batch thins out. `last`: nobody comes
    behind it.
    """
    k, mix, request = instance.latency, question.demand.mix, question.request
    long, share = question.long_output, 1.0 / instance.engines
    sequences = instance.sequences
    running = share * (instance.max_num_seqs if sequences > instance.max_num_seqs else sequences)
    thinning = long if last or long < mix.long else mix.long
    thinned = 1.0
    if running and thinning > 0.0:
        left = mix.residual if mix.residual > 1.0 else 1.0
        thinned = min(1.0, _THINNING * left / thinning * (1.0 - math.exp(-thinning / left)))
    own_context = request.prompt_tokens + long / 2.0
    k5, k6, output = k.k5, k.k6, mix.output
    context = instance.prompt_tokens / (sequences or 1) + output / 2.0
    others_s = k5 * context + k6
    alone_s = (k5 + k.k7) * own_context + k6 + k.k8
    reading_s = running / (output if output > 1.0 else 1.0) * (k.k1 * mix.prompt + k.k2)
    full_s = alone_s + others_s * running + reading_s
    thin_s = alone_s + others_s * running * thinned
    read_s = k.paper_prefill_s(1, request.prompt_tokens + share * instance.pending_prompt_tokens)
    return read_s + (long - thinning) * full_s + thinning * thin_s


def _paper_work(question: Question, instance: Instance) -> tuple[int, float, float]:
    """Ideal batch, processing time and workload (what the ledger books), as the paper defines them."""
    request, predicted = question.request, question.predicted_output
    prompt = request.prompt_tokens
    engines = instance.engines
    batch = ideal_batch(instance.figures[9] // engines, prompt, predicted, instance.max_num_seqs // engines)
    t_s = processing_s(instance.latency, batch, prompt, predicted) / engines
    workload_s = t_s * request.sequences
    return batch * engines, t_s, workload_s if workload_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S
