"""The picture of a load test: latencies as distributions, and each instance's share of the output tokens.

Runs of one policy and rate are one line: their requests are pooled. Nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.loadtest.result_tables import rate_text
from hetlb.tools.plots import COLOURS, LATENCIES, line_style, new_figure, plot_distribution, save_figure, tidy
from hetlb.tools.workload.records import latencies_s

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
