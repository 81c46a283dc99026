"""Lint of names and words: one name for one thing, the field's words, no pronoun in place of a noun.

That a function's docstring begins with an imperative verb is ruff's D401.
`python bench/check_words.py`; `make check` runs it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Folders whose docstrings and comments are read for pronouns.
ROOMS = ("hetlb", "tests", "bench", "configs", "profiling")
_QUESTION = re.compile(r"(What|Who|Whose|Whom|Where|When|How|Which|Whether|Why|Was|Were|Is|Are)\b")
#: Beginnings that put off the thing itself.
_DEFERRED = re.compile(r"(About|As|Be|By|From|Have|Of|So (many|much|long)|Some|Until)\b")
#: Beginnings of a function's docstring that lack "Return".
_RESULT = re.compile(
    r"(All|Another|Bytes|Each|Every|JSON|Keys|Least|Lines|Mean|Most|Names|One|Reason|Requests/s|Seconds|Share"
    r"|Text|Time|Tokens(/s)?|Value)\b"
)
#: Old names of things that have a name in the field, and words for people that stood for requests.
_BANNED = re.compile(
    r"\b(anybody|beginnings|everybody|fellows?|nobody|onward|somebody|untold|whoever)\b", re.IGNORECASE
)
#: Words that stand for a noun which the reader must then guess.
_PRONOUN = re.compile(r"\b(those|so (?:many|much)|that of|by (?:what|which))\b", re.IGNORECASE)
#: End of a line and the beginning of the next one, of a comment too.
_LINE_END = re.compile(r"\s*\n\s*(#:? ?)?")
#: Old headings of the dashboard and of `top`, for which the field has words (reserved, batch, work).
_OLD_HEADINGS = re.compile(r"\bpromised\b|\bcoming s\b|Ideal batch|Work booked")


def prose(text: str) -> str:
    """Return the docstrings and comments of a module."""
    found = [
        ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(found)


def pronouns(text: str) -> Iterator[str]:
    """Yield the pronouns of a text, each with the words around it."""
    text = " ".join(text.split())
    for found in _PRONOUN.finditer(text):
        yield f"name the thing: ...{text[max(0, found.start() - 30) : found.end() + 30].strip()}..."


def of_module(text: str) -> Iterator[str]:
    """Yield the mistakes of a module's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            rules = [_QUESTION, _DEFERRED]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
                rules.append(_RESULT)
            if any(rule.match(docstring) for rule in rules):
                yield f"{getattr(node, 'name', 'the module')}: docstring begins with {docstring.split()[0]!r}"
    before = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("#: ") and not before.startswith("#:") and _QUESTION.match(line[3:]):
            yield f"comment begins with {line.split()[1]!r}"
        before = line
    for word in sorted(set(_BANNED.findall(text))):
        yield f"the word {word!r}"


def of_tests(text: str) -> Iterator[str]:
    """Yield the mistakes in the names of tests."""
    for name in re.findall(r"def (test_\w+)", text):
        words = name.replace("_", " ")
        if found := _BANNED.search(words) or _PRONOUN.search(words):
            yield f"{name}: the word {found[0]!r}"


def of_pages(text: str) -> Iterator[str]:
    """Yield the mistakes of a page that operators read."""
    for heading in _OLD_HEADINGS.findall(text):
        yield f"the old heading {heading!r}"


def of_prose(text: str) -> Iterator[str]:
    """Yield the pronouns in the docstrings and comments of a module."""
    # Most modules have none in any line: to look for comments costs twenty times as much.
    if _PRONOUN.search(_LINE_END.sub(" ", text)):
        yield from pronouns(prose(text))


def of_messages(text: str) -> Iterator[str]:
    """Yield the pronouns in the messages of a module: strings that are no docstrings."""
    tree = ast.parse(text)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield from pronouns(node.value)


def shared_names(modules: list[Path]) -> Iterator[str]:
    """Yield the names that two public classes or two files have."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        where = str(path.relative_to(ROOT))
        if path.name != "__init__.py":
            places[f"file {path.name}"].append(where)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[f"class {node.name}"].append(where)
    for name, found in places.items():
        if len(found) > 1:
            yield f"{name} stands in {' and '.join(found)}"


def main() -> int:
    """Print every mistake; return 1 where there is one."""
    modules = sorted((ROOT / "hetlb").rglob("*.py"))
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "hetlb" / "cli").glob("*.py")]
    pages += [
        path for path in (ROOT / "hetlb" / "balancer" / "admin" / "dashboard").iterdir() if path.is_file()
    ]
    docs = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    sources = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    wrong = list(shared_names(modules))
    for paths, rule in (
        (modules, of_module), (sorted((ROOT / "tests").rglob("test_*.py")), of_tests), (pages, of_pages),
        (docs, pronouns), (sources, of_prose), (modules, of_messages),
    ):  # fmt: skip
        wrong += [
            f"{path.relative_to(ROOT)}: {mistake}" for path in paths for mistake in rule(path.read_text())
        ]
    for mistake in wrong:
        print(mistake)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
