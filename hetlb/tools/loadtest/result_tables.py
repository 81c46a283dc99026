"""Runs for people: tables that fit 80 columns for two instances, and a picture.

Figures are rounded only here. The picture has latencies as distributions, and each instance's share of the
output tokens. Runs of one policy and rate are one line: their requests are pooled. Nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.table import Table

from hetlb.tools.loadtest.load_result import SUSPECT, LoadResult, verdict_of
from hetlb.tools.plots import COLOURS, LATENCIES, line_style, new_figure, plot_distribution, save_figure, tidy
from hetlb.tools.tables import table
from hetlb.tools.workload.records import latencies_s

#: Most instances that get columns of their own.
_MAX_INSTANCE_COLUMNS = 4
#: Tokens per event above which some events hold several.
_ONE_TOKEN_RATIO = 1.05

Run: TypeAlias = Mapping[str, Any]
#: Heading and cell of a column. A heading that begins with `>` is of numbers, to the right.
Column: TypeAlias = tuple[str, Callable[[Any], str]]

_VERDICT: Column = ("verdict", lambda run: str(run["client"]["verdict"]))


def _table(
    columns: Sequence[Column], items: Sequence[Any], title: str | None = None, caption: str | None = None
) -> Table:
    return table(
        title,
        [head for head, _ in columns],
        [[cell(item) for _, cell in columns] for item in items],
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,  # two instances fit on 80 columns
    )


def runs_table(
    runs: Sequence[Run],
    *,
    reference_tok_s: float | None = None,
    alone: Sequence[Run] = (),
    title: str | None = None,
) -> Table:
    """Return one line per run.

    `reference_tok_s` is the base of `% of sum`: the total token throughput of all instances, each alone.
    `alone` are the runs it was measured in, shown above the others with their sum.
    """
    shown = (*alone, *runs)
    names = list(dict.fromkeys(each["name"] for run in shown for each in run["instances"]))
    by_instance = names if len(names) <= _MAX_INSTANCE_COLUMNS else []
    caption, total = "\ntokens/s: prompt and output", "total_token_throughput"
    columns: list[Column] = [
        ("policy", lambda run: str(run["policy"])),
        (">tokens/s", lambda run: f"{run[total]:,.0f}"),
    ]
    if reference_tok_s:
        columns.append((">% of\nsum", lambda run: percent(run[total] / reference_tok_s)))
        caption += "; % of sum: of what each reaches alone, added"
    columns += [
        *_latency_columns(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"), "\n"),
        *((f">{name}\nshare, end", partial(_share_and_end, name)) for name in by_instance),
    ]
    if by_instance:
        caption += "; share: of output tokens; end: of its last request"
    elif names:
        columns.append((">first, last\ninstance to end", _ends))
    if any(run["failed"] for run in shown):
        columns.append((">failed", lambda run: str(run["failed"])))
    if not alone:
        return _table(columns, runs, title, caption)
    found = _table(columns, alone, title, caption)
    found.add_row("sum", f"{reference_tok_s or 0.0:,.0f}", percent(1.0))
    for run in runs:
        found.add_row(*(cell(run) for _, cell in columns))
    return found


def throughput_table(runs: Sequence[Run]) -> Table:
    columns: list[Column] = [
        *_name_columns(runs),
        (">requests", lambda run: f"{run['completed'] + run['failed']:,}"),
        (">req/s", lambda run: f"{run['request_throughput']:,.2f}"),
        (">output\ntok/s", lambda run: f"{run['output_throughput']:,.0f}"),
        (">total\ntok/s", lambda run: f"{run['total_token_throughput']:,.0f}"),
    ]
    if any(run["failed"] for run in runs):
        columns.append((">failed", lambda run: f"{run['failed']:,}"))
    if any(run["slo_attainment"] is not None for run in runs):
        columns.append((">met the\nlimits", lambda run: _share_text(run["slo_attainment"])))
    return _table([*columns, _VERDICT], runs)


def latency_table(runs: Sequence[Run], metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    """Return median and highest of `percentiles` of each of `metrics`, one row per run of `hetlb bench`."""

    def text(value: float) -> str:
        return f"{value:.1f}" if value < 10 else f"{value:,.0f}"

    highest = f"p{max(percentiles):g}"
    keys = [f"{each}_{name}_ms" for name in metrics for each in ("median", highest)]
    suspect = [_VERDICT] if verdict_of(runs) == SUSPECT else []
    columns = [*_name_columns(runs), *_latency_columns(keys, "\n", text), *suspect]
    caption = "milliseconds, from the time a request was due"
    several = [per for run in runs if (per := run.get("tokens_per_event") or 0.0) > _ONE_TOKEN_RATIO]
    if several and "itl" in metrics:
        per = f"{min(several):.1f}" + (f" to {max(several):.1f}" if len(several) > 1 else "")
        caption += f"\nitl: between events, which hold {per} tokens; time per token: tpot"
    found = _table(columns, runs, caption=caption)
    found.padding = (0, 0)  # all figures fit on 80 columns
    return found


def instances_table(run: Run) -> Table:
    """Return a table of the instances of one run."""
    columns: list[Column] = [
        ("instance", lambda each: each["name"]),
        (">requests", lambda each: f"{each['completed']:,}"),
        (">output tokens", lambda each: f"{each['total_output_tokens']:,}"),
        (">share", lambda each: percent(_share(run, each))),
        (">last end", lambda each: seconds(each["last_finish_s"])),
        (">preempted", lambda each: "-" if each["preemptions"] is None else f"{each['preemptions']:,}"),
        (">KV peak", lambda each: _share_text(each["kv_peak"])),
    ]
    return _table(columns, run["instances"])


def classes_table(run: Run) -> Table:
    columns: list[Column] = [
        ("class", lambda each: each["name"]),
        (">requests", lambda each: f"{each['requests']:,}"),
        (">failed", lambda each: f"{each['refused']:,}"),
        (">attainment", lambda each: _share_text(each["attainment"])),
        *_latency_columns(("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_e2el_ms")),
    ]
    return _table(columns, [{"name": name, **each} for name, each in run["classes"].items()])


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """Return one policy against the baseline, at one rate."""

    def difference(each: Mapping[str, Any]) -> str:
        change = "" if each["relative"] is None else f" ({100 * each['relative']:+.1f} %)"
        return f"{each['difference']:+,.4g}{change}"

    columns: list[Column] = [
        ("figure", lambda each: each["name"]),
        (f">{comparison['baseline']}", lambda each: f"{each['baseline_mean']:,.4g}"),
        (f">{comparison['policy']}", lambda each: f"{each['mean']:,.4g}"),
        (">difference", difference),
        (
            f">{percent(comparison['confidence'])} interval",
            lambda each: "-" if each["low"] is None else f"{each['low']:+,.4g} to {each['high']:+,.4g}",
        ),
    ]
    suspect = f", {SUSPECT}" if comparison["verdict"] == SUSPECT else ""
    figures = [{"name": name, **each} for name, each in comparison["figures"].items()]
    return _table(columns, figures, title=comparison_title(comparison) + suspect)


def search_table(searches: Sequence[Mapping[str, Any]]) -> Table:
    """Return the highest rate of every policy that meets the limits."""

    def rate(key: str, each: Mapping[str, Any]) -> str:
        return "none" if each[key] is None else f"{each[key]:.4g}"

    columns: list[Column] = [
        ("policy", lambda each: each["policy"] or "-"),
        (">met at", partial(rate, "max_request_rate")),
        (">missed at", partial(rate, "lowest_missed_rate")),
        (">probes", lambda each: str(len(each["probes"]))),
    ]
    share = percent(searches[0]["slo_attainment"])
    title = f"Highest rate at which {share} of the requests meet the limits, requests/s"
    if any(each["verdict"] == SUSPECT for each in searches):
        columns.append(("verdict", lambda each: each["verdict"]))
    return _table(columns, searches, title)


def comparison_title(comparison: Mapping[str, Any]) -> str:
    rounds = comparison["rounds"]
    return f"{comparison['policy']} against {comparison['baseline']}, rate {rate_text(comparison)}, " + (
        f"{rounds} paired rounds" if rounds > 1 else "one round"
    )


def rate_text(holder: Mapping[str, Any]) -> str:
    """Return the request rate of a run or a comparison as a person reads it."""
    rate = holder["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:.4g}"


def milliseconds(value: float) -> str:
    if value < 1000:
        return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
    return f"{value / 1e3:.2f} s" if value < 10_000 else seconds(value / 1e3)


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _name_columns(runs: Sequence[Run]) -> list[Column]:
    columns: list[Column] = []
    if any(run["policy"] for run in runs):
        columns.append(("policy", lambda run: run["policy"] or "-"))
    columns.append((">rate", rate_text))
    if any(run["round"] > 1 for run in runs):
        columns.append((">round", lambda run: str(run["round"])))
    return columns


def _latency_columns(
    keys: Sequence[str], between: str = " ", text: Callable[[float], str] | None = None
) -> list[Column]:
    """Return the columns of latencies; `between` replaces the space in a heading ("mean TTFT")."""

    def cell(key: str, each: Mapping[str, Any]) -> str:
        return (text or milliseconds)(each[key])

    return [(f">{latency_name(key).replace(' ', between)}", partial(cell, key)) for key in keys]


def latency_name(key: str) -> str:
    """Return the name of a latency as a person reads it: of `median_ttft_ms` `TTFT p50`."""
    statistic, metric, _ = key.split("_")
    return f"{metric.upper()} {'p50' if statistic == 'median' else statistic}"


def _share_text(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _share(run: Run, each: Mapping[str, Any]) -> float:
    total: int = run["total_output_tokens"]
    return each["total_output_tokens"] / total if total else 0.0


def _share_and_end(name: str, run: Run) -> str:
    each = next((each for each in run["instances"] if each["name"] == name), None)
    return "-" if each is None else f"{percent(_share(run, each))} {seconds(each['last_finish_s'])}"


def _ends(run: Run) -> str:
    ends = [each["last_finish_s"] for each in run["instances"]]
    return f"{seconds(min(ends))}, {seconds(max(ends))}" if ends else "-"


_WIDTH_IN, _LATENCY_IN, _BAR_IN = 11.0, 3.4, 0.28


def write_load_plot(path: Path, measured: Sequence[LoadResult]) -> None:
    """Draw the runs. Raises `InputError` if the picture cannot be written."""
    groups: dict[str, list[LoadResult]] = {}
    for each in measured:
        groups.setdefault(_label(each.run), []).append(each)
    shares = {label: _shares([each.run for each in runs]) for label, runs in groups.items()}
    names = list(dict.fromkeys(name for share in shares.values() for name in share))
    height_in = _LATENCY_IN + (1.2 + _BAR_IN * len(groups) if names else 0.0)
    figure = new_figure(_WIDTH_IN, height_in)
    parts = figure.subfigures(2 if names else 1, 1, squeeze=False, height_ratios=_ratios(height_in, names))
    _draw_latencies(parts[0][0], groups)
    if names:
        _draw_shares(parts[1][0].subplots(), shares, names)
    save_figure(figure, path)


def _ratios(height_in: float, names: Sequence[str]) -> list[float]:
    return [_LATENCY_IN, height_in - _LATENCY_IN] if names else [height_in]


def _label(run: Mapping[str, Any]) -> str:
    rate = rate_text(run) if isinstance(run["request_rate"], str) else f"{rate_text(run)} req/s"
    return rate if run["policy"] is None else f"{run['policy']}, {rate}"


def _shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of the output tokens of each instance over some runs, {} without instances."""
    tokens: dict[str, int] = {}
    for run in runs:
        for each in run["instances"]:
            tokens[each["name"]] = tokens.get(each["name"], 0) + each["total_output_tokens"]
    total = sum(tokens.values()) or 1
    return {name: count / total for name, count in tokens.items()}


def _draw_latencies(part: Any, groups: Mapping[str, Sequence[LoadResult]]) -> None:
    axes = part.subplots(1, len(LATENCIES), sharey=True)
    for axis, (name, words) in zip(axes, LATENCIES.items(), strict=True):
        for index, (label, runs) in enumerate(groups.items()):
            done = [record for each in runs for record in each.records if record.ok]
            if values := list(latencies_s(done, name)):
                plot_distribution(axis, values, label=label, **line_style(index))
        axis.set_xlabel(words)
        axis.set_xlim(left=0)
        tidy(axis)
    axes[0].set_ylabel("share of requests")
    fullest = max(axes, key=lambda axis: len(axis.lines))
    part.legend(handles=fullest.lines, fontsize=8, loc="outside right center")


def _draw_shares(axis: Any, shares: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> None:
    left = [0.0] * len(shares)
    for index, name in enumerate(names):
        widths = [share.get(name, 0.0) for share in shares.values()]
        colour = COLOURS[index % len(COLOURS)]
        axis.barh(range(len(shares)), widths, left=left, color=colour, label=name, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(shares)), list(shares), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of output tokens")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    tidy(axis)
