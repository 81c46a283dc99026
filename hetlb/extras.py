"""Packages that only some commands or keys need, and that an installation may lack.

Commands import their packages directly; `hetlb.cli.main` turns a failed import into one line.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from hetlb.errors import ConfigError, InputError

#: Import name -> extra. Features with a key in the fleet file name the key (`check_extra`).
EXTRAS = {
    "aiconfigurator_core": "aic",
    **dict.fromkeys(("highspy", "matplotlib", "numpy", "scipy"), "tools"),
    "grpc": "pick",
    "torch": "stage",
}


def missing_extra(error: ModuleNotFoundError) -> InputError | None:
    """Return the error to report for a failed import; None if it is of no extra."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    install = f"pip install 'hetlb[{EXTRAS[package]}]'"
    return InputError(f"expected the package {package} to be installed: {install}")


def require(*packages: str) -> None:
    """Raise `ModuleNotFoundError` unless the packages are installed, without importing them."""
    for package in packages:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def check_extra(key: str, module: str, extra: str) -> None:
    """Raise `ConfigError` naming `key` unless a module of an extra is installed."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(f"{key}: expected the extra {extra} to be installed: pip install 'hetlb[{extra}]'")
