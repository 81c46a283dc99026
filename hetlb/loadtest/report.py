"""Tables of runs, for people; the figures are those of `hetlb.core.records`, rounded only here.

Promise: a table shows nothing that is not in the runs it is given, and fits 80 columns for two instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

#: More instances than this get no columns of their own.
_MAX_INSTANCE_COLUMNS = 4


def runs_table(
    runs: Sequence[Mapping[str, Any]],
    *,
    reference_tok_s: float | None = None,
    alone: Sequence[Mapping[str, Any]] = (),
    title: str | None = None,
) -> Table:
    """One line per run.

    `reference_tok_s` is what `% of sum` refers to: the total token throughput of all instances, each alone.
    `alone` are the runs it was measured in, shown above the others with their sum.
    """
    names = list(dict.fromkeys(each["name"] for run in (*alone, *runs) for each in run["instances"]))
    by_instance = names if len(names) <= _MAX_INSTANCE_COLUMNS else []
    failures = any(run["failed"] for run in (*alone, *runs))
    table = _table(title)
    table.caption = "tokens/s: prompt and output"
    table.add_column("policy")
    table.add_column("tokens/s", justify="right")
    if reference_tok_s:
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
        if reference_tok_s:
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


def instances_table(run: Mapping[str, Any], *, title: str | None = None) -> Table:
    """One line per instance of one run."""
    table = _table(title)
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


def _share(run: Mapping[str, Any], each: Mapping[str, Any]) -> float:
    total: int = run["total_output_tokens"]
    return each["total_output_tokens"] / total if total else 0.0


def _share_and_end(run: Mapping[str, Any], each: Mapping[str, Any] | None) -> str:
    if each is None:
        return "-"
    return f"{percent(_share(run, each))} {seconds(each['last_finish_s'])}"
