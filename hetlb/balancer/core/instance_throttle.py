"""Restraints on an instance for a while: its process is new, or it refused requests beyond its limit.

A refusal for a full queue (429, 503) of an engine that answers others is no failure: what ran there then is a
limit. It holds for the time that the engine asks for, or a second; then one more is tried, and more as time
passes, until it is forgotten or the engine refuses again.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.circuit_breaker import CircuitBreaker

#: Longest seconds that an engine is believed for when it says when to come again.
BUSY_CAP_S: Final = 60.0
#: Seconds that a limit without a stated time holds, and seconds until it is forgotten then.
LIMIT_S: Final = 1.0
FORGOTTEN_S: Final = 10.0
#: Growth of a limit in a second, as a share of it.
_GROWTH_SHARE: Final = 0.25


@mypyc_attr(acyclic=True)
class InstanceThrottle:
    """Slow start, learnt limit and trials of one instance."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
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

    def refused(self, sequences: int, retry_after_s: float | None, now: float) -> None:
        """Learn that it takes no more than `sequences`, for the time that it asked for if it did."""
        seconds = LIMIT_S if retry_after_s is None else min(retry_after_s, BUSY_CAP_S)
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

    def active(self, now: float) -> bool:
        """Return True if the instance may now not be treated like any other."""
        if self._ramp_since is not None and now - self._ramp_since >= self._ramp_s:
            self._ramp_since = None
        limited = now - self._limit_until < FORGOTTEN_S
        breaker = self._breaker
        return self._ramp_since is not None or limited or breaker.wary(now)

    def reason(self, max_num_seqs: int, now: float) -> str:
        """Return why it may not take all that it can now, "" without a reason; for people."""
        return self._breaker.why(now) or self.restraint(max_num_seqs - 1, max_num_seqs, now, doubt=False)

    def restraint(self, sequences: int, max_num_seqs: int, now: float, *, doubt: bool = True) -> str:
        """Return why it may take no more now, "" where it may; `doubt`: whether the breaker is heeded."""
        if doubt and self._breaker.held(now):
            return self._breaker.why(now)
        wanted = sequences + 1
        if self._ramp_since is not None:
            slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
            if wanted > max(1.0, slots):
                return f"slow start: {max(1, int(slots))} of {max_num_seqs} slots"
        limit = self.limit(now)
        return f"full: it refused more than {limit:.0f} requests" if wanted > limit else ""
