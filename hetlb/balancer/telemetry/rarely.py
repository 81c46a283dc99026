"""Log of events that a stranger can cause at will."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from hetlb.balancer.telemetry.events import Event, tell

#: Seconds from one line to the next.
_EVERY_S = 10.0


class Rarely:
    """Log of events that a stranger can cause: a line in ten seconds, with the number of omitted ones."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._left_out = 0

    def tell(self, logger: logging.Logger, event: Event, message: str, *args: object, **fields: Any) -> None:
        now = time.monotonic()
        if now - self._told_at < _EVERY_S:
            self._left_out += 1
            return
        if self._left_out:
            message, args = message + " (and %d more like it)", (*args, self._left_out)
        self._told_at, self._left_out = now, 0
        tell(logger, event, message, *args, **fields)
