"""Folder of the sockets that connect the processes of one proxy on this machine; for this user alone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def view_folder() -> Path:
    """Make such a folder."""
    return Path(tempfile.mkdtemp(prefix="hetlb-"))


def hub_in(folder: Path) -> Path:
    """Return the path of the hub of their view."""
    return folder / "hub.sock"


def waker_in(folder: Path) -> Path:
    """Return the path of the lock of the one that wakes instances."""
    return folder / "wake.lock"


def remove_folder(folder: Path) -> None:
    """Remove such a folder, as far as it is there."""
    shutil.rmtree(folder, ignore_errors=True)
