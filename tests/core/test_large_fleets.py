"""A large fleet is looked at as a small one is."""

from __future__ import annotations

import pytest
from helpers import make_scheduler, spec

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome, Request
from hetlb.tools.sim.integrity import check_scheduler


def large(count: int, fast_every: int = 4, slots: int = 8) -> Scheduler:
    capacity = Capacity(max_num_seqs=slots, kv_cache_tokens=100_000)
    specs = [spec(f"i{n}", slower=4.0 if n % fast_every else 1.0, capacity=capacity) for n in range(count)]
    return make_scheduler(specs, policy="hetlb")


def arrive(scheduler: Scheduler, number: int, **fields: object) -> Lease | None:
    """The lease of a request that is placed at once."""
    request = Request(number, "m", 100, **fields)  # type: ignore[arg-type]
    for command in scheduler.on_arrival(request, 0.0):
        assert isinstance(command, Dispatch)
        return command.lease
    return None


def test_the_last_place_of_a_large_fleet_is_found_and_then_requests_wait() -> None:
    scheduler = large(150, fast_every=1, slots=2)
    leases = []
    while (lease := arrive(scheduler, len(leases))) is not None:
        leases.append(lease)
    places = sum(each.max_num_seqs for each in scheduler.instances)
    assert len(leases) == places
    check_scheduler(scheduler)
    commands = scheduler.on_lease_ended(leases[137], Outcome.OK, 1.0)
    assert [c.lease.instance for c in commands if isinstance(c, Dispatch)] == [leases[137].instance]
    check_scheduler(scheduler)


def test_slow_instances_are_passed_over_as_in_a_small_fleet() -> None:
    placed = []
    for count in (100, 300):
        scheduler = large(count, slots=2)
        number = 0
        while arrive(scheduler, number) is not None:
            number += 1
        placed.append(number / count)
    assert placed[0] < 2.0  # the slow ones get none: the fast are done with all before
    assert placed[1] == pytest.approx(placed[0], rel=0.02)


def test_loads_stay_level_among_equals_and_the_fast_get_more() -> None:
    scheduler = large(160, slots=64)
    for number in range(1600):
        assert arrive(scheduler, number) is not None
    fast = [each.sequences for n, each in enumerate(scheduler.instances) if n % 4 == 0]
    slow = [each.sequences for n, each in enumerate(scheduler.instances) if n % 4]
    assert min(fast) > max(slow)
    assert max(fast) - min(fast) <= 0.2 * max(fast)
