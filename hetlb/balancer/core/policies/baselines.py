"""Policies to compare with, a small class each."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import ClassVar, Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import ideal_batch, processing_s
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.policies.base import MAX_WORKLOAD_S, Policy, PolicyParams
from hetlb.balancer.core.policies.sight import SchedulingContext
from hetlb.balancer.core.types import Candidate, Request

NOT_DRAWN: Final = "not drawn"

#: `prefix`: the share of a prompt that must be matched, and the difference and ratio of requests in flight
#: beyond which balance comes first. sglang-router's defaults, which vllm-router has too.
_MATCH_THRESHOLD: Final = 0.3
_BALANCE_ABS_THRESHOLD: Final = 64
_BALANCE_REL_THRESHOLD: Final = 1.5
#: Number of prefixes that `prefix` remembers, the ones used last.
_KEPT_PREFIXES: Final = 65_536
#: Assumed seconds until a first byte before an answer, and the decay of an estimate (Linkerd's).
DEFAULT_RTT_S: Final = 0.030
DECAY_S: Final = 10.0
#: Prefix of the key of a session among the keys of a request.
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

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        return Candidate(instance.name, -(self._current.get(instance.name, 0.0) + instance.spec.weight))

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        for instance in instances:
            self._current[instance.name] = self._current.get(instance.name, 0.0) + instance.spec.weight
        self._current[chosen.name] -= sum(instance.spec.weight for instance in instances)


class Random(Policy):
    """`random`: drawn in proportion to weight, as HAProxy's `balance random` does.

    The least of exponential draws of rate w_i is draw i with probability w_i / sum of all w.
    """

    name = "random"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        return Candidate(instance.name, self._rng.expovariate(instance.spec.weight))


class LeastRequests(Policy):
    """`least-requests`: fewest requests in flight."""

    name = "least-requests"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        return Candidate(instance.name, float(instance.in_flight))


class PowerOfTwoChoices(LeastRequests):
    """`p2c`: two drawn at random, the one with fewer requests in flight."""

    name = "p2c"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        count = len(instances)
        drawn = set(self._rng.sample(range(count), 2)) if count > 2 else set(range(count))
        return [
            self.rate(ctx, each) if i in drawn else Candidate(each.name, math.inf, reason=NOT_DRAWN)
            for i, each in enumerate(instances)
        ]


def kv_used_tokens(instance: Instance, now: float) -> float:
    """Return the tokens in use: the reserved ones, or the engine's report if that is more and fresh."""
    sample, at, promised = instance.sample, instance.sample_at, float(instance.kv_tokens)
    if sample is None or sample.kv_usage is None or at is None or now - at > SIGNAL_STALE_S:
        return promised
    return max(promised, sample.kv_usage * instance.kv_cache_tokens)


class LeastKv(Policy):
    """`least-kv`: most free KV tokens, absolute (a percentage hides how large the cache is)."""

    name = "least-kv"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        free = instance.kv_cache_tokens - kv_used_tokens(instance, ctx.now)
        return Candidate(instance.name, -free, kv_utilization=instance.kv_utilization)


class PeakEwma:
    """Linkerd's (tower's) peak EWMA of the time to the first byte, in seconds, for `peak-ewma`.

    A latency above the estimate replaces it at once; below it decays towards the new value with weight
    `exp(-elapsed / DECAY_S)`, also towards zero while nothing is heard.
    Source: tower `load::peak_ewma`, linkerd2-proxy `proxy::balance`.
    """

    def __init__(self, now: float) -> None:
        self._rtt_s = DEFAULT_RTT_S
        self._updated_at = now

    def observe(self, rtt_s: float, now: float) -> None:
        """Note that a first byte came after `rtt_s`."""
        if rtt_s > self._rtt_s:
            self._rtt_s = rtt_s
        else:
            keep = self._keep(now)
            self._rtt_s = self._rtt_s * keep + rtt_s * (1.0 - keep)
        self._updated_at = now

    def estimate_s(self, now: float) -> float:
        """Return the estimate now, decayed since the last observation."""
        return self._rtt_s * self._keep(now)

    def _keep(self, now: float) -> float:
        return math.exp(-(now - self._updated_at) / DECAY_S)


class PeakEwmaChoice(PowerOfTwoChoices):
    """`peak-ewma`: Linkerd's balancer, the cheaper of two drawn by peak EWMA times (in flight + 1)."""

    name = "peak-ewma"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        #: By name, with the incarnation that they are of.
        self._times: dict[str, tuple[int, PeakEwma]] = {}

    def first_byte_s(self, instance: Instance, now: float) -> float:
        """Return the estimated time to the first byte of an instance."""
        incarnation, known = self._times.get(instance.name, (-1, None))
        return (
            DEFAULT_RTT_S if known is None or incarnation != instance.incarnation else known.estimate_s(now)
        )

    def answered(self, instance: Instance, first_s: float, now: float) -> None:
        incarnation, known = self._times.get(instance.name, (-1, None))
        if known is None or incarnation != instance.incarnation:
            known = PeakEwma(now)
            self._times[instance.name] = instance.incarnation, known
        known.observe(first_s, now)

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        return Candidate(instance.name, self.first_byte_s(instance, ctx.now) * (instance.in_flight + 1))


