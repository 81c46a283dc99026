"""Tables of runs, for people; the figures are those of `hetlb.workload.records`, rounded only here.

A table shows nothing that is not in the runs it is given, and fits 80 columns for two instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from rich import box
from rich.table import Table

from hetlb.loadtest.verdict import SUSPECT, VALID

#: More instances than this get no columns of their own.
_MAX_INSTANCE_COLUMNS = 4
_NO_LATENCIES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReportCell:
    """Text of a cell; `difference` is off a baseline, `is_sure` where its interval leaves out 0."""

    text: str
    difference: str | None = None
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Cells of a row and the verdict of the runs it rests on."""

    cells: Sequence[ReportCell]
    verdict: str = VALID


def row(*texts: str, verdict: str = VALID) -> ReportRow:
    """A row of plain cells."""
    return ReportRow([ReportCell(text) for text in texts], verdict)


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table for terminals and pages. A heading that begins with `>` is of numbers, to the right.

    A terminal shows verdicts as the last column: `always_verdict`, else where one is SUSPECT.
    """

    heads: Sequence[str]
    rows: Sequence[ReportRow]
    title: str | None = None
    caption: str | None = None
    padding: int = 1
    always_verdict: bool = False

    @property
    def labels(self) -> list[str]:
        """The headings on one line each."""
        return [head.removeprefix(">").replace("\n", " ") for head in self.heads]

    def __rich__(self) -> Table:
        found = Table(
            title=self.title,
            title_justify="left",
            caption=self.caption,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, self.padding),
            pad_edge=False,
            collapse_padding=True,
            show_edge=False,  # two instances fit on 80 columns
        )
        for head in self.heads:
            justify: Any = "right" if head.startswith(">") else "left"
            found.add_column(head.removeprefix(">"), justify=justify, overflow="fold")
        flagged = self.always_verdict or any(each.verdict == SUSPECT for each in self.rows)
        if flagged:
            found.add_column("verdict")
        for each in self.rows:
            found.add_row(*(cell.text for cell in each.cells), *([each.verdict] if flagged else []))
        return found


def runs_table(
    runs: Sequence[Mapping[str, Any]],
    *,
    reference_tok_s: float | None = None,
    steady_tok_s: float | None = None,
    alone: Sequence[Mapping[str, Any]] = (),
    title: str | None = None,
) -> ReportTable:
    """One line per run.

    `reference_tok_s` is what `% of sum` refers to: the total token throughput of all instances, each alone.
    With `steady_tok_s`, that of all instances while each is full, `% of full` is the steady rate of the run,
    without its drain, in place of `% of sum`.
    `alone` are the runs it was measured in, shown above the others with their sum.
    """
    shown = (*alone, *runs)
    names = list(dict.fromkeys(each["name"] for run in shown for each in run["instances"]))
    by_instance = names if len(names) <= _MAX_INSTANCE_COLUMNS else []
    caption = "\ntokens/s: prompt and output"
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("policy", lambda run: str(run["policy"])),
        (">tokens/s", lambda run: f"{run['total_token_throughput']:,.0f}"),
    ]
    if steady_tok_s:
        steady = "total_token_throughput"
        columns.append((">% of\nfull", lambda run: percent(run["steady"][steady] / steady_tok_s)))
        caption += "; % of full: while requests come, of what all reach alone"
    elif reference_tok_s:
        columns.append((">% of\nsum", lambda run: percent(run["total_token_throughput"] / reference_tok_s)))
    columns += [
        (">TTFT\np50", partial(_latency, "median_ttft_ms")),
        (">TTFT\np99", partial(_latency, "p99_ttft_ms")),
        (">TPOT\np50", partial(_latency, "median_tpot_ms")),
        *((f">{name}\nshare, end", partial(_share_and_end, name)) for name in by_instance),
    ]
    if by_instance:
        caption += "; share: of output tokens; end: of its last request"
    elif names:
        columns.append((">first, last\ninstance to end", _ends))
    if any(run["failed"] for run in shown):
        columns.append((">failed", lambda run: str(run["failed"])))
    rows = [row(*(cell(run) for _, cell in columns)) for run in shown]
    if alone:
        total = ("sum", f"{reference_tok_s or 0.0:,.0f}", percent(1.0))
        rows.insert(len(alone), row(*total, *[""] * (len(columns) - len(total))))
    return ReportTable([head for head, _ in columns], rows, title, caption)


def throughput_table(runs: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Throughput and verdict, one row per run of `hetlb bench`."""
    limits = any(run["slo_attainment"] is not None for run in runs)
    failures = any(run["failed"] for run in runs)
    names = _name_heads(runs)
    heads = [*names, ">requests", ">req/s", ">output\ntok/s", ">total\ntok/s"]
    heads += [">failed"] * failures + [">met the\nlimits"] * limits
    rows = []
    for run in runs:
        cells = [
            *_names(run, names),
            f"{run['completed'] + run['failed']:,}",
            f"{run['request_throughput']:,.2f}",
            f"{run['output_throughput']:,.0f}",
            f"{run['total_token_throughput']:,.0f}",
        ]
        cells += [f"{run['failed']:,}"] * failures + [_share_text(run["slo_attainment"])] * limits
        rows.append(row(*cells, verdict=run["client"]["verdict"]))
    return ReportTable(heads, rows, always_verdict=True)


