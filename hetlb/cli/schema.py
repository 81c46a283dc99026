"""`hetlb schema`: the JSON schema of a kind of file, for editors."""

from __future__ import annotations

import argparse
import json

from hetlb.config.json_schema import json_schema

#: Kinds of files; `cluster` is what `search` reads, and what `split` does.
KINDS = ("fleet", "profile", "market", "cluster", "place")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb schema`."""
    parser.add_argument("kind", choices=KINDS, help="kind of file")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(json_schema(*tables(args.kind)), indent=2, ensure_ascii=False))
    return 0


def tables(kind: str) -> tuple[type, ...]:
    """The tables that a kind of file is read as."""
    if kind == "fleet":
        from hetlb.config.fleet_tables import FleetFile

        return (FleetFile,)
    if kind == "profile":
        from hetlb.config.profile_file import Profile

        return (Profile,)
    if kind == "market":
        from hetlb.plan.market import MarketFile

        return (MarketFile,)
    if kind == "place":
        from hetlb.config.place_file import PlaceFile

        return (PlaceFile,)
    from hetlb.config.cluster import ClusterFile
    from hetlb.plan.disaggregation.split_files import SplitFile

    return ClusterFile, SplitFile
