"""The picture of simulated runs: throughput, latency distributions, and the fleet over time.

Nothing is smoothed. Throughput is that of every run (medians where there are several seeds) beside
the sum of what the instances reach alone; below it the runs that were watched, all at one rate: the share of
requests that waited at most so long, and of every instance the KV blocks in use and its queue.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetlb.plots import line_style, new_figure, plot_distribution, save_figure, tidy
from hetlb.sim.simulation_sweep import TRACE, Ran, Watched

_WIDTH_IN = 11.0
_THROUGHPUT_IN, _LATENCY_IN, _FLEET_IN = 3.2, 3.0, 3.6
#: Policies beside each other before the next row begins.
_COLUMNS = 4
_HELD = "#24292f"
_FAINT = "#868e96"


def write_sweep_plot(path: Path, runs: Sequence[Mapping[str, Any]], ran: Sequence[Ran]) -> None:
    """Draw `runs` (as in the JSON) and what was watched of `ran`. Raises `InputError`."""
    watched = [each for each in ran if each.watched is not None]
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    looks = {policy: line_style(index) for index, policy in enumerate(policies)}
    width = min(_COLUMNS, len(watched))
    bands = [watched[start : start + _COLUMNS] for start in range(0, len(watched), _COLUMNS)]
    heights = [_THROUGHPUT_IN, _LATENCY_IN, *(_FLEET_IN for _ in bands)]
    figure = new_figure(_WIDTH_IN, sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights)
    _draw_throughput(parts[0], runs, looks)
    when = rate_in_words(watched[0].cell.rate)
    _draw_latencies(parts[1], watched, looks, when)
    for part, band in zip(parts[2:], bands, strict=True):
        _draw_fleet(part, band, width, when)
    save_figure(figure, path)


def _draw_throughput(
    part: Any, runs: Sequence[Mapping[str, Any]], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    rates = list(dict.fromkeys(run["request_rate"] for run in runs))
    seeds = len(runs[0].get("seeds", [0]))
    part.suptitle(
        "Throughput" + (f" (medians of {seeds} seeds)" if seeds > 1 else ""), x=0.01, ha="left", weight="bold"
    )
    axis = part.subplots()
    if len(rates) == 1:
        _draw_bars(axis, runs, looks)
    else:
        _draw_lines(axis, runs, rates, looks)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _tidy(axis)


def _draw_bars(axis: Any, runs: Sequence[Mapping[str, Any]], looks: Mapping[str, Mapping[str, Any]]) -> None:
    names = [run["policy"] for run in runs]
    values = [run["total_token_throughput"] for run in runs]
    places = range(len(runs))
    axis.bar(places, values, width=0.6, color=[looks[name]["color"] for name in names])
    for place, value in zip(places, values, strict=True):
        axis.annotate(
            f"{value:,.0f}",
            (place, value),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xticks(places, names)
    axis.set_xlim(-0.6, max(len(runs), 4) - 0.4)
    references = {"sum of each while full": runs[0]["steady_bound"], "fixed split": runs[0]["split"]}
    for style, (label, reference) in zip(("--", ":"), references.items(), strict=True):
        if reference is not None:
            axis.axhline(reference["total_token_throughput"], color=_HELD, linestyle=style, label=label, lw=1)
    axis.margins(y=0.15)
    axis.set_ylabel("tokens/s, prompt and output")
    axis.set_title(rate_in_words(_rate(runs[0]["request_rate"])), fontsize=9, loc="left")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_lines(
    axis: Any,
    runs: Sequence[Mapping[str, Any]],
    rates: Sequence[str],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Rates that are numbers to scale, and beyond them all at once and the recorded arrivals, apart."""
    order: dict[str, float | str] = dict(sorted(((text, _rate(text)) for text in rates), key=_beyond_numbers))
    numbers = [rate for rate in order.values() if isinstance(rate, float) and math.isfinite(rate)]
    step = max(numbers[-1] - numbers[0], 0.5 * numbers[-1]) / max(2, len(numbers)) if numbers else 1.0
    others = ((numbers[-1] if numbers else 0.0) + step * (1 + index) for index in range(len(rates)))
    places = {text: rate if rate in numbers else next(others) for text, rate in order.items()}
    for policy, look in looks.items():
        points = {
            run["request_rate"]: (places[run["request_rate"]], run["total_token_throughput"])
            for run in runs
            if run["policy"] == policy
        }
        at = [points[text] for text in order if order[text] != TRACE]
        axis.plot(*_columns(at[: len(numbers)]), **look)
        if numbers and len(at) > len(numbers):
            axis.plot(*_columns(at[len(numbers) - 1 :]), **{**look, "linestyle": ":", "alpha": 0.5})
        axis.plot(*_columns(list(points.values())), "o", markersize=4, color=look["color"])
        axis.plot([], [], marker="o", markersize=4, label=policy, **look)
    bound = runs[0]["steady_bound"]["total_token_throughput"]
    axis.axhline(bound, color=_HELD, linestyle="--", label="sum of each while full", lw=1)
    axis.set_xticks(list(places.values()), [_tick(rate) for rate in order.values()])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("tokens/s, prompt and output")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _beyond_numbers(named: tuple[str, float | str]) -> float:
    rate = named[1]
    return math.inf if rate == TRACE else min(float(rate), sys.float_info.max)


