"""JSON schemas of files, made from the tables that read them: what editors complete and check."""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec


def json_schema(*kinds: type) -> dict[str, Any]:
    """The schema (draft 2020-12) of files that are one of `kinds`."""
    schemas, tables = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    top = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
    # `ge=0` and `ge=0.0` are one type to Python: which of them stays depends on what was imported first.
    schema: dict[str, Any] = json.loads(json.dumps(whole), parse_float=_number)
    return schema


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
