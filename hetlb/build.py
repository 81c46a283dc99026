"""The build of hetlb that runs: compiled or interpreted."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def compiled() -> bool:
    """True if the hot path is compiled (hatch_build.py at the root says what that is), or interpreted."""
    found = find_spec("hetlb.core.scheduler")
    return found is not None and str(found.origin).endswith(tuple(EXTENSION_SUFFIXES))
