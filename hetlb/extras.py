"""Optional packages and the extras that install them.

`serve`, `top`, `explain`, `engine` and `simulate` need none. Other commands import theirs directly;
`hetlb.cli.main` turns a failed import into one line.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from importlib.util import find_spec

from hetlb.errors import InputError

#: Import name -> extra. Features with a key in the fleet file report missing packages themselves.
EXTRAS = {"highspy": "tools", "jinja2": "tools", "matplotlib": "tools", "numpy": "tools", "scipy": "tools"}


def missing_extra(error: ModuleNotFoundError) -> InputError | None:
    """Error to report for a failed import; None if no extra has the package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    install = " ".join(packages_of(EXTRAS[package]))
    return InputError(f"expected the package {package} to be installed: pip install {install}")


def packages_of(extra: str) -> list[str]:
    """Packages of an extra, by hetlb's metadata."""
    marked = f'extra == "{extra}"'
    found = [each for each in requires("hetlb") or () if each.replace("'", '"').endswith(marked)]
    return [re.split(r"[^\w.-]", each)[0] for each in found] or list(EXTRAS)


def require(*packages: str) -> None:
    """Raise `ModuleNotFoundError` unless the packages are installed, without importing them."""
    for package in packages:
        if package not in sys.modules and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
