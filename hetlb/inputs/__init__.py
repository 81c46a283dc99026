"""The reader of files and flags: YAML, addresses, numbers; errors name key, value, expectation."""

import math


def number_of(text: str) -> float:
    """Return the number in ASCII that a text is, NaN of any other: no comparison with NaN is true."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan
