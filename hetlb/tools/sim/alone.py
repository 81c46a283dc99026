"""One engine with all its requests at once and no scheduler: its rate to the last answer, and while full.

The first equals `FleetSimulation` with one instance, at a fraction of the work. It contains the drain,
which is the longer part of a run the fewer requests there are; the rate while full does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hetlb.tools.sim.deadline import LOOK_EVENTS, look
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.flights import sequences_of
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.staged_engine import StagedEngine
from hetlb.tools.workload.arrivals import PlannedRequest

#: Batches that an engine serves while its rate when full is measured, and the most requests for that.
_FULL_BATCHES = 24
_MOST_FULL_REQUESTS = 4_000


@dataclass(frozen=True, slots=True)
class Alone:
    """Figures of a run to the end: the fitting requests, their prompt and output tokens, seconds."""

    requests: int
    tokens: int
    seconds: float

    @property
    def requests_per_s(self) -> float:
        """Requests/s, 0 if nothing fitted."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens/s, 0 if nothing fitted."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def run_alone(spec: EngineSpec, plan: Sequence[PlannedRequest], rule: IterationRule) -> Alone:
    """Return the result of all fitting requests of a plan, at once and in order, to the last answer's end."""
    if spec.ranks > 1:
        one = replace(spec, ranks=1)
        parts = [run_alone(one, plan[rank :: spec.ranks], rule) for rank in range(spec.ranks)]
        sums = sum(part.requests for part in parts), sum(part.tokens for part in parts)
        return Alone(*sums, max(part.seconds for part in parts))
    model = spec.model(rule)
    requests = tokens = 0
    for planned in plan:
        if spec.fits(planned):
            requests += 1
            tokens += planned.input_tokens + planned.sequences * planned.answer_tokens
            for sequence in sequences_of(planned):
                model.submit(sequence)
    now = spec.latency.request_s
    changes = sorted(spec.changes, reverse=True)
    while (stretch := model.begin_run()) is not None:
        while changes and changes[-1][0] < now + stretch.duration_s:
            at_s, factor = changes.pop()
            model.latency = spec.latency.scaled(factor)
            stretch = model.cut(max(0.0, at_s - now))
        now += stretch.duration_s
        model.end_iteration()
    return Alone(requests, tokens, now)


@dataclass(frozen=True, slots=True)
class FullPart:
    """Part of a run while sequences wait. In `seconds`, sequences `first` to `last` were admitted."""

    first: int
    last: int
    seconds: float


def full_part(
    engine: EngineModel | StagedEngine, sequences: Sequence[EngineSequence], batch: int
) -> FullPart:
    """Run sequences submitted at once; return the part of the run while the engine is full.

    It begins when `batch` sequences have ended, and ends when no sequence waits any more. The first `batch`
    sequences begin at random points of their answers. Otherwise all of them would end, and be replaced, at
    the same time. If no sequence waits by then, the whole run is returned. Raises `StoppedError` at the
    deadline.
    """
    for number, sequence in enumerate(sequences):
        if number < batch and sequence.output_tokens:
            left = round(sequence.output_tokens * _radical_inverse(number + 1))
            sequence.output_tokens = max(1, left)
        engine.submit(sequence)
    count, now, finished = len(sequences), 0.0, 0
    begun: tuple[float, int] | None = None
    last = (0.0, 0)
    steps = engine.run() if isinstance(engine, StagedEngine) else _run(engine)
    for taken, (now, ended) in enumerate(steps):
        if taken % LOOK_EVENTS == 0:
            look()
        finished += ended
        if waiting := engine.waiting:
            last = (now, count - waiting)
            if begun is None and finished >= batch:
                begun = last
    if begun is None or last[0] <= begun[0]:
        return FullPart(0, count, now)
    return FullPart(begun[1], last[1], last[0] - begun[0])


def _run(model: EngineModel) -> Iterator[tuple[float, int]]:
    """Yield the time after each stretch of iterations, and how many sequences finished with it."""
    now = 0.0
    while (stretch := model.begin_run()) is not None:
        now += stretch.duration_s
        yield now, len(model.end_iteration().finished)


def _radical_inverse(number: int) -> float:
    """Return a number of van der Corput's sequence. Its first n numbers are evenly spread over 0..1."""
    value, scale = 0.0, 0.5
    while number:
        value += scale * (number & 1)
        number >>= 1
        scale /= 2
    return value


def batch_of(spec: EngineSpec, tokens: float) -> int:
    """Return the number of sequences that one engine runs at once, of `tokens` tokens on average."""
    return max(1, int(spec.limits.batch_of(tokens)))


def mean_batch(spec: EngineSpec, plan: Sequence[PlannedRequest]) -> int:
    """Return the sequences of a plan that run at once."""
    tokens = math.fsum(planned.prompt_tokens + planned.answer_tokens / 2 for planned in plan)
    return batch_of(spec, tokens / max(1, len(plan)))


def requests_while_full(spec: EngineSpec, plan: Sequence[PlannedRequest]) -> int:
    """Return the number of requests that keep an engine full until its rate is steady.

    It is at least the number of a plan.
    """
    return max(len(plan), min(_MOST_FULL_REQUESTS, _FULL_BATCHES * mean_batch(spec, plan)))


def full_tokens_per_s(spec: EngineSpec, plan: Sequence[PlannedRequest], rule: IterationRule) -> float:
    """Return the prompt and output tokens/s while the engine is full."""
    sequences = [each for planned in plan if spec.fits(planned) for each in sequences_of(planned)]
    sums = list(accumulate((each.prompt_tokens + each.output_tokens for each in sequences), initial=0))
    model = spec.model(rule)
    part = full_part(model, sequences, mean_batch(spec, plan))
    return spec.ranks * (sums[part.last] - sums[part.first]) / part.seconds if part.seconds > 0 else 0.0
