"""The report of a load test as one HTML file: charts, tables, verdicts, and how to measure it again.

Made from `report.html.j2`, which escapes every text; its Content-Security-Policy allows the inline style and
script alone. Nothing is smoothed: distributions are quantiles, timelines counts on a grid of moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from hetlb.loadtest.load_result import SUSPECT, LoadResult, verdict_of
from hetlb.loadtest.report import (
    Run,
    comparison_table,
    comparison_title,
    instances_table,
    latency_name,
    latency_table,
    rate_text,
    search_table,
    throughput_table,
)
from hetlb.pages import asset, content_hash, inline_module, inline_style
from hetlb.workload.records import METRICS, RequestResult, latencies_s

_LATENCIES = ("ttft", "itl", "e2el")
_PERCENTILES = (99.0,)
_INSTANCE_LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_e2el_ms")
#: Further groups are folded.
_OPEN_GROUPS = 2
_MOMENTS = 160
#: Tokens are counted over longer stretches than requests in flight are looked at: in steps of an engine's
#: batch they come all at once.
_STRETCHES = 50
_QUANTILES = 300

#: Points of one line of a chart, in order of x.
Points: TypeAlias = Sequence[tuple[float, float]]
_Axis = Mapping[str, Any]
#: A chart as the script of the page reads it.
_Chart = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportGroup:
    """A part that folds: charts, and a table."""

    title: str
    verdict: str
    is_open: bool
    charts: Sequence[_Chart] = ()
    table: Table | None = None


def _chart(title: str, lines: Mapping[str, Points], x: _Axis, y: _Axis, *, marks: bool = False) -> _Chart:
    # Five digits: more than a pixel shows, in a third of the bytes.
    drawn = [
        (name, [(float(f"{at:.5g}"), float(f"{value:.5g}")) for at, value in points])
        for name, points in lines.items()
    ]
    return {"title": title, "x": x, "y": y, "marks": marks, "lines": drawn}


def report(document: Mapping[str, Any], measured: Sequence[LoadResult]) -> str:
    """The page. `document` is what `--json` prints, `measured` the runs behind it."""
    metadata, runs, search = document["metadata"], document["runs"], document["search"]
    style = inline_style(asset("report.css", "hetlb.loadtest"))
    script = inline_module(asset("report.js", "hetlb.loadtest"))
    context = {
        "metadata": metadata,
        "runs": len(runs),
        "requests": sum(run["completed"] + run["failed"] for run in runs),
        "suspect": [
            (_name(run), run["client"]["reasons"]) for run in runs if run["client"]["verdict"] == SUSPECT
        ],
        "policies": [
            ReportGroup(comparison_title(each), each["verdict"], True, table=comparison_table(each))
            for each in document["comparison"]
        ],
        "search": search_table(search) if search else None,
        "rates": _rates(measured),
        "verdict": verdict_of(runs),
        "distributions": list(_distributions(measured)),
        "timelines": list(_timelines(measured)),
        "runs_tables": [throughput_table(runs), latency_table(runs, METRICS, _PERCENTILES)],
        "rows": lambda table: list(zip(*(column.cells for column in table.columns), strict=True)),
        "metadata_rows": [(key, _plain(value)) for key, value in metadata.items()],
        "style": Markup(style),
        "script": Markup(script),
        "content_policy": "; ".join(
            ("default-src 'none'", f"style-src {content_hash(style)}", f"script-src {content_hash(script)}")
        ),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(asset("report.html.j2", "hetlb.loadtest")).render(context).lstrip() + "\n"


def _rates(measured: Sequence[LoadResult]) -> list[_Chart]:
    """Charts of figures against the rate; none for a single rate."""
    if (
        len({each.run["request_rate"] for each in measured if isinstance(each.run["request_rate"], float)})
        < 2
    ):
        return []
    pictures: list[tuple[str, str, str, float]] = [
        ("Output throughput", "output_throughput", "tokens/s", 1.0),
        *((latency_name(key), key, "ms", 1.0) for key in (f"p99_{name}_ms" for name in _LATENCIES)),
    ]
    if any(each.run["slo_attainment"] is not None for each in measured):
        pictures.append(("Requests that met the limits", "slo_attainment", "%", 100.0))
    x = {"label": "offered requests/s", "least": 0}
    charts = []
    for name, figure, unit, factor in pictures:
        y = {"label": unit, "least": 0, **({"most": 100} if unit == "%" else {})}
        charts.append(_chart(name, against_rate(measured, figure, factor), x, y, marks=True))
    return charts


def _distributions(measured: Sequence[LoadResult]) -> Iterable[ReportGroup]:
    """A group per rate with a line per policy; one policy alone is one group with a line per rate."""
    groups: dict[str, dict[str, list[LoadResult]]] = {}
    several = len(_by_policy(measured)) > 1
    for each in measured:
        rate, policy = f"rate {rate_text(each.run)}", each.run["policy"] or "measured"
        group, line = (rate, policy) if several else (policy, rate)
        groups.setdefault(group, {}).setdefault(line, []).append(each)
    x, y = {"label": "ms", "log": True}, {"label": "share", "least": 0, "most": 1, "format": "percent"}
    for number, (title, lines) in enumerate(groups.items()):
        charts = []
        for key in _LATENCIES:
            curves = {_marked(name, each): distribution(each, key) for name, each in lines.items()}
            charts.append(_chart(key.upper(), curves, x, y))
        verdict = verdict_of(each.run for line in lines.values() for each in line)
        yield ReportGroup(title, verdict, number < _OPEN_GROUPS, charts)


def _timelines(measured: Sequence[LoadResult]) -> Iterable[ReportGroup]:
    x, y = {"label": "s", "least": 0}, {"label": "requests in flight", "least": 0}
    for number, each in enumerate(measured):
        names = [entry["name"] for entry in each.run["instances"]]
        records = each.records
        charts = (
            _chart("In flight", in_flight(records, names), x, y),
            _chart("Output", output_rate(records, names), x, {**y, "label": "tokens/s"}),
        )
        verdict = each.run["client"]["verdict"]
        table = instances_table(each.run, _INSTANCE_LATENCIES) if names else None
        yield ReportGroup(_name(each.run), verdict, number < _OPEN_GROUPS, charts, table)


def _marked(name: str, measured: Iterable[LoadResult]) -> str:
    """Name a line, marked SUSPECT if one of its runs is."""
    return f"{name} ({SUSPECT})" if verdict_of(each.run for each in measured) == SUSPECT else name


def _name(run: Run) -> str:
    words = [] if run["policy"] is None else [run["policy"]]
    return ", ".join([*words, f"rate {rate_text(run)}", f"round {run['round']}"])


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items()) or "-"
    return str(value)


# --- curves ------------------------------------------------------------------------------------------------


def _by_policy(measured: Iterable[LoadResult]) -> dict[str, list[LoadResult]]:
    found: dict[str, list[LoadResult]] = {}
    for each in measured:
        found.setdefault(each.run["policy"] or "measured", []).append(each)
    return found


def against_rate(measured: Iterable[LoadResult], figure: str, factor: float = 1.0) -> dict[str, Points]:
    """A figure against the rate, a line per policy; rounds are averaged."""
    lines: dict[str, Points] = {}
    for policy, runs in _by_policy(measured).items():
        by_rate: dict[float, list[float]] = {}
        for run in (each.run for each in runs):
            if isinstance(run["request_rate"], float) and run[figure] is not None:
                by_rate.setdefault(run["request_rate"], []).append(factor * run[figure])
        lines[_marked(policy, runs)] = [(rate, fmean(by_rate[rate])) for rate in sorted(by_rate)]
    return lines


def distribution(measured: Iterable[LoadResult], metric: str) -> Points:
    """Return the quantiles (ms, share) of a latency over these runs."""
    done = (record for each in measured for record in each.records if record.ok)
    values = 1e3 * np.array(list(latencies_s(done, metric)))
    if not len(values):
        return []
    shares = np.linspace(0.0, 1.0, min(len(values), _QUANTILES) if len(values) > 1 else 2)
    return list(zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True))


def in_flight(records: Sequence[RequestResult], names: Sequence[str]) -> dict[str, Points]:
    """Requests in flight over time (seconds), a line per instance; without instances one of all."""
    moments = np.linspace(0.0, _end_s(records), _MOMENTS)
    lines: dict[str, Points] = {}
    for name, mine in _by_instance(records, names):
        begun = np.sort([record.sent_s for record in mine if record.sent_s is not None])
        ended = np.sort([record.end_s for record in mine if record.end_s is not None])
        counts = begun.searchsorted(moments, "right") - ended.searchsorted(moments, "right")
        lines[name] = list(zip(moments.tolist(), counts.tolist(), strict=True))
    return lines


def output_rate(records: Sequence[RequestResult], names: Sequence[str]) -> dict[str, Points]:
    """Output tokens per second over time, a line per instance; tokens are counted when they came."""
    edges = np.linspace(0.0, _end_s(records), _STRETCHES + 1)
    lines: dict[str, Points] = {}
    for name, mine in _by_instance(records, names):
        times = [
            at
            for record in mine
            if record.first_token_s is not None
            for at in accumulate(record.itl_s or (), initial=record.first_token_s)
        ]
        counts, _ = np.histogram(np.clip(times, 0.0, edges[-1]), edges)
        lines[name] = list(zip(edges[1:].tolist(), (counts / edges[1]).tolist(), strict=True))
    return lines


def _by_instance(
    records: Sequence[RequestResult], names: Sequence[str]
) -> Iterable[tuple[str, list[RequestResult]]]:
    if not names:
        yield "all", list(records)
    for name in names:
        yield name, [record for record in records if record.instance == name]


def _end_s(records: Iterable[RequestResult]) -> float:
    return max((record.end_s for record in records if record.end_s is not None), default=0.0) or 1.0
