"""Quantities with units: `48GiB`, `8.03B`, `128KiB`; errors suggest a forgotten unit.

Plain numbers have the base unit. Memory sizes below 1 MiB, parameter counts below a million and links below
10 kB/s are refused with the probable meaning.
"""

from __future__ import annotations

import math
import re
from typing import Any

from hetlb.errors import ConfigError

#: Quantity in a file: a number, or text with a unit.
Quantity = float | str

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WRITTEN = re.compile(r"\s*+([0-9][0-9_]*+(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]++)?)\s*+([A-Za-z]*+)\s*+")
#: Least plausible values: smaller ones lack their unit.
_LEAST_MEMORY_BYTES, _LEAST_PARAMETERS, _LEAST_RATE = 2**20, 10**6, 10**4


def _read(value: Quantity, units: dict[str, int], key: str, example: str) -> float:
    found: Any = value
    if isinstance(value, str):
        match = _WRITTEN.fullmatch(value)
        unit = units.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f"{key}: expected a number or one with a unit such as {example}, got {value!r}")
        found = float(match[1].replace("_", "")) * unit
    if not (math.isfinite(found) and found > 0):
        raise ConfigError(f"{key}: expected a number above 0, got {value!r}")
    return float(found)


def _shown(value: Quantity) -> str:
    return repr(value) if isinstance(value, str) else f"{value:g}"


def read_bytes(value: Quantity, key: str) -> int:
    """Parse bytes, rounded to an integer. Raises `ConfigError`."""
    return max(1, round(_read(value, _BYTE_UNITS, key, "128KiB")))


def read_memory(value: Quantity, key: str) -> int:
    """Parse the memory of a GPU in bytes. Raises `ConfigError`, which suggests a missing unit."""
    found = _read(value, _BYTE_UNITS, key, "48GiB")
    if found < _LEAST_MEMORY_BYTES:
        raise ConfigError(f"{key}: expected bytes, got {_shown(value)}: did you mean {found:g}GiB?")
    return round(found)


def read_parameters(value: Quantity, key: str) -> float:
    """Parse a number of parameters. Raises `ConfigError`, which suggests a missing unit."""
    found = _read(value, _COUNT_UNITS, key, "8.03B")
    if found < _LEAST_PARAMETERS:
        raise ConfigError(
            f"{key}: expected a number of parameters, got {_shown(value)}: did you mean {found:g}B?"
        )
    return found


def read_rate(value: float, key: str) -> float:
    """Check bytes/s of a link. Raises `ConfigError`, which suggests GB/s for small values."""
    if 0.0 < value < _LEAST_RATE:
        raise ConfigError(f"{key}: expected bytes/s, got {value:g}: did you mean {value:g}e9?")
    return value
