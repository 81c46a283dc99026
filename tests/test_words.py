"""Words of the house: docstrings begin with a noun or a verb, and "who" is for people."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "hetlb").rglob("*.py"))
_QUESTION = re.compile(r"(What|Who|Whose|Whom|Where|When|How|Which|Whether|Why|Was|Were|Is|Are)\b")
#: Beginnings that put off what a thing is, or turn a verb round.
_DEFERRED = re.compile(r"(About|As|Be|By|From|Have|Of|So (many|much|long)|Some|Until)\b")
#: Old names of things that have a name in the field, and words for people that stood for requests.
_BANNED = re.compile(
    r"\b(anybody|beginnings|everybody|fellows?|nobody|onward|somebody|untold|whoever)\b", re.IGNORECASE
)

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def found(paths: list[Path], offenders: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Mistakes by file: one test for all, since reading takes less time than a test of its own."""
    wrong = {str(path.relative_to(ROOT)): offenders(path.read_text()) for path in paths}
    return {path: names for path, names in wrong.items() if names}


def asked(text: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    named = [(getattr(node, "name", "the module"), ast.get_docstring(node) or "") for node in nodes]
    return [name for name, docstring in named if _QUESTION.match(docstring) or _DEFERRED.match(docstring)]


def asked_of_attributes(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    first = [line for before, line in zip(["", *lines], lines, strict=False) if not before.startswith("#:")]
    return [line for line in first if line.startswith("#: ") and _QUESTION.match(line[3:])]


def banned(text: str) -> list[str]:
    return sorted(set(_BANNED.findall(text)))


def banned_in_names_of_tests(text: str) -> list[str]:
    names = re.findall(r"def (test_\w+)", text)
    return [name for name in names if _BANNED.search(name.replace("_", " "))]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert found(MODULES, asked) == {}


def test_comments_on_attributes_begin_with_a_noun_or_a_verb() -> None:
    assert found(MODULES, asked_of_attributes) == {}


def test_words_that_have_a_better_one_are_not_used() -> None:
    assert found(MODULES, banned) == {}


def test_names_of_tests_use_the_same_words() -> None:
    assert found(TESTS, banned_in_names_of_tests) == {}


def test_an_operator_reads_no_words_of_our_own() -> None:
    """Old headings of the dashboard and of `top`, for which the field has words (reserved, batch, work)."""
    read = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "hetlb" / "cli").glob("*.py")]
    read += [path for path in (ROOT / "hetlb" / "options" / "dashboard").iterdir() if path.is_file()]
    old = re.compile(r"\bpromised\b|\bcoming s\b|Ideal batch|Work booked")
    assert any(path.suffix == ".js" for path in read)
    assert found(read, old.findall) == {}


def test_what_is_wrong_is_found() -> None:
    assert asked('def f():\n    """How it is done."""\n\nclass A:\n    """Where."""\n') == ["f", "A"]
    assert asked('def f():\n    """Have it done."""\n') == ["f"]
    assert asked_of_attributes("#: Seconds of\n#: What\nx = 1\n#: When it was.\n") == ["#: When it was."]
    assert banned("nobody told") == ["nobody"]
    name = "test_" + "fellows"
    assert banned_in_names_of_tests(f"def {name}() -> None: ...") == [name]
