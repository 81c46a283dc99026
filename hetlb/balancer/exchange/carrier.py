"""What carries out a scheduler's commands: the clock, the counters and the sweeps of its process.

Commands go to the exchanges of this process (`balancer/exchange/driver.py`), or to relays
(`options/relays/relay_host.py`).
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from time import perf_counter
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Dispatch, Lease, Reject, RequestId
from hetlb.balancer.telemetry.counters import Totals

#: Deadlines of requests are looked at this often.
SWEEP_S: Final = 0.5
#: A timer that is so late says that this process stood still; it is due this often.
STALL_S: Final = 0.25
BEAT_S: Final = 0.1
#: An instance from which something came within so many seconds is not failed by a probe.
EMITS_S: Final = 2.0


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
        self._beater.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._due > STALL_S:
            self._stalled_at = now
        self._due = now + BEAT_S
        self._beater = self._loop.call_at(self._due, self._beat)


class Carrier(ABC):
    """Base of what carries out a scheduler's commands: the clock, counters and sweeps of its process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = loop.time
        self.counted = Totals()
        self.stalls = StallWatch(loop)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self._sweep_due = perf_counter() + SWEEP_S

    @abstractmethod
    def dispatch(self, command: Dispatch, instance: Instance, decode: Instance | None) -> None:
        """Send a request to its instance; its decode leg, if it is split, goes to `decode`."""

    @abstractmethod
    def reject(self, command: Reject, retry_after_s: float | None) -> None:
        """Turn a request down; `retry_after_s` is None where another try is of no use."""

    def pass_on(self, request_id: RequestId) -> None:
        """A busy engine's answer is the client's; it goes on by itself unless something holds it."""

    def may_turn_away(self, lease: Lease) -> bool:
        """True if a lease of which nothing came can be taken from its engine."""
        return False

    def turned_away(self, lease: Lease) -> None:
        """A lease was taken from an engine that refused it, or says nothing: its request gets another one."""

    @abstractmethod
    def tokens_so_far(self, lease: Lease) -> int:
        """Output tokens of a lease: all of them, or those that came until now."""

    @abstractmethod
    def tokens_at(self) -> dict[str, float]:
        """Return the time of the newest part of a stream by instance, of those with streams."""

    def emits(self, name: str) -> bool:
        """True if part of an answer came from an instance lately."""
        return self.now() - self.tokens_at().get(name, -math.inf) < EMITS_S

    @abstractmethod
    def instances_changed(self) -> None:
        """An instance was added or removed, or its administrative state is another."""

    def view_changed(self) -> None:
        """The answers about the fleet (`/health`, `/v1/models`) may differ from now on."""

    def ticked(self) -> None:
        """The scheduler was called because it was time."""

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        clock = perf_counter()
        lag_s = max(0.0, clock - self._sweep_due)
        self.counted.lag.observe(lag_s)
        self._sweep_due = clock + SWEEP_S
        self.swept(lag_s)

    @abstractmethod
    def swept(self, lag_s: float) -> None:
        """Sweep, twice a second; this time `lag_s` late."""

    def close(self) -> None:
        self.stalls.close()
        self._sweeper.cancel()
