"""Which instance gets a request: one small class per policy, a dict by name.

Promise: a policy scores the instances that can take the request (the scheduler has filtered), the lowest
score wins and ties go to the first in file order. `score` changes nothing but the policy's random draws;
`committed` is told what was chosen. Everything is explained by the `Candidate` it returns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hetlb.core.demand import Demand, size_of
from hetlb.core.instance import Instance
from hetlb.core.latency import ideal_batch, processing_s
from hetlb.core.types import Candidate, Request

NOT_DRAWN = "not drawn"


def _power(t_s: float, u: float, theta: float) -> float:
    return t_s * math.pow(theta, u)


def _exp(t_s: float, u: float, theta: float) -> float:
    return t_s * math.exp(theta * u)


def _linear(t_s: float, u: float, theta: float) -> float:
    return t_s * (1.0 + theta * u)


def _sum(t_s: float, u: float, theta: float) -> float:
    return t_s + theta * u


#: The forms of the paper's eq. 7, which joins processing time, KV utilisation and a constant. No copy at
#: hand prints the formula, so none of them is called the paper's own; `power` is the default.
COMBINE_FORMS: dict[str, Callable[[float, float, float], float]] = {
    "power": _power,
    "exp": _exp,
    "linear": _linear,
    "sum": _sum,
}

#: A workload is kept below this many seconds: far beyond any real one, and its nanoseconds still add up.
_MAX_WORKLOAD_S = 1e9


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """Parameters under `policy:` of the fleet file. `decay_s` belongs to `peak-ewma`."""

    theta: float = 2.0
    combine: str = "power"
    decay_s: float = 10.0


def paper_terms(
    instance: Instance,
    request: Request,
    predicted_output: float,
    params: PolicyParams,
    fixed_processing_s: float | None = None,
) -> Candidate:
    """The paper's terms of one request on one instance (Xiong et al., arXiv 2504.15303, algorithm 2).

    `T = (T_prefill(b) + T_decode(b)) / b` at the ideal batch b, u the promised KV fraction without this
    request, workload = combine(T, u, theta) times the number of sequences, score = W_i + workload.
    `fixed_processing_s` replaces T (the memory-only baseline).
    """
    capacity = instance.capacity
    batch = ideal_batch(
        instance.kv_cache_tokens, request.prompt_tokens, predicted_output, capacity.max_num_seqs
    )
    t_s = fixed_processing_s
    if t_s is None:
        t_s = processing_s(instance.latency, batch, request.prompt_tokens, predicted_output)
    u = instance.kv_utilization
    try:
        workload = COMBINE_FORMS[params.combine](t_s, u, params.theta) * request.sequences
    except OverflowError:
        workload = _MAX_WORKLOAD_S
    workload = min(workload, _MAX_WORKLOAD_S)
    return Candidate(
        instance=instance.name,
        score=instance.work_ns / 1e9 + workload,
        ideal_batch=batch,
        processing_s=t_s,
        kv_utilization=u,
        workload=workload,
    )


@dataclass(frozen=True, slots=True)
class Question:
    """What a policy is asked: where one request should go, now, given what else is asked for.

    `waiting` is the size (see `core.demand`) of the other requests in the queue for the same model.
    """

    request: Request
    predicted_output: float
    long_output: float
    waiting: int
    demand: Demand
    now: float


class Policy:
    """Base of all policies: binds on arrival and holds nothing back."""

    name: ClassVar[str]
    #: Whether it asks how much keeps arriving; the others are spared the book-keeping.
    reads_demand: ClassVar[bool] = False

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        self.params = params
        self._rng = rng

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        """One candidate per instance, in their order; an infinite score is never chosen."""
        raise NotImplementedError

    def committed(self, chosen: Instance, instances: Sequence[Instance]) -> None:
        """`chosen` out of `instances` got the request."""

    def work_s(self, candidate: Candidate, instance: Instance, request: Request, predicted: float) -> float:
        """Seconds of work to book for the chosen candidate: the paper's, unless the policy has its own.

        Booking it under every policy keeps the ledger meaningful when the policy is switched.
        """
        if candidate.workload is not None:
            return candidate.workload
        return paper_terms(instance, request, predicted, self.params).workload or 0.0

    def _draw_two(self, count: int) -> set[int]:
        return set(self._rng.sample(range(count), 2)) if count > 2 else set(range(count))


class RoundRobin(Policy):
    """`rr`: each in turn, in file order."""

    name = "rr"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._last: dict[str, str] = {}

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        names = [instance.name for instance in instances]
        last = self._last.get(instances[0].spec.model)
        start = (names.index(last) + 1) if last in names else 0
        return [Candidate(name, float((i - start) % len(names))) for i, name in enumerate(names)]

    def committed(self, chosen: Instance, instances: Sequence[Instance]) -> None:
        self._last[instances[0].spec.model] = chosen.name


class SmoothWeightedRoundRobin(Policy):
    """`wrr`: interleaved by weight, as nginx does (each gains its weight, the chosen pays the sum)."""

    name = "wrr"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._current: dict[str, float] = {}

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return [
            Candidate(instance.name, -(self._current.get(instance.name, 0.0) + instance.spec.weight))
            for instance in instances
        ]

    def committed(self, chosen: Instance, instances: Sequence[Instance]) -> None:
        for instance in instances:
            self._current[instance.name] = self._current.get(instance.name, 0.0) + instance.spec.weight
        self._current[chosen.name] -= sum(instance.spec.weight for instance in instances)


class Random(Policy):
    """`random`: uniformly."""

    name = "random"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, self._rng.random()) for instance in instances]


class LeastRequests(Policy):
    """`least-requests`: fewest requests in flight."""

    name = "least-requests"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, float(instance.in_flight)) for instance in instances]


class PowerOfTwoChoices(Policy):
    """`p2c`: two drawn at random, the one with fewer requests in flight."""

    name = "p2c"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        drawn = self._draw_two(len(instances))
        return [
            Candidate(instance.name, float(instance.in_flight))
            if i in drawn
            else Candidate(instance.name, math.inf, reason=NOT_DRAWN)
            for i, instance in enumerate(instances)
        ]


class LeastKv(Policy):
    """`least-kv`: most free KV tokens, absolute (a percentage hides how large the cache is)."""

    name = "least-kv"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return [
            Candidate(
                instance.name,
                instance.kv_used_tokens(question.now) - instance.kv_cache_tokens,
                kv_utilization=instance.kv_utilization,
            )
            for instance in instances
        ]


class PeakEwmaChoice(Policy):
    """`peak-ewma`: Linkerd's balancer, the cheaper of two drawn by peak EWMA times (in flight + 1)."""

    name = "peak-ewma"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        drawn = self._draw_two(len(instances))
        decay_s = self.params.decay_s
        return [
            Candidate(
                instance.name, instance.peak_ewma.estimate_s(question.now, decay_s) * (instance.in_flight + 1)
            )
            if i in drawn
            else Candidate(instance.name, math.inf, reason=NOT_DRAWN)
            for i, instance in enumerate(instances)
        ]


