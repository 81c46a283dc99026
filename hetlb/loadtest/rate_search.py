"""The highest rate that still meets a limit: brackets it by doubling and halving, then bisects.

Pure; `next_rate_rps` depends on nothing but what was added. The answer is a rate that was measured
and met the limit, below the lowest that was measured and missed it; one is within `RESOLUTION` of the other
unless probes ran out.
"""

from __future__ import annotations

import math

RESOLUTION = 0.05
MAX_PROBES = 20


class RateSearch:
    """Probes of one policy. What is missed at some rate is taken to be missed at every higher one."""

    def __init__(self) -> None:
        self._met: dict[float, bool] = {}
        self._probes = 0

    def add(self, rate_rps: float, met: bool) -> None:
        """Record the result measured at a rate."""
        self._met[rate_rps] = met

    @property
    def lowest_missed_rps(self) -> float | None:
        """The lowest rate that missed the limit, None if none did."""
        return min((rate for rate, met in self._met.items() if not met), default=None)

    @property
    def highest_met_rps(self) -> float | None:
        """The highest rate that met the limit below the lowest that missed it, None if none did."""
        missed = self.lowest_missed_rps
        rates = (rate for rate, met in self._met.items() if met and (missed is None or rate < missed))
        return max(rates, default=None)

    def next_rate_rps(self) -> float | None:
        """The rate to measure next, None when the search is over. Something must have been added before."""
        met, missed = self.highest_met_rps, self.lowest_missed_rps
        if self._probes == MAX_PROBES:
            return None
        if met is not None and missed is not None:
            if missed <= met * (1 + RESOLUTION):
                return None
            rate = math.sqrt(met * missed)
        elif met is not None:
            rate = 2 * met
        else:
            assert missed is not None, "expected a measured rate to start from"
            rate = missed / 2
        self._probes += 1
        return rate
