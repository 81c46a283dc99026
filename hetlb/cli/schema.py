"""`hetlb schema`: the JSON schema of a kind of file, for editors."""

from __future__ import annotations

import argparse
import inspect
import json
from pkgutil import resolve_name
from typing import Any

import msgspec

#: Tables that a kind of file is read as.
KINDS = {
    "fleet": "balancer.config.fleet_tables:FleetFile",
    "profile": "options.profiles.profile_file:Profile",
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
    kinds = [resolve_name(f"hetlb.{KINDS[kind]}")]
    (top,), tables = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
    # Python caches `ge=0` and `ge=0.0` as one type; which one depends on the order of imports.
    schema: dict[str, Any] = json.loads(json.dumps(whole), parse_float=_number)
    return schema


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
