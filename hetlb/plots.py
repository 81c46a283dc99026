"""Figures of matplotlib, made without a display and written whole or not at all.

matplotlib is imported only when a picture is asked for. A path that cannot be written is an `InputError`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hetlb.errors import InputError


def new_figure(width_in: float, height_in: float) -> Any:
    """An empty `matplotlib.figure.Figure`."""
    figure_type = importlib.import_module("matplotlib.figure").Figure
    return figure_type(figsize=(width_in, height_in), layout="constrained", dpi=130)


def save_figure(figure: Any, path: Path) -> None:
    """Write to `path`; the format is that of its ending. Raises `InputError`."""
    scratch = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(scratch)
        scratch.replace(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--plot: expected a picture file that can be written, got {path}: {error}"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
