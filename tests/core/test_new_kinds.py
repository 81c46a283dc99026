"""A kind of request that an instance has not answered yet has time to begin: an engine may compile for it."""

from __future__ import annotations

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.evidence.table import BEGINNING_S, LEAST_SILENCE_S
from hetlb.balancer.core.learning import is_first_of_kind
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Lease, Outcome
from hetlb.tools.sim.integrity import check_scheduler

FEATURE = ("logprobs",)


def fleet() -> Scheduler:
    """Return two equal servers that have answered requests without a rare field."""
    scheduler = make_scheduler([spec(name, latency=FAST) for name in "ab"], "hetlb")
    for number, name in enumerate("abab"):
        answered(scheduler, ask(scheduler, number, name, 0.1 * number), 0.1 * number + 0.05)
    return scheduler


def ask(
    scheduler: Scheduler, number: int, name: str, now: float, features: tuple[str, ...] | None = ()
) -> Lease:
    asked = request(number, streamed=True, features=features, subset=(name,) if features == () else None)
    if features != ():  # to the instance that is meant, though it may move
        (other,) = (each for each in scheduler.instances if each.name != name)
        other.evidence.asked(1.0, now)
    lease = dispatched(scheduler.on_arrival(asked, now))
    assert lease.instance == name
    return lease


def answered(scheduler: Scheduler, lease: Lease, now: float) -> None:
    scheduler.on_first_token(lease, now)
    lease.output_tokens = 1
    scheduler.on_lease_ended(lease, Outcome.OK, now)


def sweep(scheduler: Scheduler, begin: float, end: float) -> None:
    """Sweep each half second until `end`; features that are not read yet have `FEATURE`."""
    now = begin
    while now < end:
        now += 0.5
        unread = [(each.id, FEATURE) for each in scheduler.failover.unread(now)]
        scheduler.on_sweep({}, now, features=unread)


@pytest.mark.parametrize("read_at_arrival", [True, False])
def test_a_first_request_of_a_kind_stays_while_its_engine_may_compile(read_at_arrival: bool) -> None:
    scheduler = fleet()
    a = scheduler.fleet.instances["a"].evidence
    lease = ask(scheduler, 9, "a", 1.0, FEATURE if read_at_arrival else None)
    sweep(scheduler, 1.0, 1.0 + 25.0)
    assert scheduler.failover.stranded(26.0) == []
    assert a.silence.stalled_since is None
    assert not any(each.evidence.wary(26.0) for each in scheduler.instances)
    answered(scheduler, lease, 26.5)
    assert a.begun == set(FEATURE)
    assert not a.answers.lost
    check_scheduler(scheduler)


def test_an_engine_that_has_answered_the_kind_or_is_silent_for_too_long_has_stalled() -> None:
    known = fleet()
    known.fleet.instances["a"].evidence.begun.update(FEATURE)
    ask(known, 9, "a", 1.0, FEATURE)
    sweep(known, 1.0, 1.0 + LEAST_SILENCE_S + 1.0)
    assert known.fleet.instances["a"].evidence.silence.stalled_since is not None
    hung = fleet()
    lease = ask(hung, 9, "a", 1.0, FEATURE)
    sweep(hung, 1.0, 1.0 + BEGINNING_S + 1.0)
    assert hung.fleet.instances["a"].evidence.silence.stalled_since is not None
    assert hung.failover.stranded(50.0) == [lease]


def test_it_goes_where_its_kind_was_answered() -> None:
    scheduler = fleet()
    scheduler.fleet.instances["b"].evidence.begun.update(FEATURE)
    lease = ask(scheduler, 9, "a", 1.0, FEATURE)
    sweep(scheduler, 1.0, 5.0)
    assert scheduler.failover.stranded(5.0) == [lease]
    (moved,) = [each.lease for each in scheduler.on_stranded(lease, 5.0)]  # type: ignore[union-attr]
    assert moved.instance == "b"
    assert scheduler.fleet.instances["a"].evidence.silence.stalled_since is None
    check_scheduler(scheduler)


def test_other_requests_leave_an_engine_that_may_compile_and_nothing_is_lost() -> None:
    scheduler = fleet()
    a = scheduler.fleet.instances["a"].evidence
    ask(scheduler, 9, "a", 1.0, FEATURE)
    other = dispatched(scheduler.on_arrival(request(10, streamed=True), 1.0))
    while other.instance != "a":
        other = dispatched(scheduler.on_arrival(request(other.request.id + 1, streamed=True), 1.0))
    other.request.features = ()
    sweep(scheduler, 1.0, 5.0)
    stranded = scheduler.failover.stranded(5.0)
    assert other in stranded
    assert all(each.request.features != FEATURE for each in stranded if each.instance == "a")
    (moved,) = [each.lease for each in scheduler.on_stranded(other, 5.0)]  # type: ignore[union-attr]
    assert moved.instance == "b"
    assert not a.answers.lost


def test_a_request_that_comes_to_a_silent_engine_is_no_reason_of_its_silence() -> None:
    scheduler = fleet()
    ask(scheduler, 8, "a", 1.0)
    scheduler.on_arrival(request(9, streamed=True, features=FEATURE, subset=("a",)), 2.5)
    sweep(scheduler, 2.5, 5.0)
    assert scheduler.fleet.instances["a"].evidence.silence.stalled_since is not None


def test_a_new_process_has_answered_nothing() -> None:
    scheduler = fleet()
    a = scheduler.fleet.instances["a"]
    a.evidence.begun.update(FEATURE)
    scheduler.fleet.restarted(a, 1.0)
    assert is_first_of_kind(a, request(1, features=FEATURE))
    assert not is_first_of_kind(a, request(1, features=()))
