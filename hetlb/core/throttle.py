"""Restraints on an instance for a while: its process is new, it said that it is busy, it has failed.

What an instance may take never rises because it failed.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.probation import Probation

#: An engine that says when to come again is ranked last until then, and at most so long, in seconds.
BUSY_CAP_S: Final = 60.0
#: Availability at a moment: like any other, only if no other can, not now.
NORMAL: Final = 0
DEPRIORITISED: Final = 1
BLOCKED: Final = 2


@mypyc_attr(acyclic=True)
class Throttle:
    """Slow start, busy time and probation of one instance."""

    __slots__ = ("_busy_slots", "_probation", "_ramp_s", "_ramp_since", "busy_until", "restarted")

    def __init__(self, probation: Probation) -> None:
        self._probation = probation
        #: True if its process is another than the one that was up: it starts slowly once it is up.
        self.restarted = False
        #: Since when, and for how many seconds, what it may run at once grows.
        self._ramp_since: float | None = None
        self._ramp_s = 0.0
        #: Until when it is busy by its own word, and what it ran when it said so.
        self.busy_until = -math.inf
        self._busy_slots = 0

    def begin_slow_start(self, seconds: float, now: float) -> None:
        """Its process is new: for so long it may run only a growing part of what it can; 0 is not at all."""
        self.restarted = False
        self._ramp_since, self._ramp_s = (now, seconds) if seconds > 0.0 else (None, 0.0)

    def end_slow_start(self) -> bool:
        """End the slow start. True if there was one."""
        ended = self._ramp_since is not None
        self._ramp_since = None
        return ended

    def mark_busy(self, seconds: float, sequences: int, now: float) -> None:
        """It asked to come again after `seconds`, with so many sequences running."""
        self.busy_until = max(self.busy_until, now + min(seconds, BUSY_CAP_S))
        self._busy_slots = max(1, sequences)

    def active(self, now: float) -> bool:
        """True if the instance may now not be treated like any other."""
        if self._ramp_since is not None and now - self._ramp_since >= self._ramp_s:
            self._ramp_since = None
        return self._ramp_since is not None or now < self.busy_until or self._probation.active(now)

    def reason(self, max_num_seqs: int, now: float) -> str:
        """Reason of what restrains it now, "" if nothing does; for people."""
        if self._probation.active(now):
            return f"on probation: {self._probation.reason}"
        if self._ramp_since is not None and now - self._ramp_since < self._ramp_s:
            return self._slow_start(max_num_seqs, now)
        if now < self.busy_until:
            return f"busy by its own word for {self.busy_until - now:.3g} s more"
        return ""

    def _slow_start(self, max_num_seqs: int, now: float) -> str:
        assert self._ramp_since is not None
        slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
        return f"slow start: {max(1, int(slots))} of {max_num_seqs} slots"

    def availability(
        self, sequences: int, max_num_seqs: int, now: float, *, doubt: bool = True
    ) -> tuple[int, str]:
        """Availability now, and its reason; `doubt`: whether probation is heeded.

        An instance that runs nothing may always take one request, but on probation.
        """
        if doubt and self._probation.held(now):
            return BLOCKED, f"on probation: {self._probation.reason}"
        wanted = sequences + 1
        if self._ramp_since is not None:
            slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
            if wanted > max(1.0, slots):
                return BLOCKED, self._slow_start(max_num_seqs, now)
        if now < self.busy_until:
            left = f"it said it is busy, for {self.busy_until - now:.3g} s more"
            if wanted > self._busy_slots:
                return BLOCKED, f"full: {left}"
            return DEPRIORITISED, f"last: {left}"
        return NORMAL, ""
