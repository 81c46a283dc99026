"""The picture of `hetlb simulate --against`: measured and simulated times, and the KV cache over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetlb.plots import new_figure, plot_distribution, save_figure, tidy
from hetlb.sim.against import Comparison

_MEASURED, _SIMULATED = "#24292f", "#d9480f"


def write_against_plot(path: Path, found: Comparison) -> None:
    """Draw whole answers by arrival, three distributions, and the KV cache in use. Raises `InputError`."""
    figure = new_figure(11.0, 6.4)
    above, below = figure.subplots(2, 3)
    arrivals = [each.arrival_s for each in found.measured]
    for axes, name in ((above[0], "ttft_s"), (above[1], "e2e_s")):
        axes.plot(arrivals, [getattr(each, name) for each in found.measured], ".", color=_MEASURED, ms=3)
        axes.plot(arrivals, [getattr(each, name) for each in found.simulated], ".", color=_SIMULATED, ms=3)
        _label(axes, "arrival (s)", f"{name.removesuffix('_s').upper()} (s)")
    above[2].plot(
        [at_s for at_s, _ in found.kv], [100.0 * used for _, used in found.kv], lw=0.8, color=_SIMULATED
    )
    _label(above[2], "time (s)", "KV cache in use (%), simulated")
    tpot = [(each.e2e_s - each.ttft_s) / max(1, m.output_tokens - 1)
            for m, each in zip(found.measured, found.simulated, strict=True)]  # fmt: skip
    pairs: tuple[tuple[str, Sequence[float], Sequence[float]], ...] = (
        ("TTFT (s)", [m.ttft_s for m in found.measured], [s.ttft_s for s in found.simulated]),
        ("TPOT (s)", [m.tpot_s for m in found.measured], tpot),
        ("E2E (s)", [m.e2e_s for m in found.measured], [s.e2e_s for s in found.simulated]),
    )
    for axes, (name, measured, simulated) in zip(below, pairs, strict=True):
        plot_distribution(axes, measured, label="measured", color=_MEASURED)
        plot_distribution(axes, simulated, label="simulated", color=_SIMULATED)
        _label(axes, name, "share of the requests")
    below[0].legend(frameon=False)
    figure.suptitle(found.verdict)
    save_figure(figure, path)


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    tidy(axes)
