"""The policies one can compare with, a small class each, and all policies by name.

Everything a policy decides by is in the `Candidate` it returns.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import ClassVar, Final

from hetlb.core.instance import Instance
from hetlb.core.policies.base import (
    COMBINE_FORMS,
    Choice,
    PlannedShares,
    Policy,
    PolicyParams,
    SchedulingContext,
    best,
    paper_terms,
)
from hetlb.core.policies.least_delay import FULL, PASSED_OVER, Hetlb
from hetlb.core.types import Candidate, Request

__all__ = ["COMBINE_FORMS", "POLICIES", "PolicyParams", "make_policy"]

NOT_DRAWN: Final = "not drawn"
#: A reason of `planned`, and the requests of a type after which what was given counts half.
NO_SHARE: Final = "no share of this type in the plan"
REMEMBERED: Final = 4096.0
#: Lengths within this difference of their logarithms are alike to `planned`.
ALIKE: Final = 0.1

#: `prefix`: the share of a prompt that must be matched, and the difference and ratio of requests in flight
#: beyond which balance comes first. sglang-router's defaults, which vllm-router has too.
_MATCH_THRESHOLD: Final = 0.3
_BALANCE_ABS_THRESHOLD: Final = 64
_BALANCE_REL_THRESHOLD: Final = 1.5
#: `prefix` remembers so many prefixes, the ones used last.
_PREFIXES_KEPT: Final = 65_536
#: How the key of a session begins, among the keys of a request.
_SESSION: Final = "session:"


class RoundRobin(Policy):
    """`rr`: each in turn, in file order."""

    name = "rr"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._last: dict[str, str] = {}

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        names = [instance.name for instance in instances]
        last = self._last.get(instances[0].spec.model)
        start = (names.index(last) + 1) if last in names else 0
        return [Candidate(name, float((i - start) % len(names))) for i, name in enumerate(names)]

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        self._last[instances[0].spec.model] = chosen.name


class SmoothWeightedRoundRobin(Policy):
    """`wrr`: interleaved by weight, as nginx does (each gains its weight, the chosen pays the sum)."""

    name = "wrr"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        self._current: dict[str, float] = {}

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [
            Candidate(instance.name, -(self._current.get(instance.name, 0.0) + instance.spec.weight))
            for instance in instances
        ]

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        for instance in instances:
            self._current[instance.name] = self._current.get(instance.name, 0.0) + instance.spec.weight
        self._current[chosen.name] -= sum(instance.spec.weight for instance in instances)


class Random(Policy):
    """`random`: uniformly."""

    name = "random"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, self._rng.random()) for instance in instances]


class LeastRequests(Policy):
    """`least-requests`: fewest requests in flight."""

    name = "least-requests"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, float(instance.in_flight)) for instance in instances]


class PowerOfTwoChoices(Policy):
    """`p2c`: two drawn at random, the one with fewer requests in flight."""

    name = "p2c"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
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

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [
            Candidate(
                instance.name,
                instance.kv_used_tokens(ctx.now) - instance.kv_cache_tokens,
                kv_utilization=instance.kv_utilization,
            )
            for instance in instances
        ]


class PeakEwmaChoice(Policy):
    """`peak-ewma`: Linkerd's balancer, the cheaper of two drawn by peak EWMA times (in flight + 1)."""

    name = "peak-ewma"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        drawn = self._draw_two(len(instances))
        decay_s = self.params.decay_s
        return [
            Candidate(
                instance.name, instance.peak_ewma.estimate_s(ctx.now, decay_s) * (instance.in_flight + 1)
            )
            if i in drawn
            else Candidate(instance.name, math.inf, reason=NOT_DRAWN)
            for i, instance in enumerate(instances)
        ]


class Single(Policy):
    """`single`: everything to the first in file order that can take it."""

    name = "single"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, float(i)) for i, instance in enumerate(instances)]


