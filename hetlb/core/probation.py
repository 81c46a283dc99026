"""Probation: requests one at a time for an instance whose answers failed several times in a row.

From `PROBATION_AFTER` failures on an instance gets one request at a time, with longer and longer pauses,
until an answer ends well; half of the failures are forgotten every `PROBATION_HALF_S`. Where answers were
dropped or broken off a pause also ends as soon as a request or two went elsewhere, so that the failures that
eject come soon; beyond those, where it may not be ejected, after 4, 8, 16, ... requests.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

#: From so many failures in a row on the next request waits, 1 s, 2 s, 4 s, ... after the last one.
PROBATION_AFTER: Final = 2
PROBATION_BASE_S: Final = 1.0
PROBATION_CAP_S: Final = 30.0
PROBATION_HALF_S: Final = 30.0


@mypyc_attr(acyclic=True)
class Probation:
    """Recent failures of one instance, and the pause after the last request that it got."""

    __slots__ = ("_failed_at", "_failures", "_held_until", "_skip", "_skipped")

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
