"""Tables of runs, for people; the figures are those of `hetlb.workload.records`, rounded only here.

A table shows nothing that is not in the runs it is given, and fits 80 columns for two instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hetlb.loadtest.verdict import SUSPECT

#: More instances than this get no columns of their own.
_MAX_INSTANCE_COLUMNS = 4


def runs_table(
    runs: Sequence[Mapping[str, Any]],
    *,
    reference_tok_s: float | None = None,
    steady_tok_s: float | None = None,
    alone: Sequence[Mapping[str, Any]] = (),
    title: str | None = None,
) -> Table:
    """One line per run.

    `reference_tok_s` is what `% of sum` refers to: the total token throughput of all instances, each alone.
    With `steady_tok_s`, that of all instances while each is full, `% of full` is the steady rate of the run,
    without its drain, in place of `% of sum`.
    `alone` are the runs it was measured in, shown above the others with their sum.
    """
    names = list(dict.fromkeys(each["name"] for run in (*alone, *runs) for each in run["instances"]))
    by_instance = names if len(names) <= _MAX_INSTANCE_COLUMNS else []
    failures = any(run["failed"] for run in (*alone, *runs))
    table = _table(title)
    table.show_edge = False  # two instances fit on 80 columns
    table.caption = "\ntokens/s: prompt and output"
    table.add_column("policy")
    table.add_column("tokens/s", justify="right")
    if steady_tok_s:
        table.add_column("% of\nfull", justify="right")
        table.caption += "; % of full: while requests come, of what all reach alone"
    elif reference_tok_s:
        table.add_column("% of\nsum", justify="right")
    for heading in ("TTFT\np50", "TTFT\np99", "TPOT\np50"):
        table.add_column(heading, justify="right")
    for name in by_instance:
        table.add_column(f"{name}\nshare, end", justify="right")
    if by_instance:
        table.caption += "; share: of output tokens; end: of its last request"
    elif names:
        table.add_column("first, last\ninstance to end", justify="right")
    if failures:
        table.add_column("failed", justify="right")
    for run in (*alone, *runs):
        cells = [str(run["policy"]), f"{run['total_token_throughput']:,.0f}"]
        if steady_tok_s:
            cells.append(percent(run["steady"]["total_token_throughput"] / steady_tok_s))
        elif reference_tok_s:
            cells.append(percent(run["total_token_throughput"] / reference_tok_s))
        cells += [milliseconds(run[f"{key}_ms"]) for key in ("median_ttft", "p99_ttft", "median_tpot")]
        entries = {each["name"]: each for each in run["instances"]}
        cells += [_share_and_end(run, entries.get(name)) for name in by_instance]
        if names and not by_instance:
            ends = [each["last_finish_s"] for each in run["instances"]]
            cells.append(f"{seconds(min(ends))}, {seconds(max(ends))}" if ends else "-")
        if failures:
            cells.append(str(run["failed"]))
        table.add_row(*cells)
        if alone and run is alone[-1]:
            table.add_row("sum", f"{reference_tok_s or 0.0:,.0f}", percent(1.0), end_section=True)
    return table


def throughput_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table with throughput and verdict, one line per run of `hetlb bench`."""
    limits = any(run["slo_attainment"] is not None for run in runs)
    failures = any(run["failed"] for run in runs)
    table = _table(None)
    name_columns = _add_name_columns(table, runs)
    for heading in ("requests", "req/s", "output\ntok/s", "total\ntok/s"):
        table.add_column(heading, justify="right")
    if failures:
        table.add_column("failed", justify="right")
    if limits:
        table.add_column("met the\nlimits", justify="right")
    table.add_column("verdict")
    for run in runs:
        cells = [
            *_names(run, name_columns),
            f"{run['completed'] + run['failed']:,}",
            f"{run['request_throughput']:,.2f}",
            f"{run['output_throughput']:,.0f}",
            f"{run['total_token_throughput']:,.0f}",
        ]
        if failures:
            cells.append(f"{run['failed']:,}")
        if limits:
            cells.append("-" if run["slo_attainment"] is None else percent(run["slo_attainment"]))
        table.add_row(*cells, run["client"]["verdict"])
    return table


def latency_table(
    runs: Sequence[Mapping[str, Any]], metrics: Sequence[str], percentiles: Sequence[float]
) -> Table:
    """One line per run of `hetlb bench`: median and highest of `percentiles` of each of `metrics`."""
    highest = f"p{max(percentiles):g}"
    table = _table(None)
    table.padding = (0, 0)  # all figures fit on 80 columns
    table.caption = "milliseconds, from the time a request was due"
    name_columns = _add_name_columns(table, runs)
    for name in metrics:
        for heading in ("p50", highest):
            table.add_column(f"{name.upper()}\n{heading}", justify="right")
    flagged = _add_verdict_column(table, [run["client"]["verdict"] for run in runs])
    for run in runs:
        figures = [run[f"{key}_{name}_ms"] for name in metrics for key in ("median", highest)]
        verdict = [run["client"]["verdict"]] if flagged else []
        cells = [f"{figure:.1f}" if figure < 10 else f"{figure:,.0f}" for figure in figures]
        table.add_row(*_names(run, name_columns), *cells, *verdict)
    return table


