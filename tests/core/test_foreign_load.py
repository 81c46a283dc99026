"""Requests at an engine that others sent: they count in room, forecast and speed while its reports say so."""

from __future__ import annotations

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Outcome

CAPACITY = Capacity(max_num_seqs=32, kv_cache_tokens=10**6)


def crowded(count: int, now: float = 0.0) -> Scheduler:
    """Return two equal servers; `a` has reported `count` foreign requests twice."""
    specs = [spec(name, capacity=CAPACITY, latency=FAST) for name in "ab"]
    scheduler = make_scheduler(specs, "hetlb")
    for at in (now, now + 0.5):
        scheduler.on_scrape("a", EngineSample(count, 0, 0.2), at)
        scheduler.on_scrape("b", EngineSample(0, 0, 0.0), at)
    return scheduler


def test_work_goes_where_no_others_are() -> None:
    scheduler = crowded(20)
    leases = [dispatched(scheduler.on_arrival(request(i), 1.0)) for i in range(8)]
    assert [each.instance for each in leases] == ["b"] * 8


def test_others_take_slots() -> None:
    scheduler = crowded(31)
    leases = [dispatched(scheduler.on_arrival(request(i, subset=("a",)), 1.0)) for i in range(1)]
    assert leases[0].instance == "a"
    assert scheduler.on_arrival(request(9, subset=("a",)), 1.0) == []


def test_the_forecast_is_of_all_that_run() -> None:
    alone, beside = (dispatched(crowded(n).on_arrival(request(1, subset=("a",)), 1.0)) for n in (0, 30))
    assert beside.forecast_end_s > alone.forecast_end_s


@pytest.mark.parametrize("how", ["said", "stale"])
def test_they_are_gone_when_reports_say_so_or_none_come(how: str) -> None:
    scheduler = crowded(31)
    now = 1.0
    if how == "said":
        scheduler.on_scrape("a", EngineSample(0, 0, 0.0), now)
    else:
        now += SIGNAL_STALE_S
    leases = [dispatched(scheduler.on_arrival(request(i, subset=("a",)), now)) for i in range(20)]
    assert len(leases) == 20


def test_one_report_is_none_and_a_few_more_are_of_another_moment() -> None:
    specs = [spec("a", capacity=CAPACITY)]
    scheduler = make_scheduler(specs, "hetlb")
    (a,) = scheduler.instances
    scheduler.on_scrape("a", EngineSample(30, 0, 0.2), 0.0)
    assert a.foreign == 0
    scheduler.on_arrival(request(1), 0.5)
    for at in (0.6, 1.0):
        scheduler.on_scrape("a", EngineSample(3, 0, 0.2), at)
    assert a.foreign == 0


def test_a_single_request_of_others_counts_beside_none_of_its_own() -> None:
    scheduler = crowded(1)
    assert scheduler.instances[0].foreign == 1


def test_steps_beside_others_are_no_slow_ones() -> None:
    """The model knows 30 other requests: an answer beside them shows no other speed."""
    scheduler = crowded(30)
    (a, _) = scheduler.instances
    for number in range(8):
        now = 1.0 + 2.0 * number
        for at in (now - 0.4, now - 0.2):
            scheduler.on_scrape("a", EngineSample(30, 0, 0.0), at)
        lease = dispatched(scheduler.on_arrival(request(number, subset=("a",), streamed=True), now))
        scheduler.on_first_token(lease, now + lease.forecast_first_s)
        lease.output_tokens = 50
        end = now + lease.forecast_first_s + 49 * lease.forecast_step_s
        scheduler.on_lease_ended(lease, Outcome.OK, end)
    assert a.speed.shown == pytest.approx(1.0, rel=0.1)
