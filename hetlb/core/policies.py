"""The policies one can compare with, a small class each, and all policies by name.

Promise: everything a policy decides by is in the `Candidate` it returns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import ClassVar, Final

from hetlb.core.instance import Instance
from hetlb.core.late_binding import Hetlb
from hetlb.core.policy import (
    COMBINE_FORMS,
    Policy,
    PolicyParams,
    Question,
    paper_terms,
)
from hetlb.core.types import Candidate

__all__ = ["COMBINE_FORMS", "POLICIES", "PolicyParams", "make_policy"]

NOT_DRAWN: Final = "not drawn"


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
    _fixed_processing_s: ClassVar[float | None] = None

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
