"""Error texts of files and requests: key, expectation, shortened value."""

from __future__ import annotations

import contextlib
import difflib
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from hetlb.errors import InputError

#: Most names listed in an error, and most errors reported of a file.
_MOST_LISTED = 20
_MOST_CHARACTERS = 1000
#: Bounds of the size of numbers other than 0: beyond, sums could overflow.
_LEAST_NUMBER, _MOST_NUMBER = 1e-100, 1e100

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 2, 4, 4, 4
_short.maxstring = _short.maxlong = _short.maxother = 60


class Mistakes:
    """Collector of the errors of independent checks."""

    def __init__(self) -> None:
        self.found: list[InputError] = []

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Collect the error of a check instead of raising it."""
        try:
            yield
        except InputError as caught:
            self.add([caught])

    def add(self, errors: Iterable[InputError]) -> None:
        """Collect errors; more than twenty are not listed."""
        self.found += islice(errors, _MOST_LISTED - len(self.found))


def mistakes_in(raw: Any, kind: Any) -> list[str]:
    """Return `key: expected …, got …` for each value of `raw` that is no `kind`, the first twenty."""
    found = list(islice(_unusual_numbers(raw, ""), _MOST_LISTED))
    if not found:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as caught:
            from hetlb.inputs.wrong_values import invalid, told

            found = list(islice(invalid(raw, kind, ""), _MOST_LISTED)) or [told(caught, raw, kind, "")]
    return [each if len(each) <= _MOST_CHARACTERS else f"{each[:_MOST_CHARACTERS]}..." for each in found]


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """Return ` (did you mean …?)` if one of `names` is close to what was given, else nothing."""
    by_form = {name.lower().replace("-", "_"): name for name in names}
    form = given.lower().replace("-", "_") if isinstance(given, str) else ""
    close = difflib.get_close_matches(form, by_form, n=1)
    return f" (did you mean {by_form[close[0]]}?)" if close else ""


def listed(names: Collection[str]) -> str:
    """Return `a, b, c`, the first twenty of many."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(islice(names, _MOST_LISTED)) + more


def one_of(given: object, names: Collection[str]) -> str:
    """Return `expected one of a, b, got 'x' (did you mean a?)` for a name that is none of `names`."""
    return f"expected one of {listed(names)}, got {short(given)}{did_you_mean(given, names)}"


def short(value: object) -> str:
    """Return the representation of a value in at most 60 characters; only the start of a long one is read."""
    if isinstance(value, str) and len(value) > 60:
        return repr(value[:56])[:57] + "..."
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = _short.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unusual_numbers(raw: Any, path: str) -> Iterator[str]:
    """Yield the errors of numbers that are infinite, NaN or out of range."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from _unusual_numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            if not isinstance(value, str):
                yield from _unusual_numbers(value, f"{path}[{index}]")
    elif isinstance(raw, float | int) and raw and not _LEAST_NUMBER <= abs(raw) <= _MOST_NUMBER:
        finite = isinstance(raw, int) or math.isfinite(raw)
        expected = "0 or a size from 1e-100 to 1e100" if finite else "a finite number"
        yield f"{path or 'the file'}: expected {expected}, got {short(raw)}"
