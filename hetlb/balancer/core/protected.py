"""Protected: requests of one class with targets; background and looser classes leave room for them."""

from __future__ import annotations

import math
from typing import Final

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.rate import RecentRate
from hetlb.balancer.core.types import Lease

#: Newest requests that the means follow.
_NEWEST_REQUESTS: Final = 64.0
#: The control aims at this part of the share of answers that may miss a target.
_AIMED_SHARE: Final = 0.5
#: Age of a miss that counts 1/e in the control, in seconds: the load may have been another one.
_FORGET_S: Final = 60.0
#: Bound of `margin`'s logarithm: twenty times the expected load.
_MOST_PRESSURE: Final = 3.0
#: Fewest answers that ended without background beside them. If none of as many met its targets, the class
#: cannot be served in time.
_LEAST_ENDED: Final = 8


class Protected:
    """Targets of a class, its mean prompt and answer, and the pressure of misses.

    If requests state targets of their own, the tightest of the newest requests count.
    """

    __slots__ = (
        "_answered_s", "_rate", "attainment", "count", "e2e_s", "ended", "ever_met", "name",
        "newest_s", "output", "pressure", "prompt", "tpot_s", "ttft_s",
    )  # fmt: skip

    def __init__(self, service: ServiceClass) -> None:
        self.name = service.name
        self.count = 0
        self.prompt = self.output = self.newest_s = self._answered_s = 0.0
        self._rate = RecentRate()
        #: Rises with each answer that misses a target, falls with each other one and with time: a leaky
        #: integral control.
        self.pressure = 0.0
        self.ended, self.ever_met = 0, False
        self._begin(service)

    def _begin(self, service: ServiceClass) -> None:
        """Begin anew with the targets of a request: an operator may have changed them."""
        self.attainment = 0.0
        self.ttft_s = self.tpot_s = self.e2e_s = math.inf
        self._tighten(service)
        if self.ever_met:
            self.ended, self.ever_met = 0, False

    def _tighten(self, service: ServiceClass) -> None:
        self.attainment = max(self.attainment, service.attainment)
        self.ttft_s = min(self.ttft_s, service.ttft_s, service.e2e_s)
        self.tpot_s = min(self.tpot_s, service.tpot_s)
        self.e2e_s = min(self.e2e_s, service.e2e_s)

    def tightness(self) -> tuple[float, float, float]:
        """Return its targets: least for the tightest class."""
        return self.ttft_s, self.tpot_s, self.e2e_s

    @property
    def hopeless(self) -> bool:
        """True if no answer met its targets lately: no server can meet them, whatever others leave over."""
        return not self.ever_met and self.ended >= _LEAST_ENDED

    @property
    def margin(self) -> float:
        """Factor of the room kept free, by the share of answers that missed a target."""
        return math.exp(self.pressure)

    @property
    def step_s(self) -> float:
        """Seconds that a further token may take."""
        whole_s = self.e2e_s / self.output if self.output > 1.0 else math.inf
        return whole_s if whole_s < self.tpot_s else self.tpot_s

    def arrived(self, service: ServiceClass, prompt: float, output: float, now: float) -> None:
        """Note that a request came."""
        self._rate = self._rate.plus(1.0, now)
        self.count = count = self.count + 1
        gain = 1.0 / count if count < _NEWEST_REQUESTS else 1.0 / _NEWEST_REQUESTS
        self.newest_s = now
        self.prompt += gain * (prompt - self.prompt)
        self.output += gain * (output - self.output)
        if count % _NEWEST_REQUESTS == 0.0:
            self._begin(service)
        else:
            self._tighten(service)

    def answered(self, lease: Lease, now: float, alone: bool) -> None:
        """Note that an answer ended well; the first token of a whole answer is unseen.

        `alone`: the instance runs requests with targets only. If other requests run there, a miss may be
        their fault.
        """
        request, began_at, first_s = lease.request, lease.dispatched_at - lease.waited_s, 0.0
        if request.streamed and lease.first_token_at is not None:
            first_s = lease.first_token_at - began_at
        met = request.service.met(first_s, now - began_at, lease.output_tokens // request.sequences)
        self.ended += alone
        self.ever_met = self.ever_met or met
        aimed = _AIMED_SHARE * (1.0 - self.attainment)
        rise = -1.0 if met else (1.0 / aimed - 1.0 if aimed > 0.0 else math.inf)
        self.pressure *= math.exp((self._answered_s - now) / _FORGET_S)
        self._answered_s = now
        self.pressure = min(_MOST_PRESSURE, max(0.0, self.pressure + rise / _NEWEST_REQUESTS))

    def rate(self, now: float) -> float:
        """Return the requests per second of late."""
        return self._rate.per_s(now)
