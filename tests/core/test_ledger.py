"""The ledger to the unit: what a lease books and gives back, that a wrong figure is noticed, and what becomes
of a request whose lease ended badly."""

from __future__ import annotations

import random
from dataclasses import astuple
from typing import Any

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.core.admission import QueueLimits
from hetlb.core.health import HealthTracker
from hetlb.core.instance import Instance
from hetlb.core.scheduler import RETRY_FLOOR, Scheduler
from hetlb.core.speed import Mark
from hetlb.core.types import (
    AdminState,
    AdminStateSet,
    Capacity,
    Dispatch,
    Health,
    HealthChanged,
    InstanceRemoved,
    Lease,
    Outcome,
    PassOn,
    Probed,
    ProbeResult,
    Reject,
    RejectReason,
)

FIGURES = ("work_ns", "kv_tokens", "prompt_tokens", "pending_prompt_tokens", "in_flight", "sequences")


def instance_of(places: int = 64) -> Instance:
    capacity = Capacity(kv_cache_tokens=10_000, kv_tokens_per_request=10_000, max_num_seqs=places)
    return Instance(spec("a", capacity=capacity), 7, HealthTracker(random.Random(0), Health.UP), 0.0)


def lease_of(number: int, at: float = 0.0, n: int = 1, **more: Any) -> Lease:
    booked: dict[str, Any] = {"work_ns": 100, "kv_tokens": 30, "prompt_tokens": 20, "predicted_output": 10.0}
    return Lease(number, request(number, sequences=n), "a", 7, dispatched_at=at, **(booked | more))


def figures(instance: Instance) -> tuple[int, ...]:
    return tuple(getattr(instance, name) for name in FIGURES)


# --- one instance ---


def test_what_is_booked_is_counted_and_given_back_to_the_unit() -> None:
    instance = instance_of()
    first, second = lease_of(1), lease_of(2, n=3, work_ns=1, kv_tokens=2, prompt_tokens=5)
    instance.acquire(first)
    assert figures(instance) == (100, 30, 20, 20, 1, 1)
    instance.acquire(second)
    assert figures(instance) == (101, 32, 25, 25, 2, 4)
    assert instance.leases == {1: first, 2: second}
    instance.check_integrity()
    instance.first_token(second, 1.0)
    assert figures(instance) == (101, 32, 25, 20, 2, 4)
    assert second.first_token_at == 1.0
    instance.first_token(second, 2.0)  # said again
    assert figures(instance) == (101, 32, 25, 20, 2, 4)
    assert second.first_token_at == 1.0
    instance.release(second, 3.0)
    assert figures(instance) == (100, 30, 20, 20, 1, 1)
    assert second.ended
    assert not first.ended
    instance.check_integrity()
    instance.release(first, 3.0)  # its answer never began
    assert figures(instance) == (0,) * 6
    assert instance.leases == {}
    instance.check_integrity()


def test_nothing_may_be_booked_with_a_sign() -> None:
    instance = instance_of()
    instance.acquire(lease_of(1, work_ns=0, kv_tokens=0, prompt_tokens=0))
    for key, what in (("work_ns", "negative work"), ("kv_tokens", "negative KV tokens")):
        with pytest.raises(AssertionError, match=what):
            instance.acquire(lease_of(2, **{key: -1}))


def test_a_lease_is_given_back_once_and_only_where_it_is_booked() -> None:
    instance, other = instance_of(), instance_of()
    lease = lease_of(1)
    instance.acquire(lease)
    with pytest.raises(AssertionError, match="is not booked on a"):
        other.release(lease, 0.0)
    with pytest.raises(AssertionError, match="is not booked on a"):
        instance.release(lease_of(1), 0.0)
    instance.leases[1] = lease
    instance.release(lease, 0.0)
    with pytest.raises(AssertionError, match="was released before"):
        instance.release(lease, 0.0)


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_falls_below_zero_unnoticed(name: str) -> None:
    instance = instance_of()
    lease = lease_of(1)
    instance.acquire(lease)
    setattr(instance, name, getattr(instance, name) - 1)
    with pytest.raises(AssertionError, match="the ledger of a fell below zero"):
        instance.release(lease, 0.0)


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "pending_prompt_tokens"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_figure_that_is_not_the_sum_of_the_leases_is_noticed(name: str, off: int) -> None:
    instance = instance_of()
    for number in (1, 2):
        instance.acquire(lease_of(number, n=2))
    instance.check_integrity()
    setattr(instance, name, getattr(instance, name) + off)
    with pytest.raises(AssertionError, match="a"):
        instance.check_integrity()


