"""Worth: which instances suit a request, from the price of each one's time in a plan of `hetlb rent`.

The program of a plan prices the time of every instance (the dual of "no more than all of its time"), in
requests per second of the planned mix. A request taking b seconds of an instance of worth p costs the fleet
p b requests, an opportunity cost. It suits the instances with the least p b. While requests wait, each
instance gets requests that suit it, and another one only if none does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PlannedType
from hetlb.balancer.core.queue import Queued
from hetlb.balancer.core.ready import Choices

#: Largest excess cost of a suitable instance, as a share of the least cost.
_SUITING_SHARE: Final = 0.05
#: Least worth of an instance, over the largest: an instance without use in a plan is not free.
_LEAST_WORTH: Final = 1e-3
#: Growth of that share each time that as many younger requests as run were placed before a request.
_PATIENCE_SHARE: Final = 0.1
#: Largest difference of the logarithms of two similar lengths.
ALIKE_LOG_LENGTHS: Final = 0.1
_NONE: Final[frozenset[str]] = frozenset()
#: Reason against an instance.
_KEPT: Final = "a request waits that suits it better"
#: Kinds by output tokens.
_OUTPUTS: Final = 64


def busy_s(
    latency: LatencyModel,
    kv_cache_tokens: int,
    max_num_seqs: int,
    token_budget: int,
    prompt: float,
    output: float,
    need: KvNeed | None = None,
) -> float:
    """Return the engine seconds of a request on an engine full of requests like it.

    In each iteration x prompts begin and x answers end, each after `output` iterations. Memory, slots and the
    token budget limit x. If x is below 1, some iterations have no prompt.
    """
    prompt, output = max(1.0, prompt), max(1.0, output)
    context = prompt + output / 2.0
    needed = context if need is None else need.tokens(context)
    batch = max(1.0, min(float(max_num_seqs), kv_cache_tokens / needed))
    begin = min(batch / output, token_budget / (prompt + output))
    batch = max(1.0, begin * output)
    kv_tokens = batch * context
    chunk = min(prompt, float(token_budget))
    passes = begin * prompt / chunk
    together = max(1.0, passes)
    attended = together * chunk * prompt
    mixed_s = latency.mixed_step_s(together * chunk, together, chunk, batch, kv_tokens, attended)
    with_prompt = min(1.0, passes)
    iteration_s = with_prompt * mixed_s + (1.0 - with_prompt) * latency.step_s(batch, kv_tokens)
    return iteration_s / begin


class Worth:
    """The worth of instances, in requests per second of the planned mix, by name, and the planned types."""

    def __init__(self, stated: Sequence[tuple[str, float]], types: Sequence[PlannedType]) -> None:
        least = _LEAST_WORTH * max([each for _, each in stated], default=0.0)
        self._worth = {name: max(least, each) for name, each in stated}
        self._types: dict[str, list[PlannedType]] = {}
        for each in types:
            self._types.setdefault(each.model, []).append(each)
        #: Kinds of planned types, below 0, and their lengths.
        self._planned: dict[tuple[PlannedType, ...], int] = {}
        self._lengths: dict[int, tuple[float, float]] = {}
        self._known: dict[int, dict[str, float]] = {}
        self._of: tuple[int, int] = (0, 0)
        #: Newest choices, and the same without instances kept for others.
        self._everyone: Choices | None = None
        self._others: dict[frozenset[str], Choices] = {}

    def kind(self, model: str, prompt: float, predicted: float) -> int:
        """Return the kind of a request, not 0: a planned type, or lengths within a factor of the root of 2.

        If no type with such prompts has answers of the predicted length, the kind is the mean of these types.
        """
        near = [each for each in self._types.get(model, ()) if _alike(each.input_tokens, prompt)]
        if not near:
            of_prompt, of_output = [int(2.0 * math.log2(max(1.0, each))) for each in (prompt, predicted)]
            return _OUTPUTS * of_prompt + of_output + 1
        types = tuple([each for each in near if _alike(each.output_tokens, predicted)]) or tuple(near)
        known = self._planned.get(types)
        if known is None:
            known = self._planned[types] = -1 - len(self._planned)
            share = math.fsum([each.share for each in types])
            self._lengths[known] = (
                math.fsum([each.share * each.input_tokens for each in types]) / share,
                math.fsum([each.share * each.output_tokens for each in types]) / share,
            )
        return known

    def without(self, choices: Choices, kept: frozenset[str]) -> Choices:
        """Return the choices without instances kept for better suited requests."""
        if choices is not self._everyone:
            self._everyone = choices
            self._others.clear()
        found = self._others.get(kept)
        if found is None:
            found = self._others[kept] = choices.without(dict.fromkeys(kept, _KEPT))
        return found

    def suits(self, heads: Sequence[Queued], able: Sequence[Instance]) -> Suits:
        """Return the instances that suit each head of a line."""
        return Suits(heads, self, able)

    def suiting(self, kind: int, lag: float, instances: Sequence[Instance]) -> frozenset[str]:
        """Return the names of the instances that suit a request; none if the worth of none is known.

        `lag` is the number of younger requests placed before it, per running request.
        """
        most = 1.0 + _SUITING_SHARE + _PATIENCE_SHARE * lag
        return frozenset([name for name, cost in self._costs(kind, instances).items() if cost <= most])

    def _costs(self, kind: int, instances: Sequence[Instance]) -> dict[str, float]:
        """Return the cost of a request of a kind on each instance, over the least."""
        of = id(instances), instances[0].changes.count
        if of != self._of:
            self._of = of
            self._known.clear()
        found = self._known.get(kind)
        if found is None:
            lengths = self._lengths.get(kind)
            if lengths is None:
                of_prompt, of_output = divmod(kind - 1, _OUTPUTS)
                lengths = math.pow(2.0, (of_prompt + 0.5) / 2.0), math.pow(2.0, (of_output + 0.5) / 2.0)
            prompt, output = lengths
            found = {
                each.name: self._worth[each.name] * _busy_s(each, prompt, output)
                for each in instances
                if each.name in self._worth and prompt + output <= (each.longest_request_tokens or math.inf)
            }
            least = min(found.values(), default=0.0) or 1.0
            found = self._known[kind] = {name: cost / least for name, cost in found.items()}
        return found


class Suits:
    """The heads of a line, and the instances that are kept from each for others that they suit."""

    def __init__(self, heads: Sequence[Queued], worth: Worth, able: Sequence[Instance]) -> None:
        running = float(max(1, sum([each.sequences for each in able])))
        newest = max([each.number for each in heads])
        self._suits = {
            each.number: worth.suiting(each.flow.name.kind, (newest - each.number) / running, able)
            for each in heads
        }
        #: By level: instances for the waiting requests of this level or a more urgent one.
        self._wanted: dict[int, frozenset[str]] = {}
        wanted = _NONE
        for each in heads:
            wanted |= self._suits[each.number]
            self._wanted[each.flow.name.level] = wanted
        #: Instances kept for requests without a place.
        self._passed = _NONE

    def kept_from(self, entry: Queued) -> frozenset[str]:
        """Return the instances that `entry` may not take: they are kept for other requests.

        These are as urgent as `entry`, or were passed over before it.
        """
        return (self._wanted[entry.flow.name.level] - self._suits[entry.number]) | self._passed

    def passed(self, entry: Queued) -> None:
        """Keep the instances that suit an entry for it: it found no place."""
        if not entry.flow.background:
            self._passed |= self._suits[entry.number]


def _alike(length: float, other: float) -> bool:
    return log_ratio(length, other) <= ALIKE_LOG_LENGTHS


def log_ratio(length: float, other: float) -> float:
    """Return the difference of the logarithms of two lengths, 0 or more."""
    return abs(math.log(max(1.0, length) / max(1.0, other)))


def _busy_s(instance: Instance, prompt: float, output: float) -> float:
    engines = instance.engines
    cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines
    budget, need = instance.token_budget, instance.kv_need
    # As profiled: the time of an instance twice as fast as planned is worth twice as much.
    return busy_s(instance.nominal, cache, slots, budget, prompt, output, need) / engines
