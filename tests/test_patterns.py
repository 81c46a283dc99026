"""Every regular expression of hetlb reads any text in linear time: by its form, and by measurement.

By its form: a repeat that gives back what it took stands in no other repeat, and before no other one of the
same characters. By measurement: each is given texts made of its own parts, of n and 8 n characters.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest
from fuzz import costs

ROOT = Path(__file__).parents[1]
_AT_ONE_PLACE = {"match", "fullmatch"}
_ANYWHERE = {"search", "sub", "subn", "split", "findall", "finditer"}
#: A repeat of at most this many is none here.
_FEW = 20
_OTHER = 256
_ALL = frozenset(range(_OTHER + 1))
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
#: Expressions of no constant text, by module and line's text: the reason why they are not read here.
_MADE = {
    "hetlb/tools/models/quantization.py": "globs, which `fnmatch` makes atomic",
}
#: Tables whose first column has expressions, by module.
_TABLES = {"hetlb/balancer/engines/engine_mistakes.py": "_STEPS"}


class Found(NamedTuple):
    """An expression in the code: `anywhere` if a text is searched for it."""

    place: str
    text: str | bytes
    flags: int
    anywhere: bool


def _is_re(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"


def _module(name: str) -> Any:
    return importlib.import_module(name.removesuffix(".py").replace("/", "."))


#: Texts of the modules that have an expression, or a pattern of `msgspec.Meta`.
_SOURCES = {
    path.relative_to(ROOT).as_posix(): source
    for path in sorted((ROOT / "hetlb").rglob("*.py"))
    if re.search(r"\bre\.\w|pattern=", source := path.read_text())
}


@functools.cache
def _searched() -> frozenset[str]:
    """Return the names of which something in hetlb searches a text, or splits it."""
    expression = re.compile(rf"\b(\w+)\.(?:{'|'.join(_ANYWHERE)})\b")
    paths = (ROOT / "hetlb").rglob("*.py")
    return frozenset(name for path in paths for name in expression.findall(path.read_text()))


def found(name: str) -> Iterator[Found]:
    """Yield every expression of a module."""
    nodes = list(ast.walk(ast.parse(_SOURCES[name])))
    assigned = {
        node.value: target.id
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        for each in node.keywords if isinstance(node, ast.Call) else ():
            if each.arg == "pattern":  # of `msgspec.Meta`, which searches
                assert isinstance(each.value, ast.Constant), f"{name}: expected a constant pattern"
                yield Found(f"{name}:{each.value.lineno}", str(each.value.value), 0, True)
        if not (isinstance(node, ast.Call) and _is_re(node.func)):
            continue
        function = node.func.attr  # type: ignore[attr-defined]
        if function not in _AT_ONE_PLACE | _ANYWHERE | {"compile"}:
            continue
        place = f"{name}:{node.lineno}"
        if function == "compile" and node in assigned:
            pattern = getattr(_module(name), assigned[node])
            yield Found(place, pattern.pattern, pattern.flags, assigned[node] in _searched())
        elif isinstance(node.args[0], ast.Constant):
            text: Any = node.args[0].value
            yield Found(place, text, 0, function in _ANYWHERE)
        elif name in _TABLES:
            for words, *_ in getattr(_module(name), _TABLES[name]):
                yield Found(f"{place} {words}", words, 0, function in _ANYWHERE)
        else:
            assert name in _MADE, f"{place}: expected an expression that is read here, or a reason"


def _chars(code: Any, value: Any, flags: int) -> frozenset[int]:
    """Return the characters that a node of one character takes."""
    if code is codes.ANY:
        return _ALL if flags & re.DOTALL else _ALL - {10}
    if code is codes.LITERAL:
        both = {value, ord(chr(value).swapcase())} if flags & re.IGNORECASE and value < 128 else {value}
        return frozenset(min(each, _OTHER) for each in both)
    if code is codes.NOT_LITERAL:
        return _ALL - {value}
    taken: set[int] = set()
    negated = False
    for kind, part in value:
        if kind is codes.NEGATE:
            negated = True
        elif kind is codes.RANGE:
            taken.update(range(min(part[0], _OTHER), min(part[1], _OTHER) + 1))
        elif kind is codes.LITERAL:
            taken.add(min(part, _OTHER))
        else:
            one = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[str(part).rpartition("_")[2]]
            inside = {at for at in range(_OTHER) if re.match(one, chr(at))} | (
                {_OTHER} if one == r"\w" else set()
            )
            taken.update(_ALL - inside if "NOT" in str(part) else inside)
    return _ALL - taken if negated else frozenset(taken)


class Form:
    """Form of one expression; `wrong` has what is to be changed."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self.wrong: list[str] = []
        self._flags = flags
        self._read(
            list(_parser.parse(text, flags & ~re.UNICODE if isinstance(text, str) else flags)),
            frozenset(),
            False,
        )

    def _read(self, nodes: Sequence[Any], before: frozenset[int], inside: bool) -> frozenset[int]:
        """Read nodes behind a repeat that may give back characters `before`; return that set behind them."""
        for code, value in nodes:
            before = self._node(code, value, before, inside)
        return before

    def _node(self, code: Any, value: Any, before: frozenset[int], inside: bool) -> frozenset[int]:
        if code in _REPEATS:
            least, most, body = value
            if most <= _FEW or least == most:
                after = self._read(body, before, inside)
                return after | (before if not least else frozenset())
            if inside:
                self.wrong.append("a repeat in a repeat")
            first = self._all(body)
            if before & first:
                self.wrong.append("a repeat behind a repeat of the same characters")
            self._read(body, frozenset(), True)
            return first | (before if not least else frozenset())
        if code is codes.POSSESSIVE_REPEAT:
            return before if not value[0] else frozenset()
        if code is codes.ATOMIC_GROUP:
            return frozenset()
        if code is codes.SUBPATTERN:
            return self._read(value[3], before, inside)
        if code is codes.BRANCH:
            return frozenset().union(*(self._read(each, before, inside) for each in value[1]))
        if code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT, codes.GROUPREF):
            return before
        return frozenset()

    def _all(self, nodes: Sequence[Any]) -> frozenset[int]:
        """Return all characters that nodes may take."""
        taken: frozenset[int] = frozenset()
        for code, value in nodes:
            if code in (*_REPEATS, codes.POSSESSIVE_REPEAT):
                taken |= self._all(value[2])
            elif code is codes.SUBPATTERN:
                taken |= self._all(value[3])
            elif code is codes.ATOMIC_GROUP:
                taken |= self._all(value)
            elif code is codes.BRANCH:
                taken = taken.union(*(self._all(each) for each in value[1]))
            elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT, codes.GROUPREF):
                taken |= _chars(code, value, self._flags)
        return taken


