"""Deaths of engines in the middle of answers, and which of them an answer may be the cause of.

An engine that died had other answers too. Once all of them have ended well elsewhere, none of them was the
cause: engines die without their requests' doing. An answer is suspect of the deaths in it unless as many
others were of that kind lately.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hetlb.balancer.core.types import Lease

#: Maximum number of engines that die in an answer which goes on after it: the request may be what kills them.
MOST_DEATHS: Final = 1
#: Seconds for which a death counts in the rate of deaths.
_RECENT_S: Final = 60.0
#: Number of deaths that are remembered.
_KEPT_DEATHS: Final = 256


class Death:
    """One death of an engine. `answers` were in it and have not ended well since."""

    __slots__ = ("answers", "at", "instance")

    def __init__(self, instance: str, at: float) -> None:
        self.instance = instance
        self.at = at
        self.answers = 0


class Deaths:
    """The last deaths of engines that a process saw."""

    __slots__ = ("_deaths",)

    def __init__(self) -> None:
        self._deaths: deque[Death] = deque(maxlen=_KEPT_DEATHS)

    def of(self, lease: Lease, now: float) -> Death:
        """Return the death in which a lease ended: the same one for all leases from before it."""
        for death in reversed(self._deaths):
            if death.instance == lease.instance and lease.dispatched_at <= death.at:
                return death
        made = Death(lease.instance, now)
        self._deaths.append(made)
        return made

    def suspect(self, own: list[Death], now: float) -> bool:
        """Return True if an answer with these deaths may be their cause: it is not risked once more."""
        if len(own) <= MOST_DEATHS:
            return False
        cleared = sum(not each.answers and now - each.at <= _RECENT_S for each in self._deaths)
        return cleared < len(own)
