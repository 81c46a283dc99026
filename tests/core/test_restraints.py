"""Throttle of one instance, by itself: what it says at each edge of its three restraints."""

from __future__ import annotations

import random

import pytest

from hetlb.balancer.core.evidence.clients import ClientAnswers
from hetlb.balancer.core.evidence.evidence import BUSY_CAP_S, FORGOTTEN_S, Evidence
from hetlb.balancer.core.evidence.table import LIMIT_S
from hetlb.balancer.core.types import Health


def throttle(lost: int = 0) -> Evidence:
    """Return the throttle of an instance that lost `lost` answers at 0 s, beside one that is well."""
    breaker, other = [Evidence(random.Random(0), 0.0, Health.UP) for _ in range(2)]
    for _ in range(lost):
        breaker.ended_badly(0, 0.0, "", "", 0.0)
    breaker.answers.weigh(ClientAnswers(), 1)
    breaker.judge([breaker, other], 0.0)
    return breaker


def test_at_first_nothing_restrains_it() -> None:
    fresh = Evidence(random.Random(0), 0.0, Health.UP)
    assert not fresh.room.restarted
    assert not fresh.active(-1e9)
    assert fresh.restraint(1000, 8, -1e9) == ""
    assert fresh.less(8, -1e9) == ""


# --- slow start ---


def test_what_it_may_run_grows_from_one_to_all() -> None:
    slow = throttle()
    slow.room.restarted = True
    slow.room.begin_slow_start(10.0, 100.0)
    assert not slow.room.restarted
    for now, places in ((99.0, 1), (100.0, 1), (101.0, 1), (102.5, 2), (105.0, 4), (109.9, 7)):
        assert slow.active(now)
        assert slow.restraint(0, 8, now) == ""
        assert slow.restraint(places - 1, 8, now) == ""
        assert slow.restraint(max(1, places), 8, now) == f"slow start: {places} of 8 slots"
        assert slow.less(8, now) == f"slow start: {places} of 8 slots"
    assert slow.restraint(8, 8, 110.0) == "slow start: 8 of 8 slots"
    assert not slow.active(110.0)
    assert slow.restraint(8, 8, 109.0) == "", "it is over once and for all"


def test_a_slow_start_of_no_time_is_none_and_ends_one() -> None:
    slow = throttle()
    slow.room.begin_slow_start(10.0, 0.0)
    slow.room.restarted = True
    slow.room.begin_slow_start(0.0, 1.0)
    assert slow.restraint(9, 8, 1.0) == ""
    assert (slow.active(1.0), slow.room.restarted) == (False, False)


def test_a_slow_start_ends_when_it_is_told_to() -> None:
    slow = throttle()
    assert not slow.room.end_slow_start()
    slow.room.begin_slow_start(10.0, 0.0)
    assert slow.room.end_slow_start()
    assert slow.restraint(7, 8, 0.0) == ""
    assert slow.less(8, 0.0) == ""


# --- a limit that was learnt ---


def test_what_it_refused_beside_others_is_its_limit() -> None:
    full = throttle()
    full.room.is_full(3, 5.0, 100.0)
    reason = "full: it refused more than 3 requests"
    assert full.restraint(2, 8, 104.9) == ""
    assert full.restraint(3, 8, 104.9) == reason
    assert full.less(8, 101.0) == "full: it refused more than 3 requests"
    assert full.less(3, 101.0) == ""
    assert full.active(105.0 + FORGOTTEN_S - 0.001)
    assert not full.active(105.0 + FORGOTTEN_S)


def test_after_the_time_one_more_is_tried_and_then_more() -> None:
    full = throttle()
    full.room.is_full(3, None, 0.0)
    for after, limit in ((0.0, 4), (0.9, 4), (1.0, 5), (3.0, 7)):
        assert full.room.limit(LIMIT_S + after) == limit
    full.room.is_full(4, None, LIMIT_S + 0.5)
    assert full.room.limit(LIMIT_S + 0.6) == 4


@pytest.mark.parametrize("ran", [0, -1, 1])
def test_a_limit_is_one_at_least(ran: int) -> None:
    full = throttle()
    full.room.is_full(ran, 5.0, 0.0)
    assert [bool(full.restraint(running, 8, 1.0)) for running in (0, 1)] == [False, True]


def test_of_two_times_the_later_holds_up_to_a_cap() -> None:
    full = throttle()
    full.room.is_full(5, 20.0, 100.0)
    full.room.is_full(4, 1.0, 101.0)
    assert (full.room.limit(119.9), full.room.limit(120.0)) == (4, 5)
    full.room.is_full(4, 1e9, 102.0)
    assert (full.room.limit(102.0 + BUSY_CAP_S - 0.1), full.room.limit(102.0 + BUSY_CAP_S)) == (4, 5)


def test_of_several_restraints_the_strictest_is_told() -> None:
    all_three = throttle(lost=3)
    all_three.room.begin_slow_start(8.0, 0.0)
    all_three.room.is_full(3, 4.0, 0.0)
    assert all_three.restraint(1, 8, 0.5).startswith("on trial")
    assert all_three.restraint(1, 8, 0.5, doubt=False) == "slow start: 1 of 8 slots"
    assert all_three.restraint(3, 64, 2.0).startswith("full")