@pytest.mark.parametrize("module", _SOURCES)
def test_no_repeat_gives_back_what_another_may_take(module: str) -> None:
    for each in found(module):
        assert not Form(each.text, each.flags).wrong, f"{each.place}: {each.text!r}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (r"(a+)+", True), (r"\s*\s*x", True), (r"\s*(?:x)?\s*y", True), (r"[ab]*[bc]*d", True),
        (r"(a*b)*", True),
        (r"(?:a++b)*", False), (r"\s*+\s*x", False), (r"[ab]*c[ab]*", False), (r"a{2}b?[0-9]+", False),
        (r"(?:[^\"\\]++|\\.)*+\"", False), (r".*x.*", False), (r"a*(?:b|a*)c", True), (r"(?>a*)a*", False),
    ],
)  # fmt: skip
def test_the_forms_that_are_told_apart(text: str, wrong: bool) -> None:
    assert bool(Form(text, 0).wrong) is wrong


def _samples(nodes: Sequence[Any], flags: int) -> Iterator[tuple[str, str]]:
    """Yield a text that leads to each repeat, and one that the repeat takes once; last the whole and ""."""
    text = ""
    for code, value in nodes:
        if code in (*_REPEATS, codes.POSSESSIVE_REPEAT):
            once = ""
            for before, unit in _samples(value[2], flags):
                yield text + before, unit
                once = before
            yield text, once
            text += once * max(1, min(value[0], 40))
        elif code in (codes.SUBPATTERN, codes.ATOMIC_GROUP):
            inner = value[3] if code is codes.SUBPATTERN else value
            last = ""
            for before, unit in _samples(inner, flags):
                yield text + before, unit
                last = before
            text += last
        elif code is codes.BRANCH:
            last = ""
            for alternative in value[1]:
                for before, unit in _samples(alternative, flags):
                    yield text + before, unit
                    last = before
            text += last
        elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT, codes.GROUPREF):
            taken = _chars(code, value, flags)
            text += next((chr(at) for at in (97, 48, 32, 34, *range(33, 256)) if at in taken), "a")
    yield text, ""


def _hostile(each: Found) -> Iterator[tuple[str, str, str]]:
    """Yield texts for an expression: a beginning, a unit that is repeated, an end that fits nothing."""
    for before, unit in set(_samples(list(_parser.parse(each.text, each.flags & ~re.UNICODE)), each.flags)):
        if unit:
            yield before, unit, "\x00\n"
            yield before, unit, ""
        elif before:
            yield "", before, "\x00\n"
            yield "", before[:-1] or before, "\x00\n"
    for unit in (" ", "a", '"', "\\", "{", "[", ",", "=", "\n", "0"):
        yield "", unit, "\x00"


def _read(pattern: Any, each: Found, data: bytes) -> None:
    text: Any = data if isinstance(each.text, bytes) else data.decode("latin-1")
    if each.anywhere:
        for _ in pattern.finditer(text):
            pass
    else:
        pattern.match(text)
        pattern.fullmatch(text)


@pytest.mark.parametrize("module", _SOURCES)
def test_eight_times_the_text_costs_eight_times_as_much(module: str) -> None:
    """What costs the square is 64 times as much."""
    pass_s = costs.pass_s(8 * SIZE)
    for each in found(module):
        pattern: Any = re.compile(each.text, each.flags)
        read = functools.partial(_read, pattern, each)
        for before, unit, after in _hostile(each):
            make = costs.many(unit.encode("latin-1"), before.encode("latin-1"), after.encode())
            small, large = make(SIZE), make(8 * SIZE)
            if costs.cost_s(read, large, 1) > 2 * pass_s:
                assert costs.growth(read, small, large) <= costs.MOST_GROWTH, (
                    f"{each.place}: {each.text!r}: {before!r}, {unit!r} * n, {after!r}"
                )


def test_expressions_are_found() -> None:
    """A floor: a reader of the modules that finds nothing would hold for everything."""
    assert sum(len(list(found(name))) for name in _SOURCES) > 100


SIZE = 1500
