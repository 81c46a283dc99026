"""Guard of exchanges: an error that hetlb or a policy raises at one request ends that request alone.

Whatever calls an exchange from outside (a connection, a timer, a command of the scheduler) hands the error
to `Guard.ended`. Its client gets an error event or a 500, its engine is stopped, and what the scheduler has
booked for it is given back, if need be without the exchange's own help.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.types import Request
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.telemetry.events import Event, tell

if TYPE_CHECKING:
    from hetlb.balancer.exchange.driver import Driver

logger = logging.getLogger("hetlb.proxy")

#: Seconds between two log lines of one error in work of no request.
_LOG_S: Final = 60.0
#: Number of such errors that are remembered.
_REMEMBERED_ERRORS: Final = 256


class Guard:
    """Ends one exchange after an error in it, and logs errors outside of exchanges."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._logged_at: dict[str, float] = {}

    def ended(self, exchange: Exchange, error: Exception) -> None:
        """End an exchange after an `error` in it. It may have ended already."""
        label, driver, request_id = exchange.record.label, self._driver, exchange.record.request.id
        _log(f"request {label}", error, label)
        if driver.exchanges.get(request_id) is exchange:
            try:
                exchange.give_up()
            except Exception as again:
                logger.debug("its own way out failed", exc_info=again)
        if driver.exchanges.get(request_id) is exchange:
            self._try(exchange.attempt.leave)
            driver.dropped(exchange)
        self._try(lambda: exchange.response.client.forsake(exchange))
        self._try(lambda: driver.abandon(request_id))

    def run(self, work: Callable[[], None], what: str) -> None:
        """Do work outside of requests. An error is logged, the same place once a minute."""
        try:
            work()
        except Exception as error:
            self.log(error, what)

    def log(self, error: Exception, what: str) -> None:
        """Log an error in work outside of requests, the same place once a minute."""
        now, told = self._driver.now(), _told(error)
        if now - self._logged_at.get(told, -math.inf) >= _LOG_S:
            if len(self._logged_at) >= _REMEMBERED_ERRORS:
                self._logged_at.clear()
            self._logged_at[told] = now
            tell(logger, Event.INTERNAL, "%s failed: %s", what, told)
            logger.debug("%s", what, exc_info=error)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            logger.debug("one step of ending a request failed", exc_info=error)


def policy_failed(request: Request, error: Exception) -> None:
    """Log that the policy raised an error at a request."""
    _log(f"policy at request {request.id}", error, str(request.id))


def _log(what: str, error: Exception, request: str) -> None:
    told = _told(error)
    tell(logger, Event.REQUEST_FAILED, "%s failed and ends alone: %s", what, told, request=request)
    logger.debug("%s", what, exc_info=error)


def _told(error: Exception) -> str:
    """Return an error in one line: its class, its message, and the line of code that raised it."""
    message = " ".join(str(error).split())[:200]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {message}{place}"
