"""Requests that take no slot: sessions, long polls, what the engine's server answers alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome, PassOn
from hetlb.tools.sim.integrity import check_scheduler

SLOTS = 4


def fleet(*names: str, policy: str = "hetlb", **more: Any) -> Scheduler:
    capacity = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=SLOTS)
    return make_scheduler([spec(name, capacity=capacity, **more) for name in names], policy)


def session(scheduler: Scheduler, number: int, now: float, *, agreed: bool = True) -> Lease:
    asked = request(number, prompt=0, max_tokens=None, sequences=0, generates=False)
    lease = dispatched(scheduler.on_arrival(asked, now))
    if agreed:
        scheduler.on_first_token(lease, now)
    return lease


def sweeps(scheduler: Scheduler, since: float, until: float, generated: int | None = 5) -> None:
    """Let time pass over engines whose counters stand."""
    for half in range(1, 1 + math.ceil(2 * (until - since))):
        now = since + half / 2
        for each in scheduler.instances:
            scheduler.on_scrape(each.name, EngineSample(0, 0, 0.0, generated=generated), now)
        scheduler.on_sweep({}, now)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("agreed", [True, False], ids=["session", "long poll"])
def test_silence_of_what_owes_no_tokens_is_no_stall_and_takes_no_trial(policy: str, agreed: bool) -> None:
    scheduler = fleet("a", "b", policy=policy)
    sessions = [session(scheduler, number, 0.0, agreed=agreed) for number in range(1, 31)]
    assert {each.instance for each in sessions} == {"a", "b"}
    sweeps(scheduler, 0.0, 60.0)
    assert [each.evidence.why(60.0) for each in scheduler.instances] == ["", ""]
    ends = {"a": 0, "b": 0}
    for number in range(100, 160):
        lease = dispatched(scheduler.on_arrival(request(number), 60.0 + number))
        scheduler.on_first_token(lease, 60.1 + number)
        lease.output_tokens = 50
        scheduler.on_lease_ended(lease, Outcome.OK, 60.2 + number)
        ends[lease.instance] += 1
        check_scheduler(scheduler)
    if policy not in ("single", "paper"):
        twin = fleet("a", "b", policy=policy)
        for number in range(100, 160):
            lease = dispatched(twin.on_arrival(request(number), 60.0 + number))
            twin.on_first_token(lease, 60.1 + number)
            lease.output_tokens = 50
            twin.on_lease_ended(lease, Outcome.OK, 60.2 + number)
            ends[lease.instance] -= 1
        assert max(map(abs, ends.values())) <= 12, "sessions change who gets the work"


def test_sessions_are_shared_by_speed_and_take_no_place_of_others() -> None:
    capacity = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=SLOTS)
    scheduler = make_scheduler(
        [spec("fast", capacity=capacity), spec("slow", capacity=capacity, slower=3.0)], "hetlb"
    )
    for number in range(1, 401):
        session(scheduler, number, 0.0)
    by_name = {each.name: each for each in scheduler.instances}
    assert 2.0 < by_name["fast"].slotless / by_name["slow"].slotless < 4.0
    assert [each.sequences for each in scheduler.instances] == [0, 0]
    placed = [
        c for n in range(500, 520) for c in scheduler.on_arrival(request(n), 1.0) if isinstance(c, Dispatch)
    ]
    assert len(placed) == 2 * SLOTS, "every slot is there for requests that take one"
    assert len(scheduler.queue) == 12
    waits = session(scheduler, 600, 2.0)  # and where all are taken a session waits for none
    assert waits.instance in by_name
    check_scheduler(scheduler)


def test_a_session_is_no_trial_of_an_instance_in_doubt() -> None:
    scheduler = fleet("a", "b")
    lost = scheduler.fleet.instances["a"]
    for number in range(1, 7):
        lease = dispatched(scheduler.on_arrival(request(number, subset=("a",)), 0.0))
        outcome = Outcome.UPSTREAM_ERROR if number > 1 else Outcome.OK
        lease.output_tokens = 50
        scheduler.on_lease_ended(lease, outcome, 0.1)
    assert lost.evidence.answers.doubted
    for number in range(10, 40):
        assert session(scheduler, number, 10.0).instance == "b"
    assert not lost.evidence.trial
    assert dispatched(scheduler.on_arrival(request(50), 10.0)).instance == "a", "the trial is a request"
    # Where the only instance is in doubt, sessions go there and leave the trial to others.
    alone = fleet("a")
    alone.fleet.instances["a"].evidence.answers.doubted = True
    alone.fleet.reindex(0.0)
    assert session(alone, 1, 1.0).instance == "a"
    assert not alone.fleet.instances["a"].evidence.trial


def test_answers_of_the_server_alone_prove_nothing_about_the_engine() -> None:
    """`/tokenize` is answered while the engine hangs: the stall stands."""
    scheduler = fleet("a", "b")
    hung = scheduler.fleet.instances["a"]
    for number in range(1, 5):
        lease = dispatched(scheduler.on_arrival(request(number, streamed=True), 0.0))
        if lease.instance == "b":
            scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, 0.0)
    sweeps(scheduler, 0.0, 10.0)
    assert hung.evidence.silence.stalled_since is not None
    for number in range(10, 30):
        asked = request(number, prompt=1, max_tokens=None, sequences=0, generates=False)
        lease = dispatched(scheduler.on_arrival(asked, 10.0))
        assert lease.instance == "b", "not where the engine stands"
        scheduler.on_first_token(lease, 10.1)
        scheduler.on_lease_ended(lease, Outcome.OK, 10.2)
    assert hung.evidence.silence.stalled_since is not None


def test_clients_that_leave_a_long_poll_or_a_session_say_nothing_about_its_engine() -> None:
    scheduler = fleet("a", "b")
    for number in range(1, 21):
        lease = session(scheduler, number, 0.0, agreed=bool(number % 2))
        scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, 60.0)
    assert [each.evidence.answers.lost for each in scheduler.instances] == [0.0, 0.0]


@pytest.mark.parametrize("status", [400, 429, 503])
def test_a_refused_session_teaches_no_limit_and_no_doubt(status: int) -> None:
    scheduler = fleet("a", "b")
    running = [dispatched(scheduler.on_arrival(request(number), 0.0)) for number in range(1, 5)]
    for number in range(10, 20):
        lease = session(scheduler, number, 0.0, agreed=False)
        commands = scheduler.on_refused(lease, status, None, 0.1)
        while isinstance(commands[0], Dispatch):  # refused everywhere
            lease = commands[0].lease
            commands = scheduler.on_refused(lease, status, None, 0.1)
        assert commands == [PassOn(number, lease)]
        scheduler.on_lease_ended(lease, Outcome.UPSTREAM_REFUSED, 0.1)
    assert [each.evidence.room.limit(0.2) for each in scheduler.instances] == [math.inf, math.inf]
    assert [each.evidence.why(0.2) for each in scheduler.instances] == ["", ""]
    assert len(running) == 4


def test_sessions_add_nothing_to_the_budget_of_retries() -> None:
    scheduler = fleet("a", "b")
    for number in range(1, 101):
        session(scheduler, number, 0.0)
    assert scheduler.in_flight == 100
    assert scheduler.failover.slots_taken == 0
