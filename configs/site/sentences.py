"""Sentences that a user can see, from the code: `make reference` writes tests/sentences.txt.

A change of words is a change of that file, and so is seen in review. What stands in braces is filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "sentences.txt"
#: Heading, and the code with its sentences: files of hetlb/, or all files of a folder.
ROOMS = {
    "causes and states": (
        "balancer/admin/causes.py", "balancer/admin/rare_causes.py",
        "balancer/admin/fleet_status.py",
        "balancer/admin/dashboard/balance.py", "balancer/engines/engine_mistakes.py",
    ),
    "events of the log": (
        "balancer/exchange", "balancer/engines", "balancer/fleet", "balancer/telemetry", "options",
    ),
    "bodies of errors": (
        "balancer/http", "balancer/clients", "balancer/core/rejections.py", "balancer/admin",
    ),
    "mistakes in files": ("balancer/config", "inputs", "files.py"),
    "commands": ("cli", "tools/loadtest", "tools/profiler"),
}  # fmt: skip
#: Words of more than one letter that make a text a sentence; others are names, patterns and formats.
_WORD = re.compile(r"[A-Za-z][a-z']")
_LEAST_WORDS = 3
_FOR_PROGRAMMERS = {"ValueError", "RuntimeError", "TypeError", "AssertionError", "NotImplementedError"}
_PLACE = re.compile(r"\{[^}]*\}")
_NO_SENTENCE = re.compile(r"[\\^$]|\(\?")


def text_of(node: ast.expr) -> str | None:
    """Return the text of a literal, with `{…}` for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            each.value if isinstance(each, ast.Constant) else f"{{{_name(each)}}}" for each in node.values
        )
        return "".join(map(str, parts))
    return None


def _name(node: ast.expr) -> str:
    """Return the last name of what fills a place; the path to it may change and the words stay."""
    assert isinstance(node, ast.FormattedValue)
    value = node.value
    return (
        value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else "…"
    )


def _for_others(tree: ast.AST) -> set[int]:
    """Return the ids of nodes that no user sees: docstrings, parts of literals, texts of assertions."""
    found: set[int] = set()
    for node in ast.walk(tree):
        inner = isinstance(node, ast.Call) and getattr(node.func, "id", "") in _FOR_PROGRAMMERS
        if isinstance(node, ast.Assert) or inner:
            found.update(map(id, ast.walk(node)))
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            found.add(id(body[0].value))
        if isinstance(node, ast.JoinedStr):
            found.update(id(each) for part in node.values for each in ast.walk(part))
    return found


def sentences_of(path: Path) -> Iterator[str]:
    """Yield the sentences of a module."""
    tree = ast.parse(path.read_text())
    skipped = _for_others(tree)
    for node in ast.walk(tree):
        text = text_of(node) if isinstance(node, ast.expr) and id(node) not in skipped else None
        if text is None or not text.replace("\n", " ").isprintable() or _NO_SENTENCE.search(text):
            continue
        if len([each for each in _PLACE.sub("", text).split() if _WORD.search(each)]) >= _LEAST_WORDS:
            yield " ".join(text.split())


def page() -> str:
    """Return the text of the file."""
    lines = ["Made by `make reference`: sentences that a user can see. Read each change of it aloud."]
    for room, names in ROOMS.items():
        paths = [ROOT / "hetlb" / name for name in names]
        files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        lines += ["", f"== {room}", *sorted({each for file in files for each in sentences_of(file)})]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(page())
