"""`Retry-After` of a client that was turned away: the time the queue takes to drain, spread out.

From 1 to 60 seconds, never the same for all, so that those who were refused together do not come
back together.
"""

from __future__ import annotations

import random
from typing import Final

#: Seconds over which ended requests are counted, in slices of one.
WINDOW_S: Final = 10
_LONGEST_S: Final = 40.0
_SPREAD: Final = 0.5


class DrainRate:
    """Rate at which requests ended lately."""

    __slots__ = ("_counts", "_rng", "_second")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._counts = [0] * WINDOW_S
        self._second = 0

    def ended(self, now: float) -> None:
        """A request ended at `now`, seconds of a clock that never goes back."""
        self._turn(now)
        self._counts[self._second % WINDOW_S] += 1

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Seconds until another try makes sense, with `waiting` requests in the queue."""
        self._turn(now)
        rate_rps = max(1, sum(self._counts)) / WINDOW_S
        return self.spread(waiting / rate_rps)

    def spread(self, wait_s: float) -> float:
        """A wait within the bounds, up to half as long again by chance."""
        return min(_LONGEST_S, max(1.0, wait_s)) * (1.0 + _SPREAD * self._rng.random())

    def _turn(self, now: float) -> None:
        """Forget the slices that have left the window."""
        second = int(now)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._counts[passed % WINDOW_S] = 0
        self._second = max(self._second, second)
