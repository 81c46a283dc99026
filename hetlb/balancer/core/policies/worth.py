"""Worth: which instances suit a request, by what the time of each is worth in a plan of `hetlb rent`.

The program of a plan prices the time of every instance (the dual of "no more than all of its time"): so many
requests per second of the planned mix it adds. A request that takes b seconds of an instance of worth p takes
p b requests from the fleet. It suits the instances where that is least: an opportunity cost. While requests
wait, each instance gets what suits it; only where nothing that waits suits it, it gets another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import LatencyModel

#: A request suits instances where it costs at most this share more than where it costs least.
_ALIKE: Final = 0.05
#: Least worth of an instance, over the largest: one that adds nothing to a plan is no free one.
_LEAST_WORTH: Final = 1e-3
#: Requests of which the instances that suit are known.
_MOST_KNOWN: Final = 4096


def busy_s(
    latency: LatencyModel,
    kv_cache_tokens: int,
    max_num_seqs: int,
    token_budget: int,
    prompt: float,
    output: float,
) -> float:
    """Return the seconds that a request takes of an engine that is full of requests like it.

    In each iteration x prompts begin and as many answers end, `output` iterations after they began: as many as
    memory, slots and the tokens of an iteration allow. Where x is below 1, some iterations have no prompt.
    """
    prompt, output = max(1.0, prompt), max(1.0, output)
    context = prompt + output / 2.0
    batch = max(1.0, min(float(max_num_seqs), kv_cache_tokens / context))
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
    """The worth of instances, in requests per second of the planned mix, by name."""

    def __init__(self, stated: Mapping[str, float]) -> None:
        least = _LEAST_WORTH * max(stated.values(), default=0.0)
        self._worth = {name: max(least, each) for name, each in stated.items()}
        self._known: dict[tuple[int, int, int, int], frozenset[str]] = {}

    def suiting(self, prompt: float, output: float, instances: Sequence[Instance]) -> frozenset[str]:
        """Return the names of the instances that suit a request; none if the worth of none is known."""
        if not instances:
            return frozenset()
        # Lengths within 2 % are alike.
        key = (int(50.0 * math.log(max(1.0, prompt))), int(50.0 * math.log(max(1.0, output))))
        known = self._known.get((*key, id(instances), instances[0].changes.count))
        if known is not None:
            return known
        costs = {
            each.name: self._worth[each.name] * _busy_s(each, prompt, output)
            for each in instances
            if each.name in self._worth
        }
        most = (1.0 + _ALIKE) * min(costs.values(), default=0.0)
        found = frozenset(name for name, cost in costs.items() if cost <= most)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[*key, id(instances), instances[0].changes.count] = found
        return found


def _busy_s(instance: Instance, prompt: float, output: float) -> float:
    engines = instance.engines
    cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines
    return busy_s(instance.latency, cache, slots, instance.token_budget, prompt, output) / engines
