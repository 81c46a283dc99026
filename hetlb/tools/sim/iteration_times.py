"""Iterations of the simulated engine: their seconds, a stretch of equal ones, prefill work, results."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.engine_sequence import EngineSequence


class IterationRule(StrEnum):
    """Rule to combine the times of prefill and decode work in one iteration.

    `TOKEN` reads the weights once (5-8 % off measured mixed steps); `SUM` adds the two pure steps
    (21-27 % too long, since it reads them twice) and is kept as the paper's reading.
    """

    TOKEN = "token"
    SUM = "sum"


_SUM: Final = IterationRule.SUM


def iteration_s(
    latency: LatencyModel,
    rule: IterationRule,
    prefill_tokens: float,
    prompts: float,
    longest: float,
    batch: float,
    kv_tokens: float,
    attended: float = -1.0,
) -> float:
    """Return the seconds of one iteration by `rule`: `mixed_step_s`, or the sum of the two pure steps."""
    if rule is _SUM and prefill_tokens > 0.0:
        prefill_s = latency.mixed_step_s(prefill_tokens, prompts, longest, 0.0, 0.0, attended)
        step_s = latency.step_s(batch, kv_tokens)
        return prefill_s + step_s - latency.host_s if step_s > 0.0 else prefill_s
    return latency.mixed_step_s(prefill_tokens, prompts, longest, batch, kv_tokens, attended)


def growth_s(latency: LatencyModel, batch: float) -> float:
    """Return the seconds that one more token in the cache of each sequence adds to a step."""
    table = latency.better_decode
    return latency.k5 * batch + latency.k7 if table is None else table.growth_s(batch)


def uneven_s(latency: LatencyModel, batch: float, kv_tokens: float, longest: float) -> float:
    """Return the seconds that one context of `longest` tokens adds to a step, if known."""
    split = latency.split_kv
    if split is None or batch <= 0.0:
        return 0.0
    more_s = split.seconds(batch, longest) - latency.step_line(batch)[1] * kv_tokens
    return more_s if more_s > 0.0 else 0.0


@mypyc_attr(acyclic=True)
class IterationRun:
    """`steps` iterations one after the other. Step j (from 0) takes `first_s + j * increment_s` seconds.

    `decodes` sequences get one token at the end of every step. A stretch of one step may hold prefill
    work too; a longer one never does. Immutable: a shorter one takes its place.
    """

    __slots__ = ("decodes", "first_s", "increment_s", "steps")

    def __init__(self, steps: int, first_s: float, increment_s: float, decodes: int) -> None:
        self.steps = steps
        self.first_s = first_s
        self.increment_s = increment_s
        self.decodes = decodes

    def elapsed_s(self, steps: int) -> float:
        """Return seconds from the start to the end of the first `steps` steps."""
        return steps * self.first_s + self.increment_s * (steps * (steps - 1) / 2)

    @property
    def duration_s(self) -> float:
        """Seconds of the whole stretch."""
        return self.elapsed_s(self.steps)

    def steps_until(self, elapsed_s: float) -> int:
        """Return the first step, counted from 1, that ends at `elapsed_s` or later; else the last one."""
        first, increment = self.first_s, self.increment_s
        if elapsed_s <= first or self.steps == 1:
            return 1
        # Root of elapsed_s(m) = elapsed_s, in the form that does not cancel for small increments.
        slope = first - increment / 2
        square = slope * slope + 2 * increment * elapsed_s
        if square < 0 or (denominator := slope + math.sqrt(square)) <= 0:
            return self.steps
        root = 2 * elapsed_s / denominator
        steps = self.steps if root >= self.steps else max(1, math.ceil(root))
        # The root is rounded, the boundaries are what `elapsed_s` says.
        while steps > 1 and self.elapsed_s(steps - 1) >= elapsed_s:
            steps -= 1
        while steps < self.steps and self.elapsed_s(steps) < elapsed_s:
            steps += 1
        return steps

    def steps_completed(self, elapsed_s: float) -> int:
        """Return the number of steps that ended by `elapsed_s`."""
        steps = self.steps_until(elapsed_s)
        return steps if self.elapsed_s(steps) <= elapsed_s else steps - 1


class Prefills:
    """Prefill work of one iteration under composition, and the remaining limits."""

    __slots__ = (
        "attended", "budget", "joining", "joining_longest", "joining_tokens", "loads", "longest", "prompts",
        "slots", "tokens",
    )  # fmt: skip

    def __init__(self, budget: int) -> None:
        #: Tokens that the iteration may still compute, sequences that may still be admitted.
        self.budget = budget
        self.slots = 0
        #: Prompt tokens, in how many prompts, the longest part, and what they attend to
        #: (`LatencyModel.mixed_step_s`): a later part of a prompt attends to the earlier ones.
        self.tokens = self.prompts = self.longest = self.attended = 0
        #: Transferred prompts that compute one token, which costs what a decode costs; their cached tokens,
        #: and the cached tokens of the longest.
        self.joining = self.joining_tokens = self.joining_longest = 0
        #: LoRA adapters loaded for it.
        self.loads = 0

    def add(self, part: int, computed: int) -> None:
        """Add `part` tokens of a prompt with `computed` tokens in the cache."""
        self.budget -= part
        self.tokens += part
        self.prompts += 1
        if part > self.longest:
            self.longest = part
        self.attended += part * (part + 2 * computed)

    def join(self, tokens: int) -> None:
        """Add a transferred prompt of `tokens` tokens; only the last is computed."""
        self.budget -= 1
        self.joining += 1
        self.joining_tokens += tokens
        self.joining_longest = max(self.joining_longest, tokens)


class IterationEnd:
    """Results of the iterations that just ended.

    In each of its steps `stretch.decodes` sequences got a token by decoding, and after the last one
    every sequence in `EngineModel.decodes` and every one in `finished` (with output) has got one.
    `first` got their very first token, `resumed` their next one after a preemption: both by the prefill
    that ended here, at the end. `finished` are complete. `preempted` lost their slot when it began.
    """

    __slots__ = ("finished", "first", "preempted", "resumed", "stretch")

    def __init__(
        self,
        stretch: IterationRun,
        first: list[EngineSequence],
        resumed: list[EngineSequence],
        finished: list[EngineSequence],
        preempted: list[EngineSequence],
    ) -> None:
        self.stretch = stretch
        self.first = first
        self.resumed = resumed
        self.finished = finished
        self.preempted = preempted
