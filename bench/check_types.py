"""Types of what stands beside the code: benches, pictures, pages of reference; mypy for each folder.

Scripts of a folder import each other by their plain names.
`python bench/check_types.py`; `make check` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
#: Folders beside a script's own from which some import.
BESIDE = (BENCH / "proxies", BENCH.parent / "tests", BENCH.parent / "tests" / "vllm")
SITE = BENCH.parent / "configs" / "site"
PICTURES = (BENCH.parent / "tests" / "dashboard" / "pictures.py",)
#: Folders whose scripts are imported as a package.
PACKAGES = ("rent",)


def main() -> int:
    """Return 1 where a folder has a mistake."""
    folders = sorted({path.parent for path in [*BENCH.rglob("*.py"), *SITE.glob("*.py"), *PICTURES]})
    wrong = [folder for folder in folders if _check(folder)]
    return int(bool(wrong))


def _check(folder: Path) -> bool:
    own = BENCH if folder.name in PACKAGES else folder
    paths = dict.fromkeys([own, *BESIDE])
    if folder.name in PACKAGES:
        what = ["-p", folder.name]
    else:
        what = [str(each) for each in PICTURES] if folder == PICTURES[0].parent else []
        what = what or [str(path) for path in sorted(folder.glob("*.py"))]
    flags = ["--strict", "--follow-imports=silent"]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *what], env=environment, cwd=BENCH.parent, check=False
    )
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
