"""A picture of a fit: measured points against the fitted lines, and the residuals, for both phases.

A line is what the profile predicts, a point what was measured; nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hetlb.plots import new_figure, save_figure
from hetlb.profiler.fit import FitResult, Point, StepKind


def write_plot(
    path: Path,
    name: str,
    points: Sequence[Point],
    result: FitResult,
    max_num_batched_tokens: int | None = None,
) -> None:
    """Draw to `path`; the format is that of its ending. Raises `InputError`.

    `max_num_batched_tokens` is where the engine splits a prefill into several passes (None: nowhere).
    """
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2, height_ratios=(3, 1.3), sharex="col")
    for column, (phase, phase_fit) in enumerate(
        ((StepKind.PREFILL, result.prefill), (StepKind.DECODE, result.decode))
    ):
        predict = result.predict[phase]
        top, bottom = axes[0][column], axes[1][column]
        of_phase = [p for p in points if p.phase is phase]
        batches = sorted({p.batch for p in of_phase})
        low, high = min(p.length for p in of_phase), max(p.length for p in of_phase)
        lengths = [low * (high / low) ** (step / 60) for step in range(61)]
        for index, batch in enumerate(batches):
            shade = 0.15 + 0.75 * index / max(1, len(batches) - 1)
            color = (0.10 + 0.75 * shade, 0.25 + 0.25 * (1 - shade), 0.75 * (1 - shade) + 0.15)
            group = [p for p in of_phase if p.batch == batch]
            passes = [_passes(phase, batch * n, max_num_batched_tokens) for n in lengths]
            curve = [predict(batch, n, k) * 1e3 for n, k in zip(lengths, passes, strict=True)]
            top.plot(lengths, curve, color=color, linewidth=1.3)
            top.plot(
                [p.length for p in group],
                [p.seconds * 1e3 for p in group],
                "o",
                color=color,
                markersize=4.5,
                label=f"batch {batch}",
            )
            residuals = [100 * (predict(batch, p.length, p.passes) / p.seconds - 1) for p in group]
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
    save_figure(figure, path)


def _passes(phase: StepKind, tokens: float, max_num_batched_tokens: int | None) -> int:
    if phase is StepKind.DECODE or max_num_batched_tokens is None:
        return 1
    return math.ceil(tokens / max_num_batched_tokens)
