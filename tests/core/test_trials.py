"""Trials of an instance: what counts against it, what it gets meanwhile, and how it comes back."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from helpers import MODEL, all_pairs, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.evidence.lost_answers import lower_share
from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S, MOST_PAUSE_S, PAUSE_S
from hetlb.balancer.core.facts import EngineSample, ModelsLearned
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Dispatch, Lease, Outcome, PassOn
from hetlb.tools.sim.integrity import check_scheduler


def evidence(scheduler: Scheduler, name: str) -> Evidence:
    return next(each.evidence for each in scheduler.instances if each.name == name)


def whole(scheduler: Scheduler, lease: Lease, now: float) -> None:
    """End an answer well."""
    scheduler.on_first_token(lease, now)
    lease.output_tokens = 20
    scheduler.on_lease_ended(lease, Outcome.OK, now)


def refused(scheduler: Scheduler, lease: Lease, busy: bool, now: float) -> Lease | None:
    """Have an engine refuse; return the lease elsewhere, None where the client gets the refusal."""
    commands = scheduler.on_refused(lease, 503 if busy else 400, None, now)
    if isinstance(commands[0], PassOn):
        outcome = Outcome.UPSTREAM_BUSY if busy else Outcome.UPSTREAM_REFUSED
        scheduler.on_lease_ended(lease, outcome, now)
        return None
    return dispatched(commands)


@pytest.mark.parametrize(
    ("policy", "busy", "places"),
    all_pairs(sorted(POLICIES), [True, False], [("ab", "a"), ("abc", "a"), ("abc", "ab")]),
)
def test_an_instance_that_refuses_at_once_draws_no_work(
    policy: str, busy: bool, places: tuple[str, str]
) -> None:
    """Twenty a second for 10 s, then it answers: a few are lost, and it is back within 5 s."""
    fleet, bad = places
    scheduler = make_scheduler([spec(name) for name in fleet], policy)
    running: list[tuple[float, Lease]] = []
    lost, back_at = 0, 0.0
    for i in range(400):
        now = i / 20
        while running and running[0][0] <= now:
            whole(scheduler, running[0][1], running.pop(0)[0])
        lease: Lease | None = dispatched(scheduler.on_arrival(request(i), now))
        if lease is not None and lease.instance in bad and now < 10.0:
            while lease is not None and lease.instance in bad:
                lease = refused(scheduler, lease, busy, now + 0.001)
            lost += lease is None
        elif lease is not None and lease.instance == "a" and not back_at:
            back_at = now
        if lease is not None:
            running.append((now + 0.3, lease))
        scheduler.on_sweep({}, now)
    assert lost <= 10
    assert 10.0 <= back_at <= 15.0 or policy == "single" or back_at == 0.0
    assert not evidence(scheduler, "a").answers.doubted
    check_scheduler(scheduler)


@pytest.mark.parametrize(
    ("fleet", "policy"), [("a", "hetlb"), ("abc", "hetlb"), *(("ab", policy) for policy in sorted(POLICIES))]
)
def test_what_all_refuse_alike_is_the_clients_own(fleet: str, policy: str) -> None:
    """Of two clients one gets 4xx for everything: that changes nothing, at any instance."""
    scheduler = make_scheduler([spec(name) for name in fleet], policy)
    rng = random.Random(1)
    running: list[Lease] = []
    for i in range(400):
        now, bad = i / 20, rng.random() < 0.6
        lease: Lease | None = dispatched(scheduler.on_arrival(request(i), now))
        visits = 0
        while lease is not None and bad:
            lease, visits = refused(scheduler, lease, False, now), visits + 1
        assert visits <= 3
        if lease is not None:
            running.append(lease)
        while len(running) > 5:
            whole(scheduler, running.pop(0), now)
        assert not any(each.evidence.answers.lost for each in scheduler.instances), i
    check_scheduler(scheduler)


def test_one_that_refuses_every_second_request_is_found() -> None:
    """Its refused requests are answered elsewhere, and it gets trials alone: three in a row never came."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lost = visits = 0
    for i in range(200):
        now = i / 20
        lease: Lease | None = dispatched(scheduler.on_arrival(request(i), now))
        assert lease is not None
        if lease.instance == "a":
            visits += 1
            if visits % 2:
                lease = refused(scheduler, lease, False, now)
                lost += lease is None
        if lease is not None:
            whole(scheduler, lease, now)
        scheduler.on_sweep({}, now)
    assert lost <= 20
    assert visits <= 60