class Single(Policy):
    """`single`: everything to the first in file order that can take it."""

    name = "single"

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, float(i)) for i, instance in enumerate(instances)]


class Paper(Policy):
    """`paper`: the least W_i + W_ri, with the workload of processing time and KV utilisation."""

    name = "paper"
    _fixed_processing_s: float | None = None

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        params, fixed = self.params, self._fixed_processing_s
        return [
            paper_terms(instance, question.request, question.predicted_output, params, fixed)
            for instance in instances
        ]


class PaperMemory(Paper):
    """`paper-memory`: the paper's MB baseline, the same with T fixed to one second."""

    name = "paper-memory"
    _fixed_processing_s = 1.0


#: An engine is kept this much fuller than it can run at once, so that a place that frees is taken in the
#: same iteration and not a round trip later.
_OVERBOOK = 1.125
#: Of the KV cache, what may be expected to be in use: above it vLLM begins to preempt.
_KV_MARK = 0.9


#: How long the answer that decides the end of a run takes, of what it would take in a full batch: by then
#: the others have begun to leave.
_TAIL_BATCH = 0.6
#: Of assigned work, what is still to be done on average: answers in progress are half-grown.
_LEFT = 0.5


class Hetlb(Policy):
    """`hetlb`, the default: late binding to the instance whose assigned work ends first.

    One queue at the proxy: a request is bound when an instance has a place for it (fewer sequences than
    it can run at once, and KV cache below the mark: halfway between what is promised and the prompts
    alone, since answers are on average half-grown). Among those it goes where assigned work and its own,
    in seconds at the instance's full-batch speed, are least. The KV cache decides who has room, not who
    is fast, so a slow instance with much memory attracts nothing by it.

    An instance is passed over where the faster ones are done sooner: if they can finish all that waits,
    what they have begun and what keeps arriving before this one would have finished one long answer. So
    at the end of a burst nobody waits for the slowest, and under steady load beyond what the fast ones
    can do everybody works.
    """

    name = "hetlb"
    reads_demand = True

    def score(self, question: Question, instances: Sequence[Instance]) -> list[Candidate]:
        candidates = [self._candidate(question, instance) for instance in instances]
        if len(instances) > 1:
            self._pass_over(question, instances, candidates)
        return candidates

    def _candidate(self, question: Question, instance: Instance) -> Candidate:
        request, predicted = question.request, question.predicted_output
        seqs, kv = instance.max_num_seqs, instance.kv_cache_tokens
        prompt = request.prompt_tokens
        batch = ideal_batch(kv, prompt, predicted, seqs)
        t_s = processing_s(instance.latency, batch, prompt, predicted)
        workload = min(t_s * request.sequences, _MAX_WORKLOAD_S)
        candidate = Candidate(
            instance=instance.name,
            score=instance.work_ns / 1e9 + workload,
            ideal_batch=batch,
            processing_s=t_s,
            kv_utilization=instance.kv_utilization,
            workload=workload,
        )
        if instance.kv_tokens > 0:
            places = math.ceil(seqs * _OVERBOOK)
            grown = (instance.kv_tokens + instance.prompt_tokens) / 2.0
            grown += request.sequences * (prompt + predicted / 2.0)
            if instance.sequences + request.sequences > places:
                candidate.eligible = False
                candidate.reason = f"full: {instance.sequences} of {places} places taken"
            elif grown > _KV_MARK * kv:
                candidate.eligible = False
                candidate.reason = f"full: {grown / kv:.2f} of the KV cache expected in use"
        return candidate

    def _pass_over(
        self, question: Question, instances: Sequence[Instance], candidates: Sequence[Candidate]
    ) -> None:
        """Mark the instances on which a long answer would end after the faster ones are done with all."""
        request, demand = question.request, question.demand
        size = size_of(request, question.predicted_output)
        # By how long one long answer takes there, the fastest first.
        order = sorted(
            (_long_answer_s(question, instance, candidate.ideal_batch or 1), index)
            for index, (instance, candidate) in enumerate(zip(instances, candidates, strict=True))
        )
        speed, begun = 0.0, 0.0
        for place, (long_s, index) in enumerate(order):
            candidate = candidates[index]
            todo = question.waiting + size + begun
            # Nothing arriving is the best that can be: the rate is asked for only where it can matter.
            if place and candidate.eligible and todo / speed + order[0][0] < long_s:
                spare = speed - demand.rate(long_s, question.now)
                done_s = todo / spare + order[0][0] if spare > 0 else math.inf
                if done_s < long_s:
                    candidate.eligible = False
                    candidate.reason = (
                        f"passed over: a long answer takes {long_s:.3g} s here, "
                        f"the faster ones are done with all in {done_s:.3g} s"
                    )
            rate = size / max(candidate.workload or 0.0, 1e-9)
            speed += rate
            begun += _LEFT * rate * instances[index].work_ns / 1e9


def _long_answer_s(question: Question, instance: Instance, batch: int) -> float:
    """Seconds that one long answer takes in a batch that is about to thin out.

    Its own steps, and between them the prompts of those who come after the ones that leave: in the time
    of one long answer, `long / predicted` times as many as the batch holds.
    """
    prompt, long = question.request.prompt_tokens, question.long_output
    turnover = max(1.0, long / max(1.0, question.predicted_output))
    decode_s = instance.latency.decode_s(batch, prompt, long)
    return _TAIL_BATCH * (decode_s + turnover * instance.latency.prefill_s(batch, prompt))


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        SmoothWeightedRoundRobin,
        Random,
        LeastRequests,
        PowerOfTwoChoices,
        LeastKv,
        PeakEwmaChoice,
        Single,
        Paper,
        PaperMemory,
        Hetlb,
    )
}


def make_policy(name: str, params: PolicyParams, rng: random.Random) -> Policy:
    """The policy called `name`. Raises `KeyError` for an unknown name."""
    return POLICIES[name](params, rng)
