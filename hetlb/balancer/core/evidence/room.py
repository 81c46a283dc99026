"""Room of one instance for a while: less after the start of its process, and after it refused as full."""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence import table

#: Longest time in seconds for which an engine is believed that says when to come again.
BUSY_CAP_S: Final = 60.0
#: Seconds after which a limit is forgotten, and its growth in a second, as a share of it.
FORGOTTEN_S: Final = 10.0
_GROWTH_SHARE: Final = 0.25


@mypyc_attr(acyclic=True)
class Room:
    """A slow start, and a number of sequences beyond which it refused."""

    __slots__ = ("_limit", "_limit_until", "_ramp_s", "_ramp_since", "restarted")

    def __init__(self) -> None:
        #: True if its process is new and is not up yet.
        self.restarted = False
        #: Begin and length of its slow start.
        self._ramp_since: float | None = None
        self._ramp_s = 0.0
        #: Sequences beyond which it refused, and until when that holds as it is.
        self._limit = 0
        self._limit_until = -math.inf

    def begin_slow_start(self, seconds: float, now: float) -> None:
        """Let it run only a growing part of what it can for some seconds."""
        self.restarted = False
        self._ramp_since, self._ramp_s = (now, seconds) if seconds > 0.0 else (None, 0.0)

    def end_slow_start(self) -> bool:
        """End the slow start. True if there was one."""
        ended = self._ramp_since is not None
        self._ramp_since = None
        return ended

    def is_full(self, sequences: int, retry_after_s: float | None, now: float) -> None:
        """Learn that it takes no more than `sequences`, for the time that it asked for if it did."""
        seconds = table.LIMIT_S if retry_after_s is None else min(retry_after_s, BUSY_CAP_S)
        until = now + seconds
        if now >= self._limit_until or sequences < self._limit:
            self._limit = max(1, sequences)
        self._limit_until = max(self._limit_until, until)

    def limit(self, now: float) -> float:
        """Return the sequences that it is believed to take, infinite if unknown."""
        since = now - self._limit_until
        if since >= FORGOTTEN_S:
            return math.inf
        if since < 0.0:
            return self._limit
        return self._limit + 1 + int(since * max(1.0, _GROWTH_SHARE * self._limit))

    def limited(self, now: float) -> bool:
        """Return True if it may have less room than usual."""
        if self._ramp_since is not None and now - self._ramp_since >= self._ramp_s:
            self._ramp_since = None
        return self._ramp_since is not None or now - self._limit_until < FORGOTTEN_S

    def short_of(self, sequences: int, max_num_seqs: int, now: float) -> str:
        """Return the reason against running this number of sequences now, "" without one; for people."""
        if self._ramp_since is not None:
            slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
            if sequences > max(1.0, slots):
                return f"{table.SLOW_START}: {max(1, int(slots))} of {max_num_seqs} slots"
        limit = self.limit(now)
        return f"full: it refused more than {limit:.0f} requests" if sequences > limit else ""
