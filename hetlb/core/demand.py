"""How much work is asked for, in sizes that no instance decides.

Promise: the size of a request is `PROMPT_WEIGHT * prompt + predicted output` tokens (a prompt token is read
together with many others, an output token takes a step of its own). A rate says what keeps arriving, not
what came at once: it is the mean over the slots of the last seconds without those far above their median, so
that a burst, which waits in the queue and is counted there, is not also taken for what is to come.
"""

from __future__ import annotations

from hetlb.core.types import Request

#: What one prompt token weighs against one output token.
PROMPT_WEIGHT = 0.15
#: Spans over which arrivals are watched, in seconds, ascending; each is cut into `SLOTS` slots.
HORIZONS_S = (1.0, 4.0, 16.0, 64.0, 256.0)
SLOTS = 16
#: A slot with more than this many times the median is a burst.
BURST = 3.0


def size_of(request: Request, predicted_output: float) -> float:
    """The size of a request in weighted tokens, all sequences together; at least 1."""
    return max(1.0, request.sequences * (PROMPT_WEIGHT * request.prompt_tokens + predicted_output))


class _Slots:
    """Sizes that arrived over one horizon, by slot; the newest slot is still filling."""

    __slots__ = ("_rate", "_slot", "_sums", "_width_s")

    def __init__(self, horizon_s: float) -> None:
        self._width_s = horizon_s / SLOTS
        self._slot = 0
        self._sums = [0.0] * SLOTS
        self._rate: float | None = 0.0  # None when it must be computed again

    def advance(self, now: float) -> None:
        slot = int(now / self._width_s)
        if slot > self._slot:
            for step in range(min(SLOTS, slot - self._slot)):
                self._sums[(slot - step) % SLOTS] = 0.0
            self._slot = slot
            self._rate = None

    def add(self, size: float) -> None:
        self._sums[self._slot % SLOTS] += size
        self._rate = None

    def rate(self) -> float:
        if self._rate is None:
            self._rate = self._steady_rate()
        return self._rate

    def _steady_rate(self) -> float:
        most = BURST * sorted(self._sums)[SLOTS // 2]
        steady = [total for total in self._sums if total <= most]
        return sum(steady) / (len(steady) * self._width_s)


class Demand:
    """What keeps arriving for one model."""

    __slots__ = ("_horizons",)

    def __init__(self) -> None:
        self._horizons = [_Slots(horizon) for horizon in HORIZONS_S]

    def arrived(self, size: float, now: float) -> None:
        """A request of this size came in."""
        for slots in self._horizons:
            slots.advance(now)
            slots.add(size)

    def rate(self, horizon_s: float, now: float) -> float:
        """Size arriving per second, judged by about the last `horizon_s` seconds."""
        index = 0
        while index + 1 < len(HORIZONS_S) and HORIZONS_S[index + 1] <= horizon_s:
            index += 1
        slots = self._horizons[index]
        slots.advance(now)
        return slots.rate()
