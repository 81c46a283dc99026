"""A request that an engine did not answer: where it goes next, how often, and what is remembered of it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import AdminStateSet, CapacityLearned, ModelsLearned, Probed, ProbeResult
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    Command,
    Connector,
    Dispatch,
    Health,
    HealthChanged,
    KvLink,
    Lease,
    Outcome,
    PassOn,
    Reject,
    RejectReason,
    Role,
)
from hetlb.tools.sim.integrity import check_scheduler

LINK = KvLink(Connector.NIXL, lease_s=10.0, bandwidth_bytes_per_s=1e10, latency_s=0.001)


def fleet(names: str, policy: str = "single", **more: Any) -> Scheduler:
    """Instances of these names, one letter each."""
    return make_scheduler([spec(name) for name in names], policy, **more)


def linked(**roles: Role) -> Scheduler:
    """Instances that split requests, by their roles."""
    specs = [spec(name, kv=100_000, role=role, kv_transfer=LINK) for name, role in roles.items()]
    return make_scheduler(specs, "hetlb")


def named(scheduler: Scheduler, name: str) -> Instance:
    return next(each for each in scheduler.instances if each.name == name)


def arrived(scheduler: Scheduler, number: int, now: float = 0.0, **more: Any) -> Lease:
    return dispatched(scheduler.on_arrival(request(number, **more), now))


def split(scheduler: Scheduler, number: int = 1) -> tuple[Lease, Lease]:
    """Leases of both legs of a request that is split."""
    lease = arrived(scheduler, number, prompt=2000, splittable=True, streamed=True)
    assert lease.decode is not None
    return lease, lease.decode


def fill(scheduler: Scheduler, name: str) -> None:
    """Requests for an instance, from the tenth on, until one waits for it."""
    for number in range(10, 100):
        if not scheduler.on_arrival(request(number, subset=(name,)), 0.0):
            break
    assert number in scheduler.queue


def down(scheduler: Scheduler, name: str, now: float = 0.05) -> list[Command]:
    return [c for _ in range(3) for c in scheduler.on_instance(Probed(name, ProbeResult.REFUSED), now)]


def up(scheduler: Scheduler, name: str, now: float) -> list[Command]:
    return [c for _ in range(2) for c in scheduler.on_instance(Probed(name, ProbeResult.OK), now)]


def rejected(commands: list[Command]) -> RejectReason:
    [reason] = [each.reason for each in commands if isinstance(each, Reject)]
    return reason


def refuses(scheduler: Scheduler, lease: Lease, now: float = 0.2) -> list[Command]:
    return scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, now)


def drops(scheduler: Scheduler, lease: Lease, now: float = 0.2) -> list[Command]:
    return scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, now)


# --- busy ---


def test_a_second_is_a_time_to_come_again_as_any_other() -> None:
    scheduler = fleet("ab")
    assert dispatched(scheduler.on_refused(arrived(scheduler, 1), 503, 0.5, 0.1)).instance == "b"
    assert named(scheduler, "a").evidence.asked_until == pytest.approx(0.6)


def test_a_request_that_was_turned_away_does_not_come_again() -> None:
    """Refused by the next one it goes to a third, and is then turned down as one that none has run."""
    scheduler = fleet("abc")
    first = arrived(scheduler, 1)
    second = dispatched(scheduler.on_refused(first, 503, 1.0, 0.1))
    third = dispatched(refuses(scheduler, second, 5.0))
    assert [first.instance, second.instance, third.instance] == ["a", "b", "c"]
    check_scheduler(scheduler)
    assert rejected(refuses(scheduler, third, 6.0)) is RejectReason.CONNECT_FAILED
    assert not scheduler.in_flight
    check_scheduler(scheduler)


def test_a_request_that_was_turned_away_and_then_dropped_goes_to_one_more() -> None:
    """It is dropped once: the request is not what kills engines yet."""
    scheduler = fleet("abcd")
    second = dispatched(scheduler.on_refused(arrived(scheduler, 1), 503, 1.0, 0.1))
    third = dispatched(drops(scheduler, second))
    assert [second.instance, third.instance] == ["b", "c"]
    assert rejected(drops(scheduler, third)) is RejectReason.NO_RESPONSE
    check_scheduler(scheduler)


def test_a_request_taken_from_a_hanging_engine_and_then_dropped_goes_to_one_more() -> None:
    """To be taken away is no sign against a request, unlike a drop."""
    scheduler = fleet("abcd")
    lease = arrived(scheduler, 1)
    down(scheduler, lease.instance)
    second = next(c.lease for c in scheduler.on_stranded(lease, 0.1) if isinstance(c, Dispatch))
    third = dispatched(drops(scheduler, second))
    assert {lease.instance, second.instance, third.instance} == {"a", "b", "c"}
    assert rejected(drops(scheduler, third)) is RejectReason.NO_RESPONSE
    check_scheduler(scheduler)


def test_a_request_dropped_by_the_only_one_that_is_up_waits_for_another() -> None:
    scheduler = fleet("ab")
    lease = arrived(scheduler, 1)
    assert lease.instance == "a"
    down(scheduler, "b")
    assert drops(scheduler, lease) == []
    assert 1 in scheduler.queue
    check_scheduler(scheduler)
    assert dispatched(up(scheduler, "b", 5.0)).instance == "b"
    check_scheduler(scheduler)


def test_a_request_dropped_by_the_only_one_that_is_up_is_given_up_after_the_wait_for_an_instance() -> None:
    scheduler = fleet("ab")
    lease = arrived(scheduler, 1)
    down(scheduler, "b")
    assert drops(scheduler, lease) == []
    wait_s = scheduler.queue.limits.no_instance_timeout_s
    assert scheduler.on_tick(0.2 + wait_s / 2) == []
    assert rejected(scheduler.on_tick(0.3 + wait_s)) is RejectReason.NO_RESPONSE
    check_scheduler(scheduler)


def test_a_busy_time_that_ends_now_is_over() -> None:
    scheduler = fleet("ab")
    other = arrived(scheduler, 1, subset=("b",))
    assert scheduler.on_refused(other, 503, 5.0, 1.0) == [PassOn(1, other)]
    lease = arrived(scheduler, 2, 2.0, subset=None)
    assert lease.instance == "a"
    assert scheduler.on_refused(lease, 503, 1.0, 3.9) == [PassOn(2, lease)]
    assert dispatched(scheduler.on_refused(lease, 503, 1.0, 4.0)).instance == "b"


def test_an_answer_that_is_passed_on_leaves_no_note() -> None:
    scheduler = fleet("a")
    lease = arrived(scheduler, 1)
    assert scheduler.on_refused(lease, 503, 1.0, 0.1) == [PassOn(1, lease)]
    assert not scheduler.placement.retries.attempts


def test_an_answer_that_is_passed_on_leaves_the_notes_of_before() -> None:
    """It was refused by one and passed on by the other: dropped there, it has been everywhere."""
    scheduler = fleet("ab")
    lease = dispatched(refuses(scheduler, arrived(scheduler, 1)))
    assert scheduler.on_refused(lease, 503, 1.0, 0.3) == [PassOn(1, lease)]
    for _ in range(2):
        scheduler.on_instance(Probed("a", ProbeResult.OK), 0.4)
    assert named(scheduler, "a").evidence.health.state is Health.UP
    assert rejected(drops(scheduler, lease)) is RejectReason.NO_RESPONSE


def test_a_request_without_an_answer_may_not_move_where_the_driver_says_so() -> None:
    scheduler = fleet("ab")
    lease = arrived(scheduler, 1)
    assert scheduler.on_refused(lease, 503, 1.0, 0.1, may_move=False) == [PassOn(1, lease)]
    assert named(scheduler, "a").evidence.asked_until == pytest.approx(1.1)


def test_a_busy_decode_leg_is_tried_with_another_pair_and_after_that_whole() -> None:
    scheduler = linked(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    lease, decode = split(scheduler)
    assert dispatched(scheduler.on_prefilled(lease, 0.5)) is decode
    assert decode.hold is not None
    again = dispatched(scheduler.on_refused(decode, 503, 5.0, 0.6))
    assert again.decode is not None
    assert (lease.instance, {decode.instance, again.decode.instance}) == (again.instance, {"d", "e"})
    check_scheduler(scheduler)
    whole = dispatched(refuses(scheduler, again, 0.7))
    assert (whole.instance, whole.decode) == (again.decode.instance, None)
    check_scheduler(scheduler)


def test_a_busy_prefill_leg_gives_both_back_and_is_split_again() -> None:
    scheduler = linked(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    lease, decode = split(scheduler)
    again = dispatched(scheduler.on_refused(lease, 503, 5.0, 0.1))
    assert {lease.instance, again.instance} == {"p", "q"}
    assert again.decode is not None
    assert (lease.ended, decode.ended, scheduler.in_flight) == (True, True, 2)
    assert named(scheduler, "d").in_flight == 1
    check_scheduler(scheduler)


def test_what_waits_is_looked_at_when_a_request_moves() -> None:
    """One that belongs to another instance waits on."""
    scheduler = fleet("abc")
    scheduler.on_instance(AdminStateSet("c", AdminState.DRAIN), 0.0)
    assert scheduler.on_arrival(request(9, subset=("c",)), 0.0) == []
    assert dispatched(scheduler.on_refused(arrived(scheduler, 1), 503, 1.0, 0.1)).instance == "b"
    assert 9 in scheduler.queue
    check_scheduler(scheduler)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_refused_request_that_waits_for_its_next_try_is_sent_no_more_often(status: int) -> None:
    """It waits as the second instance refuses connections and the third is full."""
    small = Capacity(kv_cache_tokens=10_000, max_num_seqs=1)
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c", capacity=small)], "hetlb")
    fill(scheduler, "c")
    first = arrived(scheduler, 1)
    commands = refuses(scheduler, dispatched(scheduler.on_refused(first, status, None, 0.1)))
    assert not [each for each in commands if isinstance(each, Dispatch)]
    assert 1 in scheduler.queue
    commands = []
    for now in (1.0, 1.1):
        commands += scheduler.on_instance(Probed("b", ProbeResult.OK), now)
    second = dispatched([each for each in commands if isinstance(each, Dispatch)])
    assert (first.instance, second.instance) == ("a", "b")
    assert scheduler.on_refused(second, status, None, 2.0) == [PassOn(1, second)]
    check_scheduler(scheduler)


# --- dropped and refused ---


def test_dropped_by_the_only_one_it_is_given_up() -> None:
    scheduler = fleet("a")
    assert rejected(drops(scheduler, arrived(scheduler, 1))) is RejectReason.NO_RESPONSE
    assert not len(scheduler.queue)
    check_scheduler(scheduler)


def test_dropped_by_one_and_refused_by_the_other_it_may_have_run() -> None:
    scheduler = fleet("ab")
    second = dispatched(drops(scheduler, arrived(scheduler, 1)))
    assert rejected(refuses(scheduler, second)) is RejectReason.NO_RESPONSE


def test_refused_by_the_one_that_it_belongs_to_it_is_given_up_while_another_is_up() -> None:
    scheduler = fleet("ab")
    assert rejected(refuses(scheduler, arrived(scheduler, 1, subset=("a",)))) is RejectReason.CONNECT_FAILED
    assert not len(scheduler.queue)


def test_dropped_by_the_last_one_while_it_drains_it_is_given_up() -> None:
    scheduler = fleet("a")
    lease = arrived(scheduler, 1)
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.1)
    assert rejected(drops(scheduler, lease)) is RejectReason.NO_RESPONSE
    assert not len(scheduler.queue)


@pytest.mark.parametrize("ends", [drops, refuses])
def test_a_retry_needs_no_place_in_the_queue(ends: Any) -> None:
    scheduler = fleet("abc", limits=QueueLimits(max_requests=1))
    scheduler.on_instance(AdminStateSet("c", AdminState.DRAIN), 0.0)
    assert scheduler.on_arrival(request(9, subset=("c",)), 0.0) == []
    assert dispatched(ends(scheduler, arrived(scheduler, 1))).instance == "b"
    assert 9 in scheduler.queue
    check_scheduler(scheduler)


def test_where_all_others_are_full_and_the_queue_is_too_it_is_given_up() -> None:
    """Refused, so that none has run it."""
    scheduler = make_scheduler(
        [spec("a"), spec("b", capacity=Capacity(kv_cache_tokens=10_000, max_num_seqs=1))],
        "hetlb",
        limits=QueueLimits(max_requests=1),
    )
    fill(scheduler, "b")
    lease = arrived(scheduler, 1)
    assert lease.instance == "a"
    assert rejected(refuses(scheduler, lease)) is RejectReason.CONNECT_FAILED
    check_scheduler(scheduler)


def test_refused_and_waiting_it_may_go_back_to_where_it_was() -> None:
    """The second one is full; the first is another process by the time it answers again."""
    small = Capacity(kv_cache_tokens=10_000, max_num_seqs=1)
    scheduler = make_scheduler([spec("a"), spec("b", capacity=small)], "hetlb")
    lease = arrived(scheduler, 1)
    assert lease.instance == "a"
    fill(scheduler, "b")
    commands = refuses(scheduler, lease)
    assert not [each for each in commands if isinstance(each, Dispatch | Reject)]
    assert not scheduler.placement.retries.attempts
    found: list[Lease] = []
    for _ in range(2):
        commands = scheduler.on_instance(Probed("a", ProbeResult.OK), 1.0)
        found += [each.lease for each in commands if isinstance(each, Dispatch)]
    assert [(each.request.id, each.instance) for each in found] == [(1, "a")]
    check_scheduler(scheduler)


def test_refused_by_the_only_one_it_waits_from_now_on() -> None:
    scheduler = fleet("a")
    refuses(scheduler, arrived(scheduler, 1), 7.0)
    assert scheduler.queue.oldest_at() == 7.0
    assert scheduler.next_deadline() == 7.25
    assert scheduler.on_tick(36.9) == []
    assert rejected(scheduler.on_tick(37.0)) is RejectReason.NO_INSTANCE
    assert scheduler.next_deadline() is None


def broken(names: str) -> Scheduler:
    """A fleet of which all are lost while one of them has sent two tokens of an answer."""
    scheduler = fleet(names)
    lease = arrived(scheduler, 1)
    scheduler.on_first_token(lease, 0.1)
    for name in names:
        scheduler.on_instance(Probed(name, ProbeResult.REFUSED), 0.2)
    commands = scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, 0.3, generated=2)
    assert not [each for each in commands if isinstance(each, Dispatch | Reject)]
    return scheduler


@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_rest_of_an_answer_waits_while_all_are_lost(names: str) -> None:
    scheduler = broken(names)
    assert scheduler.on_tick(20.0) == []
    found: list[Lease] = []
    for _ in range(2):
        commands = scheduler.on_instance(Probed("a", ProbeResult.OK), 21.0)
        found += [each.lease for each in commands if isinstance(each, Dispatch)]
    assert [(each.request.id, each.instance, each.request.generated) for each in found] == [(1, "a", 2)]
    check_scheduler(scheduler)


def test_the_rest_of_an_answer_waits_for_an_instance_as_long_as_any() -> None:
    scheduler = broken("ab")
    assert scheduler.on_tick(30.0) == []
    assert rejected(scheduler.on_tick(30.3)) is RejectReason.NO_INSTANCE
    check_scheduler(scheduler)


def test_a_first_token_frees_a_place_in_the_budget_of_retries() -> None:
    scheduler = fleet("ab")
    leases = [arrived(scheduler, number) for number in range(6)]
    again = [dispatched(drops(scheduler, lease)) for lease in leases[:3]]
    assert drops(scheduler, leases[3]) == []
    assert 3 in scheduler.queue
    assert dispatched(scheduler.on_first_token(again[0], 0.3)).request.id == 3
    scheduler.on_lease_ended(again[1], Outcome.CLIENT_GONE, 0.5)
    assert dispatched(drops(scheduler, leases[4], 0.6)).request.id == 4
    assert drops(scheduler, leases[5], 0.7) == []
    check_scheduler(scheduler)


def test_a_request_that_is_over_is_forgotten() -> None:
    scheduler = fleet("ab")
    again = dispatched(drops(scheduler, arrived(scheduler, 1)))
    assert scheduler.placement.retries.attempts.keys() == {1}
    scheduler.on_lease_ended(again, Outcome.OK, 1.0)
    assert not scheduler.placement.retries.attempts
    scheduler.on_arrival(request(1), 2.0)
    check_scheduler(scheduler)


# --- first tokens ---


def test_a_first_token_brings_a_suspect_up() -> None:
    scheduler = fleet("ab", health=Health.SUSPECT)
    lease = arrived(scheduler, 1)
    commands = scheduler.on_first_token(lease, 0.5)
    assert commands == [HealthChanged("a", Health.UP, "answered a request")]
    assert {arrived(scheduler, number).instance for number in range(2, 5)} == {"a"}
    assert scheduler.on_first_token(arrived(scheduler, 9), 0.6) == []


def adapters() -> Scheduler:
    scheduler = make_scheduler([spec("a")], "hetlb")
    scheduler.on_instance(CapacityLearned("a", Capacity(max_loras=2, max_num_seqs=8)), 0.0)
    scheduler.on_instance(ModelsLearned("a", ("m", "x", "y"), ("x", "y")), 0.0)
    return scheduler


def test_the_time_to_load_an_adapter_is_seen_at_first_tokens() -> None:
    """Five loads of 3 s beyond the first token of a prompt of 100 tokens, at 100 s and later."""
    seen = []
    for number in range(5):
        scheduler = adapters()
        lease = arrived(scheduler, number, 100.0, model="x")
        load = scheduler.placement.adapter_load
        assert load.expected.keys() == {lease.id}
        first_s, loads = load.expected[lease.id]
        assert loads
        assert first_s == pytest.approx(FAST.prefill_s(100), rel=0.5)
        scheduler.on_first_token(lease, 100.0 + first_s + 3.0)
        assert not load.expected
        [late_s] = load._loaded
        seen.append(late_s)
    assert seen == pytest.approx([3.0] * 5)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CLIENT_GONE, Outcome.NO_RESPONSE])
def test_a_lease_that_ends_without_a_first_token_shows_no_load(outcome: Outcome) -> None:
    scheduler = adapters()
    leases = [arrived(scheduler, number, model=model) for number, model in enumerate("xy")]
    load = scheduler.placement.adapter_load
    assert load.expected.keys() == {lease.id for lease in leases}
    scheduler.on_lease_ended(leases[0], outcome, 1.0, retry=False)
    assert load.expected.keys() == {leases[1].id}
    plain = arrived(scheduler, 9)
    scheduler.on_lease_ended(plain, outcome, 1.0, retry=False)
    assert load.expected.keys() == {leases[1].id}
    scheduler.on_first_token(leases[1], 1.1)
    scheduler.on_lease_ended(leases[1], outcome, 1.2, retry=False)
    assert not load.expected
    check_scheduler(scheduler)


def test_a_first_token_is_expected_later_where_answers_have_shown_a_slow_instance() -> None:
    expected = []
    for slow in (False, True):
        scheduler = adapters()
        [instance] = scheduler.instances
        if slow:
            assert instance.speed.observe_prefill(10.0, 40.0, 0.0)
            instance.take_speed()
            assert instance.speed.factor == pytest.approx(3.0)
        lease = arrived(scheduler, 1, model="x")
        expected.append(scheduler.placement.adapter_load.expected[lease.id][0])
    assert expected[1] == pytest.approx(3.0 * expected[0])


def test_an_answer_that_blames_the_request_counts_as_ended_well() -> None:
    """One of three is a 500, which is less than half."""
    scheduler = fleet("ab")
    ejected = []
    for number in range(39):
        lease = arrived(scheduler, number, number / 10.0, subset=("a",))
        commands = scheduler.on_lease_ended(
            lease, Outcome.UPSTREAM_REFUSED if number % 3 else Outcome.UPSTREAM_ERROR, number / 10.0
        )
        ejected += [each for each in commands if isinstance(each, HealthChanged)]
    assert not ejected
    assert named(scheduler, "a").evidence.health.state is Health.UP
