"""Record of each request, and the figures made from it: one definition for proxy, simulator and bench.

Keys and meanings come from `vllm bench serve` (vLLM 0.32, `vllm/benchmarks/serve.py`), in
milliseconds and unrounded, with one deliberate difference: latency counts from the time a request was due,
not from when it was sent. A client or server that stalls would otherwise hide its own delay ("coordinated
omission"; MLPerf LoadGen and wrk2 count the same way). Failed requests are in no percentile, in no token
count, and never in goodput.

- TTFT: due time to first token. E2EL: due time to last token.
- TPOT: (E2EL - TTFT) / (output_tokens - 1), for requests of two tokens or more; of several sequences the
  mean number of tokens of one.
- ITL: every gap between two tokens of one request; measured over HTTP, between two events that carry text
  (a server that puts several tokens into one event shows fewer, longer gaps: its TPOT is the true figure).
- duration: first due time to the end of the last request, whatever became of it.
- steady: the same rates while requests keep coming (`steady_figures`), without the drain.
- Percentiles interpolate linearly between the closest ranks, as NumPy's default does (Hyndman and Fan,
  "Sample quantiles in statistical packages", 1996, type 7). Standard deviations are of the population,
  again as NumPy. The figures of nothing are 0.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from hetlb.balancer.core.objective import ServiceClass
from hetlb.percentiles import weighted_percentile

if TYPE_CHECKING:
    Floats: TypeAlias = array[float]

#: Figures that engines counted themselves, by instance.
Counted: TypeAlias = dict[str, dict[str, int | float]]

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (90, 99)
#: Confidence level of intervals of a mean.
CONFIDENCE_LEVEL = 0.95
#: Share of the steady window left out at its beginning: the system fills.
STEADY_FROM_SHARE = 0.2


@dataclass(slots=True)
class RequestResult:
    """One request: times in seconds on one clock, None for events that did not happen or were not seen.

    `last_token_s` is when its last text came; of an answer that came whole, when it was complete (it has
    no `first_token_s` then). `end_s` is when nothing more could come. `error` is "" or a few words that
    name the kind of failure. `itl_s` holds the gaps between its tokens, if each request is measured
    by itself.
    """

    scheduled_s: float
    prompt_tokens: int
    output_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    instance: str = ""
    ok: bool = False
    sent_s: float | None = None
    end_s: float | None = None
    error: str = ""
    itl_s: Floats | None = None
    #: Sequences that `output_tokens` belong to, which grow at the same time.
    sequences: int = 1
    #: Name of its service class, "" for the default.
    service: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Due time to first token, None if no first token was seen."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        assert self.last_token_s is not None, "expected a request that completed"
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, None for a single token or an unseen first one."""
        steps = self.output_tokens / self.sequences - 1.0
        if self.first_token_s is None or self.last_token_s is None or steps < 1.0:
            return None
        return (self.last_token_s - self.first_token_s) / steps

    def meets(self, service: ServiceClass) -> bool:
        """Return True if its answer met every target; an answer that came whole began when it ended."""
        ttft_s = self.e2el_s if self.ttft_s is None else self.ttft_s
        return service.met(ttft_s, self.e2el_s, self.output_tokens // self.sequences)

    @property
    def lateness_s(self) -> float | None:
        """Delay of its sending after it was due, None if it never was sent."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s


class Gaps:
    """Times between tokens of many requests, in as little memory as they need.

    A stretch stands for `steps` gaps from `first_s` on, growing by `increment_s`, each occurring `count`
    times: an iteration of a batch gives every decoding sequence the same gap, so a simulated run is a few
    numbers per batch, not per token.
    """

    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: Floats = array("d")

    def add(self, first_s: float, increment_s: float = 0.0, steps: int = 1, count: int = 1) -> None:
        """Count one stretch, by default a single gap."""
        self._stretches.extend((first_s, increment_s, steps, count))

    def weighted(self) -> list[tuple[float, int]]:
        """Return every gap with how often it occurred, ascending."""
        numbers = iter(self._stretches)
        return sorted(
            (first + step * increment, int(count))
            for first, increment, steps, count in zip(numbers, numbers, numbers, numbers, strict=True)
            for step in range(int(steps))
        )

    def figures(self, name: str = "itl") -> dict[str, float]:
        """Return the mean, median, deviation and percentiles in milliseconds, under `name`."""
        pairs = self.weighted()
        total = sum(count for _, count in pairs) or 1
        mean = math.fsum(gap * count for gap, count in pairs) / total
        variance = math.fsum((gap - mean) ** 2 * count for gap, count in pairs) / total
        return _named(name, mean, 1e3 * math.sqrt(variance), partial(weighted_percentile, pairs))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of ascending values by linear interpolation, as NumPy's default; 0 of none."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100.0
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def student_margin(values: Sequence[float]) -> float:
    """Half the width of the confidence interval of the mean of at least two values (Student's t)."""
    from scipy.special import stdtrit  # of the extra `tools`; most results need none

    t = float(stdtrit(len(values) - 1, (1 + CONFIDENCE_LEVEL) / 2))
    return t * statistics.stdev(values) / math.sqrt(len(values))


def latencies_s(done: Iterable[RequestResult], name: str) -> Iterable[float]:
    """Return one of `METRICS` in seconds, of every completed request (of every gap: "itl")."""
    if name == "itl":
        return chain.from_iterable(record.itl_s or () for record in done)
    return (value for record in done if (value := getattr(record, f"{name}_s")) is not None)


def latency_figures(name: str, values_s: Iterable[float]) -> dict[str, float]:
    """Return the mean, median, deviation and percentiles of seconds, in milliseconds, under `name`."""
    ordered = sorted(values_s)
    count = len(ordered) or 1
    mean = math.fsum(ordered) / count
    deviation_ms = 1e3 * math.dist(ordered, [mean] * len(ordered)) / math.sqrt(count)
    return _named(name, mean, deviation_ms, partial(percentile, ordered))


def _named(name: str, mean_s: float, deviation_ms: float, at: Callable[[float], float]) -> dict[str, float]:
    return {
        f"mean_{name}_ms": 1e3 * mean_s,
        f"median_{name}_ms": 1e3 * at(50),
        f"std_{name}_ms": deviation_ms,
        **{f"p{p}_{name}_ms": 1e3 * at(p) for p in PERCENTILES},
    }


def summarize(
    records: Sequence[RequestResult],
    gaps: Gaps | None = None,
    *,
    instances: Iterable[str] | None = None,
    counted: Counted | None = None,
    goodput_slo_s: Mapping[str, float] | None = None,
    classes: Mapping[str, ServiceClass] | None = None,
) -> dict[str, Any]:
    """Return the figures of one run; with `classes`, of each class of its requests, too.

    `gaps` are the times between tokens if they were counted for the whole run; without it they are the
    records' own. `instances` names the instances to report, by default all in the records;
    `counted` goes into their entries.
    `goodput_slo_s` maps "ttft", "tpot", "e2el" to limits in seconds; without it all completed ones count.
    """
    done = [record for record in records if record.ok]
    start = min((record.scheduled_s for record in records), default=0.0)
    ends = (record.last_token_s if record.end_s is None else record.end_s for record in records)
    end = max((when for when in ends if when is not None), default=start)
    duration = end - start
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    per_second = 1.0 / duration if duration > 0 else 0.0
    ttft_s, tpot_s, e2e_s = ((goodput_slo_s or {}).get(name, math.inf) for name in ("ttft", "tpot", "e2el"))
    goodput = ServiceClass(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) * per_second,
        "output_throughput": output_tokens * per_second,
        "total_token_throughput": (prompt_tokens + output_tokens) * per_second,
        "request_goodput": sum(record.meets(goodput) for record in done) * per_second,
        **latency_figures("ttft", latencies_s(done, "ttft")),
        **latency_figures("tpot", latencies_s(done, "tpot")),
        **(latency_figures("itl", latencies_s(done, "itl")) if gaps is None else gaps.figures("itl")),
        **latency_figures("e2el", latencies_s(done, "e2el")),
        "time_to_99_percent_s": _time_to_99_percent_s(done, start),
        **({"classes": _class_figures(records, classes, per_second)} if classes else {}),
        "steady": steady_figures(records, start, end),
        "instances": _instance_figures(done, start, instances, counted or {}),
    }


def _time_to_99_percent_s(done: Sequence[RequestResult], start_s: float) -> float | None:
    """Return the seconds from the first due time until 99 % of the answers have ended, None without any."""
    ends = sorted(record.last_token_s for record in done if record.last_token_s is not None)
    return ends[math.ceil(0.99 * len(ends)) - 1] - start_s if ends else None


def _class_figures(
    records: Sequence[RequestResult], classes: Mapping[str, ServiceClass], per_second: float
) -> dict[str, Any]:
    """Return the figures of each class; a request that failed or was refused has missed its targets."""
    default = next(iter(classes))
    found: dict[str, Any] = {}
    for name, service in classes.items():
        own = [record for record in records if (record.service or default) == name]
        done = [record for record in own if record.ok]
        met = sum(record.meets(service) for record in done)
        ttft, tpot, e2el = (
            latency_figures(metric, latencies_s(done, metric)) for metric in ("ttft", "tpot", "e2el")
        )
        latencies = ttft | tpot | e2el
        found[name] = {
            "requests": len(own),
            "refused": len(own) - len(done),
            "attainment": met / len(own) if own else None,
            "goodput_req_s": met * per_second,
            "output_throughput": sum(record.output_tokens for record in done) * per_second,
            **{key: latencies[key] for key in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_e2el_ms")},
        }
    return found


def steady_figures(
    records: Sequence[RequestResult],
    start_s: float = 0.0,
    end_s: float = 0.0,
    from_share: float = STEADY_FROM_SHARE,
) -> dict[str, Any]:
    """Return the rates while requests keep coming, and how long the run went on after that (`drain_s`).

    This is the steady part of every run of a fleet, measured or simulated. It ends with the last due time; if
    all are due at once, with the last first token, since until then something waits. It begins after
    `from_share` of that time. Prompt tokens count at the first token, output tokens evenly from the first to
    the last one, a request when it ends. `from_s` and `to_s` count from the first due time;
    `offered_token_throughput` is None if all are due at once.
    """
    done = [record for record in records if record.ok and record.last_token_s is not None]
    last_due_s = max((record.scheduled_s for record in records), default=start_s)
    at_once = last_due_s <= start_s
    to_s = max((_begun_s(record) for record in done), default=start_s) if at_once else last_due_s
    from_s = start_s + from_share * (to_s - start_s)
    seconds = to_s - from_s
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    ended = sum(from_s < (record.last_token_s or 0.0) <= to_s for record in done)
    offered = sum(r.prompt_tokens + r.output_tokens for r in records if from_s <= r.scheduled_s < to_s)
    return {
        "from_s": from_s - start_s,
        "to_s": to_s - start_s,
        "drain_s": max(0.0, end_s - to_s),
        "total_token_throughput": math.fsum(tokens_within(r, from_s, to_s) for r in done) * per_second,
        "request_throughput": ended * per_second,
        "offered_token_throughput": None if at_once else offered * per_second,
    }


def _begun_s(record: RequestResult) -> float:
    """Return the time of the first token, or the end of an answer that came whole."""
    return (record.last_token_s or 0.0) if record.first_token_s is None else record.first_token_s


def tokens_within(record: RequestResult, from_s: float, to_s: float) -> float:
    """Return the tokens of one completed request that fall into (from_s, to_s]."""
    begun, last = _begun_s(record), record.last_token_s or 0.0
    first_tokens = min(record.sequences, record.output_tokens) if last > begun else record.output_tokens
    found = float(record.prompt_tokens + first_tokens) if from_s < begun <= to_s else 0.0
    if last > begun:
        within = max(0.0, min(last, to_s) - max(begun, from_s))
        found += (record.output_tokens - first_tokens) * within / (last - begun)
    return found


def _instance_figures(
    done: Iterable[RequestResult], start: float, names: Iterable[str] | None, counted: Counted
) -> list[dict[str, Any]]:
    """Return one entry per instance; preemptions and KV peak are null if not counted."""
    by_name: dict[str, list[RequestResult]] = {}
    for record in done:
        by_name.setdefault(record.instance, []).append(record)
    if names is None:
        names = sorted(name for name in by_name if name)
    return [
        {
            "name": name,
            "completed": len(mine),
            "total_output_tokens": sum(record.output_tokens for record in mine),
            "last_finish_s": max((record.last_token_s or start for record in mine), default=start) - start,
            "preemptions": None,
            "kv_peak": None,
            **counted.get(name, {}),
        }
        for name in names
        for mine in [by_name.get(name, [])]
    ]