def latency_table(
    runs: Sequence[Mapping[str, Any]], metrics: Sequence[str], percentiles: Sequence[float]
) -> ReportTable:
    """Median and highest of `percentiles` of each of `metrics`, one row per run of `hetlb bench`."""
    highest, names = f"p{max(percentiles):g}", _name_heads(runs)
    heads = [*names, *(f">{name.upper()}\n{each}" for name in metrics for each in ("p50", highest))]
    rows = []
    for run in runs:
        figures = [run[f"{key}_{name}_ms"] for name in metrics for key in ("median", highest)]
        cells = [f"{figure:.1f}" if figure < 10 else f"{figure:,.0f}" for figure in figures]
        rows.append(row(*_names(run, names), *cells, verdict=run["client"]["verdict"]))
    caption = "milliseconds, from the time a request was due"
    return ReportTable(heads, rows, caption=caption, padding=0)  # all figures fit on 80 columns


def instances_table(run: Mapping[str, Any], latencies: Mapping[str, str] = _NO_LATENCIES) -> ReportTable:
    """One row per instance of one run; `latencies` are columns more: headings by figure."""
    heads = [
        "instance",
        ">requests",
        ">output tokens",
        ">share",
        *(f">{head}" for head in latencies.values()),
    ]
    rows = [
        row(
            each["name"],
            f"{each['completed']:,}",
            f"{each['total_output_tokens']:,}",
            percent(_share(run, each)),
            *(milliseconds(each[key]) for key in latencies),
            seconds(each["last_finish_s"]),
            "-" if each["preemptions"] is None else f"{each['preemptions']:,}",
            _share_text(each["kv_peak"]),
        )
        for each in run["instances"]
    ]
    return ReportTable([*heads, ">last end", ">preempted", ">KV peak"], rows)


def classes_table(run: Mapping[str, Any]) -> ReportTable:
    """One row per service class of one run."""
    latencies = {
        "mean TTFT": "mean_ttft",
        "p99 TTFT": "p99_ttft",
        "mean TPOT": "mean_tpot",
        "p99 E2EL": "p99_e2el",
    }
    rows = [
        row(
            name,
            f"{each['requests']:,}",
            f"{each['refused']:,}",
            _share_text(each["attainment"]),
            *(milliseconds(each[f"{key}_ms"]) for key in latencies.values()),
        )
        for name, each in run["classes"].items()
    ]
    return ReportTable(
        ["class", ">requests", ">failed", ">attainment", *(f">{key}" for key in latencies)], rows
    )


