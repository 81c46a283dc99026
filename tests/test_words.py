"""Words of the house: docstrings begin with a noun or a verb, and "who" is for people."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "hetlb").rglob("*.py"))
_QUESTION = re.compile(r"(What|Who|Whose|Whom|Where|When|How|Which|Whether|Why)\b")
#: Old names of things that have a name in the field, and words for people that stood for requests.
_BANNED = re.compile(
    r"\b(anybody|beginnings|everybody|fellows?|nobody|onward|somebody|untold|whoever)\b", re.IGNORECASE
)

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def documented(path: Path) -> list[tuple[str, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return [(getattr(node, "name", path.stem), ast.get_docstring(node) or "") for node in nodes]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_noun_or_a_verb(path: Path) -> None:
    assert [name for name, text in documented(path) if _QUESTION.match(text)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_on_attributes_begin_with_a_noun_or_a_verb(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    first = [line for before, line in zip(["", *lines], lines, strict=False) if not before.startswith("#:")]
    assert [line for line in first if line.startswith("#: ") and _QUESTION.match(line[3:])] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_that_have_a_better_one_are_not_used(path: Path) -> None:
    assert sorted(set(_BANNED.findall(path.read_text()))) == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_tests_use_the_same_words(path: Path) -> None:
    names = re.findall(r"def (test_\w+)", path.read_text())
    assert [name for name in names if _BANNED.search(name.replace("_", " "))] == []
