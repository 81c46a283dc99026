"""Plans: which requests are due when, drawn from a seed, for the simulator and the load generator alike.

A plan is made before the run, from a seed and the rows of a trace alone, so that every policy meets the same
load. Gaps are rescaled so that N requests take exactly N / R seconds, as `vllm bench serve` does (a short
Poisson run is off its rate by several percent otherwise); its ramp is that of `vllm bench serve`, too. The
first request is due at once; the gap that follows the last one counts too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hetlb.workload.content import UNSHARED, PromptContent, in_cycle
from hetlb.workload.traces import Row


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan: when it is due (seconds from the start of the run), and what it asks.

    It has `prompts` prompts of `prompt_tokens` tokens each, which begin with the spans of `content`, and asks
    for `n` answers of `output_tokens` tokens to each; without `generates` (an embedding) for none. `adapter`
    is the LoRA adapter that it asks for, "" for the model itself; `service` its class, "" for the default.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int
    output_tokens: int
    content: PromptContent = UNSHARED
    prompts: int = 1
    n: int = 1
    generates: bool = True
    tenant: str | None = None
    adapter: str = ""
    service: str = ""

    @property
    def sequences(self) -> int:
        """Sequences that an engine runs for it."""
        return self.prompts * self.n

    @property
    def input_tokens(self) -> int:
        """Tokens of all its prompts."""
        return self.prompts * self.prompt_tokens

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
        """Time at which the waves have been on for `busy_s` seconds altogether, seconds from the start."""
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
        """The rate after this share (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


@dataclass(frozen=True, slots=True)
class Load:
    """The load: the plan, and the row of each of its requests (`rows[planned.index]`)."""

    plan: list[PlannedRequest]
    rows: list[Row]


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
    rows: Sequence[Row],
    num_prompts: int | None,
    request_rate: float | str | Ramp,
    rng: random.Random,
    burstiness: float = 1.0,
    *,
    waves: Waves | None = None,
    contents: Sequence[PromptContent] | None = None,
) -> list[PlannedRequest]:
    """The first `num_prompts` rows (all by default, cycled if there are fewer) with their due times.

    `request_rate` is requests per second, `inf` (all at once), a ramp or "trace" (the recorded arrivals; a
    cycled trace goes on where it ended). `contents` are those of the rows, by default they share nothing.
    Raises `ValueError` for "trace" on rows without arrival times.
    """
    count = len(rows) if num_prompts is None else num_prompts
    order = list(range(min(count, len(rows))))
    if request_rate == "trace":
        due = _recorded(rows, order, count)
    elif isinstance(request_rate, str):
        raise ValueError(f"expected a rate or 'trace', got {request_rate!r}")
    elif request_rate == math.inf:
        due = [0.0] * count
    else:
        due, now = [], 0.0
        ramp = request_rate if isinstance(request_rate, Ramp) else Ramp("linear", 1.0, 1.0)
        mean_rps = 1.0 if isinstance(request_rate, Ramp) else request_rate
        for index, gap in enumerate(gaps_s(count, mean_rps, burstiness, rng)):
            due.append(now)
            now += gap / ramp.rate_rps(index / max(1, count - 1))
    if waves is not None:
        due = [waves.due_s(at) for at in due]
    return [
        planned_request(
            index, at, rows[row], UNSHARED if contents is None else in_cycle(contents[row], cycle)
        )
        for index, at in enumerate(due)
        for cycle, place in [divmod(index, len(order))]
        for row in [order[place]]
    ]


def make_load(
    rows: Sequence[Row],
    num_prompts: int,
    rate: Rate | Ramp,
    rng: random.Random,
    burstiness: float = 1.0,
    waves: Waves | None = None,
) -> Load:
    """`make_plan` with the row of every planned request, so that the same load can be sent again.

    Sessions and blocks of a later cycle are others: what a trace asks once shall not be in a cache already.
    """
    if rate == "trace":
        # The order in which `make_plan` replays them, so that the rows here are those of its requests.
        rows = sorted(rows[:num_prompts], key=lambda row: row.arrival_s or 0.0)
    chosen = [_in_cycle(rows[i % len(rows)], i // len(rows)) for i in range(num_prompts)]
    return Load(make_plan(rows, num_prompts, rate, rng, burstiness, waves=waves), chosen)


def _in_cycle(row: Row, cycle: int) -> Row:
    if not cycle or not (row.session or row.hash_ids):
        return row
    session = row.session and f"{cycle}/{row.session}"
    return replace(row, session=session, hash_ids=tuple(f"{cycle}/{name}" for name in row.hash_ids))


def planned_request(index: int, at_s: float, row: Row, content: PromptContent = UNSHARED) -> PlannedRequest:
    """A row that is due at some time."""
    return PlannedRequest(
        index,
        at_s,
        row.input_tokens,
        row.output_tokens,
        content,
        row.sequences,
        row.n,
        row.endpoint != "embeddings",
        row.tenant or None,
        row.adapter,
        row.service,
    )


def _recorded(rows: Sequence[Row], order: list[int], count: int) -> list[float]:
    """`count` due times, the trace repeated as needed; puts `order` in the order of arrival."""
    arrivals: dict[int, float] = {}
    for index in order:
        arrival_s = rows[index].arrival_s
        if arrival_s is None:
            raise ValueError(f"row {index + 1} has no arrival_s to replay")
        arrivals[index] = arrival_s
    order.sort(key=arrivals.__getitem__)
    times = [arrivals[index] - arrivals[order[0]] for index in order]
    # One mean gap between the end of a trace and its beginning again.
    period = times[-1] + (times[-1] / (len(times) - 1) if len(times) > 1 else 1.0) if times else 0.0
    return [times[i % len(times)] + period * (i // len(times)) for i in range(count)]
