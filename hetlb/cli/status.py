"""`hetlb status`: the fleet in one line, with an exit status for scripts."""

from __future__ import annotations

import argparse
import sys

from hetlb.cli.adminclient import AdminClient, add_admin_argument
from hetlb.cli.flags import add_json, print_document
from hetlb.errors import visible

#: Exit status by state; also 2 if no proxy answers.
EXITS = {"well": 0, "busy": 0, "degraded": 1, "down": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_argument(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status; 0 for well or busy, 1 for degraded, 2 for down or not reachable."""
    found = AdminClient(args.admin).document("/v1/status", "state", "sentence", "advice")
    print_document(
        args, found, lambda: print(visible(f"{found['state']}: {found['sentence']}. {found['advice']}"))
    )
    sys.stdout.flush()
    return EXITS[found["state"]]
