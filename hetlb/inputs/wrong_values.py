"""Each value of a document that is not of its table's kind, in words; imported where there is one."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from hetlb.inputs.mistakes import did_you_mean, short

_STEP = re.compile(r"\.([^.\[\]]++)|\[([^\[\]]*+)\]")
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


@cache
def _kinds(table: type) -> dict[str, Any]:
    """Return the types of a table's keys."""
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


def invalid(raw: Any, kind: Any, path: str) -> Iterator[str]:
    """Yield `key: expected …, got …` for values of `raw`, at a path like `models[0]`, that are no `kind`."""
    table, items, values = _shape(kind)
    before = f"{path}." if path else ""
    if table is not None and isinstance(raw, dict):
        known = table.__struct_fields__
        for key in raw:
            if key not in known:
                given = key if len(key) <= 60 else f"{key[:57]}..."
                expected = f"unknown key, expected one of {', '.join(known)}{did_you_mean(given, known)}"
                yield f"{before}{given}: {expected}"
        for field in msgspec.structs.fields(table):
            if field.name in raw:
                yield from invalid(raw[field.name], _kinds(table)[field.name], f"{before}{field.name}")
            elif field.required:
                yield f"{before}{field.name}: expected a value, but the key is missing"
    elif items is not None and isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from invalid(item, items, f"{path}[{index}]")
    elif values is not None and isinstance(raw, dict):
        for key, item in raw.items():
            yield from invalid(item, values, f"{before}{key}")
    else:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as caught:
            yield told(caught, raw, kind, path)


def _options(kind: Any) -> Iterator[object]:
    """Yield the values of a type: of its literals, and words for a table beside them."""
    for each in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            yield "a mapping of keys"
        elif get_origin(each) is Literal:
            yield from get_args(each)
        elif each is bool:
            yield from ("true", "false")


def _described(kind: Any) -> str:
    """Return the words for a pattern, "" without some."""
    for each in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        for meta in get_args(each)[1:] if get_origin(each) is Annotated else ():
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return ""


def told(error: msgspec.ValidationError, raw: Any, kind: Any, path: str) -> str:
    """Return `key: expected …, got …` of what msgspec says about the value at a path, or one inside it."""
    message, _, inner = str(error).partition(" - at `$")
    for name, index in _STEP.findall(inner):
        try:
            raw = raw[name] if name else raw[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            raw = ...
    path = (path + inner.rstrip("`")).lstrip(".") or "the file"
    if message.startswith("Invalid enum value"):
        options = [str(each) for each in _options(kind)]
        only = ", the only version there is" if options == ["1"] and path == "version" else ""
        return f"{path}: expected {' or '.join(options)}{only}, got {short(raw)}{did_you_mean(raw, options)}"
    expected = message.partition(", got `")[0]
    if " matching regex " in expected and (words := _described(kind)):
        expected = f"expected {words}"
    expected = re.sub(r"`(\w++)(?: \| \w++)*`", lambda m: _PLAIN_WORDS.get(m[1], m[1]), expected)
    got = "" if raw is ... else f", got {short(raw)}"
    return f"{path}: {expected[:1].lower()}{expected[1:]}{got}"
