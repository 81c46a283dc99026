"""Helpers of all that drives a scheduler: decisions kept, earlier answers found, health changes logged.

Used by the driver of a process that serves alone and by the scheduler process of several; nothing here is
called for a token.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NoReturn

from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Dispatch, Health, HealthChanged
from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.telemetry.counters import Totals
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.proxy")

DECISIONS_KEPT: Final = 1000
#: A decision keeps figures of every instance: of a large fleet fewer are kept, so that they stay some 10 MB.
CANDIDATES_KEPT: Final = 50_000
RESPONSES_KEPT: Final = 10_000


#: A timer that is so late says that this process stood still; it is due this often.
STALL_S: Final = 0.25
BEAT_S: Final = 0.1


_HEALTH: Final = {
    Health.UP: Event.INSTANCE_UP,
    Health.SUSPECT: Event.INSTANCE_SUSPECT,
    Health.EJECTED: Event.INSTANCE_EJECTED,
}


class StallWatch:
    """True if this process stood still: what came meanwhile was not heard, and no engine was slow."""

    __slots__ = ("_beater", "_due", "_loop", "_stalled_at")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stalled_at = -math.inf
        self._due = loop.time() + BEAT_S
        self._beater = loop.call_at(self._due, self._beat)

    def since(self, then: float) -> bool:
        """True if it stood still for a while since `then`."""
        now = self._loop.time()
        if now - self._due > STALL_S:  # the timer below is as late as this call
            self._stalled_at = now
        return self._stalled_at >= then

    def close(self) -> None:
        """Stop watching."""
        self._beater.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._due > STALL_S:
            self._stalled_at = now
        self._due = now + BEAT_S
        self._beater = self._loop.call_at(self._due, self._beat)


def newest(decisions: Iterable[Dispatch], instances: int) -> deque[Dispatch]:
    """The last dispatches, the oldest first: as many as suit a fleet of this size."""
    return deque(decisions, min(DECISIONS_KEPT, CANDIDATES_KEPT // max(1, instances)))


class Responses:
    """Instance and owner of the last `RESPONSES_KEPT` answers that can be asked for again."""

    __slots__ = ("_made_at", "_made_for")

    def __init__(self) -> None:
        self._made_at: dict[str, tuple[str, str | None]] = {}
        #: The ids by their owners, the oldest first.
        self._made_for: dict[str | None, deque[str]] = {}

    def __len__(self) -> int:
        return len(self._made_at)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._made_at

    def add(self, response_id: str, instance: str, tenant: str | None) -> None:
        """An answer was made. Its id is its first owner's; a full table forgets of the one with most."""
        if response_id in self._made_at:
            return
        self._made_at[response_id] = instance, tenant
        self._made_for.setdefault(tenant, deque()).append(response_id)
        if len(self._made_at) > RESPONSES_KEPT:
            most = max(self._made_for.values(), key=len)
            del self._made_at[most.popleft()]

    def find(self, response_id: str, tenant: str | None, scheduler: Scheduler, *, strict: bool) -> str | None:
        """The instance that keeps an answer. Raises `GateError` (404).

        Unless `strict`, None where it is not known and may have been made before: the engine decides.
        """
        known = self._made_at.get(response_id)
        if known is None and tenant is None and not strict:
            return None
        if known is None or known[1] != tenant or all(i.name != known[0] for i in scheduler.instances):
            raise GateError(404, f"Response with id '{response_id[:128]}' not found.")
        return known[0]


def several_models() -> NoReturn:
    """Refuse a request that names no model where there are several. Raises `GateError` (400)."""
    raise GateError(400, "model: expected the name of a model, since several are served here.")


def log_loop(instance: str) -> None:
    """Log that an instance is this proxy."""
    text = "%s is this proxy itself, or leads back to it: taken out (state maint)"
    tell(logger, Event.INSTANCE_LOOP, text, instance, instance=instance)


def log_health(command: HealthChanged, totals: Totals) -> None:
    """Log and count a change of an instance's health."""
    if command.health is Health.EJECTED:
        totals.instance(command.instance).ejections += 1
    tell(
        logger, _HEALTH[command.health], "%s is %s: %s", command.instance, command.health, command.reason,
        instance=command.instance, reason=command.reason,
    )  # fmt: skip
