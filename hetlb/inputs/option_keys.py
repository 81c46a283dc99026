"""Keys of the fleet file that options read: how an option adds its tables.

A key `Annotated[TYPE, of("split")]` is for the option `split`, whose package may have

- `TABLES`: the types of its keys by name, where the type here is `Any`;
- `mistakes(fleet)`: yields a line for each of its keys that cannot be, of a fleet whose instances are known;
- `check_serving(fleet)`: raises `ConfigError` unless all is there that serving with its keys needs.

Nothing of an option is imported for a file without its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final, get_args

import msgspec

from hetlb.errors import ConfigError
from hetlb.extras import option

_OWNER: Final = "option"


def of(name: str) -> msgspec.Meta:
    """Return the mark of a key that an option reads."""
    return msgspec.Meta(extra={_OWNER: name})


def owner_of(kind: Any) -> str:
    """Return the option that reads keys of a type, "" for a key of the balancer."""
    marks = getattr(kind, "__metadata__", ())
    return next((each.extra[_OWNER] for each in marks if each.extra and _OWNER in each.extra), "")


def table_of(key: str, kind: Any) -> Any:
    """Return the type of a key: its option's where the option has one. Raises `ConfigError` without it."""
    owner = owner_of(kind)
    return option(owner).TABLES[key] if owner and get_args(kind)[0] is Any else kind


class FileTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table some of whose keys options read: each converts the values of its own keys."""

    def __post_init__(self) -> None:
        for field in _marked(type(self)):
            if get_args(field.type)[0] is Any and _stated(self, field):
                try:
                    kind = table_of(field.name, field.type)
                except ConfigError:  # `stated_keys` tells of it
                    continue
                value = msgspec.convert(getattr(self, field.name), kind)
                msgspec.structs.force_setattr(self, field.name, value)


@cache
def _marked(table: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the keys of a table that options read."""
    return tuple(each for each in msgspec.structs.fields(table) if owner_of(each.type))


def _stated(table: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a key of a table has another value than its default; `{}` is a factory."""
    default = field.default if field.default is not msgspec.NODEFAULT else {}
    return bool(getattr(table, field.name) != default)


def stated_keys(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and option of each key in a table that an option reads and whose value is no default."""
    if isinstance(value, msgspec.Struct):
        for field in _marked(type(value)):
            if _stated(value, field):
                yield f"{path}.{field.name}".lstrip("."), owner_of(field.type)
        for name in value.__struct_fields__:
            yield from stated_keys(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from stated_keys(each, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from stated_keys(each, f"{path}[{index}]")


def options_of(file: msgspec.Struct) -> dict[str, ModuleType]:
    """Return the options whose keys a file states. Raises `ConfigError` naming the key of a missing one."""
    found: dict[str, ModuleType] = {}
    for path, name in stated_keys(file):
        if name not in found:
            try:
                found[name] = option(name)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
    return found
