"""Curves of a load test, made from its runs and records.

Pure; every curve is of what was measured, nothing is smoothed: distributions are the sorted values,
timelines are counts on a grid of moments.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import TypeAlias

from hetlb.loadtest.runs import MeasuredRun
from hetlb.workload.records import RequestResult, latencies_s

_MOMENTS = 160
#: Tokens are counted over longer stretches than requests in flight are looked at: in steps of an engine's
#: batch they come all at once.
_STRETCHES = 50
_QUANTILES = 300


#: Points of one line of a chart, in order of x.
Points: TypeAlias = Sequence[tuple[float, float]]


def against_rate(measured: Sequence[MeasuredRun], figure: str, factor: float = 1.0) -> dict[str, Points]:
    """A figure against the rate, a line per policy; rounds are averaged."""
    lines: dict[str, Points] = {}
    for policy in policies_of(measured):
        by_rate: dict[float, list[float]] = {}
        for run in (each.run for each in measured if each.run["policy"] == policy):
            if isinstance(run["request_rate"], float) and run[figure] is not None:
                by_rate.setdefault(run["request_rate"], []).append(factor * run[figure])
        lines[policy or "measured"] = [(rate, fmean(by_rate[rate])) for rate in sorted(by_rate)]
    return lines


def distribution(measured: Iterable[MeasuredRun], metric: str) -> Points:
    """Return the empirical distribution (ms, share) of a latency over these runs."""
    done = (record for each in measured for record in each.result.records if record.ok)
    values = sorted(latencies_s(done, metric))
    last = len(values) - 1
    if last < 1:
        return [(1e3 * value, 1.0) for value in values]
    ranks = sorted({round(i * last / (_QUANTILES - 1)) for i in range(_QUANTILES)})
    return [(1e3 * values[rank], (rank + 1) / len(values)) for rank in ranks]


def in_flight(records: Sequence[RequestResult], names: Sequence[str]) -> dict[str, Points]:
    """Requests in flight over time (seconds), a line per instance; without instances one of all."""
    lines: dict[str, Points] = {}
    for name, mine in _by_instance(records, names):
        begun = sorted(record.sent_s for record in mine if record.sent_s is not None)
        ended = sorted(record.end_s for record in mine if record.end_s is not None)
        lines[name] = [
            (at, float(bisect.bisect_right(begun, at) - bisect.bisect_right(ended, at)))
            for at in _moments(records, _MOMENTS)
        ]
    return lines


def output_rate(records: Sequence[RequestResult], names: Sequence[str]) -> dict[str, Points]:
    """Output tokens per second over time, a line per instance; tokens are counted when they came."""
    moments = _moments(records, _STRETCHES)
    width = moments[1] - moments[0] if len(moments) > 1 else 1.0
    lines: dict[str, Points] = {}
    for name, mine in _by_instance(records, names):
        counts = [0] * len(moments)
        for record in mine:
            if record.first_token_s is not None:
                for at in accumulate(record.itl_s or (), initial=record.first_token_s):
                    counts[min(bisect.bisect_left(moments, at), len(moments) - 1)] += 1
        lines[name] = [(at, count / width) for at, count in zip(moments, counts, strict=True)]
    return lines


def policies_of(measured: Sequence[MeasuredRun]) -> list[str | None]:
    """The policies that were measured, in order."""
    return list(dict.fromkeys(each.run["policy"] for each in measured))


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
