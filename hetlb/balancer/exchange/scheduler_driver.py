"""Driver of the scheduler of this process: facts go in, commands come out and are carried out at once.

The commands go to `Driver`, which has the exchanges of the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

from hetlb.balancer.clients.limiters import Limiters
from hetlb.balancer.core.facts import (
    AdminStateSet,
    EngineSample,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    HAND_OVER,
    AdminState,
    Command,
    Dispatch,
    Health,
    HealthChanged,
    Lease,
    Outcome,
    PassOn,
    Reject,
    RejectReason,
    Request,
    RequestId,
)
from hetlb.balancer.exchange.driver_timers import DrainRate
from hetlb.balancer.exchange.guard import policy_failed
from hetlb.balancer.exchange.relocations import Relocations, tokens_at
from hetlb.balancer.exchange.served_fleet import ServedFleet
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.core.block_index import KvEventBatch
    from hetlb.balancer.exchange.driver import Driver
    from hetlb.balancer.fleet.shared_fleet import SharedBookings

logger = logging.getLogger("hetlb.proxy")

DECISIONS_KEPT: Final = 1000
#: An instance that sent part of an answer within these seconds fails no probe.
_EMITS_S: Final = 2.0
#: Most requests that wait for a new list of the engines' models.
_MOST_UNKNOWN: Final = 256
#: Candidates kept with decisions, some 10 MB: of a large fleet fewer decisions are kept.
CANDIDATES_KEPT: Final = 50_000
_HEALTH: Final = {
    Health.UP: Event.INSTANCE_UP,
    Health.SUSPECT: Event.INSTANCE_SUSPECT,
    Health.EJECTED: Event.INSTANCE_EJECTED,
}


def newest(decisions: Iterable[Dispatch], instances: int) -> deque[Dispatch]:
    """Return the last dispatches, the oldest first: as many as suit a fleet of this size."""
    return deque(decisions, min(DECISIONS_KEPT, CANDIDATES_KEPT // max(1, instances)))


class SchedulerDriver:
    """The scheduler of this process, driven.

    `by_counters`: silence of an engine counts only if its own counters stand still, too.
    """

    def __init__(self, scheduler: Scheduler, driver: Driver, *, by_counters: bool = False) -> None:
        self.scheduler = scheduler
        self.driver = driver
        #: The fleet as exchanges see it.
        self.fleet = ServedFleet(scheduler)
        self.drain_rate = DrainRate(random.Random())
        #: Bookings of other processes of the fleet, None while this one is alone.
        self.view: SharedBookings | None = None
        #: Limits of clients' keys.
        self.limiters = Limiters()
        #: The last dispatches, the oldest first; fewer of a large fleet.
        self.decisions = newest((), len(scheduler.instances))
        #: Longest time of a probe in seconds.
        self.probe_timeout_s = 0.0
        #: True if a request may leave a busy engine for another one.
        self.moves_busy = True
        #: Takes an instance out of the fleet: it turned out to be this proxy.
        self.take_out: Callable[[InstanceChange], None] = self.change
        #: Asks the engines for their models, then calls back. Returns False right after an earlier look.
        self.look_up: Callable[[Callable[[], None]], bool] | None = None
        #: Requests that wait for `look_up`.
        self._unknown: dict[RequestId, Request] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._relocations = Relocations(scheduler, driver, self.carry_out, by_counters=by_counters)
        scheduler.contain(policy_failed)

    # --- facts about requests ---

    def submit(self, record: RequestRecord) -> None:
        """Take in a whole request. Raises `Refusal` if a limit of its key does not admit it."""
        request, now, owner = record.request, record.arrived_at, record.tenant
        if owner is not None and (limiter := self.limiters.of(owner)) is not None:
            answers = (request.max_tokens or 0) * request.sequences
            record.ticket = limiter.admit(record.prompt_tokens_total, answers, now)
        self.arrive(request, now)

    def arrive(self, request: Request, now: float) -> None:
        view = self.view
        started = perf_counter()
        commands = self.scheduler.on_arrival(request, now) if view is None else view.on_arrival(request, now)
        self.driver.counted.arrival.observe(perf_counter() - started)
        if commands and type(commands[0]) is Reject and self._looked_up(request, commands[0]):
            return
        self.carry_out(commands)

    def _looked_up(self, request: Request, reject: Reject) -> bool:
        """Look up the engines' models for a request of an unknown model. Return True if it waits for that."""
        if self.look_up is None or reject.reason is not RejectReason.UNKNOWN_MODEL:
            return False

        def again() -> None:
            if self._unknown.pop(request.id, None) is not None:
                self.carry_out(self.scheduler.on_arrival(request, self.driver.now()))

        self._unknown[request.id] = request
        if len(self._unknown) > _MOST_UNKNOWN or not self.look_up(again):
            del self._unknown[request.id]
            return False
        return True

    def first_token(self, lease: Lease, now: float) -> None:
        """Note that the answer of a lease began."""
        if commands := self.scheduler.on_first_token(lease, now):
            self.carry_out(commands)
        if self.scheduler.failover.misplaced_model is not None:
            self._relocations.place_misplaced(now)

    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        """End a lease; with `retry` the scheduler decides about its request.

        `generated`: tokens of its answer that are part of the prompt now, None if it begins again.
        """
        started = perf_counter()
        commands = self.scheduler.on_lease_ended(lease, outcome, now, retry=retry, generated=generated)
        self.driver.counted.end.observe(perf_counter() - started)
        if commands or self._ticker is None:
            self.carry_out(commands)

    def move(self, lease: Lease, generated: int, now: float) -> None:
        """Ask for another place for the rest of an answer, behind `generated` tokens; its engine works.

        A dispatch follows once there is a place. Without one the lease goes on.
        """
        self.carry_out(self.scheduler.on_moving(lease, generated, now))

    def refused(
        self, lease: Lease, status: int, retry_after_s: float | None, features: Sequence[str], now: float
    ) -> None:
        """Note that an engine refused or failed a request by `status`, before a byte of an answer.

        `features` are the request's (`request_features.py`). Another instance may get it. `retry_after_s`:
        seconds until a retry, None if the engine did not state any.
        """
        commands = self.scheduler.on_refused(
            lease, status, retry_after_s, now, features=features, may_move=self.moves_busy
        )
        if lease.ended:
            self.driver.turned_away(lease, _outcome_of(status))
        self.carry_out(commands)

    def cancelled(self, request_id: RequestId, now: float) -> None:
        """Forget a waiting request. Its client left."""
        self._unknown.pop(request_id, None)
        self.carry_out(self.scheduler.on_cancelled(request_id, now))

    def abandon(self, request_id: RequestId, now: float) -> None:
        """End all bookings of a request after its exchange is gone."""
        self._unknown.pop(request_id, None)
        self.carry_out(self.scheduler.abandon(request_id, now))

    def came_back(self, instance: str) -> None:
        """Stop sending to an instance: its request came back to this proxy."""
        text = "%s is this proxy itself, or leads back to it: taken out (state maint)"
        tell(logger, Event.INSTANCE_LOOP, text, instance, instance=instance)
        self.scheduler.fleet.instances[instance].leads_back = True
        self.take_out(AdminStateSet(instance, AdminState.MAINT))

    # --- facts about instances ---

    def change(self, change: InstanceChange) -> None:
        driver = self.driver
        now = driver.now()
        if isinstance(change, Probed) and change.result is ProbeResult.FAILED:
            if now - tokens_at(driver).get(change.name, -math.inf) < _EMITS_S:
                return  # busy, not dead: its probes wait behind its work
            if driver.sweeper.stalled_since(now - self.probe_timeout_s):
                return  # the probe may have been answered while this process stood still
        commands = self.scheduler.on_instance(change, now)
        if isinstance(change, InstanceAdded | InstanceRemoved | AdminStateSet):
            self.decisions = newest(self.decisions, len(self.scheduler.instances))
            driver.instances_changed()
        self.carry_out(commands)

    def sample(self, name: str, sample: EngineSample) -> None:
        instance = self.scheduler.fleet.instances.get(name)
        slept = instance is not None and instance.asleep
        self.carry_out(self.scheduler.on_scrape(name, sample, self.driver.now()))
        self.driver.sampled()
        if instance is not None and instance.asleep is not slept:
            event = Event.INSTANCE_ASLEEP if instance.asleep else Event.INSTANCE_AWAKE
            text = "%s sleeps: it gets no requests" if instance.asleep else "%s woke up"
            tell(logger, event, text, name, instance=name)

    def kv_events(self, name: str, batch: KvEventBatch) -> None:
        self.carry_out(self.scheduler.on_kv_events(name, batch, self.driver.now()))

    def set_policy(self, name: str) -> None:
        self.carry_out(self.scheduler.set_policy(name, self.driver.now()))

    # --- commands ---

    def carry_out(self, commands: list[Command]) -> None:
        driver = self.driver
        for command in commands:
            if type(command) is Dispatch:
                if command.reason != HAND_OVER:  # decided with its prefill leg
                    driver.counted.decisions += 1
                    self.decisions.append(command)
                lease, leased = command.lease, self.scheduler.ledger.leased
                driver.dispatch(
                    command, leased[lease.id], None if lease.decode is None else leased[lease.decode.id]
                )
            elif isinstance(command, Reject):
                again_s = _retry_after_s(command, self.drain_rate, len(self.scheduler.queue), driver.now())
                driver.reject(command, again_s)
            elif isinstance(command, HealthChanged):
                _log_health(command, driver.counted)
            else:  # the engine's answer goes on to the client by itself
                assert isinstance(command, PassOn), f"expected a command, got {command!r}"
        self.tick_later()

    def tick_later(self) -> None:
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.driver.loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        try:
            self.carry_out(self.scheduler.on_tick(self.driver.now()))
        finally:
            self.tick_later()

    def sweep(self, now: float) -> None:
        """Do what is due, about twice a second."""
        self._relocations.sweep(now)
        self.fleet.sampled = False

    def close(self) -> None:
        """Stop the timers."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._relocations.close()


def _outcome_of(status: int) -> Outcome:
    """Return the outcome of a lease that its engine refused or failed by a status."""
    if status in (429, 503):
        return Outcome.UPSTREAM_BUSY
    return Outcome.UPSTREAM_REFUSED if status < 500 else Outcome.UPSTREAM_ERROR


def _log_health(command: HealthChanged, totals: Totals) -> None:
    if command.health is Health.EJECTED:
        totals.instances[command.instance].ejections += 1
    tell(
        logger, _HEALTH[command.health], "%s is %s: %s", command.instance, command.health, command.reason,
        instance=command.instance, reason=command.reason,
    )  # fmt: skip


def _retry_after_s(reject: Reject, drain_rate: DrainRate, waiting: int, now: float) -> float | None:
    """Return seconds until the client of a rejected request should retry, None if a retry is useless."""
    if reject.retry_after_s is None:
        return None
    if reject.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_EXPIRED):
        return drain_rate.retry_after_s(waiting, now)
    return drain_rate.spread(reject.retry_after_s)
