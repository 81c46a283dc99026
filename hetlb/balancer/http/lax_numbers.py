"""Numbers and truth values written otherwise than JSON has them, read as vLLM's classes read them.

The classes are Pydantic's, which reads 100.0, "100" and true as integers, and "yes" as true (its conversion
table, lax mode); 100.5 is refused.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from hetlb.balancer.http.openai_fields import NumberFields, RequestFields

_INTEGER: Final = re.compile(r"[+-]?[0-9]++(?:_[0-9]++)*+(?:\.0++)?+")
_MOST_DIGITS: Final = 4300
#: Largest float read as an integer.
_MOST_FLOAT: Final = 2.0**63
_TRUE: Final = ("1", "true", "t", "yes", "y", "on")
_FALSE: Final = ("0", "false", "f", "no", "n", "off")


def plain_numbers(fields: RequestFields) -> NumberFields:
    """Return the numbers and truth values of a body. Raises `msgspec.ValidationError` as vLLM refuses one."""
    read = {
        name: (_truth if name == "stream" else _integer)(getattr(fields, name))
        for name in NumberFields.__struct_fields__
    }
    return msgspec.convert(read, NumberFields)


def _integer(value: Any) -> Any:
    """Return the integer that Pydantic reads, the same value where it reads none."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_FLOAT:
        return int(value)
    if isinstance(value, str) and len(value) <= _MOST_DIGITS:
        text = value.strip()
        if _INTEGER.fullmatch(text) is not None:
            return int(text.partition(".")[0])
    return value


def _truth(value: Any) -> Any:
    """Return the truth value that Pydantic reads, the same value where it reads none."""
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        lowered = value.lower()
        return True if lowered in _TRUE else False if lowered in _FALSE else value
    return value