def _draw_latencies(
    part: Any, watched: Sequence[Ran], looks: Mapping[str, Mapping[str, Any]], when: str
) -> None:
    part.suptitle(f"Latency, {when}", x=0.01, ha="left", weight="bold")
    axes = part.subplots(1, 3, sharey=True)
    for axis, name, label in zip(
        axes,
        ("ttft_s", "tpot_s", "e2el_s"),
        ("time to first token, s", "time per output token, s", "end to end, s"),
        strict=True,
    ):
        for ran in watched:
            policy = ran.cell.policy
            plot_distribution(axis, getattr(ran.watched, name), label=policy, **looks[policy])
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(_two_and_five(axis.get_xlim()))
        axis.axhline(0.99, color=_FAINT, linewidth=0.7, linestyle=":")
        axis.set_xlabel(label)
        axis.set_ylim(0, 1.01)
        _tidy(axis)
    axes[0].set_ylabel("share of requests")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _two_and_five(limits: tuple[float, float]) -> Callable[[float, Any], str]:
    """Labels between the powers of ten, where those leave room."""
    room = math.log10(limits[1] / limits[0]) < 2.2
    return lambda value, _: f"{value:g}" if room and f"{value:e}"[0] in "25" else ""


def _draw_fleet(part: Any, band: Sequence[Ran], width: int, when: str) -> None:
    """A column for each policy: KV use above, the queue below."""
    part.suptitle(f"The fleet over time, {when}", x=0.01, ha="left", weight="bold")
    upper, lower = part.subplots(2, width, sharex=True, sharey="row", squeeze=False)
    watched = [ran.watched for ran in band if ran.watched is not None]
    longest_queue = max(max(_queues(each), default=0) for each in watched)
    fleets = [each.series.instances.values() for each in watched]
    fullest = max((usage for fleet in fleets for each in fleet for usage in each.kv_usage), default=0.0)
    for column, ran in enumerate(band):
        assert ran.watched is not None
        series = ran.watched.series
        kv, queue = upper[column], lower[column]
        for index, (name, instance) in enumerate(series.instances.items()):
            look = {**line_style(index), "linewidth": 1.0}
            kv.plot(series.times_s, instance.kv_usage, label=name, **look)
            queue.plot(series.times_s, instance.waiting, **look)
        queue.plot(series.times_s, series.held, color=_HELD, linewidth=1.0, linestyle=(0, (4, 2)))
        kv.set_title(ran.cell.policy, fontsize=9, loc="left")
        kv.set_ylim(0, 1.02 if fullest > 0.4 else max(1.25 * fullest, 0.01))
        kv.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        queue.set_yscale("symlog", linthresh=10)
        queue.set_ylim(0, max(10, 1.3 * longest_queue))
        queue.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        queue.set_xlabel("s")
        for axis in (kv, queue):
            axis.set_xlim(left=0)
            _tidy(axis)
    for axis in (*upper[len(band) :], *lower[len(band) :]):
        axis.set_visible(False)
    upper[0].set_ylabel("KV cache in use")
    lower[0].set_ylabel("requests waiting")
    handles, labels = upper[0].get_legend_handles_labels()
    held = lower[0].lines[-1]
    part.legend(
        [*handles, held],
        [*labels, "held by the proxy"],
        fontsize=8,
        loc="outside lower center",
        ncols=min(8, len(labels) + 1),
    )


def _queues(watched: Watched) -> Iterable[int]:
    yield from watched.series.held
    for instance in watched.series.instances.values():
        yield from instance.waiting


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _tidy(axis: Any) -> None:
    tidy(axis)
    axis.tick_params(which="both", labelsize=8)


def _rate(text: str) -> float | str:
    return text if text == TRACE else float(text)


def _tick(rate: float | str) -> str:
    if isinstance(rate, str):
        return rate
    return "at once" if math.isinf(rate) else f"{rate:g}"


def rate_in_words(rate: float | str) -> str:
    """A rate as a person reads it."""
    if isinstance(rate, str):
        return "arrivals of the trace"
    return "all at once" if math.isinf(rate) else f"{rate:g} requests/s"
