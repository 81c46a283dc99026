"""Whether an instance can be trusted with work: evidence in, `Health` out.

Promise: proof of absence (a refused connection) counts at once; a missed probe alone never takes out an
instance that is emitting tokens; 4xx answers and clients that leave count for nothing; every ejection
grows the next one, up to a cap.

| state | event | next |
|---|---|---|
| any | connection refused (probe or dispatch) | ejected |
| suspect | probe ok, or an answer completed | up |
| up | `FALL` probes failed in a row, no answer completed since | ejected |
| up, suspect | `PASSIVE_FALL` failed answers in a row, not the last instance | ejected |
| ejected | ejection time over and `RISE` probes ok in a row | up |
"""

from __future__ import annotations

import random

from hetlb.core.types import Health, ProbeResult

FALL = 3
RISE = 2
PASSIVE_FALL = 5
EJECTION_BASE_S = 5.0
EJECTION_CAP_S = 60.0
EJECTION_JITTER = 0.2
#: A success this long after the last ejection forgives one step of the growth.
FORGIVE_AFTER_S = 30.0


class HealthTracker:
    """The health of one incarnation of one instance."""

    __slots__ = (
        "_ejections",
        "_forgiven_at",
        "_passive_failures",
        "_probe_failures",
        "_probe_successes",
        "_rng",
        "ejected_until",
        "reason",
        "state",
    )

    def __init__(self, rng: random.Random, state: Health = Health.SUSPECT) -> None:
        self._rng = rng
        self.state = state
        self.reason = "not probed yet" if state is Health.SUSPECT else ""
        self.ejected_until = 0.0
        self._ejections = 0
        self._forgiven_at = 0.0
        self._probe_failures = 0
        self._probe_successes = 0
        self._passive_failures = 0

    def on_probe(self, result: ProbeResult, now: float) -> bool:
        """A probe ended. True if the state changed."""
        if result is ProbeResult.OK:
            self._probe_failures = 0
            self._probe_successes += 1
            if self.state is Health.SUSPECT:
                return self._become(Health.UP, "probe answered")
            if self.state is Health.EJECTED and self._probe_successes >= RISE and now >= self.ejected_until:
                return self._become(Health.UP, f"{self._probe_successes} probes answered")
            return False
        self._probe_successes = 0
        if result is ProbeResult.REFUSED:
            return self.on_refused(now)
        self._probe_failures += 1
        if self.state is Health.UP and self._probe_failures >= FALL:
            return self._eject(f"{self._probe_failures} probes failed in a row", now)
        return False

    def on_refused(self, now: float) -> bool:
        """A connection was refused: nobody is there. No back-off: it may return as soon as it answers."""
        self._probe_successes = 0
        if self.state is Health.EJECTED:
            return False
        self.ejected_until = now
        return self._become(Health.EJECTED, "connection refused")

    def on_success(self, now: float) -> bool:
        """An answer completed or is flowing: stronger evidence than any probe."""
        self._passive_failures = 0
        self._probe_failures = 0
        if self._ejections and now - self._forgiven_at >= FORGIVE_AFTER_S:
            self._ejections -= 1
            self._forgiven_at = now
        if self.state is Health.SUSPECT:
            return self._become(Health.UP, "answered a request")
        return False

    def on_failure(self, now: float, *, may_eject: bool) -> bool:
        """An answer failed in the engine's own way. True if the state changed."""
        self._passive_failures += 1
        if self.state is not Health.EJECTED and self._passive_failures >= PASSIVE_FALL and may_eject:
            return self._eject(f"{self._passive_failures} answers failed in a row", now)
        return False

    def _eject(self, reason: str, now: float) -> bool:
        self._ejections += 1
        self._forgiven_at = now
        jitter = 1.0 + EJECTION_JITTER * (2.0 * self._rng.random() - 1.0)
        self.ejected_until = now + min(EJECTION_CAP_S, EJECTION_BASE_S * self._ejections) * jitter
        return self._become(Health.EJECTED, reason)

    def _become(self, state: Health, reason: str) -> bool:
        self.state = state
        self.reason = reason
        self._passive_failures = 0
        if state is Health.EJECTED:
            self._probe_successes = 0
        self._probe_failures = 0
        return True
