"""The report of a load test as one HTML file: charts, tables, verdicts, and how to measure it again.

Made from `report.html.j2`, which escapes every text. Self-contained: its Content-Security-Policy allows the
inline style and script alone. Light and dark as the reader's system is. The figures are those of the JSON
document, rounded only here. Curves are of what was measured, nothing is smoothed: distributions are the
sorted values, timelines are counts on a grid of moments.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hetlb.loadtest.report import (
    ReportTable,
    Run,
    comparison_table,
    comparison_title,
    instances_table,
    latency_name,
    latency_table,
    milliseconds,
    percent,
    rate_text,
    search_table,
    throughput_table,
)
from hetlb.loadtest.runs import MeasuredRun
from hetlb.loadtest.verdict import SUSPECT, verdict_of
from hetlb.pages import asset, content_hash, inline_module, inline_style
from hetlb.workload.records import METRICS, RequestResult, latencies_s

_LATENCIES = ("ttft", "itl", "e2el")
_GLANCED = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_e2el_ms")
#: Figures compared at a glance: figure, heading, how it is written.
_GLANCE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("output_throughput", "output tok/s", lambda value: f"{value:,.0f}"),
    ("request_goodput", "goodput/s", lambda value: f"{value:,.2f}"),
    *((key, latency_name(key), milliseconds) for key in _GLANCED),
)
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
    table: ReportTable | None = None


def _chart(title: str, lines: Mapping[str, Points], x: _Axis, y: _Axis, *, marks: bool = False) -> _Chart:
    drawn = [
        (name, [(_rounded(at), _rounded(value)) for at, value in points]) for name, points in lines.items()
    ]
    return {"title": title, "x": x, "y": y, "marks": marks, "lines": drawn}


def report(document: Mapping[str, Any], measured: Sequence[MeasuredRun]) -> str:
    """The page. `document` is what `--json` prints, `measured` the runs behind it."""
    metadata, runs, comparisons = document["metadata"], document["runs"], document["comparison"]
    search = document["search"]
    style = inline_style(asset("report.css", "hetlb.loadtest"))
    script = inline_module(asset("report.js", "hetlb.loadtest"))
    context = {
        "metadata": metadata,
        "runs": len(runs),
        "requests": sum(run["completed"] + run["failed"] for run in runs),
        "suspect": [
            (_name(run), run["client"]["reasons"]) for run in runs if run["client"]["verdict"] == SUSPECT
        ],
        "policies": _policies(comparisons, runs),
        "rounds": comparisons[0]["rounds"] if comparisons else 0,
        "confidence": percent(comparisons[0]["confidence"]) if comparisons else "",
        "search": search_table(search) if search else None,
        "rates": _rates(measured),
        "distributions": list(_distributions(measured)),
        "timelines": list(_timelines(measured)),
        "runs_tables": [throughput_table(runs), latency_table(runs, METRICS, _PERCENTILES)],
        "differences": [
            ReportGroup(comparison_title(each), each["verdict"], False, table=comparison_table(each))
            for each in comparisons
        ],
        "metadata_rows": [(key, _plain(value)) for key, value in metadata.items()],
        "style": Markup(style),
        "script": Markup(script),
        "content_policy": "; ".join(
            ("default-src 'none'", f"style-src {content_hash(style)}", f"script-src {content_hash(script)}")
        ),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(asset("report.html.j2", "hetlb.loadtest")).render(context).lstrip() + "\n"


def _policies(comparisons: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[tuple[str, ReportTable]]:
    """Build a table per rate that compares every policy with the first."""
    by_rate: dict[str, list[Mapping[str, Any]]] = {}
    for each in comparisons:
        by_rate.setdefault(rate_text(each), []).append(each)
    tables = []
    for rate, found in by_rate.items():
        name, figures = found[0]["baseline"], found[0]["figures"]
        own = verdict_of(run for run in runs if run["policy"] == name and rate_text(run) == rate)
        rows = [[name, *(show(figures[key]["baseline_mean"]) for key, _, show in _GLANCE)]]
        marks = {(0, column): ("", False) for column in range(1, len(_GLANCE) + 1)}
        for number, each in enumerate(found, start=1):
            rows.append([each["policy"], *(show(each["figures"][key]["mean"]) for key, _, show in _GLANCE)])
            for column, (key, _, _) in enumerate(_GLANCE, start=1):
                figure = each["figures"][key]
                if figure["relative"] is not None:
                    is_sure = figure["low"] is not None and (figure["low"] > 0 or figure["high"] < 0)
                    marks[number, column] = (f"{100 * figure['relative']:+.1f} %", is_sure)
        heads = ["policy", *(head for _, head, _ in _GLANCE)]
        verdicts = [own, *(each["verdict"] for each in found)]
        tables.append((rate, ReportTable(heads, rows, verdicts=verdicts, marks=marks)))
    return tables


def _rates(measured: Sequence[MeasuredRun]) -> ReportGroup:
    """Chart figures against the rate; none for a single rate."""
    title, verdict = "Against the rate", verdict_of(each.run for each in measured)
    rates = {each.run["request_rate"] for each in measured if isinstance(each.run["request_rate"], float)}
    if len(rates) < 2:
        return ReportGroup(title, verdict, is_open=True)
    pictures: list[tuple[str, str, str, float]] = [
        ("Output throughput", "output_throughput", "tokens/s", 1.0),
        *((latency_name(key), key, "ms", 1.0) for key in (f"p99_{name}_ms" for name in _LATENCIES)),
    ]
    if any(each.run["slo_attainment"] is not None for each in measured):
        pictures.append(("Requests that met the limits", "slo_attainment", "%", 100.0))
    names = {
        policy or "measured": _marked(
            policy or "measured", [m for m in measured if m.run["policy"] == policy]
        )
        for policy in policies_of(measured)
    }
    x = {"label": "offered requests/s", "least": 0}
    charts = []
    for name, figure, unit, factor in pictures:
        lines = {names[line]: points for line, points in against_rate(measured, figure, factor).items()}
        y = {"label": unit, "least": 0, **({"most": 100} if unit == "%" else {})}
        charts.append(_chart(name, lines, x, y, marks=True))
    return ReportGroup(title, verdict, is_open=True, charts=charts)


def _distributions(measured: Sequence[MeasuredRun]) -> Iterable[ReportGroup]:
    """A group per rate with a line per policy; one policy alone is one group with a line per rate."""
    groups: dict[str, dict[str, list[MeasuredRun]]] = {}
    several = len(policies_of(measured)) > 1
    for each in measured:
        rate, policy = f"rate {rate_text(each.run)}", each.run["policy"] or "measured"
        group, line = (rate, policy) if several else (policy, rate)
        groups.setdefault(group, {}).setdefault(line, []).append(each)
    x, y = {"label": "ms", "log": True}, {"label": "share", "least": 0, "most": 1, "format": "percent"}
    for number, (title, lines) in enumerate(groups.items()):
        charts = [
            _chart(
                key.upper(),
                {_marked(name, each): distribution(each, key) for name, each in lines.items()},
                x,
                y,
            )
            for key in _LATENCIES
        ]
        verdict = verdict_of(each.run for line in lines.values() for each in line)
        yield ReportGroup(title, verdict, number < _OPEN_GROUPS, charts)


def _timelines(measured: Sequence[MeasuredRun]) -> Iterable[ReportGroup]:
    x, y = {"label": "s", "least": 0}, {"label": "requests in flight", "least": 0}
    for number, each in enumerate(measured):
        names = [entry["name"] for entry in each.run["instances"]]
        records = each.result.records
        charts = (
            _chart("In flight", in_flight(records, names), x, y),
            _chart("Output", output_rate(records, names), x, {**y, "label": "tokens/s"}),
        )
        verdict = each.run["client"]["verdict"]
        table = instances_table(each.run, _INSTANCE_LATENCIES) if names else None
        yield ReportGroup(_name(each.run), verdict, number < _OPEN_GROUPS, charts, table)


def _marked(name: str, measured: Iterable[MeasuredRun]) -> str:
    """Name a line, marked SUSPECT if one of its runs is."""
    verdict = verdict_of(each.run for each in measured)
    return f"{name} ({SUSPECT})" if verdict == SUSPECT else name


def _name(run: Run) -> str:
    words = [] if run["policy"] is None else [run["policy"]]
    return ", ".join([*words, f"rate {rate_text(run)}", f"round {run['round']}"])


def _rounded(value: float) -> float:
    """Five digits: more than a pixel shows, in a third of the bytes."""
    return float(f"{value:.5g}")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items()) or "-"
    return str(value)


# --- curves ------------------------------------------------------------------------------------------------


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
