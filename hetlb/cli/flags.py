"""Flags with validated values, and the output of a command's result."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hetlb.errors import InputError
from hetlb.inputs import number_of

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet

#: Largest number of a flag: a larger one is a mistake.
MOST = 1e15
#: Fleet file of commands that are given none.
DEFAULT_FILE = Path("fleet.yaml")


def declare(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """Return the short form of `add_argument` for a parser or a group.

    Takes name, help, metavar, type and default in this order, other arguments by keyword.
    """

    def add(
        name: str, text: str, metavar: Any = None, kind: Any = None, default: Any = None, **more: Any
    ) -> None:
        stated = {"metavar": metavar, "type": kind, "default": default}
        more |= {key: value for key, value in stated.items() if value is not None}
        parser.add_argument(name, help=text, **more)

    return add


def stated_fleet(args: argparse.Namespace) -> Fleet:
    """Return the fleet of `--config` or `--instance`, else of the default file. Raises `InputError`."""
    from hetlb.balancer.config.fleet import fleet_from_urls, load_fleet

    if args.config is not None and args.instance:
        raise InputError("expected either --config FLEET.yaml or --instance URL (repeatable)")
    if args.config is None and not args.instance and not DEFAULT_FILE.exists():
        raise InputError(
            f"{DEFAULT_FILE}: no such file; write it with `hetlb init URL... > {DEFAULT_FILE}`, "
            "or name servers with --instance URL"
        )
    return fleet_from_urls(args.instance) if args.instance else load_fleet(args.config or DEFAULT_FILE)


def changed(table: Any, **values: Any) -> Any:
    """Copy of a table with values from flags; None leaves a field unchanged."""
    stated = {key: value for key, value in values.items() if value is not None}
    return msgspec.structs.replace(table, **stated) if stated else table


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which `print_document` obeys."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def print_document(args: argparse.Namespace, document: object, show: Callable[[], object]) -> int:
    """Print the document with `--json`, else what `show` prints; the exit status is 0."""
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        show()
    return 0


def whole(least: float, most: float = math.inf, what: str = "a whole number") -> Callable[[str], int]:
    """Return the flag type: integer from `least` to `most`."""
    bounds = ("" if least == -math.inf else f" from {least}") + ("" if most >= MOST else f" to {most}")

    def read(text: str) -> int:
        try:
            value: float = int(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {what}{bounds}, got {text:.60}")
        return int(value)

    return read


def real(words: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a flag type that accepts numbers if `fits` is true; `words` describe them in errors."""

    def read(text: str) -> float:
        value = number_of(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text:.60}")
        return value

    return read


COUNT = whole(1, int(MOST))
INTEGER = whole(-math.inf)
PORT = whole(0, 65535, "a port")
POSITIVE = real("a number above 0", lambda value: 0 < value <= MOST or value == math.inf)
FINITE = real(f"a number above 0, at most {MOST:g}", lambda value: 0 < value <= MOST)
FRACTION = real("0 to 1", lambda value: 0 <= value <= 1)
SHARE = real("a share above 0 up to 1", lambda value: 0 < value <= 1)
