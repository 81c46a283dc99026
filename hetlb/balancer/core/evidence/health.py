"""State of one instance (suspect, up, ejected) by probes, connections and first bytes of answers."""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence import table
from hetlb.balancer.core.facts import ProbeResult
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health

#: Relative variation of the duration of an ejection; ejections of which the times are kept.
EJECTION_JITTER_SHARE: Final = 0.2
_KEPT_EJECTIONS: Final = 8


@mypyc_attr(acyclic=True)
class HealthState:
    """State by the rows of `table.TRANSITIONS`."""

    __slots__ = (
        "_been_up", "_probe_failures", "_probe_successes", "_rng", "clean", "ejected_until", "ejections",
        "gone", "reason", "state",
    )  # fmt: skip

    def __init__(self, rng: random.Random, state: Health) -> None:
        self._rng = rng
        self.state = state
        #: Reason of its state.
        self.reason = "not probed yet" if state is Health.SUSPECT else ""
        self.ejected_until = 0.0
        #: Times of the last ejections. Each came within `FLAPPING_S` of the one before.
        self.ejections: deque[float] = deque(maxlen=_KEPT_EJECTIONS)
        #: True if it is up and no good answer could make it any better.
        self.clean = state is Health.UP
        self._probe_failures = self._probe_successes = 0
        #: True if no process listened at its address since its process was seen last.
        self.gone = False
        self._been_up = state is Health.UP

    @property
    def unproven(self) -> bool:
        """True if its present process has not been up yet, as far as is known."""
        return self.state is Health.EJECTED or not self._been_up

    def on_probe(self, result: ProbeResult, now: float, *, alone: bool = False, detail: str = "") -> bool:
        """Take a probe's result. True if the state changed. `alone`: no other instance could take over."""
        if result is ProbeResult.OK:
            self._probe_failures = 0
            self._probe_successes += 1
            if self.state is Health.SUSPECT:
                return self._enter(table.ANSWERS, "probe answered")
            enough = self._probe_successes >= table.RISE_PROBES and (now >= self.ejected_until or alone)
            if self.state is Health.EJECTED and enough:
                return self._enter(table.RECOVERS, f"{self._probe_successes} probes answered")
            return False
        self._probe_successes = 0
        if result is ProbeResult.REFUSED:
            return self.on_absent(now, detail)
        if result is ProbeResult.LOADING:
            return self._absent(table.LOADS, detail or "loading", now)
        self.clean = False
        self._probe_failures += 1
        if self.state is Health.UP and self._probe_failures >= table.FALL_PROBES:
            reason = f"{self._probe_failures} probes failed in a row{detail and f': {detail}'}"
            if alone:
                return self._enter(table.PROBES_FAIL_ALONE, reason)
            return self._eject(table.PROBES_FAIL, reason, now)
        if self.state is Health.SUSPECT:
            self.reason = detail or "a probe failed"
        elif self.state is Health.EJECTED:
            self.reason = detail or self.reason
        return False

    def on_absent(self, now: float, detail: str = "") -> bool:
        """Eject at a refused connection: no process listens. No back-off: it may return at once."""
        return self._absent(table.REFUSED, detail, now)

    def _absent(self, transition: Transition[Health], detail: str, now: float) -> bool:
        """Eject an instance that certainly serves nothing now. Return True if the state changed."""
        self._probe_successes = 0
        self.gone = self._been_up
        if self.state is Health.EJECTED:
            self.reason = detail or self.reason
            return False
        return self._eject(transition, detail or "it accepts no connection", now)

    def on_answering(self, *, whole: bool = False) -> bool:
        """Note that an answer began, or is `whole` and well. Return True if the state changed."""
        if self.clean:
            return False
        self._probe_failures = 0
        if self.state is Health.SUSPECT:
            return self._enter(table.ANSWERS, "answered a request")
        self.clean = whole and self.state is Health.UP
        return False

    def _eject(self, transition: Transition[Health], reason: str, now: float) -> bool:
        ejections = self.ejections
        if ejections and now - ejections[-1] > table.FLAPPING_S:
            ejections.clear()
        ejections.append(now)
        doublings = len(ejections) - 1 - (transition is table.REFUSED or transition is table.LOADS)
        seconds = 0.0 if doublings < 0 else min(table.MOST_EJECTION_S, table.EJECTION_S * 2.0**doublings)
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