class Paper(Policy):
    """`paper`: the least W_i + W_ri, with the workload of processing time and KV utilisation."""

    name = "paper"
    _fixed_processing_s: ClassVar[float | None] = None

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        params, fixed = self.params, self._fixed_processing_s
        return [
            paper_terms(instance, ctx.request, ctx.predicted_output, params, fixed) for instance in instances
        ]


class PaperMemory(Paper):
    """`paper-memory`: the paper's MB baseline, the same with T fixed to one second."""

    name = "paper-memory"
    _fixed_processing_s = 1.0


class PrefixMatch(Policy):
    """`prefix`: cache-aware routing, the instance that was sent the longest prefix of the prompt.

    Fewest requests in flight where the match is short, where several match alike, and where requests in
    flight are out of balance. Source: sglang-router's `cache_aware`, with the prefix keys of a request in
    place of a radix tree over its text.
    """

    name = "prefix"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        #: By model and prefix key: the caches that were sent it, by `Tree.cache_id`.
        self._sent: OrderedDict[tuple[str, str], set[int]] = OrderedDict()

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        loads = [instance.in_flight for instance in instances]
        least, most = min(loads), max(loads)
        balanced = most - least <= _BALANCE_ABS_THRESHOLD or most <= _BALANCE_REL_THRESHOLD * least
        matched = self._matched(ctx.request) if balanced else {}
        longest = max((matched.get(instance.tree.cache_id, 0) for instance in instances), default=0)
        if longest <= _MATCH_THRESHOLD * ctx.request.prompt_tokens:
            longest = 0
        return [
            Candidate(instance.name, float(instance.in_flight))
            if matched.get(instance.tree.cache_id, 0) >= longest
            else Candidate(instance.name, math.inf, reason="shorter prefix")
            for instance in instances
        ]

    def _matched(self, request: Request) -> dict[int, int]:
        """Tokens of the longest prefix that each cache was sent."""
        found: dict[int, int] = {}
        for name, tokens in request.prefix_keys:
            if tokens is not None:
                for cache_id in self._sent.get((request.model, name), ()):
                    found[cache_id] = max(tokens, found.get(cache_id, 0))
        return found

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        request, sent = ctx.request, self._sent
        for name, tokens in request.prefix_keys:
            if tokens is not None:
                key = (request.model, name)
                sent.setdefault(key, set()).add(chosen.tree.cache_id)
                sent.move_to_end(key)
        while len(sent) > _PREFIXES_KEPT:
            sent.popitem(last=False)


class SessionAffinity(Policy):
    """`session`: the instance of a session, by weighted rendezvous hashing; without one the fewest requests.

    A session moves only when its instance is away. Source: Schindelhauer and Schomaker, "Weighted
    distributed hash tables", SPAA 2005 (the logarithmic method).
    """

    name = "session"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        for name, _ in ctx.request.prefix_keys:
            if name.startswith(_SESSION):
                return [Candidate(each.name, _distance(name, each)) for each in instances]
        return [Candidate(each.name, float(each.in_flight)) for each in instances]


