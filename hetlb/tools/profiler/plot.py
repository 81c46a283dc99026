"""A picture of a fit: measured points against the fitted lines, and the residuals, for both phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hetlb.tools.plots import line_style, new_figure, save_figure, tidy
from hetlb.tools.profiler.fit import FitResult, Point, StepKind, seconds_of


def write_plot(
    path: Path,
    name: str,
    points: Sequence[Point],
    result: FitResult,
    max_num_batched_tokens: int | None = None,
) -> None:
    """Draw to `path`; its suffix is the format. Raises `InputError`.

    `max_num_batched_tokens` is where the engine splits a prefill into several passes (None: nowhere).
    """
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2, height_ratios=(3, 1.3), sharex="col")
    phases = ((StepKind.PREFILL, "prompt tokens"), (StepKind.DECODE, "cached tokens"))
    for column, (phase, tokens) in enumerate(phases):
        fitted, top, bottom = result.forms[phase], axes[0][column], axes[1][column]
        of_phase = [p for p in points if p.phase is phase]
        measured = sorted({p.length for p in of_phase})
        low, high = measured[0], measured[-1]
        lengths = [low * (high / low) ** (step / 60) for step in range(61)]
        for index, batch in enumerate(sorted({p.batch for p in of_phase})):
            look = line_style(index)
            group = [p for p in of_phase if p.batch == batch]
            at = [p.length for p in group]
            passes = [_passes(phase, batch * n, max_num_batched_tokens) for n in lengths]
            curve = [seconds_of(fitted, batch, n, k) * 1e3 for n, k in zip(lengths, passes, strict=True)]
            top.plot(lengths, curve, **look)
            seconds = [p.seconds * 1e3 for p in group]
            top.plot(at, seconds, "o", color=look["color"], markersize=4.5, label=f"batch {batch}")
            residuals = [100 * (seconds_of(fitted, batch, p.length, p.passes) / p.seconds - 1) for p in group]
            bottom.plot(at, residuals, "o-", color=look["color"], markersize=3, linewidth=0.7)
        of = result.reports[phase]
        figures = f"mean {of.mean_error:.1%}, p95 {of.p95_error:.1%}, max {of.max_error:.1%}"
        top.set_title(f"{phase} ({of.form}): held-out error {figures}", fontsize=10)
        top.set(xscale="log", yscale="log", ylabel="ms" if column == 0 else "ms a step")
        top.legend(fontsize=7, ncols=3, loc="upper left")
        bottom.set(ylabel="fitted / measured - 1, %", xlabel=tokens)
        bottom.axhline(0, color="0.4", linewidth=0.8)
        bottom.set_xticks(measured, [str(n) for n in measured])
        bottom.minorticks_off()
        tidy(top)
        tidy(bottom)
    figure.suptitle(f"{name}: points measured, lines fitted")
    save_figure(figure, path)


def _passes(phase: StepKind, tokens: float, max_num_batched_tokens: int | None) -> int:
    if phase is StepKind.DECODE or max_num_batched_tokens is None:
        return 1
    return math.ceil(tokens / max_num_batched_tokens)
