"""Imports go one way, the core is pure, and every module opens with what it promises."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hetlb"
ALWAYS = {
    "addresses",
    "app_listener",
    "build",
    "csv_rows",
    "errors",
    "extras",
    "files",
    "served_models",
    "tables",
    "turns",
}
MODULES = sorted(ROOT.rglob("*.py"))

#: What each room may import of hetlb besides itself and the leaves that all may (`ALWAYS`).
MAY_IMPORT = {
    "addresses": set(),
    "build": set(),
    "csv_rows": set(),
    "errors": set(),
    "extras": set(),
    "files": set(),
    "served_models": set(),
    "models": set(),
    "app_listener": set(),
    "tables": set(),
    "core": set(),
    "workload": {"core"},
    "plots": set(),
    "pages": set(),
    "turns": set(),
    "config": {"core", "models", "plan", "workload"},
    "plan": {"models", "core", "config", "sim", "profiler", "workload"},
    "sim": {"core", "config", "workload", "plots"},
    "profiler": {"models", "core", "config", "workload", "plots", "openai"},
    "proxy": {"core", "config", "workload", "pages"},
    "workers": {"core", "config", "proxy"},
    "pick": {"core", "config", "proxy"},
    "openai": set(),
    "emulator": {"core", "config", "sim", "openai"},
    "loadtest": {"core", "config", "workload", "plots", "openai"},
    "demo": set(),
    "stage": {"core", "config", "openai"},
    "cli": {
        "stage",
        "core",
        "config",
        "models",
        "workload",
        "plots",
        "plan",
        "sim",
        "profiler",
        "proxy",
        "workers",
        "pick",
        "emulator",
        "loadtest",
        "demo",
    },
}
#: `core` decides; it must not be able to look at a clock, a socket or a log.
FORBIDDEN_IN_CORE = {"asyncio", "aiohttp", "time", "logging", "os", "socket", "threading", "datetime"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def test_imports_go_one_way() -> None:
    for path in MODULES:
        here = room(path)
        if here in ("__init__", "__main__"):
            continue
        for name in imports(path):
            if name.startswith("hetlb."):
                there = name.split(".")[1]
                assert there in {here, *ALWAYS, *MAY_IMPORT[here]}, f"{path} imports {name}"


def test_the_core_is_pure_and_needs_the_standard_library_alone() -> None:
    for path in MODULES:
        for name in imports(path) if room(path) == "core" else ():
            top = name.split(".")[0]
            # Its one decorator speaks to the compiler and does nothing.
            known = name == "mypy_extensions" or top == "hetlb" or top in sys.stdlib_module_names
            assert known, f"{path}: {name}"
            assert top not in FORBIDDEN_IN_CORE, f"{path}: {name}"


def test_every_module_opens_with_what_it_promises() -> None:
    for path in MODULES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path} has no docstring"
        assert docstring.endswith((".", ":", "|")) or "\n" in docstring, path
