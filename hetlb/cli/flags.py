"""Flags with validated values, and the output of a command's result."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from hetlb.errors import InputError, TraceError
from hetlb.files import reader


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


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load, common to `bench` and `simulate`."""
    from hetlb.tools.loadtest.options import read_waves

    add = declare(parser)
    add("--trace", "requests: hetlb's CSV, or a public trace as it is", "T.csv", Path)
    rates = "requests/s, inf (all at once) or trace (recorded arrivals); several: 2,4,inf"
    add("--request-rate", rates, "R", default="inf")
    add("--burstiness", "gamma shape of the gaps (default 1: Poisson; inf: constant)", "X", POSITIVE, 1.0)
    add("--waves", "seconds of traffic at the rate, seconds of pause", "ON:OFF", read_waves)


@contextlib.contextmanager
def event_log(path: Path) -> Iterator[TextIO]:
    """Yield the lines of an event log. Raises `TraceError` if it cannot be read or followed."""
    try:
        with io.TextIOWrapper(reader(path), encoding="utf-8") as lines:
            yield lines
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except OSError as error:
        raise TraceError(f"{path}: expected a readable file: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path}: expected an event log of hetlb: {error}") from error


def secret(flag: str, variable: str) -> str:
    """Return value of the environment variable that a flag names. Raises `InputError` if it is not set."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise InputError(f"{flag}: expected a variable with a key, but {variable!r} is not set")
    return value


def number(text: str) -> float:
    """Return a number, NaN if the text is none: no comparison with NaN is true."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole(least: float, most: float = math.inf, what: str = "a whole number") -> Callable[[str], int]:
    """Return the flag type: integer from `least` to `most`."""
    bounds = ("" if least == -math.inf else f" from {least}") + ("" if most == math.inf else f" to {most}")

    def read(text: str) -> int:
        try:
            value: float = int(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {what}{bounds}, got {text}")
        return int(value)

    return read


def real(words: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a flag type that accepts numbers if `fits` is true; `words` describe them in errors."""

    def read(text: str) -> float:
        value = number(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text}")
        return value

    return read


COUNT = whole(1)
INTEGER = whole(-math.inf)
PORT = whole(0, 65535, "a port")
POSITIVE = real("a number above 0", lambda value: value > 0)
FINITE = real("a number above 0", lambda value: 0 < value < math.inf)
FRACTION = real("0 to 1", lambda value: 0 <= value <= 1)
SHARE = real("a share above 0 up to 1", lambda value: 0 < value <= 1)


def add_input_limit(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that read files of requests."""
    from hetlb.tools.workload.input_limit import DEFAULT_MIB

    text = f"largest file of requests, unpacked (default {DEFAULT_MIB})"
    declare(parser)("--max-input-mib", text, "MIB", whole(1, 1 << 20), DEFAULT_MIB)
