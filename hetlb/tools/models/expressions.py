"""Regular expressions of a model's file, matched in a time that no expression makes long.

`re` tries one way after another: `(a+)+$` takes hours. Here all ways go together: what is kept are the places
in a name that an expression can have reached, at most one for each character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

#: Maximum characters of an expression and of a name, and depth of repeats within repeats.
MAX_CHARACTERS: Final = 1024
_MAX_DEPTH: Final = 2
_REPEATS: Final = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_CLASSES: Final[dict[Any, Callable[[str], bool]]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda each: not each.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda each: not each.isspace(),
    codes.CATEGORY_WORD: lambda each: each.isalnum() or each == "_",
    codes.CATEGORY_NOT_WORD: lambda each: not (each.isalnum() or each == "_"),
}


class Expression:
    """Literals, classes, groups, alternatives, repeats, `^` and `$`. Raises `ValueError` for others."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"more than {MAX_CHARACTERS} characters")
        try:
            parsed = _parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags")
        self._nodes: list[Any] = list(parsed)
        _check(self._nodes, 0)

    def match(self, name: str) -> bool:
        """Return True if a name begins as the expression says."""
        return bool(_reached(self._nodes, name[:MAX_CHARACTERS], {0}))


def _check(nodes: Iterable[Any], depth: int) -> None:
    """Raise `ValueError` for a part of an expression that `Expression` does not support."""
    for code, value in nodes:
        if code in _REPEATS:
            if depth == _MAX_DEPTH:
                raise ValueError(f"more than {_MAX_DEPTH} repeats within each other")
            _check(value[2], depth + 1)
        elif code is codes.SUBPATTERN:
            if value[1] or value[2]:
                raise ValueError("flags")
            _check(value[3], depth)
        elif code is codes.BRANCH:
            for each in value[1]:
                _check(each, depth)
        elif code is codes.AT:
            if value not in (codes.AT_BEGINNING, codes.AT_END):
                raise ValueError("boundaries")
        elif code not in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            raise ValueError(str(code).lower().replace("_", " "))


def _reached(nodes: Iterable[Any], name: str, places: set[int]) -> set[int]:
    """Return the places reached behind these nodes from some places."""
    for code, value in nodes:
        if not places:
            break
        if code in _REPEATS:
            places = _repeated(value[0], value[1], value[2], name, places)
        elif code is codes.SUBPATTERN:
            places = _reached(value[3], name, places)
        elif code is codes.BRANCH:
            places = set().union(*(_reached(each, name, places) for each in value[1]))
        elif code is codes.AT:
            end = (0, 0) if value is codes.AT_BEGINNING else (len(name), len(name) - name.endswith("\n"))
            places = places.intersection(end)
        else:
            places = {at + 1 for at in places if at < len(name) and _takes(code, value, name[at])}
    return places


def _repeated(least: int, most: int, nodes: list[Any], name: str, places: set[int]) -> set[int]:
    for _ in range(least):
        before, places = places, _reached(nodes, name, places)
        if places == before:
            break  # empty, or an empty repeat: more of them change nothing
    found, new, count = set(places), places, least
    while new and count < most:
        new = _reached(nodes, name, new) - found
        found |= new
        count += 1
    return found


def _takes(code: Any, value: Any, each: str) -> bool:
    """Return True if a node of one character takes this one."""
    if code is codes.ANY:
        return each != "\n"
    if code is not codes.IN:
        return (ord(each) == value) is (code is codes.LITERAL)
    negated = value[0][0] is codes.NEGATE
    return negated is not any(_within(item, each) for item in value[negated:])


def _within(item: tuple[Any, Any], each: str) -> bool:
    code, value = item
    if code is codes.LITERAL:
        return bool(ord(each) == value)
    if code is codes.RANGE:
        return bool(value[0] <= ord(each) <= value[1])
    return _CLASSES[value](each)
