"""A row of a state machine's table: the code obeys the table, docs/reference/states.md is made from it."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class Transition(Generic[S]):
    """A change of state: the event, the states in which it may happen, the state that follows.

    No dataclass: mypyc cannot compile a generic one.
    """

    __slots__ = ("after", "before", "event")

    def __init__(self, event: str, before: tuple[S, ...], after: S) -> None:
        self.event = event
        self.before = before
        self.after = after


def edges(table: tuple[Transition[S], ...]) -> list[str]:
    """The rows as edges of a Mermaid state diagram."""
    return [f"{state.name} --> {row.after.name}: {row.event}" for row in table for state in row.before]
