"""Helpers for matplotlib plots; matplotlib is imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetlb.errors import InputError
from hetlb.output_files import output_path, whole_file

COLOURS = (
    *("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a800"),
    *("#0b7285", "#c2255c", "#5f3dc4", "#66a80f", "#868e96"),
)
#: Suffixes of pictures that matplotlib writes.
_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")
_STYLES = ("-", "--", ":", "-.")
#: Latencies with a drawn distribution, and their axes' names.
LATENCIES = {"ttft": "time to first token, s", "tpot": "time per output token, s", "e2el": "end to end, s"}


def picture_path(text: str) -> Path:
    """Return the value of `--plot`, before any work is done for it. Raises `InputError`."""
    path = output_path(text, "--plot")
    if path.suffix.lower() not in _PICTURES:
        raise InputError(f"--plot: expected a picture file, one of {', '.join(_PICTURES)}, got {path}")
    return path


def new_figure(width_in: float, height_in: float) -> Any:
    """Return an empty `matplotlib.figure.Figure`."""
    figure_type = importlib.import_module("matplotlib.figure").Figure
    return figure_type(figsize=(width_in, height_in), layout="constrained", dpi=130)


def line_style(index: int) -> dict[str, Any]:
    """Return the distinct colour and dashes of the line at `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": _STYLES[index // len(COLOURS) % len(_STYLES)],
        "linewidth": 1.4,
    }


def tidy(axis: Any) -> None:
    """Set a light grid and remove the top and right spines."""
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def plot_distribution(axis: Any, values: Iterable[float], **style: Any) -> None:
    """Plot the empirical distribution function of values."""
    ordered = sorted(values)
    axis.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], **style)


def save_figure(figure: Any, path: Path) -> None:
    """Save to `path` in the format of its suffix. Raises `InputError`."""
    try:
        with whole_file(path) as scratch:
            figure.savefig(scratch)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--plot: expected a picture file that can be written, got {path}: {error}"
        ) from error
