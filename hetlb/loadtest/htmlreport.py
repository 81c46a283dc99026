"""The report of a load test as one HTML file: pictures, tables, verdicts, and how to measure it again.

Self-contained (no script, no font, no address outside; the page's own policy forbids them), light
and dark as the reader's system is; every text from outside is escaped; the figures are those of the JSON
document, rounded only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hetlb.loadtest.plots import against_rate, distribution, in_flight, output_rate, policies_of
from hetlb.loadtest.report import comparison_title, milliseconds, percent, rate_text, seconds
from hetlb.loadtest.runs import Measured
from hetlb.loadtest.svg import COLOURS, Axis, Line, chart, legend
from hetlb.loadtest.verdict import SUSPECT, VALID, verdict_of

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --soft: #5f6368; --page: #fff; --panel: #f5f6f8;
  --rule: #d9dce1; --good: #1a7f37; --bad: #b3261e;
  --c0: #0a67c2; --c1: #d1500c; --c2: #16803c; --c3: #8a3ffc; --c4: #b0186e; --c5: #8a6a00; --c6: #087f8c;
  --c7: #555b66; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --soft: #a3a9b2; --page: #15171a;
  --panel: #1e2125; --rule: #363b42; --good: #57c97a; --bad: #ff8a80;
  --c0: #6cb2ff; --c1: #ff9e64; --c2: #6fd38f; --c3: #c3a1ff; --c4: #ff8ac4; --c5: #e3c04b; --c6: #5fd3df;
  --c7: #b5bcc7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 90rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } .soft { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; background: var(--panel); border-radius: 8px; }
figcaption { font-weight: 600; } figure svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; }
.sample { width: 24px; height: 10px; }
.table { container-type: inline-size; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; } .wide th, .wide td { padding: .25rem .4rem; }
td { white-space: nowrap; } tr { border-bottom: 1px solid var(--rule); } th { vertical-align: bottom; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child, .text td { text-align: left; }
td:first-child, .text td { white-space: normal; overflow-wrap: anywhere; min-width: 6em; }
.VALID { color: var(--good); } .SUSPECT { color: var(--bad); font-weight: 600; }
.flag { display: inline-block; min-width: 0; margin-left: .4em; padding: 0 .4em; border-radius: 4px;
  overflow-wrap: normal; white-space: nowrap;
  background: var(--bad); color: var(--page); font-size: .75em; font-weight: 700; }
.banner { margin: 1rem 0; padding: .5rem 1rem; border: 2px solid var(--bad); border-radius: 8px; }
summary { cursor: pointer; padding: .25rem 0; } li { overflow-wrap: anywhere; }
details[open] { margin-bottom: 1.25rem; } .charts + .table { margin-top: .5rem; }
td span:not(.flag) { display: inline-block; min-width: 5em; color: var(--soft); } td b { color: var(--text); }
""" + "".join(
    f".line-{i}.line {{ stroke: var(--c{i}); }} .line-{i}.mark {{ fill: var(--c{i}); }}\n"
    for i in range(COLOURS)
)
#: A table without the width for its columns becomes a list: a block for each row, a line for each cell.
_LIST = """
@container (max-width: WIDTH) { TABLE, TABLE tbody, TABLE tr, TABLE td { display: block; }
  TABLE thead { display: none; } TABLE tr { padding: .4rem 0; }
  TABLE td { display: flex; justify-content: flex-end; gap: 1rem; max-width: 30rem; }
  TABLE td { white-space: normal; overflow-wrap: anywhere; }
  TABLE td::before { content: attr(data-label); color: var(--soft); margin-right: auto; }
  TABLE td:first-child { font-weight: 600; justify-content: flex-start; flex-wrap: wrap; gap: 0; }
  TABLE td:first-child::before { content: none; } .text td { justify-content: flex-start; } }
"""
_LISTS = "".join(
    _LIST.replace("WIDTH", width).replace("TABLE", table)
    for table, width in (("table", "44rem"), (".wide", "72rem"))
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LATENCIES = (("ttft", "TTFT"), ("itl", "ITL"), ("e2el", "E2EL"))
#: What is compared at a glance: figure, heading, how it is written.
_GLANCE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("output_throughput", "output tok/s", lambda value: f"{value:,.0f}"),
    ("request_goodput", "goodput/s", lambda value: f"{value:,.2f}"),
    ("mean_ttft_ms", "TTFT mean", milliseconds),
    ("p99_ttft_ms", "TTFT p99", milliseconds),
    ("mean_tpot_ms", "TPOT mean", milliseconds),
    ("mean_e2el_ms", "E2EL mean", milliseconds),
    ("p99_e2el_ms", "E2EL p99", milliseconds),
)
#: Tables with more columns are wide: they become lists earlier.
_WIDE = 5
#: More groups of pictures, or runs that are SUSPECT, than this are folded.
_OPEN_GROUPS = 2


