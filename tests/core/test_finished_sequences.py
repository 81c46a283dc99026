"""Sequences of a request of several end one by one; the engine's count of what it runs shows it."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome
from hetlb.tools.sim.integrity import check_scheduler

SLOTS = 64


def loaded() -> tuple[Scheduler, Lease]:
    """One instance, all of whose slots a request of 80 sequences has taken at 0 s."""
    capacity = Capacity(kv_cache_tokens=100_000, max_num_seqs=SLOTS)
    scheduler = make_scheduler([spec("a", capacity=capacity)], "hetlb")
    return scheduler, dispatched(scheduler.on_arrival(request(1, sequences=80), 0.0))


def scrape(scheduler: Scheduler, running: int, waiting: int, now: float) -> list[int]:
    """Numbers of the requests that a scrape lets through."""
    commands = scheduler.on_scrape("a", EngineSample(running, waiting, 0.5), now)
    return [command.request_id for command in commands if isinstance(command, Dispatch)]


def test_a_request_gets_the_slot_of_a_sequence_that_ended_before_its_request() -> None:
    scheduler, _ = loaded()
    assert scrape(scheduler, SLOTS, 16, 1.0) == []
    assert scheduler.on_arrival(request(2), 1.5) == []
    assert scrape(scheduler, SLOTS, 3, 2.0) == []
    [instance] = scheduler.instances
    assert instance.unfinished_sequences == SLOTS + 3
    assert scrape(scheduler, SLOTS - 24, 0, 3.0) == [2]
    assert instance.unfinished_sequences == SLOTS - 23
    [_, second] = instance.leases.values()
    assert second.mark is not None, "it could begin at once"
    check_scheduler(scheduler)


def test_kv_tokens_of_sequences_that_ended_are_free() -> None:
    scheduler, _ = loaded()
    [instance] = scheduler.instances
    before = instance.occupancy.expected_kv_tokens(1.0)
    for now in (1.0, 2.0):
        scheduler.on_scrape("a", EngineSample(20, 0, 0.0), now)
    assert instance.occupancy.expected_kv_tokens(2.0) == pytest.approx(before / 4)


def test_a_request_that_came_since_the_last_scrape_may_be_on_its_way() -> None:
    scheduler, _ = loaded()
    scrape(scheduler, 0, 0, 0.001)
    assert scheduler.instances[0].unfinished_sequences == 80


def test_one_sequence_of_each_request_runs_to_its_end() -> None:
    scheduler, lease = loaded()
    scrape(scheduler, 64, 16, 1.0)
    scrape(scheduler, 0, 0, 2.0)
    [instance] = scheduler.instances
    assert instance.unfinished_sequences == 1
    scheduler.on_lease_ended(lease, Outcome.OK, 3.0)
    assert instance.unfinished_sequences == instance.finished_sequences == 0
    check_scheduler(scheduler)


def test_an_engine_that_does_not_tell_its_counts_frees_nothing() -> None:
    scheduler, _ = loaded()
    for now in (1.0, 2.0):
        scheduler.on_scrape("a", EngineSample(kv_usage=0.1), now)
    assert scheduler.instances[0].unfinished_sequences == 80
