"""ARCHITECTURE.md names places that exist: every path, and every symbol of "Find it by name"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PLACES = re.findall(r"\| `([\w/]+\.py)`: `(\w+)` \|", TEXT)
PATHS = sorted(set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", TEXT)))


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_a_place_holds_what_it_is_named_for(path: str, name: str) -> None:
    text = (ROOT / path).read_text()
    assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.*=", text, re.MULTILINE), f"{path}: {name}"


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "hetlb" / path).exists(), path
