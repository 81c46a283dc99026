"""`hetlb schema`: the JSON schema of a kind of file, for editors."""

from __future__ import annotations

import argparse
import json
from pkgutil import resolve_name

from hetlb.config.json_schema import json_schema

#: Tables that a kind of file is read as. `cluster` is what `search` reads, and what `split` does.
KINDS = {
    "fleet": ("config.fleet_tables:FleetFile",),
    "profile": ("config.profile_file:Profile",),
    "market": ("plan.market:MarketFile",),
    "cluster": ("config.cluster:ClusterFile", "plan.disaggregation.split_files:SplitFile"),
    "place": ("config.place_file:PlaceFile",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb schema`."""
    parser.add_argument("kind", choices=tuple(KINDS), help="kind of file")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(json_schema(*tables(args.kind)), indent=2, ensure_ascii=False))
    return 0


def tables(kind: str) -> tuple[type, ...]:
    """Tables that a kind of file is read as."""
    return tuple(resolve_name(f"hetlb.{each}") for each in KINDS[kind])
