"""The speed of an instance against its model: believed while right, corrected when clearly wrong."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.facts import AdminStateSet, InstanceAdded, InstanceUpdated
from hetlb.balancer.core.latency import LatencyModel, delay_of_reading_s
from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor
from hetlb.balancer.core.rate import MEMORY_S
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.speed import (
    MOST_PROFILED_FACTOR,
    MOST_UNPROFILED_FACTOR,
    PRIOR_S,
    TRUSTED_FACTOR,
    SpeedTracker,
    averaged,
)
from hetlb.balancer.core.types import AdminState, Lease, Outcome

MODEL = LatencyModel(1e-5, 1e-4, 0.0, 1e-3, 1e-8, 1e-4, 0.0, 1e-2)
STEPS = 50
#: Seconds of the shortest iteration of `MODEL`.
LEAST_S = MODEL.step_s(1.0, 0.0)


def answer(tracker: SpeedTracker, now: float, slower: float, running: int = 1, prompts: int = 0) -> float:
    """One answer of a model `slower` times as slow as `MODEL`, beside others. When it ends."""
    since = tracker.mark()
    tokens = running * 300.0
    took = STEPS * MODEL.step_s(running, tokens)
    took += prompts * (MODEL.k1 * 700 + MODEL.k2)
    end = now + slower * took
    tracker.prefilled(prompts, prompts * 700, now, LEAST_S)
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
        assert 1 / MOST_PROFILED_FACTOR <= tracker.factor <= MOST_PROFILED_FACTOR
        assert tracker.factor == 1.0 or not 1 / TRUSTED_FACTOR <= tracker.factor <= TRUSTED_FACTOR


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


def test_answers_longer_than_predicted_say_nothing_against_a_profile() -> None:
    """16 answers of 1,600 tokens at a time, the contexts of which are most of a step."""
    model, now, steps = replace(FAST, k5=2e-6), 0.0, 0
    predictor = SamplePredictor(LengthDistribution([100]), capped=False)
    scheduler = make_scheduler([spec("a", latency=model, kv=10**6)], predictor=predictor)
    [instance] = scheduler.instances
    running: deque[tuple[Lease, int]] = deque()
    for number in range(160):
        if len(running) == 16:
            lease, begun = running.popleft()
            lease.output_tokens = steps - begun
            scheduler.on_lease_ended(lease, Outcome.OK, now)
        lease = dispatched(scheduler.on_arrival(request(number, max_tokens=None, streamed=True), now))
        now += model.prefill_s(100)
        scheduler.on_first_token(lease, now)
        running.append((lease, steps))
        for _ in range(100):
            steps += 1
            now += model.step_s(len(running), sum(100 + steps - begun for _, begun in running))
    assert instance.speed.seen
    assert instance.speed.factor == 1.0


def test_until_an_instance_answers_it_is_as_far_off_as_others_are() -> None:
    off, far = spec("far", slower=9.0), spec("bare", latency=None)
    scheduler = make_scheduler([spec("a"), off, far])
    for name in ("far", "bare"):
        scheduler.on_instance(AdminStateSet(name, AdminState.DRAIN), 0.0)
    serve(scheduler, 2.0, True)
    a, other, bare = scheduler.instances
    assert a.speed.factor > TRUSTED_FACTOR
    assert other.speed.factor == pytest.approx(a.speed.factor, rel=0.06)
    assert (other.speed.seen, bare.speed.factor) == (False, 1.0)
    assert other.latency.k8 == pytest.approx(other.speed.factor * other.nominal.k8)
    scheduler.on_instance(InstanceAdded(spec("new")), 1e3)
    assert scheduler.instances[-1].speed.factor == a.speed.factor
    scheduler.on_instance(InstanceUpdated(off), 1e3)
    assert other.speed.factor == a.speed.factor


def test_one_that_never_answers_is_doubted_beside_one_slower_than_was_guessed() -> None:
    scheduler = make_scheduler([spec("a", latency=None), spec("b", latency=None)], "rr")
    scheduler.on_instance(AdminStateSet("b", AdminState.DRAIN), 0.0)
    serve(scheduler, 3.0, True)
    scheduler.on_instance(AdminStateSet("b", AdminState.READY), 1e3)
    b = scheduler.instances[1]
    for number in range(1000, 1020):
        now = float(number)
        lease = dispatched(scheduler.on_arrival(request(number), now))
        outcome = Outcome.NO_RESPONSE if lease.instance == "b" else Outcome.CLIENT_GONE
        scheduler.on_lease_ended(lease, outcome, now, retry=False)
    assert b.evidence.answers.doubted


def test_its_own_answers_take_the_place_of_what_others_show() -> None:
    tracker = SpeedTracker(True, 0.0)
    assert tracker.assume(3.0)
    assert not tracker.assume(3.1), "a small change is not put in force"
    run(tracker, 1.0, 60.0)
    assert tracker.factor == 1.0
    assert not tracker.assume(3.0)


def test_without_profiles_the_guess_is_corrected_by_others_and_replaced_by_the_first_answer() -> None:
    scheduler = make_scheduler([spec("a", latency=None), spec("b", latency=None), spec("c")])
    for name in ("b", "c"):
        scheduler.on_instance(AdminStateSet(name, AdminState.DRAIN), 0.0)
    serve(scheduler, 3.0, True)
    a, b, c = scheduler.instances
    assert b.speed.factor == pytest.approx(a.speed.factor, rel=0.06)
    assert b.speed.factor > TRUSTED_FACTOR
    assert (b.speed.seen, b.speed.confidence, c.speed.factor) == (False, 0.0, 1.0)
    tracker = SpeedTracker(False, 0.0)
    assert tracker.assume(3.0)
    alone = SpeedTracker(False, 0.0)
    for each in (tracker, alone):
        answer(each, 1.0, 0.5)
    assert tracker.factor == alone.factor


def test_the_paper_knows_no_correction() -> None:
    right, slow = make_scheduler([spec("a")], "paper"), make_scheduler([spec("a")], "paper")
    serve(right, 1.0, True)
    serve(slow, 3.0, True)
    works = [dispatched(each.on_arrival(request(1000), 1e6)).work_ns for each in (right, slow)]
    assert works[0] == works[1] > 0


# --- the tracker by itself ---

#: Seconds after which half of the evidence is forgotten.
HALF_S = MEMORY_S * math.log(2.0)


def test_what_ran_adds_up_until_now() -> None:
    tracker = SpeedTracker(True, 10.0)
    assert (tracker.last, tracker.factor, tracker.engines, tracker.seen) == (10.0, 1.0, 1, False)
    assert (tracker.last_expected_s, tracker.last_mixed) == (0.0, False)
    begin = tracker.mark()
    assert (begin.sequence_s, begin.token_s, begin.prompt_tokens, begin.prompts) == (0.0, 0.0, 0, 0)
    tracker.elapsed(3, 100.0, 12.0)
    tracker.elapsed(3, 100.0, 12.0)
    tracker.elapsed(9, 900.0, 11.0)
    tracker.elapsed(1, 40.0, 12.5)
    tracker.prefilled(2, 700, 12.5, LEAST_S)
    tracker.prefilled(1, 300, 12.5, LEAST_S)
    end = tracker.mark()
    assert (end.sequence_s, end.token_s, end.prompt_tokens, end.prompts) == (6.5, 220.0, 1000, 3)
    assert (begin.sequence_s, tracker.last) == (0.0, 12.5)


def test_the_rate_of_prefill_follows_within_the_memory() -> None:
    """Tokens count half after the half-life of the memory; asking changes nothing."""
    tracker = SpeedTracker(True, 0.0)
    for number in range(100):
        tracker.prefilled(1, 1000, float(number), LEAST_S)
    rate = tracker.prefilling.per_s(99.0)
    assert rate == pytest.approx(1000.0, rel=0.05)
    for _ in range(2):
        assert tracker.prefilling.per_s(99.0 + HALF_S) == pytest.approx(rate / 2.0)


def test_the_factor_is_the_ratio_of_the_sums() -> None:
    """A measured profile has `PRIOR_S` of agreement; half is forgotten at each half-life."""
    tracker = SpeedTracker(True, 0.0)
    assert tracker.observe_prefill(PRIOR_S, 3 * PRIOR_S, 0.0)
    assert (tracker.factor, tracker.seen) == (2.0, True)
    assert tracker.observe_prefill(1.0, 3.0, HALF_S)
    assert tracker.factor == pytest.approx((2 * PRIOR_S + 3.0) / (PRIOR_S + 1.0))


def test_without_a_profile_the_first_answer_counts_alone() -> None:
    tracker = SpeedTracker(False, 0.0)
    assert not tracker.seen
    assert tracker.observe_prefill(0.1, 1.0, 0.0)
    assert (tracker.factor, tracker.seen) == (pytest.approx(10.0), True)
    # It is not believed to be right because it is nearly so.
    assert tracker.observe_prefill(1000.0, 1100.0, 0.0)
    assert tracker.factor == pytest.approx(1101.0 / 1000.1)


@pytest.mark.parametrize(
    ("profiled", "most"), [(True, MOST_PROFILED_FACTOR), (False, MOST_UNPROFILED_FACTOR)]
)
def test_the_factor_ends_at_its_bounds(profiled: bool, most: float) -> None:
    slow, fast = SpeedTracker(profiled, 0.0), SpeedTracker(profiled, 0.0)
    assert slow.observe_prefill(1.0, 1e6, 0.0)
    assert fast.observe_prefill(1e6, 1.0, 0.0)
    assert (slow.factor, fast.factor) == (most, 1.0 / most)
    assert not slow.observe_prefill(1.0, 1e6, 0.0)


def test_no_time_is_no_evidence() -> None:
    tracker = SpeedTracker(False, 0.0)
    assert not tracker.observe_prefill(0.0, 5.0, 0.0)
    assert not tracker.observe_prefill(5.0, 0.0, 0.0)
    begin = tracker.mark()
    assert not tracker.answered(MODEL, begin, 0.0, 50.0, 0.0, 2048)
    assert not tracker.answered(MODEL, begin, 5.0, 0.5, 0.0, 2048)
    assert (tracker.seen, tracker.factor) == (False, 1.0)
    assert tracker.answered(MODEL, begin, 5.0, 1.0, 0.0, 2048), "one step is enough"


def test_a_small_change_is_not_put_in_force() -> None:
    tracker = SpeedTracker(False, 0.0)
    assert tracker.observe_prefill(1.0, 2.0, 0.0)
    assert not tracker.observe_prefill(1.0, 2.19, 0.0)  # 4.19 / 2: less than a twentieth more
    assert tracker.factor == 2.0
    assert tracker.observe_prefill(1.0, 2.3, 0.0)
    assert tracker.factor == pytest.approx(6.49 / 3.0)


def test_at_the_edge_of_the_trust_the_profile_is_believed() -> None:
    """With the seconds of agreement that stand against it: 12 s for 10, or 10 s for 12."""
    for expected_s, took_s in ((5.0, 7.0), (7.0, 5.0)):
        tracker = SpeedTracker(True, 0.0)
        assert (PRIOR_S + max(expected_s, took_s)) / (PRIOR_S + min(expected_s, took_s)) == TRUSTED_FACTOR
        assert not tracker.observe_prefill(expected_s, took_s, 0.0)
        assert tracker.factor == 1.0


def test_back_within_the_trust_the_profile_is_believed_again() -> None:
    tracker = SpeedTracker(True, 0.0)
    assert tracker.observe_prefill(10.0, 40.0, 0.0)
    assert tracker.factor == pytest.approx(3.0)
    assert tracker.observe_prefill(1000.0, 1000.0, 0.0)
    assert tracker.factor == 1.0
    assert not tracker.observe_prefill(1000.0, 1000.0, 0.0)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_answer_is_expected_to_take_its_steps_and_the_reading_beside_it(engines: int) -> None:
    """8 sequences with 3000 tokens ran on all engines, and prompts of 500 tokens were read."""
    for prompts, mixed in ((0, False), (6, False), (600, True)):
        tracker = SpeedTracker(True, 0.0)
        tracker.engines = engines
        tracker.elapsed(2, 50.0, 1.0)
        since = tracker.mark()
        tracker.elapsed(8, 3000.0, 5.0)
        for i in range(prompts):
            tracker.prefilled(1, 500, 1.0 + i * LEAST_S, LEAST_S)
        tracker.answered(MODEL, since, 4.0, 100.0, 5.0, 256)
        running, tokens = 8 / engines, 3000.0 / engines
        step_s = MODEL.step_s(running, tokens)
        read_s = MODEL.first_token_s(500.0, 0.0, 0.0, running, tokens, 256)
        delay_s = prompts / engines * delay_of_reading_s(read_s, 500.0, running, step_s, 256)
        assert tracker.last_expected_s == pytest.approx(100.0 * step_s + delay_s)
        assert tracker.last_mixed is (delay_s > 0.1 * tracker.last_expected_s)
        assert tracker.last_mixed is mixed


def test_prompts_that_are_done_together_were_computed_by_one_iteration() -> None:
    """Each as an iteration of its own, a burst of short prompts made its server look twice too fast."""
    tracker = SpeedTracker(True, 0.0)
    since = tracker.mark()
    tracker.elapsed(8, 3000.0, 4.0)
    for turn_at in (1.0, 2.0):
        for i in range(10):
            tracker.prefilled(1, 100, turn_at + i * 0.01 * LEAST_S, LEAST_S)
    tracker.answered(MODEL, since, 4.0, 100.0, 4.0, 2048)
    step_s = MODEL.step_s(8.0, 3000.0)
    read_s = MODEL.first_token_s(100.0, 0.0, 0.0, 8.0, 3000.0, 2048, 10.0)
    assert tracker.last_expected_s == pytest.approx(98.0 * step_s + 2.0 * read_s)


def test_an_answer_runs_at_least_itself() -> None:
    tracker = SpeedTracker(True, 0.0)
    since = tracker.mark()
    tracker.answered(MODEL, since, 4.0, 100.0, 4.0, 2048)
    assert tracker.last_expected_s == pytest.approx(100.0 * MODEL.step_s(1.0, 0.0))


factors = st.floats(1.0 / 64.0, 64.0)


@given(st.lists(st.tuples(factors, st.floats(0.01, 1.0)), min_size=1, max_size=30))
def test_a_faster_one_stays_at_least_as_fast_in_means_of_near_factors(
    shown: list[tuple[float, float]],
) -> None:
    found = sorted(zip(shown, averaged(shown), strict=True))
    for (factor, _), mean in found:
        assert factor / TRUSTED_FACTOR <= mean * 1.000001
        assert mean <= factor * TRUSTED_FACTOR * 1.000001
    for (_, one), (_, other) in pairwise(found):
        assert one <= other * 1.000001


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("slower", [3.0, 1 / 3.0])
def test_another_speed_is_learnt_within_ten_answers(profiled: bool, slower: float) -> None:
    """After a long time of one speed: the newest answers in a row are its speed now."""
    tracker, now = SpeedTracker(profiled, 0.0), 0.0
    for _ in range(300):
        now = answer(tracker, now, 1.0)
    for _ in range(10):
        now = answer(tracker, now, slower)
    assert tracker.shown == pytest.approx(slower, rel=0.1)
    assert tracker.settled
    if slower > 1.0:
        assert tracker.shown / tracker.usual > 2.5
    for _ in range(10):
        now = answer(tracker, now, 1.0)
    assert tracker.shown == pytest.approx(1.0, rel=0.1)


def test_a_few_slow_answers_among_others_are_no_other_speed() -> None:
    tracker, now = SpeedTracker(False, 0.0), 0.0
    for number in range(300):
        now = answer(tracker, now, 3.0 if number % 5 == 0 else 1.0)
        assert number < 50 or tracker.shown < 2.2


def test_an_hour_of_another_speed_is_the_usual_one() -> None:
    tracker, now = SpeedTracker(False, 0.0), 0.0
    for _ in range(100):
        now = answer(tracker, now, 1.0)
    while now < 4 * 3600.0:
        now = answer(tracker, now, 3.0)
    assert tracker.shown / tracker.usual < 1.2
