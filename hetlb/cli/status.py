"""`hetlb status`: the fleet in one line, with an exit status for scripts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hetlb.cli.adminclient import DEFAULT_URL, add_token_argument, admin_url, get
from hetlb.errors import InputError

#: Exit status by state; 2 too where no proxy answers.
EXITS = {"well": 0, "busy": 0, "degraded": 1, "down": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb status`."""
    parser.add_argument(
        "--admin",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"admin address of the proxy (default {DEFAULT_URL})",
    )
    add_token_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the status; 0 for well or busy, 1 for degraded, 2 for down or not reachable."""
    document = json.loads(get(admin_url(args.admin, "--admin"), "/v1/status", args.token_env, flag="--admin"))
    if not isinstance(document, dict) or document.get("state") not in EXITS:
        raise InputError(f"--admin: expected the admin address of a hetlb proxy, got {args.admin!r}")
    if args.json:
        print(json.dumps(document))
    else:
        print(status_line(document))
    sys.stdout.flush()
    return EXITS[document["state"]]


def status_line(document: dict[str, Any]) -> str:
    """The status as one line: state, load, limit, headroom, advice."""
    return f"{document['state']}: {document['sentence']}. {document['advice']}"
