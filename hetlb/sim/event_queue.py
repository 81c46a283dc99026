"""Events of a simulation in virtual time: earliest first, ties by kind, then by order of creation."""

from __future__ import annotations

import heapq
from typing import Any


class EventQueue:
    """Events to come; `now` is the time of the one taken last, in seconds."""

    __slots__ = ("_events", "_pushed", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._events: list[tuple[float, int, int, Any]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._events)

    def push(self, at_s: float, kind: int, payload: object) -> None:
        """Add an event."""
        self._pushed += 1
        heapq.heappush(self._events, (at_s, kind, self._pushed, payload))

    def pop(self) -> tuple[int, Any]:
        """Take the next event: its kind and payload."""
        self.now, kind, _, payload = heapq.heappop(self._events)
        return kind, payload