class Single(Policy):
    """`single`: everything to the first in file order that can take it."""

    name = "single"

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        return [Candidate(instance.name, float(i)) for i, instance in enumerate(instances)]


#: The forms of the paper's eq. 7, which joins processing time T, KV utilisation u and a constant. No copy at
#: hand prints the formula, so none of them is called the paper's own.
COMBINE_FORMS: Final[dict[str, Callable[[float, float, float], float]]] = {
    "power": lambda t_s, u, theta: t_s * math.pow(theta, u),
    "exp": lambda t_s, u, theta: t_s * math.exp(theta * u),
    "linear": lambda t_s, u, theta: t_s * (1.0 + theta * u),
    "sum": lambda t_s, u, theta: t_s + theta * u,
}


def paper_terms(
    instance: Instance,
    request: Request,
    predicted_output: float,
    params: PolicyParams,
    fixed_processing_s: float | None = None,
) -> Candidate:
    """Return the paper's terms of one request on one instance (Xiong et al., arXiv 2504.15303, algorithm 2).

    `T = (T_prefill(b) + T_decode(b)) / b` at the ideal batch b, u the promised KV fraction without this
    request, workload = combine(T, u, theta) times the number of sequences, score = W_i + workload.
    `fixed_processing_s` replaces T (the memory-only baseline). Data-parallel engines run a batch each: T is
    divided by their number.
    """
    capacity, engines = instance.capacity, instance.engines
    needed = instance.capacity.needed(request.prompt_tokens + predicted_output)
    batch = ideal_batch(instance.kv_cache_tokens // engines, needed, 0.0, capacity.max_num_seqs)
    t_s = fixed_processing_s
    if t_s is None:
        # The paper knows no correction of a profile; without a profile, the learnt speed is all there is.
        model = instance.nominal if instance.profiled else instance.latency
        t_s = processing_s(model, batch, request.prompt_tokens, predicted_output) / engines
    u = instance.kv_utilization
    try:
        workload = COMBINE_FORMS[params.combine](t_s, u, params.theta) * request.sequences
    except OverflowError:
        workload = MAX_WORKLOAD_S
    workload = min(workload, MAX_WORKLOAD_S)
    return Candidate(
        instance=instance.name,
        score=instance.work_s + workload,
        ideal_batch=batch * engines,
        processing_s=t_s,
        kv_utilization=u,
        workload=workload,
    )


class Paper(Policy):
    """`paper`: the least W_i + W_ri, with the workload of processing time and KV utilisation."""

    name = "paper"
    _fixed_processing_s: ClassVar[float | None] = None

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        fixed_s = self._fixed_processing_s
        return paper_terms(instance, ctx.request, ctx.predicted_output, self.params, fixed_s)


class PaperMemory(Paper):
    """`paper-memory`: the paper's MB baseline, the same with T fixed to one second."""

    name = "paper-memory"
    _fixed_processing_s = 1.0


class LMetric(Policy):
    """`lmetric`: least product of uncached prompt tokens to be computed there and batch, with the request.

    Source: Zhang et al., "LMetric: Simple is Better", arXiv 2603.15202, 2026.
    """

    name = "lmetric"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        sequences = ctx.request.sequences
        own = sequences * max(1, ctx.request.prompt_tokens - ctx.cached_tokens(instance))
        batch = instance.unfinished_sequences + sequences
        return Candidate(instance.name, float(instance.pending_prompt_tokens + own) * batch)


class LMetricBySpeed(LMetric):
    """`lmetric-speed`: the product of `lmetric` over the speed of the instance at the mean request."""

    name = "lmetric-speed"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        return Candidate(instance.name, super().rate(ctx, instance).score / ctx.demand.mix.speed(instance))


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
        """Return the tokens of the longest prefix that each cache was sent."""
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
        while len(sent) > _KEPT_PREFIXES:
            sent.popitem(last=False)


class SessionAffinity(LeastRequests):
    """`session`: the instance of a session, by weighted rendezvous hashing; without one the fewest requests.

    A session moves only when its instance is away. Source: Schindelhauer and Schomaker, "Weighted
    distributed hash tables", SPAA 2005 (the logarithmic method).
    """

    name = "session"

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        for name, _ in ctx.request.prefix_keys:
            if name.startswith(_SESSION):
                return Candidate(instance.name, _distance(name, instance))
        return super().rate(ctx, instance)


def _distance(session: str, instance: Instance) -> float:
    """Return -ln(h) / weight. h is uniform in (0, 1) for every pair of session and instance."""
    digest = blake2b(f"{session}/{instance.name}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (2.0**64 + 1)) / instance.spec.weight


#: The policies here, by name.
BASELINES: Final[dict[str, type[Policy]]] = {
    each.name: each
    for each in (
        RoundRobin, SmoothWeightedRoundRobin, Random, LeastRequests, PowerOfTwoChoices, LeastKv,
        PeakEwmaChoice, Single, PrefixMatch, SessionAffinity, Paper, PaperMemory, LMetric, LMetricBySpeed,
    )
}  # fmt: skip
