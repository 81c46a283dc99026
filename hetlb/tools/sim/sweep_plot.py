"""The picture of simulated runs: throughput, latency distributions, and the fleet over time.

Nothing is smoothed. Throughput is shown for every run (medians if there are several seeds) beside
the sum of what the instances reach while full; below it the runs that were watched, all at one rate: the
share of requests that waited at most so long, and of every instance the KV blocks in use and its queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetlb.tools.plots import LATENCIES, line_style, new_figure, plot_distribution, save_figure, tidy
from hetlb.tools.sim.simulation_sweep import Ran

_WIDTH_IN = 11.0
_THROUGHPUT_IN, _LATENCY_IN, _FLEET_IN = 3.2, 3.0, 3.6
#: Policies beside each other before the next row begins.
_COLUMNS = 4
_DARK = "#24292f"

_Looks = Mapping[str, Mapping[str, Any]]


def write_sweep_plot(path: Path, runs: Sequence[Mapping[str, Any]], ran: Sequence[Ran]) -> None:
    """Draw `runs` (as in the JSON) and the watched ones of `ran`. Raises `InputError`."""
    watched = [each for each in ran if each.watched is not None]
    looks = {
        name: line_style(index) for index, name in enumerate(dict.fromkeys(run["policy"] for run in runs))
    }
    bands = [watched[start : start + _COLUMNS] for start in range(0, len(watched), _COLUMNS)]
    heights = [_THROUGHPUT_IN, _LATENCY_IN, *(_FLEET_IN for _ in bands)]
    figure = new_figure(_WIDTH_IN, sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights)
    seeds = len(runs[0].get("seeds", [0]))
    _title(parts[0], "Throughput" + (f" (medians of {seeds} seeds)" if seeds > 1 else ""))
    _draw_throughput(parts[0].subplots(), runs, looks)
    when = rate_in_words(watched[0].cell.rate)
    _title(parts[1], f"Latency, {when}")
    _draw_latencies(parts[1].subplots(1, len(LATENCIES), sharey=True), watched, looks)
    for part, band in zip(parts[2:], bands, strict=True):
        _title(part, f"The fleet over time, {when}")
        _draw_fleet(part, band, min(_COLUMNS, len(watched)))
    save_figure(figure, path)


def _title(part: Any, text: str) -> None:
    part.suptitle(text, x=0.01, ha="left", weight="bold")


def _legend(axis: Any) -> None:
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_throughput(axis: Any, runs: Sequence[Mapping[str, Any]], looks: _Looks) -> None:
    """Draw tokens/s at every rate, the rates side by side."""
    rates = list(dict.fromkeys(run["request_rate"] for run in runs))
    for policy, look in looks.items():
        mine = [run for run in runs if run["policy"] == policy]
        places = [rates.index(run["request_rate"]) for run in mine]
        values = [run["total_token_throughput"] for run in mine]
        axis.plot(places, values, marker="o", markersize=4, label=policy, **look)
    bound = runs[0]["steady_bound"]["total_token_throughput"]
    axis.axhline(bound, color=_DARK, linestyle="--", label="sum of each while full", lw=1)
    if (split := runs[0]["split"]) is not None:
        axis.axhline(split["total_token_throughput"], color=_DARK, linestyle=":", label="fixed split", lw=1)
    axis.set_xticks(range(len(rates)), [rate_in_words(rate) for rate in rates])
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens/s, prompt and output")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axis)
    tidy(axis)


def _draw_latencies(axes: Any, watched: Sequence[Ran], looks: _Looks) -> None:
    for axis, (name, label) in zip(axes, LATENCIES.items(), strict=True):
        for ran in watched:
            assert ran.watched is not None
            policy = ran.cell.policy
            plot_distribution(axis, ran.watched.latencies_s[name], label=policy, **looks[policy])
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axis.set_xlabel(label)
        axis.set_ylim(0, 1.01)
        tidy(axis)
    axes[0].set_ylabel("share of requests")
    _legend(axes[-1])


def _draw_fleet(part: Any, band: Sequence[Ran], width: int) -> None:
    """Draw a column for each policy: KV use above, the queue below."""
    upper, lower = part.subplots(2, width, sharex=True, sharey="row", squeeze=False)
    for kv, queue, ran in zip(upper, lower, band, strict=False):
        assert ran.watched is not None
        moments = ran.watched.series.moments
        times_s = [moment.at_s for moment in moments]
        for index, name in enumerate(each["name"] for each in ran.summary["instances"]):
            look = {**line_style(index), "linewidth": 1.0}
            kv.plot(times_s, [100.0 * moment.kv_usage[name] for moment in moments], label=name, **look)
            queue.plot(times_s, [moment.waiting[name] for moment in moments], **look)
        held = [moment.held for moment in moments]
        queue.plot(times_s, held, color=_DARK, linewidth=1.0, linestyle=(0, (4, 2)))
        kv.set_title(ran.cell.policy, fontsize=9, loc="left")
        queue.set_yscale("symlog", linthresh=10)
        queue.set_xlabel("s")
        for axis in (kv, queue):
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
            tidy(axis)
    for axis in (*upper[len(band) :], *lower[len(band) :]):
        axis.set_visible(False)
    upper[0].set_ylabel("KV cache in use, %", fontsize=8)
    lower[0].set_ylabel("requests waiting", fontsize=8)
    handles, labels = upper[0].get_legend_handles_labels()
    part.legend(
        [*handles, lower[0].lines[-1]],
        [*labels, "held by the proxy"],
        fontsize=8,
        loc="outside lower center",
        ncols=min(8, len(labels) + 1),
    )


def rate_in_words(rate: float | str) -> str:
    """Return a rate, a number or as the JSON has it, as a person reads it."""
    if rate == "trace":
        return "arrivals of the trace"
    return "all at once" if math.isinf(float(rate)) else f"{float(rate):g} requests/s"
