"""Imports go one way, the core is pure, and every module opens with what it promises."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hetlb"
MODULES = sorted(ROOT.rglob("*.py"))
#: Modules of one purpose that every room may import.
LEAVES = {
    "addresses",
    "app_listener",
    "build",
    "errors",
    "extras",
    "files",
    "inputs",
    "logs",
    "output_files",
    "percentiles",
    "served_models",
    "systemd",
    "tasks",
    "turns",
    "watched_files",
}
#: The rooms, and what each may import of the others.
ROOMS = {
    "balancer": set(),
    "options": {"balancer"},
    "tools": {"balancer"},
    "cli": {"balancer", "options", "tools"},
}
#: Options that the tools import: replays of event logs, simulated fleets whose requests are split.
OF_TOOLS = {"event_log", "split"}
#: Folders of the same room that each folder may import.
FOLDERS = {
    "balancer/core": set(),
    "balancer/http": {"config", "core"},
    "balancer/config": {"core"},
    "balancer/telemetry": {"config", "core", "exchange", "http"},
    "tools/demo": set(),
    "tools/openai": set(),
    "tools/models": {"plan"},
    "tools/paths": set(),
    "tools/workload": set(),
    "tools/sim": {"paths", "plots", "tables", "workload"},
    "tools/emulator": {"openai", "sim"},
    "tools/loadtest": {"openai", "plots", "tables", "workload"},
    "tools/profiler": {"models", "openai", "plots", "tables", "workload"},
    "tools/stage": {"openai", "paths", "plan"},
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


def place(path: Path) -> tuple[str, ...]:
    """Return room and folder of a module, one name for a module that stands alone."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:2] if len(parts) > 2 else parts[:1]


def wrong_imports(path: Path) -> set[str]:
    """Return imports of a module that its room or its folder may not have."""
    found: set[str] = set()
    room, folder = (*place(path), "")[:2]
    for name in imports(path):
        if not name.startswith("hetlb."):
            continue
        there, inner = (*name.split(".")[1:], "")[:2]
        if there == room in ROOMS:
            allowed = FOLDERS.get(f"{room}/{folder}")
            if room == "options" and folder and (ROOT / "options" / inner).is_dir():
                allowed = set()  # an option knows no other
            if allowed is not None and inner not in {folder, *allowed}:
                found.add(name)
        elif room == "tools" and there == "options" and inner in OF_TOOLS:
            continue
        elif there not in {*LEAVES, *ROOMS.get(room, set())}:
            found.add(name)
    return found


def test_imports_go_one_way() -> None:
    wrong = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), name.removeprefix("hetlb."))
        for path in MODULES
        if path.parent != ROOT or path.stem not in ("__init__", "__main__")
        for name in wrong_imports(path)
    }
    assert wrong == set()


def test_the_core_is_pure_and_needs_the_standard_library_alone() -> None:
    for path in MODULES:
        for name in imports(path) if place(path) == ("balancer", "core") else ():
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


def circles(modules: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other, imports for types and in functions included."""
    reached: dict[str, set[str]] = {}
    for name in modules:
        found, ahead = set[str](), [name]
        while ahead:
            for each in modules[ahead.pop()] - found:
                found.add(each)
                ahead.append(each)
        reached[name] = found
    return [{name} | {each for each in found if name in reached[each]} for name, found in reached.items()]


def test_the_modules_that_know_each_other_are_few() -> None:
    found = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): imports(path) for path in MODULES}
    known = {name: {each for each in of if each in found and each != name} for name, of in found.items()}
    assert max(map(len, circles(known))) <= 5


def test_no_module_of_hetlb_is_imported_by_its_name_as_text() -> None:
    """But entry points of policies, and packages of extras; `build.py` looks for a compiled module."""
    allowed = {"balancer/core/policies/registry.py", "build.py", "extras.py", "tools/plots.py"}
    by_text = {"__import__", "entry_points", "find_spec", "import_module", "resolve_name"}
    found = {
        str(path.relative_to(ROOT))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr) in by_text
    }
    assert found <= allowed
