"""JSON schemas generated from the tables of files, for completion and checks in editors."""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec


def json_schema(*kinds: type) -> dict[str, Any]:
    """Schema (draft 2020-12) of a file that is one of `kinds`."""
    schemas, tables = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    top = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
    # Python caches `ge=0` and `ge=0.0` as one type; which one depends on the order of imports.
    schema: dict[str, Any] = json.loads(json.dumps(whole), parse_float=_number)
    return schema


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
