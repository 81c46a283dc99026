"""A name stands for one thing: no two public classes and no two files share one; and `serve` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hetlb"
MODULES = sorted(ROOT.rglob("*.py"))

#: What `hetlb serve` imports of hetlb where the fleet file asks for nothing special, and its lines at most.
SERVE_ROOMS = {
    "__init__", "addresses", "app_listener", "build", "cli", "config", "core", "errors", "files",
    "image_tokens", "pages", "proxy", "served_models", "turns", "websocket", "workload",
}  # fmt: skip
SERVE_LINES = 30_000


def twice(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert twice(found) == {}


def test_no_two_files_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py":
            found[path.stem].append(str(path.relative_to(ROOT)))
    assert twice(found) == {}


def test_a_plain_serve_imports_these_rooms_and_no_more_lines() -> None:
    code = "import sys, hetlb.cli.serve; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT.parent, text=True).split()
    names = [name for name in loaded if name.split(".")[0] == "hetlb"]
    assert {name.split(".")[1] for name in names if "." in name} <= SERVE_ROOMS
    lines = 0
    for name in names:
        path = ROOT.parent.joinpath(*name.split("."))
        file = path.with_suffix(".py")
        lines += len((file if file.exists() else path / "__init__.py").read_text().splitlines())
    assert lines <= SERVE_LINES
