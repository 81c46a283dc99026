"""Events of the causes that no other event tells: one as a cause begins, one once no instance has it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

from hetlb.balancer.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.status")
#: Causes that have no event of their own.
TOLD: Final = frozenset(
    (
        "fails", "flaps", "foreign_load", "hopeless_target", "long_wait", "one_process", "refused", "refuses",
        "saturated", "slow", "slowed", "tenant_hog", "wrong_answers",
    )
)  # fmt: skip
#: Seconds between two events of one cause.
_PAUSE_S: Final = 60.0


class CauseLog:
    """Causes that last, and the times of their last events."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._told_at: dict[str, float] = {}

    def look(self, causes: Sequence[Mapping[str, str]], now: float) -> None:
        """Log the begin or the end of causes, as a status lists them."""
        found = {each["cause"]: each for each in reversed(causes) if each["cause"] in TOLD}
        for cause in self._lasting - found.keys():
            self._lasting.remove(cause)
            tell(logger, Event.CAUSE_OVER, "%s is over", cause, cause=cause)
        for cause, each in found.items():
            if cause in self._lasting or now - self._told_at.get(cause, -math.inf) < _PAUSE_S:
                continue
            self._lasting.add(cause)
            self._told_at[cause] = now
            text, instance = "%s. %s", each["instance"]
            tell(
                logger, Event.CAUSE, text, each["sentence"], each["advice"], cause=cause, instance=instance
            )  # fmt: skip
