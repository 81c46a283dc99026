"""Base of every policy: its parameters, the work that it books, the decision.

A policy sees only instances that can take the request, the lowest score wins and ties go to the first in file
order. Choosing changes nothing but the policy's random draws; `committed` reports the choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import ideal_batch, processing_s
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.policies.sight import SchedulingContext, Sight, foreseen
from hetlb.balancer.core.types import Candidate, Request

if TYPE_CHECKING:
    from hetlb.balancer.core.queue import Queued
    from hetlb.balancer.core.ready import Choices


#: Largest workload in seconds: far beyond any real one, and its nanoseconds still add up.
MAX_WORKLOAD_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class PlannedType(PickleByFields):
    """A type of request in a plan: mean lengths in tokens, its share of all, and each instance's of it."""

    model: str
    input_tokens: float
    output_tokens: float
    share: float
    instances: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyParams(PickleByFields):
    """Parameters under `policy:` of the fleet file; `worth`, `types` and `weights` are for `hetlb`."""

    theta: float = 2.0
    combine: str = "power"
    worth: tuple[tuple[str, float], ...] = ()
    types: tuple[PlannedType, ...] = ()
    adapter_load_s: float = 0.25
    weights: tuple[tuple[str, float], ...] = ()


class KeptForOthers(Protocol):
    """Instances that are kept from each head of a line for other requests, which suit them (`plans`)."""

    def kept_from(self, entry: Queued) -> frozenset[str]: ...
    def passed(self, entry: Queued) -> None: ...


class PlannedWorth(Protocol):
    """Worth of the time of instances in a plan, which decides which suit a request (`plans`)."""

    def kind(self, model: str, prompt: float, predicted: float) -> int: ...
    def without(self, choices: Choices, kept: frozenset[str]) -> Choices: ...
    def suits(self, heads: Sequence[Queued], able: Sequence[Instance]) -> KeptForOthers: ...


@mypyc_attr(acyclic=True, free_list_len=1)
class Choice:
    """Index of the instance, seconds of work to book, forecast; `candidates` are made on demand."""

    __slots__ = ("candidates", "forecast", "index", "work_s")

    def __init__(
        self, index: int, work_s: float, candidates: Callable[[], list[Candidate]], forecast: Sight
    ) -> None:
        self.index = index
        self.work_s = work_s
        self.candidates = candidates
        self.forecast = forecast


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy:
    """Base of all policies: binds on arrival and holds nothing back."""

    name: ClassVar[str]
    #: True if a request may be left waiting although an instance could take it. The others are asked only
    #: about the instances that stand best.
    holds_back: ClassVar[bool] = False
    #: Worth of the time of each instance in a plan, None without one.
    worth: PlannedWorth | None

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        self.worth = None  # a default of the class is lost where the compiler knows no class of this name
        self.params = params
        self._rng = rng

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        """Return the eligible candidate with the lowest score, the first of several; None for none now."""
        candidates = self.score(ctx, instances)
        index = best(candidates)
        if index is None:
            return None
        # The ledger stays meaningful when the policy is switched.
        workload = candidates[index].workload
        if workload is None:
            workload = paper_work(instances[index], ctx.request, ctx.predicted_output)[2]
        return Choice(index, workload, lambda: candidates, foreseen(ctx, instances[index]))

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        """Return one candidate per instance, in their order; an infinite score is never chosen."""
        return [self.rate(ctx, each) for each in instances]

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        """Return the candidate of one instance, for policies that look at each by itself."""
        raise NotImplementedError

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        """Note that `chosen` out of `instances` got the request."""

    def answered(self, instance: Instance, first_s: float, now: float) -> None:
        """Note that the first byte of an answer came, `first_s` seconds after its dispatch."""


def best(candidates: Sequence[Candidate]) -> int | None:
    """Return the index of the eligible candidate with the lowest score, the first of several."""
    index: int | None = None
    for i, candidate in enumerate(candidates):
        if candidate.eligible and (index is None or candidate.score < candidates[index].score):
            index = i
    return index


def paper_work(instance: Instance, request: Request, predicted: float) -> tuple[int, float, float]:
    """Return ideal batch, processing time and work in seconds (booked in the ledger) of a request.

    Xiong et al., arXiv 2504.15303: `T = (T_prefill(b) + T_decode(b)) / b` at the ideal batch b.
    Data-parallel engines run a batch each: T is divided by their number.
    """
    prompt, engines = request.prompt_tokens, instance.engines
    cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines
    batch = ideal_batch(cache, instance.capacity.needed(prompt + predicted), 0.0, slots)
    t_s = processing_s(instance.latency, batch, prompt, predicted) / engines
    work_s = t_s * request.sequences
    return batch * engines, t_s, work_s if work_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S
