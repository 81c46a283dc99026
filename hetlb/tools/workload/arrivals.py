"""Plans: which requests are due when, drawn from a seed, for the simulator and the load generator alike.

A plan is made before the run, from a seed and the rows of a trace alone, so that every policy meets the same
load. Gaps are rescaled so that N requests take exactly N / R seconds, as `vllm bench serve` does (a short
Poisson run is off its rate by several percent otherwise); the ramp is the same as there, too. The
first request is due at once; the gap that follows the last one counts too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hetlb.tools.workload.rows import UNSHARED, PromptContent, Row, contents_of


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan: its row, when it is due (seconds from the start of the run), and its content.

    It has `row.sequences` prompts, which begin with the spans of `content`, and asks for `row.n` answers to
    each; without `generates` (an embedding) for none.
    """

    index: int
    scheduled_s: float
    row: Row
    content: PromptContent = UNSHARED

    @property
    def generates(self) -> bool:
        return self.row.endpoint != "embeddings"

    @property
    def prompt_tokens(self) -> int:
        return self.row.input_tokens

    @property
    def output_tokens(self) -> int:
        return self.row.output_tokens

    @property
    def sequences(self) -> int:
        """Sequences that an engine runs for it."""
        return self.row.sequences * self.row.n

    @property
    def input_tokens(self) -> int:
        """Tokens of all its prompts."""
        return self.row.sequences * self.row.input_tokens

    @property
    def answer_tokens(self) -> int:
        """Output tokens of each sequence: at least one, unless nothing is generated."""
        return max(1, self.output_tokens) if self.generates else 0


@dataclass(frozen=True, slots=True)
class Waves:
    """On-off traffic: `on_s` seconds on, `off_s` off. Rates apply while on."""

    on_s: float
    off_s: float

    def due_s(self, busy_s: float) -> float:
        """Return the time, in seconds from the start, when the waves have been on for `busy_s` seconds."""
        return busy_s + self.off_s * math.floor(busy_s / self.on_s)


#: Requests/s (`inf`: all at once), or "trace": the recorded arrivals.
Rate: TypeAlias = float | Literal["trace"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from `start_rps` to `end_rps` over the requests of a run."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate_rps(self, progress: float) -> float:
        """Return the rate after this share (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


def gaps_s(count: int, rate_rps: float, burstiness: float, rng: random.Random) -> list[float]:
    """Return `count` gaps between arrivals, gamma-distributed with shape `burstiness` (1: Poisson).

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
    rows: Sequence[Row],
    num_prompts: int | None,
    request_rate: float | str | Ramp,
    rng: random.Random,
    burstiness: float = 1.0,
    *,
    waves: Waves | None = None,
    hash_block_tokens: int | None = None,
) -> list[PlannedRequest]:
    """Return the first `num_prompts` rows (all by default, cycled if there are fewer) with their due times.

    A cycled trace repeats after its end; sessions and blocks of a later cycle are others: what a trace asks
    once shall not be in a cache already. With `hash_block_tokens` (what one of the `hash_ids` stands for)
    prompts have their contents, else they share nothing. Raises `ValueError` for "trace" on rows without
    arrival times.
    """
    count = len(rows) if num_prompts is None else num_prompts
    rows = rows[:count]
    if request_rate == "trace":
        rows, due = _recorded(rows, count)
    elif request_rate == math.inf:
        due = [0.0] * count
    else:
        due, now = [], 0.0
        ramp = request_rate if isinstance(request_rate, Ramp) else Ramp("linear", 1.0, 1.0)
        mean_rps = 1.0 if isinstance(request_rate, Ramp) else float(request_rate)
        for index, gap in enumerate(gaps_s(count, mean_rps, burstiness, rng)):
            due.append(now)
            now += gap / ramp.rate_rps(index / max(1, count - 1))
    if waves is not None:
        due = [waves.due_s(at) for at in due]
    chosen = [_in_cycle(rows[i % len(rows)], i // len(rows)) for i in range(count)]
    contents = [UNSHARED] * count if hash_block_tokens is None else contents_of(chosen, hash_block_tokens)
    return [
        PlannedRequest(index, *each) for index, each in enumerate(zip(due, chosen, contents, strict=True))
    ]


def _in_cycle(row: Row, cycle: int) -> Row:
    if not cycle or not (row.session or row.hash_ids):
        return row
    session = row.session and f"{cycle}/{row.session}"
    return replace(row, session=session, hash_ids=tuple(f"{cycle}/{name}" for name in row.hash_ids))


def _recorded(rows: Sequence[Row], count: int) -> tuple[list[Row], list[float]]:
    """Return the rows in the order of arrival, and `count` due times, the trace repeated as needed."""
    arrivals = []
    for number, row in enumerate(rows, start=1):
        if row.arrival_s is None:
            raise ValueError(f"row {number} has no arrival_s to replay")
        arrivals.append(row.arrival_s)
    order = sorted(range(len(rows)), key=arrivals.__getitem__)
    times = [arrivals[index] - arrivals[order[0]] for index in order]
    # One mean gap between the end of a trace and its beginning again.
    period = times[-1] + (times[-1] / (len(times) - 1) if len(times) > 1 else 1.0) if times else 0.0
    return [rows[i] for i in order], [
        times[i % len(times)] + period * (i // len(times)) for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of every run: rows of a trace, how many of them, and how evenly they arrive.

    One of their `hash_ids` stands for `hash_block_tokens`; None: prompts share nothing.
    """

    rows: Sequence[Row]
    num_prompts: int | None = None
    burstiness: float = 1.0
    hash_block_tokens: int | None = None
    waves: Waves | None = None

    @property
    def count(self) -> int:
        """Requests of a run."""
        return len(self.rows) if self.num_prompts is None else self.num_prompts

    def plan(self, rate: float | str | Ramp, seed: int) -> list[PlannedRequest]:
        """Due time of each request. Raises `ValueError` for "trace" on rows without arrival times."""
        return make_plan(
            self.rows,
            self.num_prompts,
            rate,
            random.Random(seed),
            self.burstiness,
            waves=self.waves,
            hash_block_tokens=self.hash_block_tokens,
        )
