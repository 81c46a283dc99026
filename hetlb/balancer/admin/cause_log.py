"""Events of the causes that no other event tells: one as a cause begins, one once no instance has it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from hetlb.balancer.admin.causes import CAUSES, StateCause
from hetlb.balancer.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.status")
#: Seconds between two events of one cause.
_PAUSE_S: Final = 60.0


class CauseLog:
    """Causes that last, and the times of their last events."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._told_at: dict[str, float] = {}

    def look(self, causes: Sequence[StateCause], now: float) -> None:
        """Log the begin or the end of causes."""
        told = [each for each in causes if CAUSES[each.cause].event == Event.CAUSE.event]
        found = {each.cause: each for each in reversed(told)}
        for cause in self._lasting - found.keys():
            self._lasting.remove(cause)
            tell(logger, Event.CAUSE_OVER, "%s is over", cause, cause=cause)
        for cause, each in found.items():
            if cause in self._lasting or now - self._told_at.get(cause, -math.inf) < _PAUSE_S:
                continue
            self._lasting.add(cause)
            self._told_at[cause] = now
            text = each.sentence, each.advice
            tell(logger, Event.CAUSE, "%s. %s", *text, cause=cause, instance=each.instance)
