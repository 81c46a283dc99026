"""Both sides of a driver: the scheduler as exchanges see it, and the executor of its commands.

Facts go to a `SchedulerSide` (`balancer/exchange/scheduler_driver.py`). Commands go to a `Carrier`, the
exchanges of this process (`balancer/exchange/driver.py`).
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.rate import RecentRate
from hetlb.balancer.core.types import Dispatch, Lease, Outcome, Reject, RequestId
from hetlb.balancer.engines.engine_pools import Target
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.request_record import RequestRecord

#: Seconds between looks at the deadlines of requests.
SWEEP_S: Final = 0.5
#: Lateness of a timer, in seconds, that shows that this process stood still; and seconds between its calls.
STALL_S: Final = 0.25
BEAT_S: Final = 0.1
#: An instance that sent part of an answer within these seconds fails no probe.
EMITS_S: Final = 2.0
#: Least assumed rate of ended requests, per second.
_LEAST_RPS: Final = 0.1
#: Requests that end within these seconds are counted at once.
_TOGETHER_S: Final = 0.1
#: Longest `Retry-After` in seconds, and the largest share added at random: not all come back together.
_LONGEST_RETRY_AFTER_S: Final = 40.0
_SPREAD_SHARE: Final = 0.5


class DrainRate:
    """Recent rate of ended requests, and the `Retry-After` of rejected clients."""

    __slots__ = ("_at", "_count", "_rate", "_rng")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rate = RecentRate()
        #: Requests that ended at about the same time, and that time.
        self._count, self._at = 0.0, -math.inf

    def ended(self, now: float) -> None:
        if now - self._at > _TOGETHER_S:
            self._take()
            self._at = now
        self._count += 1.0

    def _take(self) -> None:
        if self._count:
            self._rate, self._count = self._rate.plus(self._count, self._at), 0.0

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Return seconds until another try makes sense, with `waiting` requests in the queue."""
        self._take()
        return self.spread(waiting / max(_LEAST_RPS, self._rate.per_s(now)))

    def spread(self, wait_s: float) -> float:
        """Return a wait within the bounds, up to half as long again by chance."""
        return min(_LONGEST_RETRY_AFTER_S, max(1.0, wait_s)) * (1.0 + _SPREAD_SHARE * self._rng.random())


class SchedulerSide(ABC):
    """The scheduler as the exchanges of a process see it, wherever it is."""

    def __init__(self) -> None:
        self.drain_rate = DrainRate(random.Random())

    # --- the fleet ---

    @property
    @abstractmethod
    def models(self) -> Collection[str]:
        """Every name that some instance answers to."""

    @property
    @abstractmethod
    def only_model(self) -> str:
        """The model of a fleet that serves one, "" of another."""

    @property
    @abstractmethod
    def block_tokens(self) -> int:
        """Tokens of a block of engines that publish blocks, 0 if none does or the size is unknown here."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that wait for an instance."""

    @abstractmethod
    def available(self, model: str) -> bool:
        """Return True if some instance of a model takes requests, as far as this process knows."""

    def takes(self, instance: str) -> bool | None:
        """Return True if an instance takes requests, False if it does not now, None if there is none."""
        return None

    @abstractmethod
    def targets(self) -> Collection[Target]:
        """Return the engines that may get requests."""

    @abstractmethod
    def serves(self, lease: Lease) -> bool:
        """Return True if the instance of a lease serves its model, as far as is known."""

    # --- facts ---

    @abstractmethod
    def submit(self, record: RequestRecord) -> None:
        """Take in a whole request. Raises `Refusal` if it is not admitted."""

    @abstractmethod
    def first_token(self, lease: Lease, now: float) -> None:
        """Note that the answer of a lease began."""

    @abstractmethod
    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        """End a lease; with `retry` the scheduler decides about its request.

        `generated`: tokens of its answer that are part of the prompt now, None if it begins again.
        """

    @abstractmethod
    def move(self, lease: Lease, generated: int, now: float) -> None:
        """Ask for a place elsewhere for an answer's rest, behind `generated` tokens, though its engine lives.

        A dispatch follows once there is a place; without one the lease goes on.
        """

    def names(self, lease: Lease, model: str) -> bool:
        """Return True if the instance of a lease lists a model by this name, as far as is known."""
        return True

    @property
    def refused_kinds(self) -> bool:
        """True if some instance refuses some kind of request: features of requests matter."""
        return False

    @abstractmethod
    def refused(
        self, lease: Lease, status: int, retry_after_s: float | None, features: Sequence[str], now: float
    ) -> None:
        """Note that an engine refused or failed a request by `status`, before a byte of an answer.

        `features` are the request's (`request_features.py`). Another instance may get it. `retry_after_s`:
        seconds until a retry, None if the engine did not state any.
        """

    def hung_s(self, lease: Lease, now: float) -> float | None:
        """Return the seconds since the counters of an engine last moved, 0.0 if they are unknown.

        None while they move, as far as this process knows.
        """
        return 0.0

    @abstractmethod
    def cancelled(self, request_id: RequestId, now: float) -> None:
        """Forget a waiting request. Its client left."""

    @abstractmethod
    def abandon(self, request_id: RequestId, now: float) -> None:
        """End all bookings of a request after its exchange is gone."""

    @abstractmethod
    def came_back(self, instance: str) -> None:
        """Stop sending to an instance: its request came back to this proxy."""

    def learn_prompt(self, model: str, text_bytes: int, tokens: int) -> None:
        """Tell other processes of the `tokens` that an engine counted in prompts of text alone."""

    # --- time ---

    def count_calls(self) -> None:
        """Count the seconds of the scheduler's calls since the last time."""

    def sweep(self, now: float) -> None:
        """Do what is due, about twice a second."""

    def close(self) -> None:
        """Stop the timers."""


