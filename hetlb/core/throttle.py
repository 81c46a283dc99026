"""Restraints on an instance for a while: its process is new, it said that it is busy, it has failed.

What an instance may take never rises because it failed. On probation, from `PROBATION_AFTER` failures on, it
gets one request at a time, with longer and longer pauses, until an answer ends well; half of the failures are
forgotten every `PROBATION_HALF_S`. Where answers were dropped or broken off a pause also ends as soon as a
request or two went elsewhere, so that the failures that eject come soon; beyond those, where it may not be
ejected, after 4, 8, 16, ... requests.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

#: An engine that says when to come again is ranked last until then, and at most so long, in seconds.
BUSY_CAP_S: Final = 60.0
#: Availability at a moment: like any other, only if no other can, not now.
NORMAL: Final = 0
DEPRIORITISED: Final = 1
BLOCKED: Final = 2
#: From so many failures in a row on the next request waits, 1 s, 2 s, 4 s, ... after the last one.
PROBATION_AFTER: Final = 2
PROBATION_BASE_S: Final = 1.0
PROBATION_CAP_S: Final = 30.0
PROBATION_HALF_S: Final = 30.0


@mypyc_attr(acyclic=True)
class Probation:
    """Recent failures of one instance, and the pause after the last request that it got."""

    def __init__(self) -> None:
        self._failures = 0
        self._failed_at = 0.0
        self._held_until = 0.0
        #: Requests that must go elsewhere to end a pause (None: none do), and those that did.
        self._skip: int | None = None
        self._skipped = 0

    @property
    def reason(self) -> str:
        """Evidence that it rests on."""
        return f"{self._failures} answers failed in a row"

    def failed(self, skip: int | None, now: float) -> None:
        """An answer failed. `skip` requests elsewhere end the pause, None: time alone does."""
        self._skip = skip
        self._failures = self._remembered(now) + 1
        self._failed_at = now
        self._skipped = 0
        self._held_until = now + self._pause_s(self._failures)

    def forget(self) -> None:
        """An answer ended well, or another process took its place."""
        self._failures = 0

    def active(self, now: float) -> bool:
        """True if it failed so often of late that it gets one request at a time, with pauses."""
        return self._failures >= PROBATION_AFTER and self._remembered(now) >= PROBATION_AFTER

    def held(self, now: float) -> bool:
        """True if it is on probation and its pause is not over."""
        if now >= self._held_until or (self._skip is not None and self._skipped >= self._skip):
            return False
        return self.active(now)

    def dispatched(self, now: float) -> None:
        """It got a request: on probation, the pause begins anew."""
        if self._failures >= PROBATION_AFTER:
            self._held_until = now + self._pause_s(self._remembered(now))
            self._skipped = 0

    def passed_over(self) -> None:
        """A request went elsewhere while it was held."""
        self._skipped += 1

    def _remembered(self, now: float) -> int:
        return self._failures >> min(64, max(0, int((now - self._failed_at) / PROBATION_HALF_S)))

    def _pause_s(self, failures: int) -> float:
        if failures < PROBATION_AFTER:
            return 0.0
        return min(PROBATION_CAP_S, PROBATION_BASE_S * 2.0 ** min(16, failures - PROBATION_AFTER))


@mypyc_attr(acyclic=True)
class Throttle:
    """Slow start, busy time and probation of one instance."""

    def __init__(self, probation: Probation) -> None:
        self._probation = probation
        #: True if its process is new and is not up yet.
        self.restarted = False
        #: Begin and length of its slow start.
        self._ramp_since: float | None = None
        self._ramp_s = 0.0
        #: End of the engine's Retry-After, and what it ran when it said so.
        self.busy_until = -math.inf
        self._busy_slots = 0

    def begin_slow_start(self, seconds: float, now: float) -> None:
        """Let it run only a growing part of what it can for so long."""
        self.restarted = False
        self._ramp_since, self._ramp_s = (now, seconds) if seconds > 0.0 else (None, 0.0)

    def end_slow_start(self) -> bool:
        """End the slow start. True if there was one."""
        ended = self._ramp_since is not None
        self._ramp_since = None
        return ended

    def mark_busy(self, seconds: float, sequences: int, now: float) -> None:
        """It asked to come again after `seconds`, with `sequences` running."""
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
        """Availability now, and its reason; `doubt`: whether probation is heeded."""
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
