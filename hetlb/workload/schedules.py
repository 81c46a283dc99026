"""Schedules of a load test: one rate, a ramp of rates, all at once, or as recorded.

A schedule is made before the run from a seed alone, and keeps the row of every planned request, so
that the same load can be sent again. Fixed rates, waves and recordings are those of
`hetlb.workload.arrivals`, which the simulator uses too; the ramp is that of `vllm bench serve`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hetlb.workload.arrivals import PlannedRequest, Waves, gaps_s, make_plan, planned_request
from hetlb.workload.traces import Row

#: Requests/s (`inf`: all at once), or "trace": the recorded arrivals.
Rate: TypeAlias = float | Literal["trace"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from `start_rps` to `end_rps` over the requests of a run."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate_rps(self, progress: float) -> float:
        """The rate after this share (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


@dataclass(frozen=True, slots=True)
class Load:
    """The load: the plan, and the row of each of its requests (`rows[planned.index]`)."""

    plan: list[PlannedRequest]
    rows: list[Row]


def make_load(
    rows: Sequence[Row],
    num_prompts: int,
    rate: Rate | Ramp,
    rng: random.Random,
    burstiness: float = 1.0,
    waves: Waves | None = None,
) -> Load:
    """The first `num_prompts` rows, cycled if there are fewer, with their due times.

    Sessions and blocks of a later cycle are others: what a trace asks once shall not be in a cache already.
    Raises `ValueError` for "trace" on rows without arrival times.
    """
    if rate == "trace":
        # The order in which `make_plan` replays them, so that the rows here are those of its requests.
        rows = sorted(rows[:num_prompts], key=lambda row: row.arrival_s or 0.0)
    chosen = [_in_cycle(rows[i % len(rows)], i // len(rows)) for i in range(num_prompts)]
    if not isinstance(rate, Ramp):
        return Load(make_plan(rows, num_prompts, rate, rng, burstiness, waves=waves), chosen)
    plan: list[PlannedRequest] = []
    now_s = 0.0
    for i, (row, gap) in enumerate(zip(chosen, gaps_s(num_prompts, 1.0, burstiness, rng), strict=True)):
        plan.append(planned_request(i, now_s if waves is None else waves.due_s(now_s), row))
        now_s += gap / rate.rate_rps(i / max(1, num_prompts - 1))
    return Load(plan, chosen)


def _in_cycle(row: Row, cycle: int) -> Row:
    if not cycle or not (row.session or row.hash_ids):
        return row
    session = row.session and f"{cycle}/{row.session}"
    return replace(row, session=session, hash_ids=tuple(f"{cycle}/{name}" for name in row.hash_ids))
