"""A server of several data-parallel engines: all its places, KV tokens and speed, and no more than that."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.instance import DEFAULT_KV_CACHE_TOKENS, DEFAULT_MAX_NUM_SEQS, Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.speed import SpeedTracker
from hetlb.balancer.core.types import Candidate, Capacity, Dispatch

KV = 400_000


def capacity(engines: int, places: int | None = 64) -> Capacity:
    """Return the capacity of a server of `engines` engines of `KV` tokens, from profile and scrape."""
    return Capacity(
        kv_cache_tokens=KV * engines, kv_tokens_per_request=KV, max_num_seqs=places, engines=engines
    )


def server(name: str, engines: int, places: int = 64) -> Instance:
    scheduler = make_scheduler([spec(name, capacity=capacity(engines, places))])
    [instance] = scheduler.instances
    return instance


def sample(engines: int, **more: int | float) -> EngineSample:
    return EngineSample(running=0, waiting=0, kv_usage=0.0, capacity=capacity(engines, None), **more)  # type: ignore[arg-type]


def test_places_and_kv_tokens_are_summed_over_all_engines() -> None:
    instance = server("a", 3)
    assert (instance.engines, instance.max_num_seqs, instance.kv_cache_tokens) == (3, 192, 3 * KV)
    assert instance.longest_request_tokens == KV


def test_they_are_learnt_from_a_scrape() -> None:
    scheduler = make_scheduler([spec("a", capacity=Capacity())])
    [instance] = scheduler.instances
    assert instance.max_num_seqs == DEFAULT_MAX_NUM_SEQS
    instance.learn_capacity(Capacity(engines=4))
    assert instance.max_num_seqs == 4 * DEFAULT_MAX_NUM_SEQS
    assert instance.kv_cache_tokens == 4 * DEFAULT_KV_CACHE_TOKENS
    scheduler.on_scrape("a", sample(2), 1.0)
    assert (instance.engines, instance.max_num_seqs) == (2, 2 * DEFAULT_MAX_NUM_SEQS)
    assert instance.kv_cache_tokens == 2 * KV
    # One that says nothing of engines leaves what is known.
    scheduler.on_scrape("a", EngineSample(running=0, waiting=0, kv_usage=0.0), 2.0)
    assert (instance.engines, instance.max_num_seqs) == (2, 2 * DEFAULT_MAX_NUM_SEQS)


def test_requests_that_wait_for_the_memory_of_one_full_engine_do_not_tell_places() -> None:
    scheduler = make_scheduler([spec("a", capacity=Capacity())])
    for now in (1.0, 2.0, 3.0):
        told = EngineSample(10, 2, 0.5, capacity(2, None), kv_usage_max=1.0)
        scheduler.on_scrape("a", told, now)
    assert scheduler.instances[0].max_num_seqs == 2 * DEFAULT_MAX_NUM_SEQS


def candidates(scheduler: Scheduler, number: int, prompt: int, sequences: int = 1) -> list[Candidate]:
    """What the policy sees for a request, which is dispatched."""
    command = scheduler.on_arrival(request(number, prompt=prompt, sequences=sequences), 0.0)[0]
    assert isinstance(command, Dispatch)
    return list(command.candidates)


@pytest.mark.parametrize("policy", ["hetlb", "paper"])
@given(engines=st.integers(1, 8), load=st.integers(0, 20), prompt=st.integers(1, 8000))
def test_an_engine_of_several_with_its_part_of_the_load_is_like_one_alone(
    policy: str, engines: int, load: int, prompt: int
) -> None:
    """The next request sees the same delays as on one engine with its part; the work it adds is a part."""
    alone = make_scheduler([spec("a", capacity=capacity(1))], policy)
    several = make_scheduler([spec("a", capacity=capacity(engines))], policy)
    for number in range(load):
        alone.on_arrival(request(number, prompt=200), 0.0)
    for number in range(load * engines):
        several.on_arrival(request(number, prompt=200), 0.0)
    [one] = candidates(alone, 10_000, prompt)
    [many] = candidates(several, 10_000, prompt)
    if one.terms is not None:
        assert many.terms is not None
        for term in ("first_token_s", "own_s", "others_s"):
            assert many.terms[term] == pytest.approx(one.terms[term], rel=1e-9)
    assert one.workload is not None
    assert many.workload == pytest.approx(one.workload / engines, rel=1e-9)
    assert many.kv_utilization == pytest.approx(one.kv_utilization)


def test_one_request_alone_is_no_faster_for_the_engines_that_idle() -> None:
    scheduler = make_scheduler(
        [spec("one", capacity=capacity(1)), spec("eight", capacity=capacity(8))], "hetlb"
    )
    one, eight = candidates(scheduler, 1, prompt=5000)
    assert one.terms is not None
    assert eight.terms == one.terms


def test_the_sequences_of_one_request_are_spread() -> None:
    """Eight samples on eight engines take as long as one on one."""
    single = make_scheduler([spec("a", capacity=capacity(1))], "hetlb")
    eight = make_scheduler([spec("a", capacity=capacity(8))], "hetlb")
    [one], [spread] = candidates(single, 1, 2000), candidates(eight, 1, 2000, sequences=8)
    assert spread.terms == pytest.approx(one.terms)


@pytest.mark.parametrize("policy", ["hetlb", "paper"])
def test_it_gets_its_share_beside_a_server_of_one_engine(policy: str) -> None:
    fleet = [spec("one", capacity=capacity(1)), spec("three", capacity=capacity(3))]
    scheduler = make_scheduler(fleet, policy)
    chosen = Counter(
        dispatched(commands).instance
        for number in range(200)
        if (commands := scheduler.on_arrival(request(number, prompt=300, max_tokens=100), 0.0))
    )
    assert 2.4 <= chosen["three"] / chosen["one"] <= 3.6, chosen


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_answers_as_fast_as_each_engine_is_leave_the_speed_alone(engines: int) -> None:
    """16 sequences on each engine: without knowing of them the server looked far too fast."""
    tracker = SpeedTracker(True, 0.0)
    tracker.engines = engines
    running, now = 16, 0.0
    tokens = running * 500.0
    for _ in range(100):
        since = tracker.mark()
        took_s = 100 * FAST.step_s(running, tokens) + FAST.read_delay_s(500, 0.0, running, tokens, 2048)
        now += took_s
        tracker.prefilled(engines, engines * 500, now, FAST.step_s(1.0, 0.0))
        tracker.elapsed(running * engines, tokens * engines, now)
        assert not tracker.answered(FAST, since, took_s, 100, now, 2048)
    assert tracker.factor == 1.0
