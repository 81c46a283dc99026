"""Deadline of a command: each of its simulations asks for it while it runs, and stops then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: Events, or stretches of an engine's iterations, between two looks at the clock: some milliseconds.
LOOK_EVENTS: Final = 64

_ends: list[Callable[[], bool]] = []


class StoppedError(Exception):
    """A simulation that was stopped before its end."""


@contextmanager
def ends_when(over: Callable[[], bool]) -> Iterator[None]:
    """Stop simulations inside once `over` is true; contexts may be nested, the earliest end holds."""
    _ends.append(over)
    try:
        yield
    finally:
        _ends.pop()


def is_over() -> bool:
    """Return True if simulations are to stop now."""
    return any(over() for over in _ends)


def look() -> None:
    """Raise `StoppedError` if simulations are to stop now."""
    if is_over():
        raise StoppedError
