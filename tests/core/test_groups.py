"""A large fleet is dealt into groups that are alike, and a decision looks at two or three of them."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import make_scheduler, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.core.policies.groups import LARGEST_WHOLE, Groups
from hetlb.core.prefix_index import Held
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import AdminState, AdminStateSet, Capacity, Dispatch, Lease, Outcome, Request


def large(count: int, fast_every: int = 4, slots: int = 8) -> Scheduler:
    capacity = Capacity(max_num_seqs=slots, kv_cache_tokens=100_000)
    specs = [spec(f"i{n}", slower=4.0 if n % fast_every else 1.0, capacity=capacity) for n in range(count)]
    return make_scheduler(specs, policy="hetlb")


@settings(max_examples=25)
@given(st.integers(LARGEST_WHOLE + 1, 500), st.integers(1, 9))
def test_every_instance_is_in_one_group_and_each_group_has_its_share_of_the_fast(
    count: int, fast_every: int
) -> None:
    fleet = large(count, fast_every).instances
    groups, looked = Groups().in_order(fleet, 0, None)
    assert looked == 2
    assert sorted(i for group in groups for i in group.indices) == list(range(count))
    assert all([fleet[i] for i in group.indices] == group.instances for group in groups)
    fast = [sum(i % fast_every == 0 for i in group.indices) for group in groups]
    assert max(fast) - min(fast) <= 1
    assert sum(group.share for group in groups) == pytest.approx(1.0)


def test_requests_go_round_the_groups_and_their_seconds_are_all_others() -> None:
    fleet = large(640).instances
    known = Groups()
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(9000):
        groups, _ = known.in_order(fleet, number, None)
        firsts = [group.indices[0] for group in groups]
        assert len(set(firsts)) == 10
        seen[firsts[0], firsts[1]] += 1
    assert set(seen.values()) == {100}
    assert len(seen) == 90


def test_the_group_that_holds_most_of_the_prompt_is_looked_at() -> None:
    fleet = large(640).instances
    known, held = Groups(), Held()
    for n, tokens in ((7, 100), (300, 500), (600, 200)):
        held.tokens[fleet[n].tree.cache_id] = tokens
    for number in range(90):
        groups, looked = known.in_order(fleet, number, held)
        assert any(300 in group.indices for group in groups[:looked])
        assert 2 <= looked <= 3
        assert len(groups) == 10


def arrive(scheduler: Scheduler, number: int, **fields: object) -> Lease | None:
    """The lease of a request that is placed at once."""
    request = Request(number, "m", 100, **fields)  # type: ignore[arg-type]
    for command in scheduler.on_arrival(request, 0.0):
        assert isinstance(command, Dispatch)
        return command.lease
    return None


def test_the_last_place_of_a_large_fleet_is_found_and_then_requests_wait() -> None:
    scheduler = large(300, fast_every=1, slots=2)
    leases = []
    while (lease := arrive(scheduler, len(leases))) is not None:
        leases.append(lease)
    places = sum(each.max_num_seqs for each in scheduler.instances)
    assert len(leases) == places
    scheduler.check_integrity()
    commands = scheduler.on_lease_ended(leases[137], Outcome.OK, 1.0)
    assert [c.lease.instance for c in commands if isinstance(c, Dispatch)] == [leases[137].instance]
    scheduler.check_integrity()


def test_slow_instances_are_passed_over_as_in_a_small_fleet() -> None:
    """Each group is there for its share of what waits and comes: many groups leave as much as one."""
    placed = []
    for count in (100, 300, 600):
        scheduler = large(count, slots=2)
        number = 0
        while arrive(scheduler, number) is not None:
            number += 1
        placed.append(number / count)
    assert placed[0] < 2.0  # the slow ones get none: the fast are done with all before
    assert placed[1:] == [pytest.approx(placed[0], rel=0.02)] * 2


def test_loads_stay_level_among_equals_and_the_fast_get_more() -> None:
    scheduler = large(320, slots=64)
    for number in range(3200):
        assert arrive(scheduler, number) is not None
    fast = [each.sequences for n, each in enumerate(scheduler.instances) if n % 4 == 0]
    slow = [each.sequences for n, each in enumerate(scheduler.instances) if n % 4]
    assert min(fast) > max(slow)
    assert max(fast) - min(fast) <= 0.2 * max(fast)


def test_people_see_every_instance_and_what_was_not_looked_at() -> None:
    scheduler = large(300)
    scheduler.on_instance(AdminStateSet("i5", AdminState.DRAIN), 0.0)
    (command,) = scheduler.on_arrival(Request(0, "m", 100), 0.0)
    assert isinstance(command, Dispatch)
    candidates = command.candidates
    assert [each.instance for each in candidates] == [f"i{n}" for n in range(300)]
    chosen = min((each for each in candidates if each.eligible), key=lambda each: each.score)
    assert chosen.instance == command.lease.instance
    reasons = Counter(each.reason.partition(":")[0] for each in candidates)
    assert reasons["not looked at"] > 150
    assert all(each.instance != command.lease.instance for each in candidates if each.reason)
