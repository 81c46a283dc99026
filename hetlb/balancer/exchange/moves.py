"""Moves of requests away from an instance that has been given notice."""

from __future__ import annotations

import math

from hetlb.balancer.core.instance import NOTICE_MARGIN_S
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.driver_timers import SWEEP_S
from hetlb.balancer.exchange.exchange_states import Phase


def move_all_away(driver: Driver, now: float) -> None:
    """Move requests away from all instances that leave."""
    for each in driver.scheduling.fleet.targets():
        if each.leaves_at is not None:
            move_away(driver, each.name, each.leaves_at, now)


def move_away(driver: Driver, name: str, gone_at: float, now: float) -> None:
    """Move requests that end after their instance leaves, evenly until then, the shortest first."""
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
