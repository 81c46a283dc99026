"""Rate of a count. Older events weigh less."""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

#: Age of an event that counts 1/e, in seconds.
MEMORY_S: Final = 15.0
#: Seconds that a rate is taken over at least, and seconds of silence after which it begins anew.
_LEAST_S: Final = 1.0
_FORGOTTEN_S: Final = 4.0 * MEMORY_S


@mypyc_attr(acyclic=True)
class RecentRate:
    """Rate of a count over about its last `MEMORY_S` seconds, or since its first event; never changed."""

    __slots__ = ("_at", "_known", "_per_s", "_rank", "_since")

    def __init__(self, at: float = -math.inf, per_s: float = 0.0, since: float = 0.0) -> None:
        self._at = at
        self._per_s = per_s
        self._since = since
        #: Share of the exponential weights that falls after the first event, 0 before it is computed.
        self._known = 0.0
        self._rank = math.nan

    def plus(self, count: float, now: float) -> RecentRate:
        """Return the rate with a count of now."""
        since_s = now - self._at
        if since_s > _FORGOTTEN_S:
            return RecentRate(now, count / MEMORY_S, now)
        decayed = self._per_s * math.exp(-since_s / MEMORY_S) if since_s > 0.0 else self._per_s
        return RecentRate(now, decayed + count / MEMORY_S, self._since)

    def per_s(self, now: float) -> float:
        """Return the rate now."""
        since_s = now - self._at
        if not self._known:
            seconds = self._at - self._since
            self._known = 1.0 - math.exp(-(seconds if seconds > _LEAST_S else _LEAST_S) / MEMORY_S)
        known = self._per_s / self._known
        return known * math.exp(-since_s / MEMORY_S) if since_s > 0.0 else known

    @property
    def rank(self) -> float:
        """Logarithm of the rate without its decay: it orders rates at any later time, as all decay alike."""
        if self._rank != self._rank:
            rate = self.per_s(self._at)
            self._rank = math.log(rate) + self._at / MEMORY_S if rate > 0.0 else -math.inf
        return self._rank
