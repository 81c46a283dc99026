"""Health of an instance: whether a process answers at its address; every change is a row of `TRANSITIONS`.

Proof of absence (a refused connection) counts at once. What its answers are worth the breaker knows
(`circuit_breaker.py`).
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health, Outcome, ProbeResult

FALL_PROBES: Final = 3
RISE_PROBES: Final = 2
#: Duration of an ejection in seconds, and its relative variation. It doubles with each ejection within
#: `FLAPPING_S` of the one before, up to `MOST_EJECTION_S`. The first for a refused connection has none.
EJECTION_S: Final = 2.5
EJECTION_JITTER_SHARE: Final = 0.2
FLAPPING_S: Final = 120.0
MOST_EJECTION_S: Final = 60.0
#: Most ejections with kept times.
_KEPT_EJECTIONS: Final = 8


@dataclass(frozen=True, slots=True)
class HealthParams(PickleByFields):
    """Parameters under `health:` of the fleet file; 0 turns slow start off."""

    slow_start_s: float = 30.0


class Verdict(StrEnum):
    """Meaning of the end of a lease for its instance."""

    WELL = "as a success"
    ABSENT = "as a refused connection"
    LOST = "as a lost answer"
    REFUSED = "as a refusal of its kind of request"
    NOTHING = "against no instance"


_VERDICTS: dict[Outcome, Verdict] = {
    Outcome.OK: Verdict.WELL,
    Outcome.UPSTREAM_BUSY: Verdict.LOST,
    Outcome.UPSTREAM_REFUSED: Verdict.REFUSED,
    Outcome.UPSTREAM_ERROR: Verdict.LOST,
    Outcome.CONNECT_FAILED: Verdict.ABSENT,
    Outcome.NO_RESPONSE: Verdict.LOST,
    Outcome.BROKEN_STREAM: Verdict.LOST,
}


def verdict(outcome: Outcome) -> Verdict:
    """Return the verdict of a lease that ended in `outcome`."""
    return _VERDICTS.get(outcome, Verdict.NOTHING)


_IN_USE: Final = (Health.SUSPECT, Health.UP)
REFUSED: Final = Transition("a connection is refused, by a probe or a dispatch", _IN_USE, Health.EJECTED)
ANSWERS: Final = Transition("a probe is answered, or an answer begins", (Health.SUSPECT,), Health.UP)
PROBES_FAIL: Final = Transition(
    f"{FALL_PROBES} probes fail in a row, and no answer came since", (Health.UP,), Health.EJECTED
)
PROBES_FAIL_ALONE: Final = Transition(
    f"{FALL_PROBES} probes fail in a row, and no other instance could take over", (Health.UP,), Health.SUSPECT
)
RECOVERS: Final = Transition(
    f"the ejection time is over and {RISE_PROBES} probes in a row are answered", (Health.EJECTED,), Health.UP
)
TRANSITIONS: Final = (REFUSED, ANSWERS, PROBES_FAIL, PROBES_FAIL_ALONE, RECOVERS)


class HealthTracker:
    """The health of one incarnation of one instance."""

    def __init__(self, rng: random.Random, state: Health = Health.SUSPECT) -> None:
        self._rng = rng
        self.state = state
        self.reason = "not probed yet" if state is Health.SUSPECT else ""
        self.ejected_until = 0.0
        #: Times of its ejections, each within `FLAPPING_S` of the one before.
        self.ejections: deque[float] = deque(maxlen=_KEPT_EJECTIONS)
        #: True if it is up and no success could make it any better.
        self.clean = state is Health.UP
        self._probe_failures = 0
        self._probe_successes = 0
        #: True if no process listened at its address since its process was seen last.
        self.gone = False
        self._been_up = state is Health.UP

    # --- evidence ---

    def on_probe(self, result: ProbeResult, now: float, *, alone: bool = False, detail: str = "") -> bool:
        """Take a probe's result. True if the state changed. `alone`: no other instance could take over."""
        if result is ProbeResult.OK:
            self._probe_failures = 0
            self._probe_successes += 1
            if self.state is Health.SUSPECT:
                return self._enter(ANSWERS, "probe answered")
            if (
                self.state is Health.EJECTED
                and self._probe_successes >= RISE_PROBES
                and (now >= self.ejected_until or alone)
            ):
                return self._enter(RECOVERS, f"{self._probe_successes} probes answered")
            return False
        self._probe_successes = 0
        if result is ProbeResult.REFUSED:
            return self.on_refused(now, detail)
        self.clean = False
        self._probe_failures += 1
        if self.state is Health.UP and self._probe_failures >= FALL_PROBES:
            reason = f"{self._probe_failures} probes failed in a row"
            reason = f"{reason}: {detail}" if detail else reason
            return self._enter(PROBES_FAIL_ALONE, reason) if alone else self._eject(PROBES_FAIL, reason, now)
        if self.state is Health.SUSPECT:
            self.reason = detail or "a probe failed"
        return False

    def on_refused(self, now: float, detail: str = "") -> bool:
        """Eject at a refused connection: no process listens. No back-off: it may return at once."""
        self._probe_successes = 0
        self.gone = self._been_up
        if self.state is Health.EJECTED:
            self.reason = detail or self.reason
            return False
        return self._eject(REFUSED, detail or "connection refused", now)

    def on_answering(self) -> bool:
        """Note that an answer began. Return True if the state changed."""
        if self.clean:
            return False
        self._probe_failures = 0
        return self.state is Health.SUSPECT and self._enter(ANSWERS, "answered a request")

    def on_success(self) -> bool:
        """Note that an answer is whole and well. Return True if the state changed."""
        if self.clean:
            return False
        self._probe_failures = 0
        if self.state is Health.SUSPECT:
            return self._enter(ANSWERS, "answered a request")
        self.clean = self.state is Health.UP
        return False

    # --- states ---

    def _eject(self, transition: Transition[Health], reason: str, now: float) -> bool:
        ejections = self.ejections
        if ejections and now - ejections[-1] > FLAPPING_S:
            ejections.clear()
        ejections.append(now)
        doublings = len(ejections) - 1 - (transition is REFUSED)
        seconds = 0.0 if doublings < 0 else min(MOST_EJECTION_S, EJECTION_S * 2.0**doublings)
        self.ejected_until = now + seconds * (1.0 + EJECTION_JITTER_SHARE * (2.0 * self._rng.random() - 1.0))
        return self._enter(transition, reason)

    def _enter(self, transition: Transition[Health], reason: str) -> bool:
        assert self.state in transition.before, f"{self.state.value}: {transition.event}"
        self.state = state = transition.after
        self.reason = reason
        self.clean = False
        self._been_up = self._been_up or state is Health.UP
        if state is Health.EJECTED:
            self._probe_successes = 0
        self._probe_failures = 0
        return True
