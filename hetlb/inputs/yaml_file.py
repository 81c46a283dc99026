"""YAML reader of all files: bounded, with line numbers in errors, typed by msgspec structs.

Data is built directly from parser events (libyaml's if PyYAML has it), so that documents that are too large,
too deep or expanded by aliases are refused before they are built.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import yaml

from hetlb.errors import ConfigError, ConfigErrors, InputError
from hetlb.files import read_text
from hetlb.inputs.mistakes import mistakes_in, short

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
#: Above 0, at most 1.
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_T = TypeVar("_T")

#: Limits of a file: bytes, values (with values repeated by aliases), levels, characters of a number.
MAX_FILE_BYTES: Final = 8 << 20
MAX_VALUES: Final = 200_000
MAX_LEVELS: Final = 32
_MAX_DIGITS: Final = 60

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX: Final = "tag:yaml.org,2002:"


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises `ConfigError`."""
    try:
        raw = json.loads(read_text(path, ConfigError, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as caught:
        raise ConfigError(f"{path}: expected valid JSON: {caught}") from caught
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file: expected a mapping of keys, got {short(raw)}")
    return raw


class _Resolver(yaml.resolver.Resolver):
    """PyYAML's resolver with the floats of YAML 1.2 (PyYAML reads `5e-8` as text)."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper that quotes text which the resolver takes for such a float."""


_FLOAT: Final = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _each in (_Resolver, _Dumper):
    _each.add_implicit_resolver(f"{_PREFIX}float", _FLOAT, list("-+0123456789"))
_resolver: Any = _Resolver()
_scalars = yaml.constructor.SafeConstructor()


def yaml_text(document: dict[str, Any]) -> str:
    """Dump a document as YAML, with flow style for lists and mappings of scalars."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Builder:
    """Builder of plain data from the events of a document; `lines` maps paths of keys to line numbers."""

    def __init__(self, text: str, *, lines: bool = False) -> None:
        self._parser = _Loader(text)
        self._keeps_lines = lines
        self.lines: dict[str, int] = {}
        self._values = 0
        #: Value of each anchor and its number of values.
        self._anchors: dict[str, tuple[Any, int]] = {}

    def build(self) -> Any:
        """Build the document's data. Raises `yaml.YAMLError`."""
        next_event, root = self._parser.get_event, None
        try:
            next_event()  # the stream begins
            if isinstance(next_event(), yaml.DocumentStartEvent):
                root = self._value(next_event(), "", 0)
                next_event()  # the document ends
                if not isinstance(event := next_event(), yaml.StreamEndEvent):
                    raise _wrong("expected a single document", event)
        finally:
            self._parser.dispose()
        return root

    def _value(self, event: Any, path: str, level: int) -> Any:
        """Build the value that starts with an event, at a nesting level."""
        before = self._values
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _wrong(f"expected the anchor of *{event.anchor} before it", event)
            value, count = self._anchors[event.anchor]
            self._count(count, event)
            return value
        self._count(1, event)
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif level == MAX_LEVELS:
            raise _wrong(f"expected at most {MAX_LEVELS} levels, got more", event)
        else:
            value = (self._list if isinstance(event, yaml.SequenceStartEvent) else self._mapping)(
                path, level + 1
            )
        if event.anchor is not None:
            self._anchors[event.anchor] = value, self._values - before
        return value

    def _count(self, values: int, event: Any) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise _wrong(f"expected at most {MAX_VALUES} values, got more", event)

    def _list(self, path: str, level: int) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := self._parser.get_event(), yaml.SequenceEndEvent):
            found.append(self._value(event, self._noted(f"{path}[{len(found)}]", event), level))
        return found

    def _mapping(self, path: str, level: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[Any] | None = None
        while not isinstance(event := self._parser.get_event(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise _wrong("expected a plain key", event)
            key = event.value
            merges = key == "<<" and event.implicit[0]
            if key in found or (merges and merged is not None):
                raise _wrong(f"the key {short(key)} stands here twice", event)
            at = self._noted(f"{path}.{key}" if path else key, event)
            value = self._value(self._parser.get_event(), at, level)
            if not merges:
                found[key] = value
                continue
            merged = value if isinstance(value, list) else [value]
            if not all(isinstance(each, dict) for each in merged):
                raise _wrong("expected a mapping, or a list of them, behind <<", event)
        for each in merged or ():
            for key, value in each.items():
                found.setdefault(key, value)
        return found

    def _noted(self, path: str, event: Any) -> str:
        """Record the line of a path and return it; "" if lines are not kept."""
        if not self._keeps_lines:
            return ""
        self.lines[path] = event.start_mark.line + 1
        return path


def _scalar(event: Any) -> Any:
    """Convert a scalar to text, a number, a boolean or None."""
    text, tag = event.value, event.tag
    if event.implicit[0]:
        tag = _resolver.resolve(yaml.ScalarNode, text, (True, False))
    elif tag is None or tag == "!":
        return text
    elif tag.removeprefix(_PREFIX) not in ("str", "int", "float", "bool", "null"):
        raise _wrong(f"expected no tag, got {short(tag)}", event)
    kind = tag.removeprefix(_PREFIX)
    if kind not in ("int", "float", "bool", "null") or len(text) > _MAX_DIGITS:
        return text
    try:
        value = _scalars.yaml_constructors[tag](_scalars, yaml.ScalarNode(tag, text))
    except (ValueError, KeyError, OverflowError) as caught:
        raise _wrong(f"expected a value of !!{kind}, got {short(text)}", event) from caught
    # 8e9 is an integer.
    if kind == "float" and abs(value) < 2**53 and value == int(value):
        return int(value)
    return value


def _wrong(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def parse_yaml(path: Path, error: type[InputError]) -> Any:
    """Read the plain data of a file. Raises `error`."""
    text = read_text(path, error, MAX_FILE_BYTES)
    try:
        return _Builder(text).build()
    except yaml.MarkedYAMLError as caught:
        mark = caught.problem_mark or caught.context_mark
        where = f" line {mark.line + 1}:" if mark else ""
        raise error(f"{path}:{where} expected valid YAML: {caught.problem or caught.context}") from caught
    except yaml.YAMLError as caught:
        line = str(caught).splitlines()[0] if str(caught) else type(caught).__name__
        raise error(f"{path}: expected valid YAML: {line}") from caught


def load_yaml(path: Path, kind: type[_T], error: type[InputError]) -> _T:
    """Read `path` as a `kind`. Raises `error` with one line per wrong value."""
    raw = parse_yaml(path, error)
    if not isinstance(raw, dict):
        got = "an empty file" if raw is None else short(raw)
        raise error(f"{path}: the file: expected a mapping of keys, got {got}")
    if found := [error(f"{path}: {each}") for each in mistakes_in(raw, kind)]:
        raise with_lines(path, list(found))
    return msgspec.convert(raw, kind)


def convert(raw: Any, kind: type[_T]) -> _T:
    """Convert plain data to a `kind`. Raises `ConfigError` naming key, value and expectation."""
    for each in mistakes_in(raw, kind):
        raise ConfigError(each)
    return msgspec.convert(raw, kind)


def with_lines(path: Path, mistakes: list[InputError]) -> InputError:
    """Combine the mistakes of a file into one error, with line numbers and in their order."""
    try:
        builder = _Builder(read_text(path, InputError, MAX_FILE_BYTES), lines=True)
        builder.build()
    except (yaml.YAMLError, InputError):
        return mistakes[0] if len(mistakes) == 1 else ConfigErrors(mistakes)

    def line_of(text: str) -> int:
        begin = f"{path}: "
        key = text[len(begin) :].partition(": ")[0] if text.startswith(begin) else ""
        while key and key not in builder.lines:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return builder.lines.get(key, 0)

    placed = [(line_of(str(each)), each) for each in mistakes]
    for line, each in placed:
        if line:
            each.args = (f"{each.args[0]} (line {line})", *each.args[1:])
    in_order = [each for _, each in sorted(placed, key=lambda pair: pair[0])]
    return in_order[0] if len(in_order) == 1 else ConfigErrors(in_order)
