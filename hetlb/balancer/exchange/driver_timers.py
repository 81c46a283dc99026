"""Timers of the driver of a process: its sweeps, and the rate at which its requests end."""

from __future__ import annotations

import math
import random
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sized
from typing import Final

from hetlb.balancer.core.rate import RecentRate

#: Seconds between looks at the deadlines of requests.
SWEEP_S: Final = 0.5
#: Lateness of a timer, in seconds, that shows that this process stood still; and seconds between its calls
#: while requests are open.
STALL_S: Final = 0.25
BEAT_S: Final = 0.1
#: Least assumed rate of ended requests, per second.
_LEAST_RPS: Final = 0.1
#: Requests that end within these seconds are counted at once.
_TOGETHER_S: Final = 0.1
#: Longest `Retry-After` in seconds, and the largest share added at random: not all come back together.
_LONGEST_RETRY_AFTER_S: Final = 40.0
_SPREAD_SHARE: Final = 0.5


class DrainRate:
    """Recent rate of ended requests, and the `Retry-After` of rejected clients."""

    __slots__ = ("_at", "_count", "_rate", "_rng")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rate = RecentRate()
        #: Requests that ended at about the same time, and that time.
        self._count, self._at = 0.0, -math.inf

    def ended(self, now: float) -> None:
        if now - self._at > _TOGETHER_S:
            self._take()
            self._at = now
        self._count += 1.0

    def _take(self) -> None:
        if self._count:
            self._rate, self._count = self._rate.plus(self._count, self._at), 0.0

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Return seconds until another try makes sense, with `waiting` requests in the queue."""
        self._take()
        return self.spread(waiting / max(_LEAST_RPS, self._rate.per_s(now)))

    def spread(self, wait_s: float) -> float:
        """Return a wait within the bounds, up to half as long again by chance."""
        return min(_LONGEST_RETRY_AFTER_S, max(1.0, wait_s)) * (1.0 + _SPREAD_SHARE * self._rng.random())


class Sweeper:
    """Timer of a process's sweeps, and its watch for standstills.

    Example: a timer that comes 0.3 s late shows that this process stood still. Its bytes were not read
    meanwhile, and no engine was slow. While requests are open it is called between the sweeps, too.
    """

    __slots__ = ("_due", "_loop", "_open", "_stalled_at", "_sweep", "_sweep_at", "_timer")

    def __init__(self, loop: AbstractEventLoop, sweep: Callable[[float], None], requests: Sized) -> None:
        """`sweep` is called each `SWEEP_S`, with its lateness in seconds. `requests` are the open ones."""
        self._loop, self._sweep, self._open, self._stalled_at = loop, sweep, requests, -math.inf
        self._sweep_at = self._due = loop.time() + SWEEP_S
        self._timer = loop.call_later(SWEEP_S, self.fire)

    def fire(self) -> None:
        """Sweep if that is due. Set the timer to the next sweep; with open requests, to the next beat."""
        late_s, now = self._late_s(), self._loop.time()
        if sweeps := self._sweep_at - now < BEAT_S / 10.0:  # a timer may come early
            self._sweep_at = now + SWEEP_S
        wait_s = min(BEAT_S, self._sweep_at - now) if self._open else self._sweep_at - now
        self._due = now + wait_s
        self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self.fire)
        if sweeps:
            self._sweep(late_s)

    def stalled_since(self, then: float) -> bool:
        """Return True if this process stood still for a while since a time of its event loop."""
        self._late_s()
        return self._stalled_at >= then

    def close(self) -> None:
        self._timer.cancel()

    def _late_s(self) -> float:
        """Return how late the timer is by now, in seconds; note a standstill."""
        now = self._loop.time()
        late_s = max(0.0, now - self._due)
        if late_s > STALL_S:
            self._stalled_at = now
        return late_s
