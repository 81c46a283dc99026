"""The highest rate that still meets a limit: brackets it by doubling and halving, then bisects.

Pure; `next_rate_rps` depends on nothing but what was added. The answer is a rate that was measured
and met the limit, below the lowest that was measured and missed it; one is within `RESOLUTION` of the other
unless probes ran out.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

RESOLUTION = 0.05
MAX_PROBES = 20


class RateSearch:
    """Probes of one policy. What is missed at some rate is taken to be missed at every higher one.

    A rate meets the limits if `attainment`, a share of the requests, does in the mean of its runs.
    """

    def __init__(self, attainment: float) -> None:
        self._attainment = attainment
        self._shares: dict[float, list[float]] = {}
        self._probes = 0

    def add(self, rate_rps: float, share: float) -> None:
        """Record the share measured at a rate."""
        self._shares.setdefault(rate_rps, []).append(share)

    def document(self) -> dict[str, Any]:
        """Result and probes, as in the JSON document."""
        return {
            "max_request_rate": self.highest_met_rps,
            "lowest_missed_rate": self.lowest_missed_rps,
            "probes": [
                {"request_rate": rate, "slo_attainment": fmean(shares)}
                for rate, shares in sorted(self._shares.items())
            ],
        }

    def _rates(self, *, met: bool) -> list[float]:
        return [rate for rate, each in self._shares.items() if (fmean(each) >= self._attainment) is met]

    @property
    def lowest_missed_rps(self) -> float | None:
        """The lowest rate that missed the limit, None if none did."""
        return min(self._rates(met=False), default=None)

    @property
    def highest_met_rps(self) -> float | None:
        """The highest rate that met the limit below the lowest that missed it, None if none did."""
        missed = self.lowest_missed_rps
        return max((r for r in self._rates(met=True) if missed is None or r < missed), default=None)

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