def test_what_others_have_booked_is_part_of_the_figures_and_not_of_the_leases() -> None:
    instance = instance_of()
    instance.acquire(lease_of(1))
    nothing = (0,) * 8
    theirs = (1000, 200, 100, 50, 3, 4, 0, 0)
    instance.share(nothing, theirs, 1.0)
    assert figures(instance) == (1100, 230, 120, 70, 4, 5)
    instance.check_integrity()
    for place in (0, 1, 2, 4, 5):
        wrong = list(instance.others)
        wrong[place] += 1
        right, instance.others = instance.others, (wrong[0], wrong[1], wrong[2], wrong[3], wrong[4], wrong[5])
        with pytest.raises(AssertionError):
            instance.check_integrity()
        instance.others = right
    instance.share(theirs, nothing, 2.0)
    assert figures(instance) == (100, 30, 20, 20, 1, 1)
    instance.check_integrity()
    instance.share(theirs, nothing, 2.0)
    with pytest.raises(AssertionError, match="others have booked"):
        instance.check_integrity()


def test_a_lease_that_ended_may_not_stay_booked() -> None:
    instance = instance_of()
    lease = lease_of(1)
    instance.acquire(lease)
    lease.ended = True
    with pytest.raises(AssertionError, match="a"):
        instance.check_integrity()


def test_the_speed_tracker_is_told_of_everything_in_between() -> None:
    """Sequence-seconds and token-seconds, each answer half-grown, at most as many as run at once."""
    instance = instance_of(places=2)
    first = lease_of(1, at=1.0, kv_tokens=60, prompt_tokens=20)
    instance.acquire(first)
    assert first.mark == Mark(0.0, 0.0, 0, 0)
    second = lease_of(2, at=3.0, kv_tokens=40, prompt_tokens=40)
    instance.acquire(second)
    assert second.mark == Mark(2.0, 80.0, 0, 0)
    third = lease_of(3, at=4.0, kv_tokens=40, prompt_tokens=40)
    instance.acquire(third)
    assert third.mark is None  # it could not begin at once
    instance.first_token(first, 6.0)
    # From 3 to 4 two ran with 80 tokens; from 4 to 6 two of three did, with two thirds of 120.
    assert first.first_mark is not None
    assert astuple(first.first_mark) == pytest.approx((2.0 + 2.0 + 4.0, 80.0 + 80.0 + 160.0, 20, 1))
    instance.release(first, 7.0)
    assert astuple(instance.speed.mark()) == pytest.approx((10.0, 400.0, 20, 1))
    instance.release(second, 7.0)
    instance.release(third, 9.0)
    assert astuple(instance.speed.mark()) == pytest.approx((12.0, 480.0, 20, 1))


def test_a_clock_that_stands_adds_nothing() -> None:
    instance = instance_of()
    for number in (1, 2):
        instance.acquire(lease_of(number, at=5.0))
    instance.first_token(instance.leases[1], 5.0)
    instance.release(instance.leases[2], 4.0)
    assert instance.speed.mark() == Mark(0.0, 0.0, 20, 1)
    assert instance.speed.last == 5.0


# --- what a dispatch books ---


def test_a_lease_says_what_was_decided() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    first = dispatched(scheduler.on_arrival(request(1, prompt=100, max_tokens=50), 3.0))
    second = dispatched(scheduler.on_arrival(request(2, prompt=40, max_tokens=50, sequences=2), 4.0))
    assert (first.id, first.instance, first.incarnation, first.dispatched_at) == (1, "a", 1, 3.0)
    assert (second.id, second.instance, second.incarnation, second.dispatched_at) == (2, "b", 2, 4.0)
    assert first.predicted_output > 0
    assert (first.prompt_tokens, first.kv_tokens) == (100, 100 + round(first.predicted_output))
    assert (second.prompt_tokens, second.kv_tokens) == (80, 2 * (40 + round(second.predicted_output)))
    candidates, _ = make_scheduler([spec("a")], "rr").explain(first.request, first.predicted_output, 3.0)
    assert candidates[0].processing_s is not None
    assert first.work_ns == round(candidates[0].processing_s * 1e9)
    assert scheduler.holder(first).name == "a"
    scheduler.check_integrity()