def comparison_table(comparison: Mapping[str, Any]) -> ReportTable:
    """One policy against the baseline, at one rate."""
    rows = []
    for name, figure in comparison["figures"].items():
        change = "" if figure["relative"] is None else f" ({100 * figure['relative']:+.1f} %)"
        interval = "-" if figure["low"] is None else f"{figure['low']:+,.4g} to {figure['high']:+,.4g}"
        means = (f"{figure['baseline_mean']:,.4g}", f"{figure['mean']:,.4g}")
        rows.append(row(name, *means, f"{figure['difference']:+,.4g}{change}", interval))
    heads = (
        comparison["baseline"],
        comparison["policy"],
        "difference",
        f"{percent(comparison['confidence'])} interval",
    )
    suspect = f", {SUSPECT}" if comparison["verdict"] == SUSPECT else ""
    return ReportTable(
        ["figure", *(f">{head}" for head in heads)], rows, comparison_title(comparison) + suspect
    )


def search_table(searches: Sequence[Mapping[str, Any]]) -> ReportTable:
    """The highest rate of every policy that meets the limits."""
    rows = []
    for each in searches:
        found = (each["max_request_rate"], each["lowest_missed_rate"])
        rates = ("none" if rate is None else f"{rate:.4g}" for rate in found)
        rows.append(row(each["policy"] or "-", *rates, str(len(each["probes"])), verdict=each["verdict"]))
    share = percent(searches[0]["slo_attainment"])
    title = f"Highest rate at which {share} of the requests meet the limits, requests/s"
    return ReportTable(["policy", ">met at", ">missed at", ">probes"], rows, title)


def comparison_title(comparison: Mapping[str, Any]) -> str:
    """Policies, rate and rounds of a comparison."""
    rounds = comparison["rounds"]
    return f"{comparison['policy']} against {comparison['baseline']}, rate {rate_text(comparison)}, " + (
        f"{rounds} paired rounds" if rounds > 1 else "one round"
    )


def rate_text(holder: Mapping[str, Any]) -> str:
    """The request rate of a run or a comparison as a person reads it."""
    rate = holder["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:.4g}"


def milliseconds(value: float) -> str:
    """A latency as a person reads it."""
    if value < 1000:
        return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
    return f"{value / 1e3:.2f} s" if value < 10_000 else seconds(value / 1e3)


def seconds(value: float) -> str:
    """A point in a run as a person reads it."""
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def percent(fraction: float) -> str:
    """A fraction as a person reads it."""
    return f"{100 * fraction:.0f} %"


def _name_heads(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Headings of the columns that tell the runs apart."""
    heads = ["policy"] if any(run["policy"] for run in runs) else []
    return [*heads, ">rate", ">round"] if any(run["round"] > 1 for run in runs) else [*heads, ">rate"]


def _names(run: Mapping[str, Any], heads: Sequence[str]) -> list[str]:
    cells = {"policy": run["policy"] or "-", ">rate": rate_text(run), ">round": str(run["round"])}
    return [cells[head] for head in heads]


def _share_text(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _share(run: Mapping[str, Any], each: Mapping[str, Any]) -> float:
    total: int = run["total_output_tokens"]
    return each["total_output_tokens"] / total if total else 0.0


def _latency(key: str, run: Mapping[str, Any]) -> str:
    return milliseconds(run[key])


def _share_and_end(name: str, run: Mapping[str, Any]) -> str:
    each = next((each for each in run["instances"] if each["name"] == name), None)
    return "-" if each is None else f"{percent(_share(run, each))} {seconds(each['last_finish_s'])}"


def _ends(run: Mapping[str, Any]) -> str:
    ends = [each["last_finish_s"] for each in run["instances"]]
    return f"{seconds(min(ends))}, {seconds(max(ends))}" if ends else "-"
