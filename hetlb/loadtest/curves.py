"""Curves of a load test, made from its runs and records.

Pure; every curve is of what was measured, nothing is smoothed: distributions are the sorted values,
timelines are counts on a grid of moments.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hetlb.loadtest.metrics import latencies_s
from hetlb.loadtest.runs import MeasuredRun
from hetlb.workload.records import RequestResult

_MOMENTS = 160
#: Tokens are counted over longer stretches than requests in flight are looked at: in steps of an engine's
#: batch they come all at once.
_STRETCHES = 50
_QUANTILES = 300


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name and its points, in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def against_rate(measured: Sequence[MeasuredRun], figure: str, factor: float = 1.0) -> list[Line]:
    """A figure against the rate, a line per policy; rounds are averaged."""
    lines = []
    for policy in policies_of(measured):
        by_rate: dict[float, list[float]] = {}
        for run in (each.run for each in measured if each.run["policy"] == policy):
            if isinstance(run["request_rate"], float) and run[figure] is not None:
                by_rate.setdefault(run["request_rate"], []).append(factor * run[figure])
        lines.append(Line(policy or "measured", [(rate, fmean(by_rate[rate])) for rate in sorted(by_rate)]))
    return lines


def distribution(measured: Iterable[MeasuredRun], metric: str) -> list[tuple[float, float]]:
    """Return the empirical distribution (ms, share) of a latency over these runs."""
    done = (record for each in measured for record in each.result.records if record.ok)
    values = sorted(latencies_s(done, metric))
    last = len(values) - 1
    if last < 1:
        return [(1e3 * value, 1.0) for value in values]
    ranks = sorted({round(i * last / (_QUANTILES - 1)) for i in range(_QUANTILES)})
    return [(1e3 * values[rank], (rank + 1) / len(values)) for rank in ranks]


def in_flight(records: Sequence[RequestResult], names: Sequence[str]) -> list[Line]:
    """Requests in flight over time (seconds), a line per instance; without instances one of all."""
    lines = []
    for name, mine in _by_instance(records, names):
        begun = sorted(record.sent_s for record in mine if record.sent_s is not None)
        ended = sorted(record.end_s for record in mine if record.end_s is not None)
        lines.append(
            Line(
                name,
                [
                    (at, float(bisect.bisect_right(begun, at) - bisect.bisect_right(ended, at)))
                    for at in _moments(records, _MOMENTS)
                ],
            )
        )
    return lines


def output_rate(records: Sequence[RequestResult], names: Sequence[str]) -> list[Line]:
    """Output tokens per second over time, a line per instance; tokens are counted when they came."""
    moments = _moments(records, _STRETCHES)
    lines = []
    for name, mine in _by_instance(records, names):
        counts = [0] * len(moments)
        for record in mine:
            for at in _token_times_s(record):
                counts[min(bisect.bisect_left(moments, at), len(moments) - 1)] += 1
        width = moments[1] - moments[0] if len(moments) > 1 else 1.0
        lines.append(Line(name, [(at, count / width) for at, count in zip(moments, counts, strict=True)]))
    return lines


def policies_of(measured: Sequence[MeasuredRun]) -> list[str | None]:
    """The policies that were measured, in order."""
    return list(dict.fromkeys(each.run["policy"] for each in measured))


def _token_times_s(record: RequestResult) -> Iterable[float]:
    if record.first_token_s is None:
        return
    at = record.first_token_s
    yield at
    for gap in record.itl_s or ():
        at += gap
        yield at


def _by_instance(
    records: Sequence[RequestResult], names: Sequence[str]
) -> Iterable[tuple[str, list[RequestResult]]]:
    if not names:
        yield "all", list(records)
    for name in names:
        yield name, [record for record in records if record.instance == name]


def _moments(records: Sequence[RequestResult], count: int) -> list[float]:
    """Evenly from the start of a run to its end."""
    end = max((record.end_s for record in records if record.end_s is not None), default=0.0)
    return [end * i / (count - 1) for i in range(count)] if end > 0 else [0.0]