class StallWatch:
    """True if this process stood still: bytes were not read meanwhile, and no engine was slow."""

    __slots__ = ("_beater", "_due", "_loop", "_stalled_at")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stalled_at = -math.inf
        self._due = loop.time() + BEAT_S
        self._beater = loop.call_at(self._due, self._beat)

    def since(self, then: float) -> bool:
        """Return True if it stood still for a while since `then`."""
        self._look()  # the timer is as late as this call
        return self._stalled_at >= then

    def close(self) -> None:
        self._beater.cancel()

    def _look(self) -> float:
        """Note a stall; return the time."""
        now = self._loop.time()
        if now - self._due > STALL_S:
            self._stalled_at = now
        return now

    def _beat(self) -> None:
        self._due = self._look() + BEAT_S
        self._beater = self._loop.call_at(self._due, self._beat)


class Carrier(ABC):
    """Base of the executors of a scheduler's commands: the clock, counters and sweeps of its process."""

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
        """Reject a request; `retry_after_s` is None if another try is useless."""

    def pass_on(self, request_id: RequestId) -> None:
        """Pass a busy engine's answer on to the client, unless something holds it."""

    def may_turn_away(self, lease: Lease) -> bool:
        """Return True if a lease without any answer bytes can be taken from its engine."""
        return False

    def takes_back(self) -> bool:
        """Return True if requests can be taken from live engines, to wait again or to go to another."""
        return False

    def turned_away(self, lease: Lease, outcome: Outcome) -> None:
        """Give a request another lease: its engine refused it, is silent, or was thought to be faster."""

    @abstractmethod
    def tokens_so_far(self, lease: Lease) -> int:
        """Return the output tokens of a lease: all of them, or the tokens until now."""

    @abstractmethod
    def tokens_at(self) -> dict[str, float]:
        """Return the time of the newest part of a stream, by instance with streams."""

    def emits(self, name: str) -> bool:
        """Return True if part of an answer came from an instance lately."""
        return self.now() - self.tokens_at().get(name, -math.inf) < EMITS_S

    @abstractmethod
    def instances_changed(self) -> None:
        """Note that an instance was added or removed, or has another administrative state."""

    def view_changed(self) -> None:
        """Note that answers about the fleet (`/health`, `/v1/models`) may differ from now on."""

    def ticked(self) -> None:
        """Note that the scheduler was called because it was time."""

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
