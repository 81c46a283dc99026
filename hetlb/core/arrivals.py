"""Seeded arrival processes: one source for the simulator and the load generator.

Promise: the plan is made before the run, from a seed and a trace alone, so that every policy meets the
same load. Gaps are rescaled so that N requests take exactly N / R seconds, as `vllm bench serve` does
(a short Poisson run is off its rate by several percent otherwise). The first request is due at once; the
gap that follows the last one counts too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetlb.core.values import Value


class LengthsRow(Protocol):
    """What a plan needs of a row of a trace."""

    @property
    def arrival_s(self) -> float | None: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlannedRequest(Value):
    """One request of a plan: when it is due (seconds from the start of the run) and how long it is."""

    index: int
    scheduled_s: float
    prompt_tokens: int
    output_tokens: int


def gaps_s(count: int, rate_rps: float, burstiness: float, rng: random.Random) -> list[float]:
    """`count` gaps between arrivals, gamma-distributed with shape `burstiness` (1 is Poisson, inf constant).

    Their sum is exactly `count / rate_rps`. The coefficient of variation is `1 / sqrt(burstiness)`.
    """
    if math.isinf(burstiness):
        return [1.0 / rate_rps] * count
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    total = math.fsum(gaps)
    if total == 0.0 and gaps:  # shapes near 0 draw nothing but zeros: all the time is in one gap then
        gaps[rng.randrange(count)] = total = 1.0
    scale = (count / rate_rps) / total if gaps else 0.0
    return [gap * scale for gap in gaps]


def make_plan(
    rows: Sequence[LengthsRow],
    num_prompts: int | None,
    request_rate: float | str,
    rng: random.Random,
    burstiness: float = 1.0,
) -> list[PlannedRequest]:
    """The first `num_prompts` rows (all by default, cycled if there are fewer) with their due times.

    `request_rate` is requests per second, `inf` (all at once) or "trace" (the recorded arrivals; a cycled
    trace goes on where it ended). Raises `ValueError` for "trace" on rows without arrival times.
    """
    count = len(rows) if num_prompts is None else num_prompts
    if request_rate == "trace":
        rows, due = _recorded(rows, count)
    elif isinstance(request_rate, str):
        raise ValueError(f"expected a rate or 'trace', got {request_rate!r}")
    elif math.isinf(request_rate):
        due = [0.0] * count
    else:
        due, now = [], 0.0
        for gap in gaps_s(count, request_rate, burstiness, rng):
            due.append(now)
            now += gap
    chosen = (rows[i % len(rows)] for i in range(count))
    return [
        PlannedRequest(i, at, row.input_tokens, row.output_tokens)
        for i, (row, at) in enumerate(zip(chosen, due, strict=True))
    ]


def _recorded(rows: Sequence[LengthsRow], count: int) -> tuple[list[LengthsRow], list[float]]:
    """The first `count` rows in order of arrival, and `count` due times, the trace repeated as needed."""
    arrivals: list[tuple[float, LengthsRow]] = []
    for i, row in enumerate(rows[:count]):
        if row.arrival_s is None:
            raise ValueError(f"row {i + 1} has no arrival_s to replay")
        arrivals.append((row.arrival_s, row))
    arrivals.sort(key=lambda arrival: arrival[0])
    times = [at - arrivals[0][0] for at, _ in arrivals]
    # One mean gap between the end of a trace and its beginning again.
    period = times[-1] + (times[-1] / (len(times) - 1) if len(times) > 1 else 1.0) if times else 0.0
    due = [times[i % len(times)] + period * (i // len(times)) for i in range(count)]
    return [row for _, row in arrivals], due
