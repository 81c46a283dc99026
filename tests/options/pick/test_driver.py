"""The picker's driver without Envoy."""

from __future__ import annotations

import asyncio

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.facts import AdminStateSet, EngineSample
from hetlb.balancer.core.types import AdminState, Capacity, Dispatch, Outcome, Places, Request
from hetlb.balancer.exchange.driver_timers import Sweeper
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.pick.pick_driver import MOST_RANKED_INSTANCES, PickDriver


@pytest.mark.parametrize("count", [30, 3 * MOST_RANKED_INSTANCES])
async def test_fallbacks_can_take_the_request_and_are_not_the_chosen_one(count: int) -> None:
    capacity = Capacity(max_num_seqs=8, kv_cache_tokens=100_000)
    scheduler = make_scheduler([spec(f"i{n}", capacity=capacity) for n in range(count)], "hetlb")
    loop = asyncio.get_running_loop()
    driver = PickDriver(scheduler, ProxyTable(), TokenEstimator(), loop, {}, OPTIONS.splits)
    down = {f"i{n}" for n in range(0, count, 3)}
    for name in down:
        scheduler.on_instance(AdminStateSet(name, AdminState.DRAIN), 0.0)
    subset = tuple(f"i{n}" for n in range(count) if n % 2)
    seen: set[str] = set()
    for number in range(60):
        request = Request(number, "m", 100, places=Places(subset if number % 2 else None))
        (command,) = scheduler.on_arrival(request, 0.0)
        assert isinstance(command, Dispatch)
        driver.picking.decisions.append(command)
        found = driver.fallbacks(2)
        assert len(set(found)) == 2
        assert not {*found} & {command.lease.instance, *down}
        assert number % 2 == 0 or {*found} <= {*subset}
        seen.update(found)
    assert len(seen) >= min(4, count // 50)  # not always the same
    assert driver.fallbacks(0) == []
    driver.close()


@pytest.mark.parametrize("told", [True, False])
async def test_an_engine_whose_counters_stand_still_gets_trials_alone(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Envoy shows no answers: without counters silence says nothing."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    driver = PickDriver(
        scheduler, ProxyTable(), TokenEstimator(), asyncio.get_running_loop(), {}, OPTIONS.splits
    )
    held = dispatched(scheduler.on_arrival(request(1, streamed=True), driver.now()))
    clock = begun = driver.now()
    monkeypatch.setattr(Sweeper, "stalled_since", lambda self, then: False)
    monkeypatch.setattr(driver, "now", lambda: clock)
    while clock < begun + 10.0:
        clock += 0.5
        driver.picking.sample(held.instance, EngineSample(1, 0, 0.1, generated=7 if told else None))
        driver.picking.sweep(clock)
    breaker = scheduler.fleet.instances[held.instance].evidence
    assert (breaker.silence.stalled_since is not None) is told
    scheduler.on_lease_ended(held, Outcome.CLIENT_GONE, clock)
    driver.close()
