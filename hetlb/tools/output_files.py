"""Paths of results, checked before the work for them."""

from __future__ import annotations

import os
from pathlib import Path

from hetlb.errors import InputError


def output_path(text: str | Path, flag: str) -> Path:
    """Return the path of a result that can be written. Raises `InputError` naming the flag."""
    path = Path(text)
    target = path.resolve()
    if not target.parent.is_dir() or target.is_dir():
        raise InputError(f"{flag}: expected a file in a folder that exists, got {path}")
    replaced = target.is_file() or not target.exists()  # devices and pipes are written directly
    if not os.access(target.parent if replaced else target, os.W_OK):
        raise InputError(f"{flag}: expected a file that can be written, got {path}")
    return path


def fleet_path(text: str) -> Path:
    """Return the value of `--write-fleet`. Raises `InputError`."""
    return output_path(text, "--write-fleet")
