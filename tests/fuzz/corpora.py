"""Corpora of the fuzz targets; an option has a `fuzzed.py` and a `corpus` beside its tests."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from fuzz import engine_pages

TESTS = Path(__file__).resolve().parents[1]


def corpora() -> dict[str, Path]:
    """Return the folder of kept inputs of every target, by its name."""
    folders = [*TESTS.glob("fuzz/corpus/*"), *TESTS.glob("options/*/corpus/*")]
    return {path.name: path for path in sorted(folders, key=lambda path: path.name)}


def of_rooms() -> list[ModuleType]:
    """Return the modules of targets: each has some of `TARGETS`, `PREFIXES` and `GROWTH`."""
    names = sorted(path.parent.name for path in TESTS.glob("options/*/fuzzed.py"))
    return [engine_pages, *(import_module(f"options.{name}.fuzzed") for name in names)]
