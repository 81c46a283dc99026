"""Rate of a count, in which older events weigh less."""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

#: Age at which an event counts 1/e, in seconds.
MEMORY_S: Final = 15.0


@mypyc_attr(acyclic=True)
class RecentRate:
    """Rate of a count over about its last `MEMORY_S` seconds; never changed."""

    __slots__ = ("_at", "_per_s")

    def __init__(self, at: float = 0.0, per_s: float = 0.0) -> None:
        self._at = at
        self._per_s = per_s

    def plus(self, count: float, now: float) -> RecentRate:
        """Return the rate with a count of now."""
        return RecentRate(now, self.per_s(now) + count / MEMORY_S)

    def per_s(self, now: float) -> float:
        """Return the rate now."""
        since_s = now - self._at
        return self._per_s * math.exp(-since_s / MEMORY_S) if since_s > 0.0 else self._per_s
