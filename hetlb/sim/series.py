"""KV use, queue and running requests of a simulated fleet over time.

A bounded number of evenly spaced moments however long the run is (where they become too many, every
second one is dropped and the interval doubles), so that the same run gives the same series. A run that is
not watched pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: The interval that a series begins with, seconds.
_FIRST_INTERVAL_S = 0.01
#: A series holds between half of this and this many moments (fewer only where a run is very short).
_MOST_MOMENTS = 800


@dataclass(slots=True)
class InstanceSeries:
    """One engine at every moment: fraction of its KV blocks in use, sequences waiting in it, and running."""

    kv_usage: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def add(self, kv_usage: float, waiting: int, running: int) -> None:
        """One more moment."""
        self.kv_usage.append(kv_usage)
        self.waiting.append(waiting)
        self.running.append(running)

    def thin(self) -> None:
        """Keep every second moment, the first included."""
        del self.kv_usage[1::2], self.waiting[1::2], self.running[1::2]


class FleetSeries:
    """State of a simulated fleet at moments `times_s` (seconds from the start).

    `held` is how many requests waited at the proxy, bound to no instance.
    """

    __slots__ = ("held", "instances", "interval_s", "times_s")

    def __init__(self, names: Iterable[str]) -> None:
        self.interval_s = _FIRST_INTERVAL_S
        self.times_s: list[float] = []
        self.held: list[int] = []
        self.instances = {name: InstanceSeries() for name in names}

    def begin(self, now: float, held: int) -> None:
        """Begin a moment; the instances' figures are added next."""
        self.times_s.append(now)
        self.held.append(held)

    def end(self) -> float:
        """End a moment; returns when the next one is due."""
        if len(self.times_s) > _MOST_MOMENTS:
            del self.times_s[1::2], self.held[1::2]
            for instance in self.instances.values():
                instance.thin()
            self.interval_s *= 2
        return self.times_s[-1] + self.interval_s
