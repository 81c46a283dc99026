"""Schedulers that share a ledger decide as one would: balance, order, bounds, what they know of instances."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

import pytest
from helpers import dispatched, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.test_fleet import fleet, load
from workers.many import Many
from workers.test_ledger import setup_of

from hetlb.core.admission import MOST_TAG
from hetlb.core.demand import size_of
from hetlb.core.ledger import key_of
from hetlb.core.scheduler import RETRY_FLOOR, TICK_S
from hetlb.core.types import (
    Capacity,
    Command,
    Dispatch,
    Health,
    InstanceSpec,
    Lease,
    Outcome,
    Probed,
    ProbeResult,
    Reject,
    RejectReason,
    Request,
)
from hetlb.sim.fleet import FleetSimulation

#: Room for one request at a time, so that the second one waits.
ONE = Capacity(kv_cache_tokens=200, kv_tokens_per_request=200, max_num_seqs=64)


@pytest.fixture
def made() -> Iterator[list[Many]]:
    every: list[Many] = []
    yield every
    for each in every:
        each.close()


def many(made: list[Many], specs: tuple[InstanceSpec, ...], number: int = 2, **limits: object) -> Many:
    fellows = Many(dataclasses.replace(setup_of(**limits), specs=specs), number)
    made.append(fellows)
    return fellows


def leases(commands: list[Command]) -> list[Lease]:
    return [each.lease for each in commands if isinstance(each, Dispatch)]


# --- balance ---


@pytest.mark.parametrize("policy", ["hetlb", "paper", "least-requests"])
@pytest.mark.parametrize("rate", [25.0, 60.0])
def test_four_decide_as_one_does(policy: str, rate: float) -> None:
    """What each would have decided alone, when all know the lengths equally well."""
    found = {}
    for number in (1, 4):
        setup, engines = fleet(1.0, 1.0, 2.0, 4.0, policy=policy)
        simulation = FleetSimulation(setup, engines, load(1000, rate), model="m")
        if number > 1:
            simulation.scheduler = Many(setup, number)  # type: ignore[assignment]
        summary = simulation.run().summary()
        found[number] = summary
    one, four = found[1], found[4]
    assert four["total_token_throughput"] == pytest.approx(one["total_token_throughput"], rel=0.02)
    for alone, shared in zip(one["instances"], four["instances"], strict=True):
        assert abs(alone["completed"] - shared["completed"]) <= 0.03 * 1000


def test_four_that_learn_for_themselves_lose_nothing() -> None:
    """Each learns lengths from its own quarter of the answers: over some seeds that costs under 2 %."""
    throughput: dict[int, list[float]] = {1: [], 4: []}
    shares: dict[int, list[list[float]]] = {1: [], 4: []}
    for seed in range(6):
        for number in (1, 4):
            setup, engines = fleet(1.0, 1.0, 2.0, 4.0, policy="hetlb", predictor="online", seed=seed)
            simulation = FleetSimulation(setup, engines, load(1500, 40.0, seed), model="m")
            if number > 1:
                simulation.scheduler = Many(setup, number)  # type: ignore[assignment]
            summary = simulation.run().summary()
            throughput[number].append(summary["total_token_throughput"])
            shares[number].append([each["completed"] / 1500 for each in summary["instances"]])
    assert statistics.mean(throughput[4]) >= 0.98 * statistics.mean(throughput[1])
    for one, four in zip(zip(*shares[1], strict=True), zip(*shares[4], strict=True), strict=True):
        assert abs(statistics.mean(one) - statistics.mean(four)) <= 0.03


# --- the queue ---


def test_the_oldest_goes_first_wherever_it_waits(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 3)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    order = [4, 1, 5, 2, 3]  # scheduler 1, 1, 2, 2, 0
    for step, request_id in enumerate(order):
        assert fellows.on_arrival(request(request_id), 0.01 * (step + 1)) == []
    served = []
    for step in range(len(order)):
        (lease,) = leases(fellows.on_lease_ended(lease, Outcome.OK, 1.0 + step))
        served.append(lease.request.id)
    assert served == order
    assert fellows.on_lease_ended(lease, Outcome.OK, 9.0) == []
    fellows.check_integrity()
    assert fellows.next_deadline() is None


def test_a_better_priority_goes_first_wherever_it_waits(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    fellows.on_arrival(request(2), 0.1)
    fellows.on_arrival(request(1, priority=-1), 0.2)
    (lease,) = leases(fellows.on_lease_ended(lease, Outcome.OK, 1.0))
    assert lease.request.id == 1


def test_who_is_to_go_first_and_sleeps_holds_nobody_up(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    fellows.on_arrival(request(1), 0.1)
    fellows.on_arrival(request(2), 0.2)
    first, second = fellows.members
    assert first.on_lease_ended(lease, Outcome.OK, 1.0) == []
    assert fellows.woken == [1], "the older one was not woken"
    fellows.woken.clear()  # and does not wake up
    assert first.on_tick(1.1) == []
    (taken,) = leases(first.on_tick(1.0 + TICK_S))
    assert taken.request.id == 2
    assert len(second.queue) == 1


def test_who_begins_to_wait_before_an_end_is_told_is_woken_by_it(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    zero, one = fellows.members
    assert zero.on_lease_ended(lease, Outcome.OK, 1.0) == []
    assert zero.untold
    assert fellows.instance(1, "a").in_flight == 1, "it was told at once, though nobody waits"
    assert one.on_arrival(request(1), 1.0001) == []
    assert zero.tell_rest(1.001) == []
    assert not zero.untold
    assert fellows.woken == [1]
    (taken,) = leases(one.on_wake(1.0011))
    assert taken.request.id == 1
    zero.take_in(1.002)
    assert fellows.instance(0, "a").in_flight == 1


def test_an_end_and_the_next_request_there_are_told_as_one(made: list[Many]) -> None:
    fellows = many(made, (spec("a"),), 2)
    zero, one = fellows.members
    (lease,) = leases(zero.on_arrival(request(0), 0.0))
    one.take_in(0.0)
    assert zero.on_lease_ended(lease, Outcome.OK, 1.0) == []
    (later,) = leases(zero.on_arrival(request(2, prompt=70), 1.0001))
    instance = fellows.instance(1, "a")
    assert (instance.in_flight, instance.prompt_tokens) == (1, 70)
    assert zero.tell_rest(1.001) == []
    assert zero.on_lease_ended(later, Outcome.NO_RESPONSE, 2.0, retry=False) == []
    assert fellows.instance(1, "a").in_flight == 0, "what is no success is told at once"


def test_an_arrival_leaves_freed_room_to_who_was_woken_for_it(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 3)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    fellows.on_arrival(request(1), 0.1)
    zero, one, two = fellows.members
    assert zero.on_lease_ended(lease, Outcome.OK, 1.0) == []
    assert two.on_arrival(request(2), 1.0001) == []
    (taken,) = leases(one.on_wake(1.0002))
    assert taken.request.id == 1
    fellows.now = 1.0002
    (later,) = leases(fellows.on_lease_ended(taken, Outcome.OK, 2.0))
    assert later.request.id == 2


def test_the_bounds_of_the_queue_hold_for_all_together(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2, max_requests=3, max_bytes=1000)
    lease = dispatched(fellows.on_arrival(request(0), 0.0))
    for request_id in (1, 2, 3):
        assert fellows.on_arrival(request(request_id, body_bytes=300), 0.0) == []
    for request_id in (4, 5):
        (refused,) = fellows.on_arrival(request(request_id), 0.0)
        assert isinstance(refused, Reject)
        assert refused.reason is RejectReason.QUEUE_FULL
    fellows.on_lease_ended(lease, Outcome.OK, 0.0)
    (refused,) = fellows.on_arrival(request(6, body_bytes=500), 0.0)
    assert isinstance(refused, Reject)
    assert fellows.on_arrival(request(7, body_bytes=400), 0.0) == []


def serve(fellows: Many, lease: Lease, count: int) -> list[Request]:
    """End what runs and take what comes instead, one after the other."""
    served = []
    for step in range(count):
        (lease,) = leases(fellows.on_lease_ended(lease, Outcome.OK, 100.0 + step))
        served.append(lease.request)
    return served


def test_a_crowd_in_one_of_them_does_not_hold_up_a_tenant_in_another(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    lease = dispatched(fellows.on_arrival(request(0, tenant="crowd"), 0.0))
    for step in range(1, 50):
        fellows.on_arrival(request(2 * step, tenant="crowd"), 0.001 * step)
    for step in range(5):
        fellows.on_arrival(request(2 * step + 1, tenant="one"), 1.0 + step)
    served = [each.tenant for each in serve(fellows, lease, 12)]
    assert served.count("one") == 5
    assert served[:2].count("one") == 1, "they take turns from the beginning"
    fellows.check_integrity()


def test_a_tenant_that_waits_in_two_of_them_has_one_share(made: list[Many]) -> None:
    """Also where the fellow that has the other tenant would not have looked again by itself."""
    fellows = many(made, (spec("a", capacity=ONE),), 4)
    lease = dispatched(fellows.on_arrival(request(0, tenant="x"), 0.0))
    for step in range(1, 61):  # x in all four, y in the last one only, behind x
        fellows.on_arrival(request(step, tenant="x"), 0.001 * step)
    for step in range(20):
        fellows.on_arrival(request(4 * (step + 20) + 3, tenant="y"), 1.0 + 0.001 * step)
    served = [each.tenant for each in serve(fellows, lease, 40)]
    assert served.count("y") == 20
    for end in range(2, 41):
        assert abs(served[:end].count("y") - end / 2) <= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), number=st.integers(1, 4), weight=st.sampled_from([1.0, 2.0, 0.5]))
def test_tenants_are_served_fairly_over_all(data: st.DataObject, number: int, weight: float) -> None:
    """Two that both wait differ, per weight, by a request or two of each; each is served by arrival."""
    weights = {"a": 1.0, "b": weight}
    made: list[Many] = []
    fellows = many(made, (spec("i", capacity=ONE),), number, tenant_weights=weights)
    lease = dispatched(fellows.on_arrival(request(0, prompt=150), 0.0))
    waiting: dict[str, list[Request]] = {"a": [], "b": []}
    work = dict.fromkeys(waiting, 0.0)
    now, largest = 0.0, size_of(request(0, prompt=190), 256.0)
    for request_id in range(1, data.draw(st.integers(20, 60))):
        now += 0.01
        if data.draw(st.booleans()) or not (waiting["a"] or waiting["b"]):
            tenant, prompt = data.draw(st.sampled_from("ab")), data.draw(st.integers(120, 190))
            asked = request(request_id, prompt=prompt, tenant=tenant)
            assert leases(fellows.on_arrival(asked, now)) == []
            if not waiting[tenant]:  # nobody saves up
                work = dict.fromkeys(waiting, 0.0)
            waiting[tenant].append(asked)
            continue
        (lease,) = leases(fellows.on_lease_ended(lease, Outcome.CLIENT_GONE, now))
        tenant = str(lease.request.tenant)
        overtaken = waiting[tenant].index(lease.request)
        # What a fellow said of its head may be out of date by one request that was served elsewhere.
        assert overtaken < number, f"{overtaken} of its tenant came before"
        del waiting[tenant][overtaken]
        work[tenant] += size_of(lease.request, lease.predicted_output) / weights[tenant]
        if waiting["a"] and waiting["b"]:
            assert abs(work["a"] - work["b"]) <= 2 * largest * (1.0 + 1.0 / weight)
        fellows.check_integrity()
    for each in made:
        each.close()


def test_a_tenant_whose_worker_dies_waits_for_nothing_more(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    lease = dispatched(fellows.on_arrival(request(1, tenant="x"), 0.0))
    fellows.on_arrival(request(2, tenant="x"), 0.1)
    fellows.on_arrival(request(4, tenant="y"), 0.2)
    fellows.on_arrival(request(3, tenant="y"), 0.3)
    fellows.replace(0)
    assert fellows.members[1].queue.held_by("x") == (0, 0)
    assert [each.id for each in serve(fellows, lease, 1)] == [3]
    fellows.check_integrity()


def test_a_weight_that_is_next_to_nothing_stays_within_the_ledger(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2, tenant_weights={"x": 5e-324}, max_requests=None)
    for member in fellows.members:  # as after years of it
        member.queue.passed(request(10_000, tenant="x"), 1.0)
        member._ledger.put(key_of("tag", "m\0" + "0", "x"), MOST_TAG - 1, 0)
    lease = dispatched(fellows.on_arrival(request(0, tenant="x"), 0.0))
    for request_id in range(1, 12):
        fellows.on_arrival(request(request_id, tenant="x" if request_id < 9 else "y"), 0.01 * request_id)
    served = [each.tenant for each in serve(fellows, lease, 11)]
    assert served == ["y"] * 3 + ["x"] * 8
    fellows.check_integrity()


def test_shares_of_the_queue_are_held_over_all(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2, max_requests=10, tenant_share=0.3)
    fellows.on_arrival(request(0), 0.0)
    for request_id in (1, 2, 3):
        assert fellows.on_arrival(request(request_id, tenant="x"), 0.0) == []
    for request_id in (4, 5):
        (refused,) = fellows.on_arrival(request(request_id, tenant="x"), 0.0)
        assert isinstance(refused, Reject)
    assert fellows.on_arrival(request(6, tenant="y"), 0.0) == []
    fellows.on_cancelled(2, 0.0)
    assert fellows.on_arrival(request(7, tenant="x"), 0.0) == []


def test_a_full_queue_makes_room_for_who_holds_least_over_all(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2, max_requests=4)
    fellows.on_arrival(request(0), 0.0)
    for request_id in (1, 2, 3, 4):
        assert fellows.on_arrival(request(request_id, tenant="x"), 0.0) == []
    (refused,) = fellows.on_arrival(request(5, tenant="y"), 0.0)
    assert isinstance(refused, Reject)
    assert refused.request_id == 3, "the newest of the tenant that holds most, of those that wait here"
    (refused,) = fellows.on_arrival(request(7, tenant="x"), 0.0)
    assert isinstance(refused, Reject)
    assert refused.request_id == 7


def test_what_waits_elsewhere_counts_as_waiting(made: list[Many]) -> None:
    fellows = many(made, (spec("a", capacity=ONE),), 2)
    fellows.on_arrival(request(0), 0.0)
    fellows.on_arrival(request(2), 0.0)
    one = fellows.members[1]
    one.take_in(0.0)
    own, other = one.queue.waiting("m"), fellows.members[0].queue.waiting("m")
    assert own == other > 0


def test_the_budget_of_retries_is_that_of_all(made: list[Many]) -> None:
    fellows = many(made, (spec("a"), spec("b")), 2, policy="least-requests")
    again: list[Lease] = []
    for request_id in range(2 * RETRY_FLOOR + 2):
        lease = dispatched(fellows.on_arrival(request(request_id), 0.0))
        again += leases(fellows.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.0))
    assert len(again) == RETRY_FLOOR
    assert {fellows.of(lease.request.id) for lease in again} == {0, 1}


# --- what they know ---


def test_how_fast_requests_arrive_is_known_to_all(made: list[Many]) -> None:
    one = many(made, (spec("a"),), 1)
    four = many(made, (spec("a"),), 4)
    for step in range(400):
        for fellows in (one, four):
            lease = dispatched(fellows.on_arrival(request(step), step * 0.01))
            fellows.on_lease_ended(lease, Outcome.CLIENT_GONE, step * 0.01)
    alone = one.members[0]._demand("m").rate(1.0, 4.0)
    assert alone > 0.0
    for member in four.members:
        member.take_in(4.0)
        assert member._demand("m").rate(1.0, 4.0) == pytest.approx(alone, rel=0.15)


def test_an_ejection_is_everybodys_and_so_is_the_way_back(made: list[Many]) -> None:
    fellows = many(made, (spec("a"), spec("b")), 3)
    for step in range(12):
        lease = dispatched(fellows.on_arrival(request(step), 0.0))
        fellows.on_lease_ended(
            lease, Outcome.CONNECT_FAILED if lease.instance == "a" else Outcome.OK, 0.0, retry=False
        )
    states = [fellows.instance(index, "a").health.state for index in range(3)]
    assert states == [Health.EJECTED] * 3
    for now in (1.0, 2.0):
        fellows.now = now
        fellows.members[1].on_instance(Probed("a", ProbeResult.OK), now)
    states = [fellows.instance(index, "a").health.state for index in range(3)]
    assert states == [Health.UP] * 3


def test_health_goes_over_whole(made: list[Many]) -> None:
    fellows = many(made, (spec("a"), spec("b")), 2)
    one, two = (fellows.instance(index, "a") for index in range(2))
    one.health.on_refused(0.0)
    fellows.members[1].adopt_health("a", one.health.saved(), 0.0)
    assert (two.health.state, two.health.reason) == (Health.EJECTED, "connection refused")
    fellows.now = 1.0
    assert all(
        lease.instance == "b"
        for step in (1, 3, 5)
        for lease in leases(fellows.members[1].on_arrival(request(step), 1.0))
    )
    fellows.members[1].adopt_health("nobody", one.health.saved(), 0.0)


def test_a_speed_is_judged_by_what_ran_in_all_of_them() -> None:
    """Answers at half speed halve the speed of the model, however few of them a scheduler has itself."""
    for number in (1, 4):
        setup, engines = fleet(2.0, policy="hetlb", predictor="empirical")
        believed = dataclasses.replace(setup.specs[0], latency=fleet(1.0)[0].specs[0].latency)
        setup = dataclasses.replace(setup, specs=(believed,))
        simulation = FleetSimulation(setup, engines, load(400, 4.0), model="m")
        if number > 1:
            simulation.scheduler = fellows = Many(setup, number)  # type: ignore[assignment]
            simulation.run()
            factors = [member.instances[0].speed.factor for member in fellows.members]
        else:
            simulation.run()
            factors = [simulation.scheduler.instances[0].speed.factor]
        assert all(factor == pytest.approx(2.0, rel=0.15) for factor in factors), (number, factors)