@pytest.mark.parametrize("prompt", [9_999, 10_000, 50_000])
def test_one_request_books_no_more_than_its_instance_has(prompt: int) -> None:
    scheduler = make_scheduler([spec("a")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1, prompt=prompt, max_tokens=10, exact=False), 0.0))
    assert lease.kv_tokens == 10_000
    assert lease.prompt_tokens == min(prompt, 10_000)


def test_a_decision_names_those_that_were_left_out_in_their_places() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "least-requests")
    scheduler.on_instance(AdminStateSet("b", AdminState.DRAIN), 0.0)
    command = scheduler.on_arrival(request(1), 0.0)[0]
    assert isinstance(command, Dispatch)
    assert command.request_id == 1
    assert [(each.instance, each.eligible) for each in command.considered()] == [
        ("a", True), ("b", False), ("c", True),
    ]  # fmt: skip
    assert command.considered()[1].reason == "draining"


# --- ends ---


def fill(scheduler: Scheduler, first: int, count: int) -> list[Lease]:
    return [dispatched(scheduler.on_arrival(request(first + n), 0.0)) for n in range(count)]


def rejects(commands: list[Any]) -> list[tuple[int, RejectReason, str, float | None]]:
    return [
        (each.request_id, each.reason, each.detail, each.retry_after_s)
        for each in commands
        if isinstance(each, Reject)
    ]


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UPSTREAM_ERROR])
def test_an_engine_that_answers_is_up_whatever_it_says(outcome: Outcome) -> None:
    scheduler = make_scheduler([spec("a")], "rr", health=Health.SUSPECT)
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, outcome, 1.0)
    assert commands == [HealthChanged("a", Health.UP, "answered a request")]
    lease = dispatched(scheduler.on_arrival(request(2), 1.0))
    assert scheduler.on_lease_ended(lease, outcome, 2.0) == []


def test_a_first_token_is_told_to_health_and_to_the_ledger() -> None:
    scheduler = make_scheduler([spec("a")], "peak-ewma", health=Health.SUSPECT)
    lease = dispatched(scheduler.on_arrival(request(1), 1.0))
    assert scheduler.on_first_token(lease, 3.0) == [HealthChanged("a", Health.UP, "answered a request")]
    instance = scheduler.instances[0]
    assert instance.pending_prompt_tokens == 0
    assert instance.peak_ewma.estimate_s(3.0, 10.0) == 2.0
    assert instance.peak_ewma.estimate_s(4.0, 10.0) < 2.0
    assert scheduler.on_first_token(lease, 4.0) == []


def test_what_an_answer_was_teaches_the_predictor_by_sequence() -> None:
    scheduler = make_scheduler([spec("a")], "rr")
    for number in range(200):
        lease = dispatched(scheduler.on_arrival(request(number, max_tokens=None, sequences=2), 0.0))
        lease.output_tokens = 2 * 77
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    lease = dispatched(scheduler.on_arrival(request(999, max_tokens=None), 1.0))
    assert lease.predicted_output == pytest.approx(77, abs=8)


def test_refused_everywhere_is_a_502_that_may_be_asked_again() -> None:
    """An instance that drains keeps the model from being down: nothing to wait for."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    assert commands[0] == HealthChanged("a", Health.EJECTED, "connection refused")
    second = dispatched(commands)
    scheduler.on_instance(Probed("a", ProbeResult.OK), 0.2)
    scheduler.on_instance(Probed("a", ProbeResult.OK), 0.2)
    commands = scheduler.on_lease_ended(second, Outcome.CONNECT_FAILED, 0.3)
    detail = "No instance of this model accepts connections."
    assert rejects(commands) == [(1, RejectReason.CONNECT_FAILED, detail, 1.0)]
    scheduler.check_integrity()
    assert scheduler.in_flight == 0


def test_refused_while_all_are_down_waits_from_now_on() -> None:
    scheduler = make_scheduler([spec("a")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1, max_tokens=33), 0.0))
    assert rejects(scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 5.0)) == []
    (entry,) = scheduler.queue
    assert (entry.request.id, entry.arrived_at) == (1, 5.0)
    assert entry.predicted_output == lease.predicted_output
    scheduler.check_integrity()
    scheduler.on_instance(Probed("a", ProbeResult.OK), 6.0)
    again = dispatched(scheduler.on_instance(Probed("a", ProbeResult.OK), 6.0))
    assert (again.request.id, again.instance) == (1, "a")  # it was never run: nobody is left out
    scheduler.check_integrity()


def test_refused_with_nobody_to_wait_for_is_given_up() -> None:
    limits = QueueLimits(no_instance_timeout_s=0.0)
    scheduler = make_scheduler([spec("a")], "rr", limits=limits)
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    assert [(number, reason) for number, reason, _, _ in rejects(commands)] == [(1, RejectReason.NO_INSTANCE)]
    scheduler.check_integrity()


def test_dropped_twice_is_given_up() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1))
    assert (lease.instance, second.instance) == ("a", "b")
    assert second.predicted_output == lease.predicted_output
    commands = scheduler.on_lease_ended(second, Outcome.NO_RESPONSE, 0.2)
    detail = "The instance closed the connection without answering."
    assert rejects(commands) == [(1, RejectReason.NO_RESPONSE, detail, None)]
    scheduler.check_integrity()


def test_dropped_once_and_refused_everywhere_else_is_not_to_be_asked_again() -> None:
    """An engine may have run it: the client must not be told otherwise, and it does not wait for that one."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1))
    commands = scheduler.on_lease_ended(second, Outcome.CONNECT_FAILED, 0.2)
    assert [reason for _, reason, _, _ in rejects(commands)] == [RejectReason.NO_RESPONSE]
    scheduler.check_integrity()


