"""`hetlb schema`: the JSON schema of a kind of file, for editors."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import msgspec

from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.plan.cluster import ClusterFile
from hetlb.tools.plan.market import MarketFile
from hetlb.tools.plan.placement.place_file import PlaceFile
from hetlb.tools.stage.stages_file import StagesFile

#: Tables that the kinds of files are read as.
KINDS: dict[str, type[msgspec.Struct]] = {
    "fleet": FleetFile,
    "profile": Profile,
    "market": MarketFile,
    "cluster": ClusterFile,
    "place": PlaceFile,
    "stages": StagesFile,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), help="kind of file")


def run(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(args.kind), indent=2, ensure_ascii=False))
    return 0


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a kind of file."""
    (top,), tables = msgspec.json.schema_components([KINDS[kind]], ref_template="#/$defs/{name}")
    for table in tables.values():
        if "description" in table:
            table["description"] = inspect.cleandoc(table["description"])
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": tables}
    # Python caches `ge=0` and `ge=0.0` as one type; which one depends on the order of imports.
    schema: dict[str, Any] = json.loads(json.dumps(document), parse_float=_number)
    return schema


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
