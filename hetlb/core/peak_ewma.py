"""Peak EWMA of an instance's time to the first byte, for the policy `peak-ewma`."""

from __future__ import annotations

import math


class PeakEwma:
    """Linkerd's (tower's) peak EWMA of the time to the first byte, in seconds.

    A latency above the estimate replaces it at once; below it decays towards the new value with weight
    `exp(-elapsed / DECAY_S)`, also towards zero while nothing is heard. The start value is Linkerd's
    default of 30 ms. Source: tower `load::peak_ewma`, linkerd2-proxy `proxy::balance`.
    """

    __slots__ = ("_rtt_s", "_updated_at")

    DEFAULT_RTT_S = 0.030
    DECAY_S = 10.0

    def __init__(self, now: float) -> None:
        self._rtt_s = self.DEFAULT_RTT_S
        self._updated_at = now

    def observe(self, rtt_s: float, now: float) -> None:
        """A first byte came after `rtt_s`."""
        if rtt_s > self._rtt_s:
            self._rtt_s = rtt_s
        else:
            keep = self._keep(now)
            self._rtt_s = self._rtt_s * keep + rtt_s * (1.0 - keep)
        self._updated_at = now

    def estimate_s(self, now: float) -> float:
        """The estimate now, decayed since the last observation."""
        return self._rtt_s * self._keep(now)

    def _keep(self, now: float) -> float:
        return math.exp(-(now - self._updated_at) / self.DECAY_S)
