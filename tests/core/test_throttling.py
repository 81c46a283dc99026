"""Limits of an instance after it came back, said it is busy, or failed; ejection."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.evidence.evidence import BUSY_CAP_S
from hetlb.balancer.core.evidence.table import MOST_PAUSE_S, HealthParams
from hetlb.balancer.core.facts import (
    AdminStateSet,
    EngineSample,
    InstanceAdded,
    InstanceRemoved,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    Command,
    Dispatch,
    Health,
    HealthChanged,
    Lease,
    Outcome,
    PassOn,
    Reject,
)
from hetlb.tools.sim.integrity import check_scheduler

PLACES = 64
#: What the default policy keeps there: a fiftieth more, so that a place that frees is taken at once.
FULL = 64


def roomy(name: str, slower: float = 1.0, places: int = PLACES) -> object:
    capacity = Capacity(kv_cache_tokens=10**7, kv_tokens_per_request=10**7, max_num_seqs=places)
    return spec(name, slower=slower, capacity=capacity)


def instance(scheduler: Scheduler, name: str) -> object:
    return next(each for each in scheduler.instances if each.name == name)


def leases(commands: list[Command]) -> list[Lease]:
    return [command.lease for command in commands if isinstance(command, Dispatch)]


# --- busy ---


def test_a_busy_engine_s_request_goes_to_another_once_and_counts_for_nothing() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "single")
    first = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_refused(first, 503, 7.0, 0.1))
    assert (first.instance, second.instance, second.request.id) == ("a", "b", 1)
    assert first.ended
    assert all(each.evidence.health.state is Health.UP for each in scheduler.instances)
    # Two runs in all: the second engine's answer is the client's.
    assert scheduler.on_refused(second, 503, 7.0, 0.2) == [PassOn(1, second)]
    assert not second.ended
    assert scheduler.on_lease_ended(second, Outcome.UPSTREAM_ERROR, 0.3) == []
    check_scheduler(scheduler)
    assert scheduler.in_flight == 0


@pytest.mark.parametrize("said", [None, 0.0, -1.0])
def test_without_a_time_to_come_again_it_is_tried_elsewhere_and_nothing_is_remembered(
    said: float | None,
) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    elsewhere = dispatched(scheduler.on_refused(lease, 503, said, 0.1))
    assert elsewhere.instance == "b"
    scheduler.on_lease_ended(elsewhere, Outcome.UPSTREAM_ERROR, 0.2)
    assert dispatched(scheduler.on_arrival(request(2), 0.3)).instance == "a"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_busy_instance_is_last_but_not_out_and_not_for_ever(policy: str) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], policy)
    name = ""
    for i in range(40):
        lease = dispatched(scheduler.on_arrival(request(i), 0.0))
        if i == 0:
            name = lease.instance
            dispatched(scheduler.on_refused(lease, 503, 1e9, 0.0))
        else:
            assert lease.instance != name
    other = "b" if name == "a" else "a"
    scheduler.on_instance(AdminStateSet(other, AdminState.DRAIN), 1.0)
    lease = dispatched(scheduler.on_arrival(request(50), 1.0))
    assert lease.instance == name
    scheduler.on_first_token(lease, 1.0)
    scheduler.on_instance(AdminStateSet(other, AdminState.READY), 1.0)
    later = 1.0 + BUSY_CAP_S
    assert name in {dispatched(scheduler.on_arrival(request(60 + i), later)).instance for i in range(60)}


def test_without_another_that_has_room_the_answer_is_passed_on() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b", places=2)], "hetlb")
    held = []
    while len(scheduler.queue) == 0 and instance(scheduler, "b").in_flight < 2:
        held += leases(scheduler.on_arrival(request(len(held), subset=("b",)), 0.0))
    lease = dispatched(scheduler.on_arrival(request(100, prompt=4000), 0.0))
    assert lease.instance == "a"
    busy_b = next(each for each in held if each.instance == "b")
    assert scheduler.on_refused(busy_b, 503, 5.0, 0.1) == [PassOn(busy_b.request.id, busy_b)]
    assert scheduler.on_refused(lease, 503, 5.0, 0.1) == [PassOn(100, lease)]
    again = scheduler.on_refused(lease, 503, 5.0, 0.1)
    assert again == [PassOn(100, lease)], "said again it changes nothing"
    check_scheduler(scheduler)


def test_a_busy_engine_that_is_alone_is_not_given_more_than_it_had() -> None:
    scheduler = make_scheduler([roomy("a")], "hetlb")
    held = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(10)]
    assert scheduler.on_refused(held[-1], 503, 5.0, 0.1) == [PassOn(9, held[-1])]
    scheduler.on_lease_ended(held.pop(), Outcome.UPSTREAM_ERROR, 0.1)
    assert scheduler.on_arrival(request(10), 0.2) == [], "it waits for one of the nine"
    commands = scheduler.on_lease_ended(held.pop(), Outcome.OK, 0.3)
    assert dispatched(commands).request.id == 10
    assert scheduler.on_arrival(request(11), 0.4) == []
    assert dispatched(scheduler.on_tick(5.2)).request.id == 11


def test_busy_answers_are_tried_elsewhere_within_the_budget_of_retries() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    asked = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(8)]
    outcomes = [scheduler.on_refused(lease, 503, 3.0, 0.1) for lease in asked]
    assert sum(len(leases(commands)) for commands in outcomes) == 3
    assert sum(isinstance(c, PassOn) for commands in outcomes for c in commands) == 5


# --- slow start ---


def bring_back(scheduler: Scheduler, name: str, now: float) -> None:
    scheduler.on_instance(Probed(name, ProbeResult.REFUSED), now)
    for _ in range(2):
        scheduler.on_instance(Probed(name, ProbeResult.OK), now)
    assert instance(scheduler, name).evidence.health.state is Health.UP


def saturate(scheduler: Scheduler, first_id: int, now: float, count: int = 400) -> list[Lease]:
    found: list[Lease] = []
    for i in range(first_id, first_id + count):
        found += leases(scheduler.on_arrival(request(i), now))
    return found


def test_never_at_the_start_of_the_process() -> None:
    for health in (Health.UP, Health.SUSPECT):
        scheduler = make_scheduler([roomy("a"), roomy("b")], "hetlb", health=health)
        for name in "ab":
            scheduler.on_instance(Probed(name, ProbeResult.OK), 0.0)
        saturate(scheduler, 0, 0.0)
        assert [each.in_flight for each in scheduler.instances] == [FULL, FULL]


def test_an_engine_that_was_not_there_at_the_start_does_not_start_slowly() -> None:
    scheduler = make_scheduler([roomy("a")], "hetlb", health=Health.SUSPECT)
    bring_back(scheduler, "a", 5.0)
    assert len(saturate(scheduler, 0, 5.0)) == FULL


def restart(scheduler: Scheduler, name: str, how: str, now: float) -> None:
    """Have the process of an instance be another, in one of the ways in which that shows."""
    if how == "refused":
        bring_back(scheduler, name, now)
    elif how == "added":
        scheduler.on_instance(InstanceRemoved(name), now - 1.0)
        scheduler.on_instance(InstanceAdded(roomy(name)), now)  # type: ignore[arg-type]
    else:  # so quickly that no probe noticed
        scheduler.on_scrape(name, EngineSample(began=1000.0), now - 1.0)
        scheduler.on_scrape(name, EngineSample(began=2000.0), now)


@pytest.mark.parametrize("how", ["refused", "added", "told"])
def test_slow_start_grows_with_time_while_others_have_room(how: str) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "least-requests")
    restart(scheduler, "b", how, 10.0)
    number = 0
    for second in (10, 16, 25, 39):
        saturate(scheduler, number, float(second), 40)
        number += 40
        slots = max(1, PLACES * (second - 10) // 30)
        assert instance(scheduler, "b").in_flight == slots
        assert instance(scheduler, "b").evidence.less(PLACES, float(second)) == (
            f"slow start: {slots} of {PLACES} slots"
        )
    assert instance(scheduler, "b").evidence.less(PLACES, 40.0) == ""
    check_scheduler(scheduler)


@pytest.mark.parametrize("how", ["refused", "added", "told"])
def test_a_slow_start_is_over_as_soon_as_requests_wait(how: str) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "hetlb")
    restart(scheduler, "b", how, 10.0)
    assert instance(scheduler, "b").evidence.active(10.0)
    saturate(scheduler, 0, 10.0)
    assert [each.in_flight for each in scheduler.instances] == [FULL, FULL]
    check_scheduler(scheduler)


@pytest.mark.parametrize("state", [AdminState.DRAIN, AdminState.MAINT])
def test_an_engine_that_did_not_restart_has_its_share_back_at_once(state: AdminState) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "least-requests")
    scheduler.on_scrape("b", EngineSample(began=1000.0), 0.5)
    scheduler.on_instance(AdminStateSet("b", state), 1.0)
    scheduler.on_instance(AdminStateSet("b", AdminState.READY), 10.0)
    scheduler.on_scrape("b", EngineSample(began=1000.0), 10.5)
    saturate(scheduler, 0, 10.5, 40)
    assert [each.in_flight for each in scheduler.instances] == [20, 20]


def test_a_network_that_was_away_is_no_restart() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "hetlb")
    scheduler.on_scrape("b", EngineSample(began=1000.0), 0.5)
    scheduler.on_instance(Probed("b", ProbeResult.REFUSED), 1.0)
    scheduler.on_instance(Probed("b", ProbeResult.OK), 2.0)
    scheduler.on_scrape("b", EngineSample(began=1000.0), 2.0)
    scheduler.on_instance(Probed("b", ProbeResult.OK), 3.0)
    assert instance(scheduler, "b").evidence.health.state is Health.UP
    assert not instance(scheduler, "b").evidence.active(3.0)


def test_two_processes_behind_one_address_are_no_restarts() -> None:
    scheduler = make_scheduler([roomy("a")], "hetlb")
    for number in range(10):
        scheduler.on_scrape("a", EngineSample(began=2000.0 - 1000.0 * (number % 2)), float(number))
        assert not instance(scheduler, "a").evidence.active(float(number))


def test_starts_that_a_page_says_are_no_more_than_instances() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "hetlb")
    for number in range(50):
        for name in "ab":
            scheduler.on_scrape(name, EngineSample(began=2000.0 - number), float(number))
    assert {began: [each.name for each in alike] for began, alike in scheduler.fleet.by_start.items()} == {
        2000.0: ["a", "b"]
    }
    scheduler.on_scrape("a", EngineSample(began=3000.0), 60.0)
    scheduler.on_instance(InstanceRemoved("b"), 61.0)
    assert list(scheduler.fleet.by_start) == [3000.0]
    check_scheduler(scheduler)


def test_slow_start_can_be_switched_off() -> None:
    scheduler = make_scheduler(
        [roomy("a"), roomy("b")], "hetlb", health_params=HealthParams(slow_start_s=0.0)
    )
    bring_back(scheduler, "b", 10.0)
    assert not instance(scheduler, "b").evidence.active(10.0)


def test_what_it_had_read_is_forgotten() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "hetlb")
    asked = request(1, prompt=3000, prefix_keys=(("session:x", None),))
    lease = dispatched(scheduler.on_arrival(asked, 0.0))
    home = lease.instance
    scheduler.on_first_token(lease, 0.5)
    scheduler.on_lease_ended(lease, Outcome.OK, 0.6)
    held = scheduler.fleet.prefixes.held(asked.prefix_keys, asked.prompt_tokens)
    assert held is not None
    assert instance(scheduler, home).tree.cache_id in held.tokens
    bring_back(scheduler, home, 1.0)
    assert scheduler.fleet.prefixes.held(asked.prefix_keys, asked.prompt_tokens) is None


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"hetlb", "planned"}))
def test_policies_that_bind_at_once_hold_nothing_back_when_all_have_come_back(policy: str) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], policy)
    for name in "ab":
        bring_back(scheduler, name, 10.0)
    assert len(saturate(scheduler, 0, 10.0)) == 400


# --- doubt ---


def fail(scheduler: Scheduler, lease: Lease, how: str, now: float) -> list[Command]:
    if how == "dropped":
        return scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, now, retry=False)
    if how == "broken":
        scheduler.on_first_token(lease, now)
        return scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, now)
    return scheduler.on_lease_ended(lease, Outcome.UPSTREAM_ERROR, now)


@pytest.mark.parametrize("how", ["dropped", "broken", "500"])
@pytest.mark.parametrize("policy", ["least-requests", "p2c", "peak-ewma", "hetlb", "paper", "rr"])
def test_an_instance_that_fails_at_once_is_no_magnet(how: str, policy: str) -> None:
    """Ten requests a second for 15 s; the others answer in a second, `bad` fails in a millisecond."""
    scheduler = make_scheduler([roomy("bad"), roomy("b"), roomy("c")], policy)
    running: list[tuple[float, Lease]] = []
    errors = 0
    for i in range(150):
        now = i / 10
        while running and running[0][0] <= now:
            ends_at, lease = running.pop(0)
            scheduler.on_first_token(lease, ends_at)
            lease.output_tokens = 20
            scheduler.on_lease_ended(lease, Outcome.OK, ends_at)
        lease = dispatched(scheduler.on_arrival(request(i), now))
        if lease.instance == "bad":
            errors += 1
            fail(scheduler, lease, how, now + 0.001)
        else:
            running.append((now + 1.0, lease))
    # Two until it is in doubt, and a trial every few seconds: so it is back soon once it is well.
    assert 2 <= errors <= 7
    check_scheduler(scheduler)


def test_an_answer_that_ends_well_ends_the_doubt() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "single")
    fail(scheduler, dispatched(scheduler.on_arrival(request(0), 0.0)), "500", 0.0)
    for i in (1, 2):
        assert dispatched(scheduler.on_arrival(request(i), 0.25 * i)).instance == "b"
    trial = dispatched(scheduler.on_arrival(request(3), 1.0))
    assert trial.instance == "a"
    assert dispatched(scheduler.on_arrival(request(4), 1.5)).instance == "b", "one at a time"
    scheduler.on_lease_ended(trial, Outcome.OK, 1.6)
    assert dispatched(scheduler.on_arrival(request(5), 1.7)).instance == "a"


def test_where_all_are_in_doubt_none_is() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "rr")
    for i in range(40):
        fail(scheduler, dispatched(scheduler.on_arrival(request(i), 0.0)), "500", 0.0)
    assert len(saturate(scheduler, 100, 0.0)) == 400


@given(st.lists(st.floats(0.0, 40.0), min_size=1, max_size=40))
def test_doubt_decays(gaps: list[float]) -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "single")
    now, number = 0.0, 0
    for gap in gaps:
        now += gap
        number += 1
        lease = dispatched(scheduler.on_arrival(request(number), now))
        if lease.instance == "a":
            fail(scheduler, lease, "500", now)
    for waited in range(0, 400, 5):
        number += 1
        if dispatched(scheduler.on_arrival(request(number), now + waited)).instance == "a":
            assert waited <= MOST_PAUSE_S + 65.0
            break
    else:
        raise AssertionError("it never gets another chance")


# --- who may be ejected ---


def ejected(commands: list[Command]) -> list[str]:
    return [c.instance for c in commands if isinstance(c, HealthChanged) and c.health is Health.EJECTED]


def test_refused_connections_eject_whatever_is_left() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b")], "rr")
    for name in "ab":
        scheduler.on_instance(Probed(name, ProbeResult.REFUSED), 0.0)
    assert all(each.evidence.health.state is Health.EJECTED for each in scheduler.instances)


def test_the_only_one_is_not_ejected_for_probes_that_time_out() -> None:
    scheduler = make_scheduler([roomy("a")], "hetlb")
    for _ in range(10):
        scheduler.on_instance(Probed("a", ProbeResult.FAILED), 0.0)
    assert scheduler.instances[0].evidence.health.state is Health.SUSPECT
    assert dispatched(scheduler.on_arrival(request(1), 0.0)).instance == "a"


# --- an engine dies under many requests ---


@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests"])
def test_no_request_that_waits_at_an_engine_that_dies_is_lost(policy: str) -> None:
    scheduler = make_scheduler([roomy("a", places=40), roomy("b", places=40)], policy)
    held = saturate(scheduler, 0, 0.0, 60)
    dying = [lease for lease in held if lease.instance == "a"]
    alive = [lease for lease in held if lease.instance == "b"]
    assert len(dying) > 20
    answered: set[int] = set()
    moved: list[Lease] = []
    for lease in dying:
        commands = scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 1.0)
        assert not [c for c in commands if isinstance(c, Reject)]
        moved += leases(commands)
    scheduler.on_instance(Probed("a", ProbeResult.REFUSED), 1.1)
    now = 1.2
    while alive or moved:
        lease = (moved or alive).pop(0)
        now += 0.05
        assert lease.instance == "b"
        moved += leases(scheduler.on_first_token(lease, now))
        lease.output_tokens = 10
        answered.add(lease.request.id)
        moved += leases(scheduler.on_lease_ended(lease, Outcome.OK, now))
        moved += leases(scheduler.on_tick(now))
        check_scheduler(scheduler)
    assert answered == set(range(60))


def test_a_refused_request_waits_where_the_others_are_full() -> None:
    scheduler = make_scheduler([roomy("a"), roomy("b", places=2)], "hetlb")
    for i in range(2):
        dispatched(scheduler.on_arrival(request(i, subset=("b",)), 0.0))
    lease = dispatched(scheduler.on_arrival(request(10), 0.0))
    assert lease.instance == "a"
    other = next(iter(instance(scheduler, "b").leases.values()))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    assert not [c for c in commands if isinstance(c, Reject)]
    assert 10 in scheduler.queue
    assert dispatched(scheduler.on_lease_ended(other, Outcome.OK, 1.0)).request.id == 10
