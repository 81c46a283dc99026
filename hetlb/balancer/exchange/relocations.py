"""Requests that another instance gets instead.

Example: an instance stands still while three requests wait there. Each of them is taken back, and the
scheduler places it again. The same is done if an instance turned out to be slower than it was thought, and,
with answers that have begun too, if an instance has been given notice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.instance import NOTICE_MARGIN_S, Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Lease, LeaseId, Outcome
from hetlb.balancer.exchange.driver_timers import SWEEP_S
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.telemetry.events import Event, tell

if TYPE_CHECKING:
    from hetlb.balancer.exchange.driver import Driver

logger = logging.getLogger("hetlb.proxy")

#: Seconds after a pause of this process without conclusions from silence.
_OWN_STALL_S: Final = 1.0
#: Seconds until requests that found the budget of retries used up are looked at again.
_NEXT_MOVES_S: Final = 0.05


class Relocations:
    """Watch for instances that stand still, and mover of the requests that wait at the wrong instance.

    `by_counters`: silence counts only if an engine's own counters stand still, too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        driver: Driver,
        carry_out: Callable[[list[Command]], None],
        *,
        by_counters: bool,
    ) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._carry_out = carry_out
        self._by_counters = by_counters
        self._mover: asyncio.TimerHandle | None = None
        #: Names of the instances that have stalled, as last reported.
        self._stalled: set[str] = set()

    def sweep(self, now: float) -> None:
        """Check which instances work, and send elsewhere the requests that wait at others."""
        scheduler, driver = self._scheduler, self._driver
        if driver.sweeper.stalled_since(now - _OWN_STALL_S):
            return  # bytes that came meanwhile are not read yet
        if scheduler.in_flight or any(each.evidence.wary(now) for each in scheduler.instances):
            unread = [(lease.id, driver.features(lease)) for lease in scheduler.failover.unread(now)]
            still: Sequence[LeaseId] = ()
            if any(map(_misses, scheduler.instances)):
                from hetlb.balancer.core.evidence import missing

                still = missing.still(scheduler.instances, lambda lease: _token_at(driver, lease), now)
            newest, lag_s = tokens_at(driver), round(driver.counted.recent.lag_s, 2)
            commands = scheduler.on_sweep(
                newest, now, by_counters=self._by_counters, features=unread, still=still, lag_s=lag_s
            )
            self._carry_out(commands)
        self._tell_stalls(now)
        if self._mover is None:
            self._move_stranded()

    def place_misplaced(self, now: float) -> None:
        """Place requests again after their instance turned out to be slower than assumed."""
        scheduler = self._scheduler
        self._move(scheduler.failover.misplaced(), scheduler.on_misplaced, now, Outcome.MISPLACED)
        self._carry_out(scheduler.wait_again(now))

    def _move_stranded(self) -> None:
        """Move requests away from stalled instances. If the budget is used up, move the rest soon."""
        self._mover, now, scheduler = None, self._driver.now(), self._scheduler
        stranded = scheduler.failover.stranded(now)
        left = self._move(stranded, scheduler.on_stranded, now, Outcome.UPSTREAM_BUSY)
        if left and scheduler.placement.retries.leases:
            self._mover = self._driver.loop.call_later(_NEXT_MOVES_S, self._move_stranded)

    def _move(
        self,
        leases: list[Lease],
        place: Callable[[Lease, float], list[Command]],
        now: float,
        outcome: Outcome,
    ) -> bool:
        """Place leases again at other instances, if they may be taken back. Return True if some stay.

        `place` is the scheduler's method for one lease. Moved leases end with `outcome`.
        """
        left = False
        for lease in leases:
            if self._driver.may_turn_away(lease):
                commands = place(lease, now)
                if lease.ended:
                    self._driver.turned_away(lease, outcome)
                left = left or not lease.ended
                self._carry_out(commands)
        return left

    def _tell_stalls(self, now: float) -> None:
        """Log which instances have stalled, or do so no more."""
        stalled = {
            each.name for each in self._scheduler.instances if each.evidence.silence.stalled_since is not None
        }
        for name in stalled - self._stalled:
            why = self._scheduler.fleet.instances[name].evidence.why(now)
            text = "%s has %s: it gets one request at a time"
            tell(logger, Event.INSTANCE_STALLED, text, name, why, instance=name, reason=why)
            self._driver.counted.instances[name].stalls += 1
        for name in self._stalled - stalled:
            if name in self._scheduler.fleet.instances:
                tell(logger, Event.INSTANCE_MOVES, "%s goes on", name, instance=name)
        self._stalled = stalled

    def close(self) -> None:
        """Stop the timer."""
        if self._mover is not None:
            self._mover.cancel()


# --- instances that leave ---


def move_all_away(driver: Driver, now: float) -> None:
    """Move requests away from all instances that leave."""
    for each in driver.scheduling.scheduler.instances:
        if each.leaves_at is not None:
            move_away(driver, each.name, each.leaves_at, now)


def _misses(instance: Instance) -> bool:
    """Return True if an engine reported fewer requests than it has now."""
    sample = instance.sample
    return sample is not None and instance.sequences > (sample.running or 0) + (sample.waiting or 0)


def tokens_at(driver: Driver) -> dict[str, float]:
    """Return the time of the newest part of a stream, by instance with streams."""
    found: dict[str, float] = {}
    for exchange in driver.exchanges.values():
        lease = exchange.record.lease
        if lease is not None and exchange.phase is Phase.STREAMING and exchange.attempt.owes.computed:
            at = exchange.attempt.token_at(exchange.since)
            if at > found.get(lease.instance, -math.inf):
                found[lease.instance] = at
    return found


def _token_at(driver: Driver, lease: Lease) -> float:
    """Return the time of the newest part of a stream; infinite if its client does not read it."""
    exchange = driver.exchanges.get(lease.request.id)
    if exchange is None or exchange.record.lease is not lease or exchange.response.paused_since is not None:
        return math.inf
    return exchange.attempt.token_at(exchange.since)


def move_away(driver: Driver, name: str, gone_at: float, now: float) -> None:
    """Move requests that would end after their instance leaves.

    Moves are spread evenly over the time until then, the shortest requests first.
    """
    left_s = gone_at - NOTICE_MARGIN_S - now
    late = []
    for each in driver.exchanges.values():
        record, lease = each.record, each.record.lease
        if lease is not None and lease.instance == name and each.phase is not Phase.QUEUED:
            ends_at = lease.dispatched_at + lease.forecast_end_s
            if ends_at > now + left_s or left_s < SWEEP_S:
                late.append((ends_at, record.request.id))
    late.sort()
    most = math.ceil(len(late) * SWEEP_S / max(left_s, SWEEP_S))
    for _, request_id in late:
        exchange = driver.exchanges.get(request_id)
        if most <= 0 or exchange is None:
            continue
        try:
            most -= exchange.attempt.move()
        except Exception as error:
            driver.guard.ended(exchange, error)
