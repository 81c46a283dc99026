"""The YAML reader of every file, and errors that name file, key, value and what was expected."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from hetlb.errors import ConfigError, ConfigErrors, InputError

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
#: Above 0, and 1 at most.
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_T = TypeVar("_T")


# --- reading YAML ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's floats (PyYAML reads `5e-8` as text) and no repeated keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)
             |[-+]?(?:[0-9][0-9_]*)\.[0-9_]*
             |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
             |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    seen: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int):
            raise yaml.MarkedYAMLError(problem="expected a plain key", problem_mark=key_node.start_mark)
        key = str(key)
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} stands here twice", problem_mark=key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def read_text(path: Path, error: type[InputError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as caught:
        raise error(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    except UnicodeDecodeError as caught:
        raise error(f"{path}: expected UTF-8 text, got byte {caught.object[caught.start]:#04x}") from caught


_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")


def _value_at(raw: Any, path: str) -> Any:
    """The value that msgspec's `.a[0].b` points at, or a marker where it cannot be followed."""
    for name, index in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
        try:
            raw = raw[name] if name else raw[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ...
    return raw


#: msgspec's names of types in the words of someone who writes YAML.
_PLAIN_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of keys",
    "null": "nothing",
}


def _keys_at(kind: Any, path: str) -> tuple[str, ...]:
    """The keys that the table at `path` of a `kind` may have."""
    for name, _ in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
        if name:
            kind = get_type_hints(kind)[name]
        for inner in get_args(kind):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                kind = inner
    fields: tuple[str, ...] = kind.__struct_fields__
    return fields


def _options_at(kind: Any, path: str) -> str:
    """The values that the `Literal` at `path` of a `kind` lists, in words."""
    table, _, key = path.rpartition(".")
    for name in re.findall(r"[^.\[\]]+", table):
        kind = get_type_hints(kind).get(name, kind)
        structs = [each for each in get_args(kind) if isinstance(each, type)]
        kind = next((each for each in structs if issubclass(each, msgspec.Struct)), kind)
    options = [str(each) for each in get_args(get_type_hints(kind)[key])]
    if options == ["1"] and key == "version":
        return "1, the only version there is"
    return " or ".join(options)


