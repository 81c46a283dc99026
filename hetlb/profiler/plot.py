"""A picture of a fit: measured points against the fitted lines, and the residuals, for both phases.

Promise: matplotlib (the extra `plot`) is needed only here and only when a picture is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from hetlb.errors import InputError, ProfileError
from hetlb.profiler.fit import FitResult, Phase, Point


def write_plot(path: Path, name: str, points: Sequence[Point], result: FitResult) -> None:
    """Draw to `path`; the format is that of its ending. Raises `InputError` or `ProfileError`."""
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise InputError("--plot: expected matplotlib to be installed (pip install 'hetlb[plot]')") from error
    latency = result.latency
    better = latency.better_prefill
    prefill = better.prefill_s if better is not None else latency.prefill_s
    figure = figure_type(figsize=(11, 7), layout="constrained", dpi=130)
    axes = figure.subplots(2, 2, height_ratios=(3, 1.3), sharex="col")
    columns = ((Phase.PREFILL, prefill, result.prefill), (Phase.DECODE, latency.decode_step_s, result.decode))
    for column, (phase, predict, phase_fit) in enumerate(columns):
        top, bottom = axes[0][column], axes[1][column]
        of_phase = [p for p in points if p.phase is phase]
        batches = sorted({p.batch for p in of_phase})
        low, high = min(p.length for p in of_phase), max(p.length for p in of_phase)
        lengths = [low * (high / low) ** (step / 60) for step in range(61)]
        for index, batch in enumerate(batches):
            shade = 0.15 + 0.75 * index / max(1, len(batches) - 1)
            color = (0.10 + 0.75 * shade, 0.25 + 0.25 * (1 - shade), 0.75 * (1 - shade) + 0.15)
            group = [p for p in of_phase if p.batch == batch]
            top.plot(lengths, [predict(batch, n) * 1e3 for n in lengths], color=color, linewidth=1.3)
            top.plot(
                [p.length for p in group],
                [p.seconds * 1e3 for p in group],
                "o",
                color=color,
                markersize=4.5,
                label=f"batch {batch}",
            )
            residuals = [100 * (predict(batch, p.length) / p.seconds - 1) for p in group]
            bottom.plot([p.length for p in group], residuals, "o-", color=color, markersize=3, linewidth=0.7)
        held_out = phase_fit.error
        top.set_title(
            f"{phase} ({phase_fit.form}): held-out error mean {held_out.mean:.1%}, p95 {held_out.p95:.1%}, "
            f"max {held_out.max:.1%}",
            fontsize=10,
        )
        top.set(xscale="log", yscale="log", ylabel="ms" if column == 0 else "ms a step")
        bottom.set(
            ylabel="fitted / measured - 1, %", xlabel="prompt tokens" if column == 0 else "cached tokens"
        )
        bottom.axhline(0, color="0.4", linewidth=0.8)
        top.legend(fontsize=7, ncols=3, loc="upper left")
        for axis in (top, bottom):
            axis.grid(alpha=0.3, which="both", linewidth=0.4)
        bottom.set_xticks(
            sorted({p.length for p in of_phase}), [str(n) for n in sorted({p.length for p in of_phase})]
        )
        bottom.minorticks_off()
    figure.suptitle(f"{name}: points measured, lines fitted")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: expected a picture file that can be written: {error}") from error
