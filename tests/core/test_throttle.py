"""Throttle of one instance, by itself: what it says at each edge of its three restraints."""

from __future__ import annotations

import pytest

from hetlb.core.throttle import BLOCKED, BUSY_CAP_S, DEPRIORITISED, NORMAL, Probation, Throttle


def throttle(failures: int = 0) -> Throttle:
    """That of an instance whose last so many answers failed at 0 s."""
    probation = Probation()
    for _ in range(failures):
        probation.failed(None, 0.0)
    return Throttle(probation)


def test_at_first_nothing_restrains_it() -> None:
    fresh = Throttle(Probation())
    assert not fresh.restarted
    assert not fresh.active(-1e9)
    assert fresh.availability(1000, 8, -1e9) == (NORMAL, "")
    assert fresh.reason(8, -1e9) == ""


# --- slow start ---


def test_what_it_may_run_grows_from_one_to_all() -> None:
    slow = throttle()
    slow.restarted = True
    slow.begin_slow_start(10.0, 100.0)
    assert not slow.restarted
    for now, places in ((99.0, 1), (100.0, 1), (101.0, 1), (102.5, 2), (105.0, 4), (109.9, 7)):
        assert slow.active(now)
        assert slow.availability(0, 8, now) == (NORMAL, "")
        assert slow.availability(places - 1, 8, now) == (NORMAL, "")
        assert slow.availability(max(1, places), 8, now) == (BLOCKED, f"slow start: {places} of 8 slots")
        assert slow.reason(8, now) == f"slow start: {places} of 8 slots"
    assert slow.availability(8, 8, 110.0) == (BLOCKED, "slow start: 8 of 8 slots")
    assert not slow.active(110.0)
    assert slow.availability(8, 8, 109.0) == (NORMAL, ""), "it is over once and for all"


def test_a_slow_start_of_no_time_is_none_and_ends_one() -> None:
    slow = throttle()
    slow.begin_slow_start(10.0, 0.0)
    slow.restarted = True
    slow.begin_slow_start(0.0, 1.0)
    assert slow.availability(9, 8, 1.0) == (NORMAL, "")
    assert (slow.active(1.0), slow.restarted) == (False, False)


def test_a_slow_start_ends_when_it_is_told_to() -> None:
    slow = throttle()
    assert not slow.end_slow_start()
    slow.begin_slow_start(10.0, 0.0)
    assert slow.end_slow_start()
    assert slow.availability(7, 8, 0.0) == (NORMAL, "")
    assert slow.reason(8, 0.0) == ""


# --- busy ---


def test_a_busy_instance_is_last_up_to_what_it_ran_and_full_beyond() -> None:
    busy = throttle()
    busy.mark_busy(5.0, 3, 100.0)
    left = "it said it is busy, for 1.25 s more"
    assert busy.availability(0, 8, 103.75) == (DEPRIORITISED, f"last: {left}")
    assert busy.availability(2, 8, 103.75) == (DEPRIORITISED, f"last: {left}")
    assert busy.availability(3, 8, 103.75) == (BLOCKED, f"full: {left}")
    assert busy.active(104.999)
    assert not busy.active(105.0)
    assert busy.availability(3, 8, 105.0) == (NORMAL, "")


@pytest.mark.parametrize("ran", [0, -1, 1])
def test_a_busy_instance_may_run_one(ran: int) -> None:
    busy = throttle()
    busy.mark_busy(5.0, ran, 0.0)
    assert busy.availability(0, 8, 1.0)[0] == DEPRIORITISED
    assert busy.availability(1, 8, 1.0)[0] == BLOCKED


def test_of_two_times_to_come_again_the_later_holds_up_to_a_cap() -> None:
    busy = throttle()
    busy.mark_busy(20.0, 5, 100.0)
    busy.mark_busy(1.0, 4, 101.0)
    assert busy.busy_until == 120.0
    assert busy.availability(4, 8, 102.0)[0] == BLOCKED
    busy.mark_busy(1e9, 4, 102.0)
    assert busy.busy_until == 102.0 + BUSY_CAP_S


# --- probation ---


def test_probation_blocks_unless_it_is_not_heeded() -> None:
    doubtful = throttle(failures=2)
    reason = "on probation: 2 answers failed in a row"
    assert doubtful.availability(0, 8, 0.5) == (BLOCKED, reason)
    assert doubtful.availability(0, 8, 0.5, doubt=False) == (NORMAL, "")
    assert doubtful.availability(0, 8, 1.0) == (NORMAL, "")
    assert doubtful.active(1.0), "it gets one at a time"
    assert not throttle(failures=1).active(0.0)


def test_of_several_restraints_the_strictest_is_told() -> None:
    all_three = throttle(failures=2)
    all_three.begin_slow_start(8.0, 0.0)
    all_three.mark_busy(4.0, 3, 0.0)
    assert all_three.availability(1, 8, 0.5)[1].startswith("on probation")
    assert all_three.availability(1, 8, 1.0) == (BLOCKED, "slow start: 1 of 8 slots")
    assert all_three.availability(1, 8, 2.0)[0] == DEPRIORITISED
    assert all_three.availability(3, 64, 2.0)[1].startswith("full")