def explain_validation_error(caught: msgspec.ValidationError, raw: Any, kind: Any) -> str:
    """One `key: expected …, got …` phrase from msgspec's message and the data it complains about."""
    text = str(caught)
    match = _AT.search(text)
    path = match["path"].lstrip(".") if match else ""
    message = text[: match.start()] if match else text
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message):
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        keys = _keys_at(kind, match["path"] if match else "")
        return f"{key}: unknown key, expected one of {', '.join(keys)}{did_you_mean(unknown[1], keys)}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        key = f"{path}.{missing[1]}" if path else missing[1]
        return f"{key}: expected a value, but the key is missing"
    value = _value_at(raw, match["path"]) if match else raw
    if message.startswith("Invalid enum value"):
        options = _options_at(kind, path)
        return f"{path}: expected {options}, got {short(value)}{did_you_mean(value, options.split(' or '))}"
    expected = re.sub(r", got `.*`$", "", message)
    expected = re.sub(r"`(\w+)( \| \w+)*`", lambda m: _PLAIN_WORDS.get(m[1], m[1]), expected)
    expected = expected[:1].lower() + expected[1:]
    got = "" if value is ... else f", got {short(value)}"
    return f"{path or 'the file'}: {expected}{got}"


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """` (did you mean …?)` where one of `names` is close to what was given, else nothing."""
    close = difflib.get_close_matches(str(given), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def short(value: object) -> str:
    """`value` as Python writes it, in 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(raw: Any, kind: type[_T]) -> _T:
    """Plain data as a `kind`. Raises `ConfigError` naming key, value and what was expected."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as caught:
        raise ConfigError(explain_validation_error(caught, raw, kind)) from caught


def _mistakes(raw: Any, kind: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every value of `raw` that is no `kind`: msgspec's message, and where, `.models[0].name`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        origin, arguments = get_origin(arguments[0]), get_args(arguments[0])
    options = arguments if origin in (Union, types.UnionType) else (kind,)
    table = next(
        (each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct)), None
    )
    if table is not None and isinstance(raw, dict):
        hints = get_type_hints(table, include_extras=True)
        for key in raw:
            if key not in table.__struct_fields__:
                yield f"Object contains unknown field `{key}`", path
        for field in msgspec.structs.fields(table):
            if field.name in raw:
                yield from _mistakes(raw[field.name], hints[field.name], f"{path}.{field.name}")
            elif field.required:
                yield f"Object missing required field `{field.name}`", path
    elif origin is tuple and arguments[1:] == (...,) and isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _mistakes(item, arguments[0], f"{path}[{index}]")
    else:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as caught:
            message, _, inner = str(caught).partition(" - at `$")
            yield message, path + inner.rstrip("`")


def _lines_of(path: Path) -> dict[str, int]:
    """The lines of a YAML file on which its keys and items stand, by their paths: `models[0].name`."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, where: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{where}.{key.value}" if where else str(key.value)
                lines[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[f"{where}[{index}]"] = value.start_mark.line + 1
                walk(value, f"{where}[{index}]")

    with contextlib.suppress(yaml.YAMLError, RecursionError):
        node = yaml.compose(read_text(path, InputError), _Loader)
        if node is not None:
            walk(node, "")
    return lines


def with_lines(path: Path, mistakes: list[InputError]) -> InputError:
    """The mistakes of a file as one error: each with the line of its key, in the order of the lines."""
    lines = _lines_of(path)

    def line_of(text: str) -> int:
        begin = f"{path}: "
        key = text[len(begin) :].partition(": ")[0] if text.startswith(begin) else ""
        while key and key not in lines:
            key = re.sub(r"(\.[^.\[\]]*|\[[^\]]*\]|^[^.\[]+)$", "", key)
        return lines.get(key, 0)

    placed = [(line_of(str(each)), each) for each in mistakes]
    for line, each in placed:
        if line:
            each.args = (f"{each.args[0]} (line {line})", *each.args[1:])
    in_order = [each for _, each in sorted(placed, key=lambda pair: pair[0])]
    return in_order[0] if len(in_order) == 1 else ConfigErrors(in_order)


class Mistakes:
    """Mistakes that are looked for one after the other and told together."""

    def __init__(self) -> None:
        self.found: list[InputError] = []

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Keep the error of a check; the next check goes on."""
        try:
            yield
        except InputError as caught:
            self.found.append(caught)


def parse_yaml(path: Path, error: type[InputError]) -> Any:
    text = read_text(path, error)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as caught:
        mark = caught.problem_mark or caught.context_mark
        where = f" line {mark.line + 1}:" if mark else ""
        raise error(f"{path}:{where} expected valid YAML: {caught.problem or caught.context}") from caught
    except (yaml.YAMLError, ValueError, RecursionError) as caught:
        line = str(caught).splitlines()[0] if str(caught) else type(caught).__name__
        raise error(f"{path}: expected valid YAML: {line}") from caught


def load_yaml(path: Path, kind: type[_T], error: type[InputError]) -> _T:
    """Read `path` as a `kind`. Raises `error` with one line on anything that is not as expected."""
    raw = parse_yaml(path, error)
    if not isinstance(raw, dict):
        raise error(f"{path}: the file: expected a mapping of keys, got {short(raw)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as caught:
        found = [
            error(f"{path}: {explain_validation_error(_error(message, where), raw, kind)}")
            for message, where in _mistakes(raw, kind, "")
        ]
        whole = [error(f"{path}: {explain_validation_error(caught, raw, kind)}")]
        raise with_lines(path, list(found or whole)) from caught


def _error(message: str, where: str) -> msgspec.ValidationError:
    """A mistake as msgspec tells of it."""
    return msgspec.ValidationError(f"{message} - at `${where}`" if where else message)
