"""All cases: importing this registers every one of them, the options' cases too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from faults.cases import CASES, Case

_TESTS = Path(__file__).resolve().parents[1]
#: Files of cases: the matrix's own, and one beside the tests of some options.
FILES = sorted([*_TESTS.glob("faults/*_cases.py"), *_TESTS.glob("options/*/*_cases.py")])
for _path in FILES:
    import_module(".".join(_path.relative_to(_TESTS).with_suffix("").parts))

__all__ = ["CASES", "FILES", "Case"]
