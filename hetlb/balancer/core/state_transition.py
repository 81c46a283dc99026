"""A row of a state machine's table: the code obeys the table, docs/reference/states.md is made from it."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class Transition(Generic[S]):
    """A change of state: the event, the states that it may happen in, the state that follows."""

    __slots__ = ("after", "before", "event")

    def __init__(self, event: str, before: tuple[S, ...], after: S) -> None:
        self.event = event
        self.before = before
        self.after = after

    def take(self, state: S) -> S:
        """Return the state that follows `state`, which must be in `before`."""
        assert state in self.before, f"{state}: {self.event}"
        return self.after
