"""KV use and queues of a simulated fleet over time.

A bounded number of evenly spaced moments however long the run is (where they become too many, every
second one is dropped and the interval doubles), so that the same run gives the same series. A run that is
not watched pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: A series holds between half of this and this many moments (fewer only where a run is very short).
_MOST_MOMENTS = 800


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """A fleet `at_s` seconds from the start: requests `held` at the proxy, bound to no instance.

    By instance: the fraction of its KV blocks in use, and the sequences waiting in it.
    """

    at_s: float
    held: int
    kv_usage: dict[str, float]
    waiting: dict[str, int]


@dataclass(slots=True)
class FleetSeries:
    """Moments of a simulated fleet, `interval_s` seconds apart."""

    interval_s: float = 0.01
    moments: list[FleetMoment] = field(default_factory=list)

    def add(self, moment: FleetMoment) -> float:
        """Add a moment; returns when the next one is due."""
        self.moments.append(moment)
        if len(self.moments) > _MOST_MOMENTS:
            del self.moments[1::2]
            self.interval_s *= 2
        return self.moments[-1].at_s + self.interval_s
