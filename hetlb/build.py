"""Version and kind of build (compiled or interpreted)."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

from hetlb import __version__

#: CPU of a plain request, interpreted / compiled (bench/proxies/RESULTS.md).
SLOWDOWN = 3


def compiled() -> bool:
    """Return True if the hot path is compiled (hatch_build.py at the root lists its modules)."""
    found = find_spec("hetlb.balancer.http.http1")
    return found is not None and str(found.origin).endswith(tuple(EXTENSION_SUFFIXES))


def version_line() -> str:
    """Describe version and build."""
    cost = f"interpreted: {SLOWDOWN} times the CPU of the compiled build per plain request"
    return f"hetlb {__version__} ({'compiled' if compiled() else cost})"