@pytest.mark.parametrize("client", ["", "10.0.0.9"])
def test_one_that_breaks_one_answer_of_five_is_in_doubt_and_stays_so(client: str) -> None:
    """Three good answers in a row are no sign while four of five are good; of one client, too."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    doubted = visits = 0
    for i in range(400):
        now = i / 10
        lease = dispatched(scheduler.on_arrival(request(i, client=client, streamed=True), now))
        scheduler.on_first_token(lease, now)
        bad = lease.instance == "a" and visits % 5 == 4
        visits += lease.instance == "a"
        if bad:
            scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, now)
        else:
            whole(scheduler, lease, now)
        scheduler.on_sweep({}, now)
        doubted += now > 10.0 and evidence(scheduler, "a").answers.doubted
    assert doubted >= 200
    check_scheduler(scheduler)


def test_clients_whose_every_second_request_is_wrong_change_nothing() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    for i in range(200):
        now = i / 20
        lease: Lease | None = dispatched(scheduler.on_arrival(request(i), now))
        while lease is not None and i % 4 < 2:
            lease = refused(scheduler, lease, False, now)
        if lease is not None:
            whole(scheduler, lease, now)
        for each in scheduler.instances:
            assert not each.evidence.wary(now)


@pytest.mark.parametrize("own", ["of-a", "of-b", "of-all"])
def test_names_that_not_all_answer_to_change_nothing(own: str) -> None:
    """An adapter that one instance has alone is no pool in which it is as good as the best."""
    scheduler = make_scheduler([spec(name) for name in "ab"])
    for name in "ab":
        names = (MODEL, "lora") if own in ("of-all", f"of-{name}") else (MODEL,)
        scheduler.on_instance(ModelsLearned(name, names), 0.0)
    visits = 0
    for i in range(100):
        now = i / 10
        lease = dispatched(scheduler.on_arrival(request(i), now))
        visits += lease.instance == "a"
        if lease.instance == "a":
            scheduler.on_lease_ended(lease, Outcome.UPSTREAM_ERROR, now)
        else:
            whole(scheduler, lease, now)
        scheduler.on_sweep({}, now)
    assert visits <= 12
    assert evidence(scheduler, "a").answers.doubted
    assert dispatched(scheduler.on_arrival(request(100, model="lora"), 10.0)).instance in "ab"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_engine_alone_is_never_refused_work(policy: str) -> None:
    scheduler = make_scheduler([spec("a")], policy)
    for i in range(50):
        assert refused(scheduler, dispatched(scheduler.on_arrival(request(i), i / 20)), True, i / 20) is None
        scheduler.on_sweep({}, i / 20)
    lease = dispatched(scheduler.on_arrival(request(99), 3.0))
    for tick in range(20):
        scheduler.on_sweep({}, 3.0 + tick)
    assert lease.instance == "a"
    assert isinstance(scheduler.on_arrival(request(100), 24.0)[0], Dispatch)


def test_a_full_queue_is_a_limit_and_no_fault() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    held = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(5)]
    moved = refused(scheduler, held[4], True, 0.1)
    assert moved is not None
    assert moved.instance == "b"
    assert dispatched(scheduler.on_arrival(request(9), 0.2)).instance == "b"
    whole(scheduler, held[0], 0.3)
    assert dispatched(scheduler.on_arrival(request(10), 0.4)).instance == "a", "a place is free"
    assert evidence(scheduler, "a").answers.lost == 0.0
    check_scheduler(scheduler)


def known(scheduler: Scheduler) -> None:
    """Let every instance show its speed."""
    for i, each in enumerate(scheduler.instances):
        lease = dispatched(scheduler.on_arrival(request(1000 + i, subset=(each.name,), streamed=True), 0.0))
        scheduler.on_first_token(lease, 0.1)
        lease.output_tokens = 50
        scheduler.on_lease_ended(lease, Outcome.OK, 0.6)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_says_nothing_stalls_and_its_requests_go_elsewhere(policy: str) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], policy)
    known(scheduler)
    lease = dispatched(scheduler.on_arrival(request(1, subset=None, streamed=True), 1.0))
    hung, now = lease.instance, 1.0
    while evidence(scheduler, hung).silence.stalled_since is None:
        now += 0.5
        scheduler.on_sweep({}, now)
        assert now < 10.0
    assert now - 1.0 > LEAST_SILENCE_S
    (stranded,) = scheduler.failover.stranded(now)
    moved = dispatched(scheduler.on_stranded(stranded, now))
    assert (stranded.ended, moved.instance != hung) == (True, True)
    whole(scheduler, moved, now + 0.1)
    # A trial, one at a time; a token of it ends the stall.
    later = now + PAUSE_S
    trial = dispatched(scheduler.on_arrival(request(2, streamed=True), later))
    other = dispatched(scheduler.on_arrival(request(3, streamed=True), later + MOST_PAUSE_S))
    assert (trial.instance, other.instance != hung) == (hung, True)
    scheduler.on_first_token(trial, later + MOST_PAUSE_S)
    assert evidence(scheduler, hung).silence.stalled_since is None
    check_scheduler(scheduler)


def test_counters_that_move_are_work_and_counters_that_stand_are_none() -> None:
    scheduler = make_scheduler([spec("a")], "hetlb")
    known(scheduler)
    scheduler.on_scrape("a", EngineSample(1, 0, 0.1, generated=10), 0.9)
    lease = dispatched(scheduler.on_arrival(request(1, streamed=True), 1.0))
    for second in range(2, 60):
        scheduler.on_scrape("a", EngineSample(1, 0, 0.1, generated=10 + second), float(second))
        scheduler.on_sweep({}, second + 0.5)
        assert evidence(scheduler, "a").silence.stalled_since is None
    for second in range(60, 70):
        scheduler.on_scrape("a", EngineSample(1, 0, 0.1, generated=69), float(second))
        scheduler.on_sweep({}, second + 0.5)
    assert evidence(scheduler, "a").silence.stalled_since is not None
    assert not evidence(scheduler, "a").silence.works(70.0)
    scheduler.on_first_token(lease, 70.0)


def test_seconds_in_which_it_stood_still_say_nothing_about_its_speed() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    known(scheduler)
    (a, _) = scheduler.instances
    before = a.speed.factor
    lease = dispatched(scheduler.on_arrival(request(1, streamed=True), 1.0))
    scheduler.on_first_token(lease, 1.1)
    tick = 1.5
    while tick < 31.0:
        scheduler.on_sweep({}, tick)
        tick += 0.5
    scheduler.on_sweep({"a": 31.2}, 31.2)
    lease.output_tokens = 50
    scheduler.on_lease_ended(lease, Outcome.OK, 31.6)
    assert a.speed.factor == pytest.approx(before, rel=0.5)


def test_a_factor_that_nothing_confirms_returns_to_the_one_before() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    (a, _) = scheduler.instances
    for _ in range(30):
        a.speed._observe(1.0, 1.0, 10.0)
    a.speed._observe(0.01, 30.0, 11.0)
    worse = a.speed.factor
    assert worse > 1.2
    for second in range(12, 90):
        scheduler.on_sweep({}, float(second))
    assert a.speed.factor < 1.1
    assert a.latency == a.nominal.scaled(a.speed.factor)


def test_slots_that_were_learnt_grow_while_all_are_taken() -> None:
    from hetlb.balancer.core.types import Capacity

    scheduler = make_scheduler([spec("a", capacity=Capacity(kv_cache_tokens=10**7))], "hetlb")
    (a,) = scheduler.instances
    a.max_num_seqs, a.slots_learnt_at = 2, 0.0
    leases: list[Any] = [dispatched(scheduler.on_arrival(request(i, streamed=True), 0.0)) for i in range(2)]
    assert scheduler.on_arrival(request(3), 0.1) == []
    for second in range(1, 61):
        for lease in leases:
            scheduler.on_first_token(lease, float(second))
        commands = scheduler.on_sweep({"a": float(second)}, float(second))
        commands += scheduler.on_arrival(request(100 + second), float(second))
        leases += [each.lease for each in commands if isinstance(each, Dispatch)]
    assert a.max_num_seqs > 20


def test_the_lower_end_of_a_share() -> None:
    assert lower_share(0.0, 0.0) == 0.0
    assert lower_share(0.0, 10.0) == pytest.approx(0.0, abs=1e-12)
    assert lower_share(2.0, 2.0) == pytest.approx(2.0 / (2.0 + 1.28**2))
    assert 0.0 < lower_share(5.0, 10.0) < 0.5


@pytest.mark.parametrize(
    ("policy", "status"), [("hetlb", 400), *((each, 500) for each in sorted(set(POLICIES) - {"single"}))]
)
def test_one_that_never_answered_well_gets_one_request_a_second(policy: str, status: int) -> None:
    """From the start two of three fail: what both lose counts, and so does what nobody else was asked for."""
    scheduler = make_scheduler([spec(name) for name in "abc"], policy)
    running: list[tuple[float, Lease]] = []
    visits: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for i in range(300):
        now = i / 30
        while running and running[0][0] <= now:
            whole(scheduler, running[0][1], running.pop(0)[0])
        lease: Lease | None = dispatched(scheduler.on_arrival(request(i), now))
        while lease is not None and lease.instance != "c":
            visits[lease.instance].append(now)
            commands = scheduler.on_refused(lease, status, None, now)
            if isinstance(commands[0], PassOn):
                outcome = Outcome.UPSTREAM_REFUSED if status < 500 else Outcome.UPSTREAM_ERROR
                scheduler.on_lease_ended(lease, outcome, now)
                lease = None
            else:
                lease = dispatched(commands)
        if lease is not None:
            running.append((now + 0.4, lease))
        scheduler.on_sweep({}, now)
    for name in "ab":
        later = visits[name][2:]
        assert all(second - first >= PAUSE_S - 0.05 for first, second in pairwise(later)), visits[name]
    check_scheduler(scheduler)


def test_what_all_refuse_leaves_a_new_fleet_as_it_was() -> None:
    scheduler = make_scheduler([spec(name) for name in "abc"], "rr")
    lease: Lease | None = dispatched(scheduler.on_arrival(request(1), 0.0))
    while lease is not None:
        lease = refused(scheduler, lease, False, 0.0)
    assert not any(each.evidence.wary(0.0) for each in scheduler.instances)


def test_a_trial_that_begins_is_enough_where_nothing_was_lost() -> None:
    """A refusal at the start does not hold an instance back until its first, long answer ends."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    first = lease.instance
    other = dispatched(scheduler.on_refused(lease, 400, None, 0.0))
    assert evidence(scheduler, first).held(0.5)
    trial = dispatched(scheduler.on_arrival(request(2), 1.5))
    assert (trial.instance, bool(trial.trial)) == (first, True)
    scheduler.on_first_token(trial, 2.0)
    assert not evidence(scheduler, first).wary(2.0)
    for each in (other, trial):
        whole(scheduler, each, 60.0)
    check_scheduler(scheduler)


def test_a_refusal_is_no_clients_mistake_while_one_without_room_was_not_asked() -> None:
    """The third server of an unknown speed takes three requests at first."""
    scheduler = make_scheduler([spec(name, latency=None) for name in "abc"], "hetlb")
    for i in range(3):
        assert dispatched(scheduler.on_arrival(request(100 + i, subset=("c",)), 0.0)).instance == "c"
    visits = 0
    for i in range(60):
        commands = scheduler.on_arrival(request(i), i / 100)
        lease = dispatched(commands) if commands else None
        while lease is not None and lease.instance != "c":
            visits += 1
            lease = refused(scheduler, lease, False, i / 100)
    assert visits <= 2
    check_scheduler(scheduler)