def test_a_driver_that_does_not_retry_ends_the_request() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    for outcome in (Outcome.NO_RESPONSE, Outcome.CONNECT_FAILED):
        lease = dispatched(scheduler.on_arrival(request(1), 0.0))
        commands = scheduler.on_lease_ended(lease, outcome, 0.1, retry=False)
        assert not any(isinstance(each, Dispatch | Reject) for each in commands)
        assert scheduler.in_flight == 0
        scheduler.check_integrity()


def test_no_more_than_the_budget_is_tried_again_at_a_time_and_the_others_go_first_then() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    dropped = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    assert len(dropped) == 6
    again: list[Lease] = []
    for lease in dropped[:5]:
        commands = scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1)
        again += [each.lease for each in commands if isinstance(each, Dispatch)]
        scheduler.check_integrity()
    assert len(again) == RETRY_FLOOR
    assert {each.instance for each in again} == {"b"}
    assert len(scheduler.queue) == 2
    # A first token, an end: each makes room for one.
    scheduler.on_first_token(again[0], 0.2)
    (fourth,) = [each.lease for each in scheduler.on_tick(0.2) if isinstance(each, Dispatch)]
    commands = scheduler.on_lease_ended(again[1], Outcome.OK, 0.3)
    (fifth,) = [each.lease for each in commands if isinstance(each, Dispatch)]
    assert [each.request.id for each in (fourth, fifth)] == [each.request.id for each in dropped[3:5]]
    scheduler.check_integrity()
    for lease in (again[0], again[2], fourth, fifth):
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    scheduler.check_integrity()


def test_refusals_are_not_bounded_by_that_budget() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    refused = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    for lease in refused:
        assert dispatched(scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)).instance == "b"
    scheduler.check_integrity()


def test_a_full_queue_turns_a_dropped_request_down() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests", limits=QueueLimits(max_requests=0))
    dropped = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    outcomes = [scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1) for lease in dropped[:4]]
    assert [len(rejects(commands)) for commands in outcomes] == [0, 0, 0, 1]
    assert rejects(outcomes[3])[0][1] is RejectReason.NO_RESPONSE
    scheduler.check_integrity()


def test_a_client_that_leaves_while_its_request_waits_to_be_tried_again_leaves_nothing() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    dropped = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    for lease in dropped[:4]:
        scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1)
    (waiting,) = scheduler.queue
    assert scheduler.on_cancelled(waiting.request.id, 0.2) == []
    assert len(scheduler.queue) == 0
    scheduler.check_integrity()


# --- busy ---


