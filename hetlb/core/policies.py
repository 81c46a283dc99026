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


class Policy:
    """Base of all policies: binds on arrival and holds nothing back."""

    name: ClassVar[str]

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        self.params = params
        self._rng = rng

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
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

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
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

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
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

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        return [Candidate(instance.name, self._rng.random()) for instance in instances]


class LeastRequests(Policy):
    """`least-requests`: fewest requests in flight."""

    name = "least-requests"

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        return [Candidate(instance.name, float(instance.in_flight)) for instance in instances]


class PowerOfTwoChoices(Policy):
    """`p2c`: two drawn at random, the one with fewer requests in flight."""

    name = "p2c"

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
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

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        return [
            Candidate(
                instance.name,
                instance.kv_used_tokens(now) - instance.kv_cache_tokens,
                kv_utilization=instance.kv_utilization,
            )
            for instance in instances
        ]


class PeakEwmaChoice(Policy):
    """`peak-ewma`: Linkerd's balancer, the cheaper of two drawn by peak EWMA times (in flight + 1)."""

    name = "peak-ewma"

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        drawn = self._draw_two(len(instances))
        decay_s = self.params.decay_s
        return [
            Candidate(instance.name, instance.peak_ewma.estimate_s(now, decay_s) * (instance.in_flight + 1))
            if i in drawn
            else Candidate(instance.name, math.inf, reason=NOT_DRAWN)
            for i, instance in enumerate(instances)
        ]


class Single(Policy):
    """`single`: everything to the first in file order that can take it."""

    name = "single"

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        return [Candidate(instance.name, float(i)) for i, instance in enumerate(instances)]


class Paper(Policy):
    """`paper`: the least W_i + W_ri, with the workload of processing time and KV utilisation."""

    name = "paper"
    _fixed_processing_s: float | None = None

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        params, fixed = self.params, self._fixed_processing_s
        return [paper_terms(instance, request, predicted_output, params, fixed) for instance in instances]


class PaperMemory(Paper):
    """`paper-memory`: the paper's MB baseline, the same with T fixed to one second."""

    name = "paper-memory"
    _fixed_processing_s = 1.0


#: An engine is kept this much fuller than it can run at once, so that a place that frees is taken in the
#: same iteration and not a round trip later.
_OVERBOOK = 1.125
#: Of the KV cache, what may be expected to be in use: above it vLLM begins to preempt.
_KV_MARK = 0.9


class Hetlb(Policy):
    """`hetlb`, the default: late binding to the instance whose assigned work ends first.

    One queue at the proxy: a request is bound when an instance has a place for it (fewer sequences than
    it can run at once, and KV cache below the mark: halfway between what is promised and the prompts
    alone, since answers are on average half-grown). Among those it goes where assigned work and its own,
    in seconds at the instance's full-batch speed, are least. The KV cache decides who has room, not who
    is fast, so a slow instance with much memory attracts nothing by it.
    """

    name = "hetlb"

    def score(
        self, request: Request, predicted_output: float, instances: Sequence[Instance], now: float
    ) -> list[Candidate]:
        return [self._candidate(request, predicted_output, instance) for instance in instances]

    def _candidate(self, request: Request, predicted: float, instance: Instance) -> Candidate:
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
