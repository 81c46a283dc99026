"""Iterations of an engine: a stretch of equal ones, the prefill work of one, the results."""

from __future__ import annotations

import math

from mypy_extensions import mypyc_attr

from hetlb.tools.sim.engine_sequence import EngineSequence


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
