"""`hetlb schema`: the JSON schema of a kind of file, for editors."""

from __future__ import annotations

import argparse
import inspect
import json
import types
from functools import cache, reduce
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from hetlb.inputs.option_keys import table_of

#: Tables that a kind of file is read as.
KINDS = {
    "fleet": "balancer.config.fleet_tables:FleetFile",
    "profile": "balancer.config.profile_file:Profile",
    "market": "tools.plan.market:MarketFile",
    "cluster": "tools.plan.cluster:ClusterFile",
    "place": "tools.plan.placement.place_file:PlaceFile",
    "stages": "tools.stage.stages_file:StagesFile",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), help="kind of file")


def run(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(args.kind), indent=2, ensure_ascii=False))
    return 0


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a kind of file."""
    kinds = [whole(resolve_name(f"hetlb.{KINDS[kind]}"))]
    (top,), tables = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
    # Python caches `ge=0` and `ge=0.0` as one type; which one depends on the order of imports.
    schema: dict[str, Any] = json.loads(json.dumps(document), parse_float=_number)
    return schema


def whole(kind: Any) -> Any:
    """Return a type with the tables of options in the place of `Any`, in all tables in it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _whole_table(kind)
    if not (arguments := get_args(kind)) or get_origin(kind) is Literal:
        return kind
    if get_origin(kind) is Annotated:
        return Annotated[(whole(arguments[0]), *arguments[1:])]
    if get_origin(kind) in (Union, types.UnionType):
        return reduce(or_, map(whole, arguments))
    return get_origin(kind)[tuple(each if each is ... else whole(each) for each in arguments)]


@cache
def _whole_table(table: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints, fields = get_type_hints(table, include_extras=True), []
    for field in msgspec.structs.fields(table):
        kind = table_of(field.name, hints[field.name])
        default: Any = field.default
        if default is None and isinstance(kind, type):
            default = kind()  # a table whose keys all have defaults
        elif field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        fields.append((field.name, whole(kind), *(() if default is msgspec.NODEFAULT else (default,))))
    return msgspec.defstruct(
        table.__name__,
        fields,
        namespace={"__doc__": table.__doc__},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
