"""The speed of an instance against its model: believed while right, corrected when clearly wrong."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.latency import LatencyModel
from hetlb.core.scheduler import Scheduler
from hetlb.core.speed import MEMORY_S, MOST_PROFILED, TRUST, SpeedTracker
from hetlb.core.types import Outcome

MODEL = LatencyModel(1e-5, 1e-4, 0.0, 1e-3, 1e-8, 1e-4, 0.0, 1e-2)
STEPS = 50


def answer(tracker: SpeedTracker, now: float, slower: float, running: int = 1, prompts: int = 0) -> float:
    """One answer of a model `slower` times as slow as `MODEL`, beside others. When it ends."""
    since = tracker.mark()
    tokens = running * 300.0
    took = STEPS * MODEL.step_s(running, tokens)
    took += prompts * (MODEL.k1 * 700 + MODEL.k2)
    end = now + slower * took
    tracker.read(prompts, prompts * 700)
    tracker.elapsed(running, tokens, end)
    tracker.answered(MODEL, since, end - now, STEPS, end, 2048)
    return end


def run(tracker: SpeedTracker, slower: float, seconds: float, now: float = 0.0, running: int = 1) -> float:
    until = now + seconds
    while now < until:
        now = answer(tracker, now, slower, running, prompts=3)
    return now


@pytest.mark.parametrize("slower", [1.0, 1.0 / 1.15, 1.15])
def test_a_profile_that_is_about_right_is_believed_exactly(slower: float) -> None:
    tracker = SpeedTracker(True, 0.0)
    run(tracker, slower, 60.0, running=8)
    assert tracker.factor == 1.0


@pytest.mark.parametrize("slower", [0.3, 0.7, 1.3, 3.0])
def test_a_wrong_profile_is_corrected_within_a_minute(slower: float) -> None:
    tracker = SpeedTracker(True, 0.0)
    run(tracker, slower, 4 * MEMORY_S, running=8)
    assert tracker.factor == pytest.approx(slower, rel=0.06)


def test_an_instance_that_slows_down_is_noticed_and_forgiven() -> None:
    tracker = SpeedTracker(True, 0.0)
    now = run(tracker, 1.0, 60.0)
    now = run(tracker, 3.0, 60.0, now)
    assert tracker.factor == pytest.approx(3.0, rel=0.08)
    run(tracker, 1.0, 120.0, now)
    assert tracker.factor == 1.0


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 500), st.integers(0, 50)), max_size=40))
def test_the_factor_is_bounded_and_never_within_the_trust(answers: list[tuple[float, int, int]]) -> None:
    tracker, now = SpeedTracker(True, 0.0), 0.0
    for slower, running, prompts in answers:
        now = answer(tracker, now, slower, running, prompts)
        assert 1 / MOST_PROFILED <= tracker.factor <= MOST_PROFILED
        assert tracker.factor == 1.0 or not 1 / TRUST <= tracker.factor <= TRUST


def serve(scheduler: Scheduler, slower: float, streamed: bool, count: int = 80) -> None:
    now = 0.0
    k = scheduler.instances[0].nominal
    for i in range(count):
        lease = dispatched(scheduler.on_arrival(request(i), now))
        read = k.prefill_s(100)
        decode = 50 * k.step_s(1, 100 + 51 / 2)
        if streamed:
            scheduler.on_first_token(lease, now + slower * read)
        now += slower * (read + decode)
        if not streamed:
            scheduler.on_first_token(lease, now)
        lease.output_tokens = 51
        scheduler.on_lease_ended(lease, Outcome.OK, now)


@pytest.mark.parametrize("streamed", [True, False])
def test_streams_and_whole_answers_both_tell_the_speed(streamed: bool) -> None:
    scheduler = make_scheduler([spec("a")])
    instance = scheduler.instances[0]
    serve(scheduler, 2.0, streamed, count=400)
    assert instance.latency.k8 == pytest.approx(2.0 * instance.nominal.k8, rel=0.1)


def test_the_paper_knows_no_correction() -> None:
    right, slow = make_scheduler([spec("a")], "paper"), make_scheduler([spec("a")], "paper")
    serve(right, 1.0, True)
    serve(slow, 3.0, True)
    works = [dispatched(each.on_arrival(request(1000), 1e6)).work_ns for each in (right, slow)]
    assert works[0] == works[1] > 0
