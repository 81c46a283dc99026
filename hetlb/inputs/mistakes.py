"""Error texts of files and requests: key, expectation, shortened value."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import reprlib
import types
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from hetlb.errors import InputError
from hetlb.inputs.gone import gone_key, gone_value

#: Most names listed in an error, and most errors reported of a file.
_LISTED = 20
_MOST_CHARACTERS = 1000
#: Bounds of the size of numbers other than 0: beyond them sums could overflow.
_LEAST, _MOST = 1e-100, 1e100

_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\]]*)\]")
#: msgspec's names of types in plain words.
_PLAIN_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of keys",
    "null": "nothing",
}
_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 2, 4, 4, 4
_short.maxstring = _short.maxlong = _short.maxother = 60


class Mistakes:
    """Collector of the errors of independent checks."""

    def __init__(self) -> None:
        self.found: list[InputError] = []

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Collect the error of a check instead of raising it."""
        try:
            yield
        except InputError as caught:
            self.add([caught])

    def add(self, errors: Iterable[InputError]) -> None:
        """Collect errors; more than twenty are not listed."""
        self.found += islice(errors, _LISTED - len(self.found))


def mistakes_in(raw: Any, kind: Any) -> list[str]:
    """`key: expected …, got …` for each value of `raw` that is no `kind`, the first twenty."""
    found = list(islice(_unusual_numbers(raw, ""), _LISTED))
    if not found:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as caught:
            found = list(islice(_invalid(raw, kind, ""), _LISTED)) or [_told(caught, raw, kind, "")]
    return [each if len(each) <= _MOST_CHARACTERS else f"{each[:_MOST_CHARACTERS]}..." for each in found]


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """` (did you mean …?)` where one of `names` is close to what was given, else nothing."""
    close = difflib.get_close_matches(str(given), list(names), n=1) if isinstance(given, str) else []
    return f" (did you mean {close[0]}?)" if close else ""


def listed(names: Collection[str]) -> str:
    """Return `a, b, c`, the first twenty of many."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(islice(names, _LISTED)) + more


def one_of(given: object, names: Collection[str]) -> str:
    """Return `expected one of a, b, got 'x' (did you mean a?)` for a name that is none of `names`."""
    return f"expected one of {listed(names)}, got {short(given)}{did_you_mean(given, names)}"


def short(value: object) -> str:
    """Representation of a value in at most 60 characters; only the start of a long one is read."""
    if isinstance(value, str) and len(value) > 60:
        return repr(value[:56])[:57] + "..."
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = _short.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unusual_numbers(raw: Any, path: str) -> Iterator[str]:
    """Errors of numbers that are infinite, NaN or out of range."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _unusual_numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            if not isinstance(value, str):
                yield from _unusual_numbers(value, f"{path}[{index}]")
    elif isinstance(raw, float | int) and raw and not _LEAST <= abs(raw) <= _MOST:
        finite = isinstance(raw, int) or math.isfinite(raw)
        expected = "0 or a size from 1e-100 to 1e100" if finite else "a finite number"
        yield f"{path or 'the file'}: expected {expected}, got {short(raw)}"


@cache
def _hints(table: type) -> dict[str, Any]:
    return get_type_hints(table, include_extras=True)


class _Shape(NamedTuple):
    """Forms that a type admits: a table, a list of items, a mapping of values; None for each it does not."""

    table: type[msgspec.Struct] | None
    items: Any
    values: Any


def _shape(kind: Any) -> _Shape:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    table = items = values = None
    for each in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        arguments = get_args(each)
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            table = each
        elif get_origin(each) is tuple and arguments[1:] == (...,):
            items = arguments[0]
        elif get_origin(each) is dict:
            values = arguments[1]
    return _Shape(table, items, values)


def _invalid(raw: Any, kind: Any, path: str) -> Iterator[str]:
    """`key: expected …, got …` for every value of `raw`, at a path like `models[0]`, that is no `kind`."""
    table, items, values = _shape(kind)
    before = f"{path}." if path else ""
    if table is not None and isinstance(raw, dict):
        known = table.__struct_fields__
        for key in raw:
            if key not in known:
                if (gone := gone_key(before + key)) is not None:
                    yield gone
                    continue
                given = key if len(key) <= 60 else f"{key[:57]}..."
                expected = f"unknown key, expected one of {', '.join(known)}{did_you_mean(given, known)}"
                yield f"{before}{given}: {expected}"
        for field in msgspec.structs.fields(table):
            if field.name in raw:
                yield from _invalid(raw[field.name], _hints(table)[field.name], f"{before}{field.name}")
            elif field.required:
                yield f"{before}{field.name}: expected a value, but the key is missing"
    elif items is not None and isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _invalid(item, items, f"{path}[{index}]")
    elif values is not None and isinstance(raw, dict):
        for key, item in raw.items():
            yield from _invalid(item, values, f"{before}{key}")
    else:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as caught:
            yield gone_value(path, raw) or _told(caught, raw, kind, path)


def _told(error: msgspec.ValidationError, raw: Any, kind: Any, path: str) -> str:
    """`key: expected …, got …` of what msgspec says about the value at a path, or one inside it."""
    message, _, inner = str(error).partition(" - at `$")
    for name, index in _STEP.findall(inner):
        try:
            raw = raw[name] if name else raw[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            raw = ...
    path = (path + inner.rstrip("`")).lstrip(".") or "the file"
    if message.startswith("Invalid enum value"):
        options = [str(each) for each in get_args(kind)]
        only = ", the only version there is" if options == ["1"] and path == "version" else ""
        return f"{path}: expected {' or '.join(options)}{only}, got {short(raw)}{did_you_mean(raw, options)}"
    expected = re.sub(r", got `.*`$", "", message)
    expected = re.sub(r"`(\w+)( \| \w+)*`", lambda m: _PLAIN_WORDS.get(m[1], m[1]), expected)
    got = "" if raw is ... else f", got {short(raw)}"
    return f"{path}: {expected[:1].lower()}{expected[1:]}{got}"
