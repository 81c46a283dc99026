"""Parts that an installation may lack: packages that only some commands need, and options.

Commands import their packages directly; `hetlb.cli.main` turns a failed import into one line. An option is a
folder of `hetlb/options`; one that was deleted is a feature that this installation lacks, and nothing else.
Its package (or a module of it) has one function `hook`: the balancer imports no option, it asks for one by
name where the fleet file, a flag or a request needs it (`balancer/interfaces.py` has the types).
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hetlb.errors import ConfigError, InputError

#: Import name -> extra. Features with a key in the fleet file name the key (`check_extra`).
EXTRAS = {
    "aiconfigurator_core": "aic",
    **dict.fromkeys(("highspy", "matplotlib", "numpy", "scipy"), "tools"),
    "grpc": "pick",
    "torch": "stage",
}


def missing_extra(error: ModuleNotFoundError) -> InputError | None:
    """Return the error to report for a failed import; None if it is of no extra and no option's folder."""
    package, *inner = (error.name or "").split(".")
    if package == "hetlb" and inner[:1] == ["options"]:
        folder = ".".join(inner[1:2])
        if sys.modules.get(f"hetlb.options.{folder}") is not None:
            return None
        return ConfigError(
            f"expected an installation with the option {folder}, but hetlb/options/{folder} is missing"
        )
    if package not in EXTRAS:
        return None
    install = f"pip install 'hetlb[{EXTRAS[package]}]'"
    return InputError(f"expected the package {package} to be installed: {install}")


def require(*packages: str) -> None:
    """Raise `ModuleNotFoundError` unless the packages are installed, without importing them."""
    for package in packages:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


@cache  # decisions ask for some; a failed import is tried again
def option(name: str) -> ModuleType:
    """Return an option's package, or a module of it. Raises `ConfigError` where its folder is missing."""
    try:
        return import_module(f"hetlb.options.{name}")
    except ModuleNotFoundError as error:
        if isinstance(missing := missing_extra(error), ConfigError):
            raise missing from None
        raise


def hook(name: str, *args: Any, **named: Any) -> Any:
    """Call the function `hook` of an option; return its result. Raises `ConfigError` as `option` does."""
    return option(name).hook(*args, **named)


def check_extra(key: str, module: str, extra: str) -> None:
    """Raise `ConfigError` naming `key` unless a module of an extra is installed."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(f"{key}: expected the extra {extra} to be installed: pip install 'hetlb[{extra}]'")