def instances_table(run: Mapping[str, Any]) -> Table:
    """One line per instance of one run."""
    table = _table(None)
    for heading in ("instance", "requests", "output tokens", "share", "last end", "preempted", "KV peak"):
        table.add_column(heading, justify="left" if heading == "instance" else "right")
    for each in run["instances"]:
        table.add_row(
            each["name"],
            f"{each['completed']:,}",
            f"{each['total_output_tokens']:,}",
            percent(_share(run, each)),
            seconds(each["last_finish_s"]),
            "-" if each["preemptions"] is None else f"{each['preemptions']:,}",
            "-" if each["kv_peak"] is None else percent(each["kv_peak"]),
        )
    return table


def classes_table(run: Mapping[str, Any]) -> Table:
    """One line per service class of one run."""
    table = _table(None)
    for heading in (
        "class",
        "requests",
        "failed",
        "attainment",
        "mean TTFT",
        "p99 TTFT",
        "mean TPOT",
        "p99 E2EL",
    ):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, each in run["classes"].items():
        table.add_row(
            name,
            f"{each['requests']:,}",
            f"{each['refused']:,}",
            "-" if each["attainment"] is None else percent(each["attainment"]),
            *(milliseconds(each[f"{key}_ms"]) for key in ("mean_ttft", "p99_ttft", "mean_tpot", "p99_e2el")),
        )
    return table


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """One policy against the baseline, at one rate."""
    suspect = f", {SUSPECT}" if comparison["verdict"] == SUSPECT else ""
    table = _table(comparison_title(comparison) + suspect)
    table.add_column("figure")
    for heading in (comparison["baseline"], comparison["policy"], "difference"):
        table.add_column(heading, justify="right")
    table.add_column(f"{percent(comparison['confidence'])} interval", justify="right")
    for name, figure in comparison["figures"].items():
        change = "" if figure["relative"] is None else f" ({100 * figure['relative']:+.1f} %)"
        interval = "-" if figure["low"] is None else f"{figure['low']:+,.4g} to {figure['high']:+,.4g}"
        table.add_row(
            name,
            f"{figure['baseline_mean']:,.4g}",
            f"{figure['mean']:,.4g}",
            f"{figure['difference']:+,.4g}{change}",
            interval,
        )
    return table


def search_table(searches: Sequence[Mapping[str, Any]]) -> Table:
    """The highest rate of every policy that meets the limits."""
    share = percent(searches[0]["slo_attainment"])
    table = _table(f"Highest rate at which {share} of the requests meet the limits, requests/s")
    table.add_column("policy")
    for heading in ("met at", "missed at", "probes"):
        table.add_column(heading, justify="right")
    flagged = _add_verdict_column(table, [each["verdict"] for each in searches])
    for each in searches:
        met, missed = each["max_request_rate"], each["lowest_missed_rate"]
        table.add_row(
            each["policy"] or "-",
            "none" if met is None else f"{met:.4g}",
            "none" if missed is None else f"{missed:.4g}",
            str(len(each["probes"])),
            *([each["verdict"]] if flagged else []),
        )
    return table


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


def _table(title: str | None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _add_name_columns(table: Table, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the columns that tell the runs apart."""
    columns = ["policy"] if any(run["policy"] for run in runs) else []
    columns += ["rate", "round"] if any(run["round"] > 1 for run in runs) else ["rate"]
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "policy" else "right", overflow="fold")
    return columns


def _add_verdict_column(table: Table, verdicts: Sequence[str]) -> bool:
    """Add a column for the verdicts unless all are VALID; returns whether there is one."""
    if SUSPECT not in verdicts:
        return False
    table.add_column("verdict")
    return True


def _names(run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    cells = {"policy": run["policy"] or "-", "rate": rate_text(run), "round": str(run["round"])}
    return [cells[column] for column in columns]


def _share(run: Mapping[str, Any], each: Mapping[str, Any]) -> float:
    total: int = run["total_output_tokens"]
    return each["total_output_tokens"] / total if total else 0.0


def _share_and_end(run: Mapping[str, Any], each: Mapping[str, Any] | None) -> str:
    if each is None:
        return "-"
    return f"{percent(_share(run, each))} {seconds(each['last_finish_s'])}"