def _distance(session: str, instance: Instance) -> float:
    """-ln(h) / weight, h being uniform in (0, 1) for every pair of session and instance."""
    digest = blake2b(f"{session}/{instance.name}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (2.0**64 + 1)) / instance.spec.weight


class Planned(Hetlb):
    """`planned`: every type of request divided over the instances as a plan says.

    A request is of the types with the nearest prompt length, and of the one among them whose answers are as
    long as predicted; where none is, lengths cannot be told in advance and it counts as a mean of them. Of
    the instances with room, by the rules of `hetlb`, it goes to the one that is furthest behind its share;
    it waits while only instances without a share have room. Where no instance with a share can be reached,
    or nothing is planned for the model, the decision is that of `hetlb`.
    """

    name = "planned"
    lookahead = 1

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        #: By type and instance: requests given, halved when they become many so that old ones fade.
        self._given: dict[str, dict[str, float]] = {}
        self._means: dict[tuple[str, ...], PlannedShares] = {}

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice:
        planned = self._planned(ctx, instances)
        if planned is None:
            return super().choose(ctx, instances)
        candidates = self.score(ctx, instances)
        index = best(candidates)
        return index, 0.0 if index is None else candidates[index].workload or 0.0, lambda: candidates

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        planned = self._planned(ctx, instances)
        if planned is None:
            return super().score(ctx, instances)
        given, shares = self._given.get(planned.name, {}), dict(planned.instances)
        return [
            replace(
                candidate,
                score=(given.get(candidate.instance, 0.0) + 1.0) / shares[candidate.instance],
                eligible=candidate.eligible or self._may_wait_there(candidate, instance),
            )
            if shares.get(candidate.instance, 0.0) > 0.0
            else replace(candidate, score=math.inf, eligible=False, reason=NO_SHARE)
            for candidate, instance in zip(super().score(ctx, instances), instances, strict=True)
        ]

    @staticmethod
    def _may_wait_there(candidate: Candidate, instance: Instance) -> bool:
        """Whether an instance that `hetlb` would not take may have the request all the same.

        To wait for a faster instance is `hetlb`'s way to divide the work: a plan has done that. And where a
        request may go to few instances, those that wait for one that is full hold up all behind them: up to
        twice what fits an instance waits in its engine instead.
        """
        if candidate.reason.startswith(PASSED_OVER):
            return True
        return (
            candidate.reason.startswith(FULL)
            and instance.kv_tokens < 2 * instance.kv_cache_tokens
            and instance.sequences < 2 * instance.max_num_seqs
        )

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        planned = self._planned(ctx, instances)
        if planned is None:
            return
        given = self._given.setdefault(planned.name, {})
        given[chosen.name] = given.get(chosen.name, 0.0) + 1.0
        if sum(given.values()) > REMEMBERED:
            for name in given:
                given[name] /= 2.0

    def _planned(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> PlannedShares | None:
        """The shares of a request's type, None where none of the instances has any."""
        planned = self._type_of(ctx)
        if planned is None:
            return None
        names = {instance.name for instance in instances}
        return planned if any(share > 0.0 and name in names for name, share in planned.instances) else None

    def _type_of(self, ctx: SchedulingContext) -> PlannedShares | None:
        types = [each for each in self.params.shares if each.model == ctx.request.model]
        if not types:
            return None
        prompt = [_log_ratio(ctx.request.prompt_tokens, each.input_tokens) for each in types]
        near = [each for each, off in zip(types, prompt, strict=True) if off <= min(prompt) + ALIKE]
        if len(near) == 1:
            return near[0]
        output = [_log_ratio(ctx.predicted_output, each.output_tokens) for each in near]
        nearest = min(range(len(near)), key=lambda i: output[i])
        return near[nearest] if output[nearest] <= ALIKE else self._mean(near)

    def _mean(self, types: Sequence[PlannedShares]) -> PlannedShares:
        """Types that cannot be told apart as one."""
        key = tuple(each.name for each in types)
        known = self._means.get(key)
        if known is None:
            total = sum(each.share for each in types)
            shares: dict[str, float] = {}
            for each in types:
                for name, share in each.instances:
                    shares[name] = shares.get(name, 0.0) + share * each.share / total
            known = self._means[key] = replace(
                types[0], name="+".join(key), share=total, instances=tuple(shares.items())
            )
        return known


def _log_ratio(length: float, other: float) -> float:
    return abs(math.log(max(1.0, length) / max(1.0, other)))


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
        PrefixMatch,
        SessionAffinity,
        Paper,
        PaperMemory,
        Hetlb,
        Planned,
    )
}


def make_policy(name: str, params: PolicyParams, rng: random.Random) -> Policy:
    """The policy called `name`. Raises `KeyError` for an unknown name."""
    return POLICIES[name](params, rng)
