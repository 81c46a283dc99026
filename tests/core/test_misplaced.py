"""A profile that the first prompts show to be wrong: what was placed by it is placed anew."""

from __future__ import annotations

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease
from hetlb.options.peers.lease_wire import booked
from hetlb.tools.sim.integrity import check_scheduler

#: A burst of prompts of a whole iteration each: no more than engines may have ahead.
PROMPTS, TOKENS = 16, 2048
CAPACITY = Capacity(kv_cache_tokens=10**6, max_num_seqs=64, max_num_batched_tokens=TOKENS)


def burst(*profiles: LatencyModel) -> tuple[Scheduler, list[Lease]]:
    """All at once at instances a, b, ... that claim to be as fast as these profiles."""
    specs = [spec(name, latency=each, capacity=CAPACITY) for name, each in zip("abc", profiles, strict=False)]
    scheduler = make_scheduler(specs, "hetlb", params=PolicyParams())
    leases = [
        dispatched(scheduler.on_arrival(request(i, prompt=TOKENS, max_tokens=50, streamed=True), 0.0))
        for i in range(PROMPTS)
    ]
    return scheduler, leases


def first_token(scheduler: Scheduler, leases: list[Lease], name: str, slower: float) -> float:
    """Let the first prompt of an instance be read by a server that is `slower` than `FAST`; when."""
    lease = next(each for each in leases if each.instance == name)
    now = slower * FAST.prefill_s(TOKENS)
    assert scheduler.on_first_token(lease, now) == []
    return now


def take_back(scheduler: Scheduler, leases: list[Lease], now: float) -> dict[int, str]:
    """Place anew what is misplaced; where each request is then."""
    found = {lease.request.id: lease.instance for lease in leases}
    for lease in scheduler.failover.misplaced():
        assert lease.first_token_at is None
        for command in scheduler.on_misplaced(lease, now):
            assert isinstance(command, Dispatch)
            found[command.request_id] = command.lease.instance
    for command in scheduler.wait_again(now):
        assert isinstance(command, Dispatch)
        found[command.request_id] = command.lease.instance
    check_scheduler(scheduler)
    return found


@pytest.mark.parametrize(("claims", "is_slower"), [(0.5, 1.0), (1.0, 2.0), (2.0, 1.0)])
def test_a_wrong_profile_is_corrected_by_the_first_prompts(claims: float, is_slower: float) -> None:
    """Beside an equal server it gets its share as soon as its first prompt has been read, not its answers."""
    scheduler, leases = burst(FAST.scaled(claims), FAST)
    at_first = sum(each.instance == "a" for each in leases)
    now = first_token(scheduler, leases, "a", is_slower)
    assert scheduler.failover.misplaced_model is not None
    assert scheduler.instances[0].latency.k1 == pytest.approx(is_slower * FAST.k1)
    found = take_back(scheduler, leases, now)
    assert scheduler.failover.misplaced_model is None
    assert len(found) == PROMPTS
    after = sum(each == "a" for each in found.values())
    right = PROMPTS / (1.0 + is_slower)
    assert 0.4 * right <= after <= 1.3 * right
    assert abs(after - right) <= abs(at_first - right) + 1.0


@pytest.mark.parametrize("slower", [0.75, 1.0, 1.4])
def test_a_profile_that_is_about_right_moves_nothing(slower: float) -> None:
    scheduler, leases = burst(FAST, FAST)
    first_token(scheduler, leases, "a", slower)
    assert scheduler.failover.misplaced_model is None
    assert scheduler.failover.misplaced() == []
    assert scheduler.instances[0].speed.factor == 1.0


def test_only_the_first_prompts_move_what_was_placed() -> None:
    scheduler, leases = burst(FAST, FAST)
    now = first_token(scheduler, leases, "a", 1.0)
    lease = next(each for each in leases if each.instance == "a" and each.first_token_at is None)
    scheduler.on_first_token(lease, now + 10.0)
    assert scheduler.failover.misplaced_model is None


def test_prompts_of_a_few_milliseconds_show_nothing() -> None:
    """The way to a server and back may take as long."""
    quick = FAST.scaled(0.01)
    scheduler, leases = burst(quick, quick)
    lease = next(each for each in leases if each.instance == "a")
    scheduler.on_first_token(lease, 0.03)
    assert not scheduler.instances[0].speed.begun


def test_prompts_beside_answers_show_nothing() -> None:
    """A short prompt tells too little; the next one comes while its answer runs."""
    scheduler = make_scheduler([spec("a", capacity=CAPACITY)], "hetlb")
    for number, prompt, at in ((1, 20, 0.0), (2, TOKENS, 1.0)):
        lease = dispatched(scheduler.on_arrival(request(number, prompt=prompt, streamed=True), at))
        scheduler.on_first_token(lease, at + 3.0 * FAST.prefill_s(prompt))
    assert not scheduler.instances[0].speed.begun
    assert scheduler.failover.misplaced_model is None


def test_prompts_that_came_during_an_iteration_are_no_part_of_it() -> None:
    scheduler = make_scheduler([spec("a", capacity=CAPACITY)], "hetlb")
    first = dispatched(scheduler.on_arrival(request(1, prompt=TOKENS + 10, streamed=True), 0.0))
    now = FAST.prefill_s(TOKENS + 10)
    for number in range(2, 9):
        scheduler.on_arrival(request(number, prompt=TOKENS, streamed=True), 0.95 * now)
    scheduler.on_first_token(first, now)
    assert scheduler.instances[0].speed.factor == 1.0
    assert scheduler.failover.misplaced_model is None


def test_what_was_restored_shows_nothing() -> None:
    _, leases = burst(FAST, FAST)
    fresh = make_scheduler([spec(name, capacity=CAPACITY) for name in "ab"], "hetlb")
    restored = [fresh.restore(booked(each, 5.0), 5.0) for each in leases]
    assert all(restored)
    fresh.on_first_token(next(each for each in restored if each and each.instance == "a"), 5.1)
    assert fresh.failover.misplaced_model is None
