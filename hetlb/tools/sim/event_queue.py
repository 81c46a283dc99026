"""Events of a simulation in virtual time: earliest first, ties by kind, then by order of creation."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any, TypeAlias

#: Time (s), kind, number of creation, payload.
Event: TypeAlias = tuple[float, int, int, Any]


class EventQueue:
    """Events to come; `now` is the time of the one taken last, in seconds."""

    __slots__ = ("_events", "_pushed", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._events: list[Event] = []
        self._pushed = 0

    def push(self, at_s: float, kind: int, payload: object) -> None:
        """Add an event."""
        self._pushed += 1
        heappush(self._events, (at_s, kind, self._pushed, payload))

    def pop(self, before_s: float = math.inf) -> Event | None:
        """Take the next event, if there is one before `before_s`."""
        events = self._events
        if not events or events[0][0] >= before_s:
            return None
        event = heappop(events)
        self.now = event[0]
        return event

    def next_s(self) -> float:
        """Return the time of the next event in seconds, `now` if there is none."""
        return self._events[0][0] if self._events else self.now
