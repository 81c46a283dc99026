"""JSON schemas of files, made from the tables that read them: what editors complete and check."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec


def json_schema(*kinds: type) -> dict[str, Any]:
    """The schema (draft 2020-12) of files that are one of `kinds`."""
    schemas, tables = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    top = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
