"""Packages that only some commands need, and the extra of hetlb that installs each of them.

`pip install hetlb` is what `serve`, `top`, `explain`, `engine` and `simulate` import. A command that needs
more imports it like anything else; `hetlb.cli.main` turns the failure into one line.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from importlib.util import find_spec

from hetlb.errors import InputError

#: Package as imported -> extra. Features that name their key of the fleet file report for themselves.
EXTRAS = {"highspy": "tools", "jinja2": "tools", "matplotlib": "tools", "numpy": "tools", "scipy": "tools"}


def missing_extra(error: ModuleNotFoundError) -> InputError | None:
    """The error to report for a failed import; None where no extra installs that package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    install = " ".join(packages_of(EXTRAS[package]))
    return InputError(f"expected the package {package} to be installed: pip install {install}")


def packages_of(extra: str) -> list[str]:
    """Names of the packages of an extra: they are in an index wherever hetlb itself was installed from."""
    marked = f'extra == "{extra}"'
    found = [each for each in requires("hetlb") or () if each.replace("'", '"').endswith(marked)]
    return [re.split(r"[^\w.-]", each)[0] for each in found] or list(EXTRAS)


def require(*packages: str) -> None:
    """Raise `ModuleNotFoundError` unless the packages are installed; nothing is imported."""
    for package in packages:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
