"""Helpers for declaring flags, with validated ranges of numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hetlb.config.mistakes import short


def declare(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """Short form of `add_argument` for a parser or a group.

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
    return msgspec.structs.replace(
        table, **{key: value for key, value in values.items() if value is not None}
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Flags of a load, common to `bench` and `simulate`."""
    from hetlb.loadtest.options import read_waves
    from hetlb.workload.content import HASH_BLOCK_TOKENS

    add = declare(parser)
    add("--trace", "requests: arrival_s,input_tokens,output_tokens", "T.csv", Path)
    rates = "requests/s, inf (all at once) or trace (recorded arrivals); several: 2,4,inf"
    add("--request-rate", rates, "R", default="inf")
    add("--burstiness", "gamma shape of the gaps (default 1: Poisson; inf: constant)", "X", POSITIVE, 1.0)
    add("--waves", "seconds of traffic at the rate, seconds of pause", "ON:OFF", read_waves)
    blocks = f"tokens of a block of hash_ids (default {HASH_BLOCK_TOKENS})"
    add("--hash-block-size", blocks, "N", whole(1), HASH_BLOCK_TOKENS)


def whole(least: int, most: float = math.inf, what: str = "a whole number") -> Callable[[str], int]:
    """Flag type: integer from `least` to `most`."""
    to = "" if most == math.inf else f" to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from {least}{to}, got {text}")
        return value

    return read


def integer(hint: str = "") -> Callable[[str], int]:
    """Flag type: any integer; `hint` ends its error."""

    def read(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {short(text)}{hint}") from None

    return read


def real(words: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Flag type: number for which `fits` is true; `words` describe it in errors. NaN fits no comparison."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text}")
        return value

    return read


PORT = whole(0, 65535, "a port")
POSITIVE = real("a number above 0", lambda value: value > 0)
FINITE = real("a number above 0", lambda value: 0 < value < math.inf)
SHARE = real("a share above 0 up to 1", lambda value: 0 < value <= 1)
