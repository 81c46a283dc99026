"""`python bench/check_signatures.py [--count 10] [--seed 0]`: does mypy see a changed signature of an option?

In a copy of the package, one public function or method of `hetlb/options` at a time gets a parameter that no
caller gives; mypy has to fail. The exit status is 1 if a change is not seen.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARAMETER = "changed_signature: int"


class Place(NamedTuple):
    """A function of an option, as `Class.method` or `function`."""

    path: Path
    name: str
    line: int
    column: int


def places() -> list[Place]:
    """Return the public functions of options and the methods of their public classes."""
    found = []
    for path in sorted((ROOT / "hetlb" / "options").rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name[0] != "_"]
        for owner, body in [("", tree.body), *((f"{each.name}.", each.body) for each in classes)]:
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and _changes(each):
                    last = each.args.args[-1] if each.args.args else None
                    if last is not None:
                        end = last.annotation or last
                        assert end.end_lineno is not None
                        assert end.end_col_offset is not None
                        where = end.end_lineno, end.end_col_offset
                        found.append(Place(path.relative_to(ROOT), f"{owner}{each.name}", *where))
    return found


def _changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if a further parameter changes what callers have to give: of no property, nor default."""
    public = function.name[0] != "_" or function.name == "__init__"
    return public and not function.decorator_list and not function.args.defaults


def changed(text: str, place: Place) -> str:
    """Return a module whose function has one more parameter."""
    lines = text.split("\n")
    line = lines[place.line - 1].encode()
    lines[place.line - 1] = (line[: place.column] + f", {PARAMETER}".encode() + line[place.column :]).decode()
    return "\n".join(lines)


def main() -> int:
    """Change `--count` functions, one at a time; print what mypy sees."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn = random.Random(args.seed).sample(places(), args.count)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="hetlb-signatures-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "hetlb", folder / "hetlb", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        command = [sys.executable, "-m", "mypy", "--no-error-summary", "hetlb"]
        subprocess.run(command, cwd=folder, check=True)
        for place in drawn:
            target = folder / place.path
            before = target.read_text()
            target.write_text(changed(before, place))
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            target.write_text(before)
            line = done.stdout.split("\n", 1)[0]
            missed += not done.returncode
            print(f"{place.path}: {place.name}: {line or 'NOT SEEN'}", flush=True)
    print(f"{args.count - missed} of {args.count} changes are seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