def test_who_was_turned_away_is_not_asked_again_and_was_not_run() -> None:
    """Turned away by one, refused by the next: nobody ran it, and the client may ask again."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_busy(lease, 0.5, 0.1))
    assert (second.instance, scheduler.in_flight) == ("b", 1)
    assert second.predicted_output == lease.predicted_output
    commands = scheduler.on_lease_ended(second, Outcome.CONNECT_FAILED, 0.2)
    assert [reason for _, reason, _, _ in rejects(commands)] == [RejectReason.CONNECT_FAILED]
    scheduler.check_integrity()


def test_turned_away_and_then_dropped_is_two_runs() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_busy(lease, 5.0, 0.1))
    commands = scheduler.on_lease_ended(second, Outcome.NO_RESPONSE, 0.2)
    assert [reason for _, reason, _, _ in rejects(commands)] == [RejectReason.NO_RESPONSE]
    scheduler.check_integrity()


def test_a_second_is_long_enough_to_be_heeded() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    assert dispatched(scheduler.on_busy(lease, 0.1, 0.0)).instance == "b"
    assert scheduler.instances[0].busy_until == 0.1


def test_all_busy_is_passed_on_and_leaves_no_notes() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    first, second = fill(scheduler, 1, 2)
    assert isinstance(scheduler.on_busy(first, 5.0, 0.0)[0], Dispatch)
    assert scheduler.on_busy(second, 5.0, 0.0) == [PassOn(2, second)]
    scheduler.check_integrity()
    scheduler.on_lease_ended(second, Outcome.UPSTREAM_ERROR, 0.1)
    scheduler.check_integrity()


def test_a_retry_that_is_turned_away_by_a_busy_engine_keeps_its_notes() -> None:
    """Refused by one, then the next is busy: the answer goes to the client, the notes stay until the end."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1))
    assert scheduler.on_busy(second, 5.0, 0.2) == [PassOn(1, second)]
    scheduler.check_integrity()
    assert scheduler.on_lease_ended(second, Outcome.UPSTREAM_ERROR, 0.3) == []
    scheduler.check_integrity()
    assert scheduler.in_flight == 0


def test_what_an_engine_turns_away_counts_against_the_budget_of_retries() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    busy = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    said = [scheduler.on_busy(lease, 5.0, 0.1)[0] for lease in busy[:4]]
    assert [type(each) for each in said] == [Dispatch] * RETRY_FLOOR + [PassOn]
    scheduler.check_integrity()


# --- noticing ---


def taken(scheduler: Scheduler) -> Lease:
    return dispatched(scheduler.on_arrival(request(1), 0.0))


def test_the_scheduler_notices_what_does_not_add_up() -> None:
    def leased_twice(scheduler: Scheduler, lease: Lease) -> None:
        scheduler._leased[99] = scheduler._leased[lease.id]

    def not_leased(scheduler: Scheduler, lease: Lease) -> None:
        del scheduler._leased[lease.id]

    def elsewhere(scheduler: Scheduler, lease: Lease) -> None:
        scheduler._leased[lease.id] = scheduler.instances[1]

    def waits_too(scheduler: Scheduler, lease: Lease) -> None:
        scheduler.queue.push(lease.request, 0.0)

    def retry_outlives(scheduler: Scheduler, lease: Lease) -> None:
        scheduler._retrying.add(99)

    def notes_outlive(scheduler: Scheduler, lease: Lease) -> None:
        scheduler._attempts[99] = scheduler._attempts.get(1)  # type: ignore[assignment]

    def wrong_ledger(scheduler: Scheduler, lease: Lease) -> None:
        scheduler.instances[1].kv_tokens += 1

    def wrong_queue(scheduler: Scheduler, lease: Lease) -> None:
        scheduler.queue.bytes += 1

    for break_it in (
        leased_twice, not_leased, elsewhere, waits_too, retry_outlives, notes_outlive, wrong_ledger,
        wrong_queue,
    ):  # fmt: skip
        scheduler = make_scheduler([spec("a"), spec("b")], "rr")
        lease = taken(scheduler)
        scheduler.check_integrity()
        break_it(scheduler, lease)
        with pytest.raises(AssertionError):
            scheduler.check_integrity()


def test_the_leases_of_a_removed_instance_are_looked_at_too() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = taken(scheduler)
    gone = scheduler.holder(lease)
    scheduler.on_instance(InstanceRemoved("a"), 0.0)
    scheduler.check_integrity()
    gone.work_ns += 1
    with pytest.raises(AssertionError, match="a"):
        scheduler.check_integrity()


def test_what_waits_is_known_to_the_check() -> None:
    """Notes of a request that waits to be tried again are no leftovers."""
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    dropped = [each for each in fill(scheduler, 1, 12) if each.instance == "a"]
    for lease in dropped[:4]:
        scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1)
    assert [entry.request.id for entry in scheduler.queue] == [dropped[3].request.id]
    scheduler.check_integrity()
