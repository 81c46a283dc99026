"""The scheduler as exchanges see it, wherever it is.

It is in this process (`balancer/exchange/scheduler_driver.py`), or is reached over a channel
(`options/relays/relay_driver.py`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final

from hetlb.balancer.core.types import Lease, Outcome, RequestId
from hetlb.balancer.engines.engine_pools import Target
from hetlb.balancer.exchange.exchange import Exchange, Maker
from hetlb.balancer.http.endpoints import Kind

#: Seconds over which ended requests are counted, in slices of one.
WINDOW_S: Final = 10
#: Longest `Retry-After` in seconds, and the part of each by which it is spread: not all come back together.
_LONGEST_S: Final = 40.0
_SPREAD: Final = 0.5


class DrainRate:
    """Rate at which requests ended lately, and the `Retry-After` of clients that are turned away."""

    __slots__ = ("_counts", "_rng", "_second")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._counts = [0] * WINDOW_S
        self._second = 0

    def ended(self, now: float) -> None:
        self._turn(now)
        self._counts[self._second % WINDOW_S] += 1

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Seconds until another try makes sense, with `waiting` requests in the queue."""
        self._turn(now)
        rate_rps = max(1, sum(self._counts)) / WINDOW_S
        return self.spread(waiting / rate_rps)

    def spread(self, wait_s: float) -> float:
        """A wait within the bounds, up to half as long again by chance."""
        return min(_LONGEST_S, max(1.0, wait_s)) * (1.0 + _SPREAD * self._rng.random())

    def _turn(self, now: float) -> None:
        """Forget the slices that have left the window."""
        second = int(now)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._counts[passed % WINDOW_S] = 0
        self._second = max(self._second, second)


class Splits(Maker):
    """Attempts of requests that are split between instances, and what is known of these (`options/split`)."""

    @abstractmethod
    def may_split(self, kind: Kind, path: str, body: bytes) -> bool:
        """Return True if a request with one prompt and one sequence can be split."""

    @abstractmethod
    def judged(self) -> None:
        """Count what the scheduler has found about earlier ones."""

    @abstractmethod
    def stop(self) -> None:
        """Break off the requests of the proxy's own."""


class SchedulerSide(ABC):
    """The scheduler as the exchanges of a process see it, wherever it is."""

    def __init__(self) -> None:
        self.drain_rate = DrainRate(random.Random())
        #: None while no instance has ever taken part in a split.
        self.splits: Splits | None = None

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
        """Tokens of a block of engines that tell of theirs, 0 where none does or it is not known here."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that wait for an instance."""

    @abstractmethod
    def available(self, model: str) -> bool:
        """True if some instance of a model takes requests, as far as this process knows."""

    @abstractmethod
    def targets(self) -> Collection[Target]:
        """The engines that may get requests."""

    @abstractmethod
    def serves(self, lease: Lease) -> bool:
        """True if the instance of a lease serves its model, as far as is known."""

    # --- facts ---

    @abstractmethod
    def submit(self, exchange: Exchange) -> None:
        """A whole request came in."""

    @abstractmethod
    def first_token(self, lease: Lease, now: float) -> None:
        """The answer of a lease began."""

    @abstractmethod
    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        """A lease ended; with `retry` the scheduler says what becomes of its request.

        `generated`: so many tokens of its answer are part of the prompt now, None where it begins again.
        """

    @abstractmethod
    def move(self, lease: Lease, generated: int, now: float) -> None:
        """The answer of a lease is to go on elsewhere while its engine lives, `generated` tokens of it said.

        A dispatch follows once there is a place; without one the lease goes on.
        """

    @abstractmethod
    def refused(self, lease: Lease, busy: bool, retry_after_s: float | None, now: float) -> None:
        """An engine refused a request and ran nothing of it; `busy`: it has no room.

        Another instance may get it. `retry_after_s`: when to come again, None where the engine did not say.
        """

    def works(self, lease: Lease, now: float) -> bool:
        """True if the own counters of the instance of a lease moved lately, as far as this process knows."""
        return False

    def stalled_s(self, lease: Lease, now: float) -> float:
        """Return the seconds for which the instance of a lease has been stalled, 0.0 if it is not."""
        return 0.0

    @abstractmethod
    def cancelled(self, request_id: RequestId, now: float) -> None:
        """The client of a waiting request left."""

    @abstractmethod
    def abandon(self, request_id: RequestId, now: float) -> None:
        """End whatever the scheduler has of a request, of which its exchange has lost track."""

    @abstractmethod
    def came_back(self, instance: str) -> None:
        """A request to an instance came back to this proxy: nothing goes there any more."""

    def learn_prompt(self, model: str, text_bytes: int, tokens: int) -> None:
        """An engine counted `tokens` in prompts of text alone: other processes may learn of it."""

    # --- time ---

    def count_calls(self) -> None:
        """Count the seconds of the scheduler's calls since the last time."""

    def sweep(self, now: float) -> None:
        """Called about twice a second."""

    def close(self) -> None:
        """Stop the timers."""