def report(document: Mapping[str, Any], measured: Sequence[Measured]) -> str:
    """The page. `document` is what `--json` prints, `measured` the runs behind it."""
    metadata, runs = document["metadata"], document["runs"]
    requests = sum(run["completed"] + run["failed"] for run in runs)
    sections = [
        f"<h1>Load test of {escape(str(metadata['model_id']))}</h1>",
        f'<p class="soft">{escape(metadata["url"])}, {escape(metadata["date"])}, {len(runs)} runs, '
        f"{requests:,} requests. Latency counts from the time a request was due.</p>",
        _verdicts(runs),
        _glance(document["comparison"]),
        _search(document["search"]),
        _rates(measured),
        _distributions(measured),
        _timelines(measured),
        "<h2>Runs</h2>",
        _runs_table(runs),
        _comparisons(document["comparison"]),
        "<h2>To measure it again</h2>",
        _table(("", ""), ((key, _plain(value)) for key, value in metadata.items()), kind="text"),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test of {escape(str(metadata['model_id']))}</title>"
        f"<style>{_STYLE}{_LISTS}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _verdicts(runs: Sequence[Mapping[str, Any]]) -> str:
    suspect = [run for run in runs if run["client"]["verdict"] == SUSPECT]
    if not suspect:
        return '<p class="VALID">VALID: in every run the client was fit to measure.</p>'
    reasons = "".join(
        f"<li>{escape(_name(run))}: {escape(reason)}</li>"
        for run in suspect
        for reason in run["client"]["reasons"]
    )
    title = f"SUSPECT: {len(suspect)} of {len(runs)} runs"
    opening = " open" if len(suspect) <= _OPEN_GROUPS else ""
    return (
        f'<div class="banner"><p class="SUSPECT">{title}: there the client was not fit to measure. '
        f"Do not rely on what is marked.</p><details{opening}><summary>Reasons</summary>"
        f"<ul>{reasons}</ul></details></div>"
    )


def _flag(verdict: str) -> str:
    """The mark of what rests on a run that is SUSPECT."""
    return f'<span class="flag">{SUSPECT}</span>' if verdict == SUSPECT else ""


def _glance(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Every policy beside the first: a table per rate, with the differences that are no chance in bold."""
    if not comparisons:
        return ""
    parts = ["<h2>Policies</h2>"]
    by_rate: dict[str, list[Mapping[str, Any]]] = {}
    for each in comparisons:
        by_rate.setdefault(rate_text(each), []).append(each)
    for rate, found in by_rate.items():
        baseline = found[0]["figures"]
        rows = [
            [
                escape(found[0]["baseline"]),
                *(f"{show(baseline[key]['baseline_mean'])} <span></span>" for key, _, show in _GLANCE),
            ]
        ]
        rows += [
            [
                escape(each["policy"]) + _flag(each["verdict"]),
                *(_against(each["figures"][key], show) for key, _, show in _GLANCE),
            ]
            for each in found
        ]
        heads = ["policy", *(head for _, head, _ in _GLANCE)]
        parts.append(f"<h3>rate {escape(rate)}</h3>{_markup_table(heads, rows)}")
    rounds, level = comparisons[0]["rounds"], percent(comparisons[0]["confidence"])
    said = (
        f"Bold: the {level} interval of the difference, taken within each round, leaves out 0."
        if rounds > 1
        else "One round gives no interval: how much one differs from the next is not known."
    )
    return f'{"".join(parts)}<p class="soft">Means over {rounds} round{"s" if rounds > 1 else ""}. {said}</p>'


def _against(figure: Mapping[str, Any], show: Callable[[float], str]) -> str:
    """A mean, and by how much it is off the baseline's."""
    text = show(figure["mean"])
    if figure["relative"] is None:
        return text
    sure = figure["low"] is not None and (figure["low"] > 0) == (figure["high"] > 0)
    difference = f"{100 * figure['relative']:+.1f} %"
    return f"{text} <span>{f'<b>{difference}</b>' if sure else difference}</span>"


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    heads = ["run", "completed", "failed", "req/s", "output tok/s", "goodput/s", "SLO met"]
    heads += [f"{name} {figure}" for _, name in _LATENCIES for figure in ("p50", "p99")] + [
        "TPOT p50",
        "verdict",
    ]
    rows = []
    for run in runs:
        cells = [
            _name(run),
            f"{run['completed']:,}",
            f"{run['failed']:,}",
            f"{run['request_throughput']:,.2f}",
            f"{run['output_throughput']:,.0f}",
            f"{run['request_goodput']:,.2f}",
            "-" if run["slo_attainment"] is None else percent(run["slo_attainment"]),
        ]
        cells += [
            milliseconds(run[f"{key}_{name}_ms"]) for name, _ in _LATENCIES for key in ("median", "p99")
        ]
        rows.append([*cells, milliseconds(run["median_tpot_ms"]), run["client"]["verdict"]])
    return _table(heads, rows)


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    if not comparisons:
        return ""
    folded = (
        _folded(comparison_title(each), _comparison(each), False, each["verdict"]) for each in comparisons
    )
    return f"<h2>Differences</h2>{''.join(folded)}"


def _comparison(comparison: Mapping[str, Any]) -> str:
    rows = []
    for name, figure in comparison["figures"].items():
        interval = "-" if figure["low"] is None else f"{figure['low']:+,.4g} to {figure['high']:+,.4g}"
        rows.append(
            [
                name,
                f"{figure['baseline_mean']:,.4g}",
                f"{figure['mean']:,.4g}",
                f"{figure['difference']:+,.4g}",
                "-" if figure["relative"] is None else f"{100 * figure['relative']:+.1f} %",
                interval,
            ]
        )
    level = percent(comparison["confidence"])
    heads = (
        "figure",
        comparison["baseline"],
        comparison["policy"],
        "difference",
        "relative",
        f"{level} interval",
    )
    return _table(heads, rows)


def _search(searches: Sequence[Mapping[str, Any]]) -> str:
    if not searches:
        return ""
    rows = [
        [
            each["policy"] or "-",
            *(
                "none" if each[key] is None else f"{each[key]:.4g}"
                for key in ("max_request_rate", "lowest_missed_rate")
            ),
            str(len(each["probes"])),
            each["verdict"],
        ]
        for each in searches
    ]
    share = percent(searches[0]["slo_attainment"])
    title = f"<h2>Highest rate at which {share} of the requests meet the limits</h2>"
    return title + _table(("policy", "met at, req/s", "missed at, req/s", "rates measured", "verdict"), rows)


def _rates(measured: Sequence[Measured]) -> str:
    rates = {each.run["request_rate"] for each in measured if isinstance(each.run["request_rate"], float)}
    if len(rates) < 2:
        return ""
    x, figures = Axis("offered requests/s", least=0), []
    pictures: list[tuple[str, str, str, float, float | None]] = [
        ("Output throughput", "output_throughput", "tokens/s", 1.0, None)
    ]
    pictures += [(f"{name} p99", f"p99_{key}_ms", "ms", 1.0, None) for key, name in _LATENCIES]
    if any(each.run["slo_attainment"] is not None for each in measured):
        pictures.append(("Requests that met the limits", "slo_attainment", "%", 100.0, 100.0))
    for title, figure, unit, factor, most in pictures:
        lines = against_rate(measured, figure, factor)
        figures.append(_figure(title, lines, x, Axis(unit, least=0, most=most), marks=True))
    names = [policy or "measured" for policy in policies_of(measured)]
    flag = _flag(verdict_of(each.run for each in measured))
    return f"<h2>Against the rate{flag}</h2>{legend(names)}{_charts(figures)}"


def _distributions(measured: Sequence[Measured]) -> str:
    """A group per rate with a line per policy; one policy alone is one group with a line per rate."""
    groups: dict[str, dict[str, list[Measured]]] = {}
    several = len(policies_of(measured)) > 1
    for each in measured:
        rate, policy = f"rate {rate_text(each.run)}", each.run["policy"] or "measured"
        group, line = (rate, policy) if several else (policy, rate)
        groups.setdefault(group, {}).setdefault(line, []).append(each)
    parts = ["<h2>Distributions</h2>"]
    for number, (group, lines) in enumerate(groups.items()):
        figures = [
            _figure(
                name,
                [Line(line, distribution(each, key)) for line, each in lines.items()],
                Axis("ms", log=True),
                Axis("share", least=0, most=1),
            )
            for key, name in _LATENCIES
        ]
        verdict = verdict_of(each.run for line in lines.values() for each in line)
        content = f"{legend(list(lines))}{_charts(figures)}"
        parts.append(_folded(group, content, number < _OPEN_GROUPS, verdict))
    return "".join(parts)


def _timelines(measured: Sequence[Measured]) -> str:
    parts = ["<h2>Instances over time</h2>"]
    x, y = Axis("seconds", least=0), Axis("requests in flight", least=0)
    for number, each in enumerate(measured):
        names = [entry["name"] for entry in each.run["instances"]]
        records = each.result.records
        figures = [
            _figure("In flight", in_flight(records, names), x, y),
            _figure("Output", output_rate(records, names), x, Axis("tokens/s", least=0)),
        ]
        content = f"{legend(names or ['all'])}{_charts(figures)}{_instances(each.run)}"
        verdict = each.run["client"]["verdict"]
        parts.append(_folded(_name(each.run), content, number < _OPEN_GROUPS, verdict))
    return "".join(parts)


def _instances(run: Mapping[str, Any]) -> str:
    if not run["instances"]:
        return ""
    total = run["total_output_tokens"] or 1
    rows = [
        [
            entry["name"],
            f"{entry['completed']:,}",
            f"{entry['failed']:,}",
            percent(entry["total_output_tokens"] / total),
            *(
                milliseconds(entry[f"{key}_ms"])
                for key in ("median_ttft", "p99_ttft", "median_tpot", "p99_e2el")
            ),
            seconds(entry["last_finish_s"]),
            "-" if entry["preemptions"] is None else f"{entry['preemptions']:,}",
            "-" if entry["kv_peak"] is None else percent(entry["kv_peak"]),
        ]
        for entry in run["instances"]
    ]
    heads = (
        "instance",
        "completed",
        "failed",
        "share of output",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "E2EL p99",
    )
    return _table((*heads, "last end", "preempted", "KV peak"), rows)


def _figure(title: str, lines: Sequence[Line], x: Axis, y: Axis, *, marks: bool = False) -> str:
    picture = chart(lines, x, y, marks=marks, name=title)
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def _charts(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _folded(title: str, content: str, is_open: bool, verdict: str = VALID) -> str:
    opening = " open" if is_open else ""
    return f"<details{opening}><summary>{escape(title)}{_flag(verdict)}</summary>{content}</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    return _markup_table(heads, ([*map(escape, row)] for row in rows), kind=kind)


def _markup_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """A table of cells that are HTML."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row, heads))}</tr>" for row in rows)
    title = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    kind = "wide" if len(heads) > _WIDE else kind
    return f'<div class="table"><table class="{kind}">{title}<tbody>{body}</tbody></table></div>'


def _cell(text: str, label: str) -> str:
    """One cell of HTML."""
    colour = f' class="{text}"' if text in (VALID, SUSPECT) else ""
    return f'<td{colour} data-label="{escape(label)}">{text}</td>'


def _name(run: Mapping[str, Any]) -> str:
    words = [] if run["policy"] is None else [run["policy"]]
    return ", ".join([*words, f"rate {rate_text(run)}", f"round {run['round']}"])


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items()) or "-"
    return str(value)
