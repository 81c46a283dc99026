"""Declaration of flags: one line for most, with the range of a number where it is declared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


def declare(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """A short form of `add_argument` for the flags of a parser or of a group.

    It takes name, help, metavar, type, default, and by name what else argparse takes.
    """

    def add(
        name: str, text: str, metavar: Any = None, kind: Any = None, default: Any = None, **more: Any
    ) -> None:
        stated = {"metavar": metavar, "type": kind, "default": default}
        more |= {key: value for key, value in stated.items() if value is not None}
        parser.add_argument(name, help=text, **more)

    return add


def changed(table: Any, **values: Any) -> Any:
    """A table of a file with the values of flags; one that is None stays as it is."""
    return msgspec.structs.replace(
        table, **{key: value for key, value in values.items() if value is not None}
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Flags of a load that is sent or simulated: `args.trace`, `args.request_rate` and so on."""
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
    """Type of a flag: a whole number from `least` to `most`."""
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


def real(words: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Type of a flag: a number that fits; `words` say which do. NaN fits no comparison."""

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
