"""Sizes and streams: a steady stream is seen, a burst is not taken for one."""

from __future__ import annotations

import math
import random

import pytest
from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.demand import Demand, size_of
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.protected import Protected
from hetlb.balancer.core.rate import RecentRate


def test_a_prompt_token_weighs_less_than_an_output_token() -> None:
    assert size_of(request(1, prompt=200), 70.0) == pytest.approx(100.0)
    assert size_of(request(1, prompt=200, sequences=3), 70.0) == pytest.approx(300.0)
    assert size_of(request(1, prompt=1, generates=False), 0.0) == 1.0


@pytest.mark.parametrize("rate", [0.2, 2.0, 30.0, 1000.0])
@pytest.mark.parametrize("answer_s", [0.01, 3.0, 60.0])
def test_a_steady_stream_goes_on_however_soon_it_is_answered(rate: float, answer_s: float) -> None:
    """Poisson arrivals, sparse ones too: at no time but a few are they taken for ended."""
    demand, rng, now = Demand(), random.Random(1), 100.0
    demand.answer_s = answer_s
    ended_s = begun_s = asked = missed = 0.0
    for _ in range(max(2000, round(20 * rate))):
        gap_s = rng.expovariate(rate)
        if now > 100.0 + answer_s / 8.0 + 10.0 / rate:
            asked, missed = asked + 1.0, missed + (not demand.goes_on(now))
            begun_s += gap_s
            ended_s += sum(not demand.goes_on(now + gap_s * part / 20) for part in range(20)) * gap_s / 20
        now += gap_s
        demand.arrived(100.0, 50.0, now)
    assert missed <= 0.03 * asked
    assert ended_s < 0.05 * begun_s


@given(st.integers(1, 1000), st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.booleans())
def test_a_burst_is_no_stream(count: int, spread: float, later_s: float, before: bool) -> None:
    """Requests within a 64th of the time of an answer came at once, whatever came before a silence."""
    demand = Demand()
    demand.answer_s = 4.0
    for number in range(40 * before):
        demand.arrived(100.0, 50.0, 40.0 + number)
    for i in range(count):
        demand.arrived(100.0, 50.0, 100.0 + i * spread * 4.0 / 64.0 / count)
    assert not demand.goes_on(100.1 + later_s)
    assert demand.burst == count


def test_a_stream_ends_some_gaps_after_its_last_request_and_begins_anew() -> None:
    demand = Demand()
    for number in range(40):
        demand.arrived(100.0, 50.0, 100.0 + number)
    assert demand.goes_on(146.9)
    assert not demand.goes_on(147.5)
    demand.arrived(100.0, 50.0, 200.0)
    assert not demand.goes_on(200.0)


@pytest.mark.parametrize("before", [1, 40])
def test_a_stream_is_seen_after_a_silence_as_soon_as_any_other(before: int) -> None:
    demand = Demand()
    for number in range(before):
        demand.arrived(100.0, 50.0, 100.0 * number)
    for number in range(5):
        assert not demand.goes_on(50_000.0 + number)
        demand.arrived(100.0, 50.0, 50_000.0 + number)
    assert demand.goes_on(50_004.0)


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_asking_changes_nothing(gaps: list[float]) -> None:
    asked, silent, now = Demand(), Demand(), 0.0
    for gap in gaps:
        now += gap
        for each in (asked, silent):
            each.arrived(100.0, 50.0, now)
        asked.goes_on(now + gap)
    assert asked.goes_on(now) is silent.goes_on(now)


@pytest.mark.parametrize("begins", [0.0, 1e6])
def test_a_rate_is_known_after_seconds_and_forgotten_after_a_minute(begins: float) -> None:
    rate, now = RecentRate(), begins
    for number in range(50):
        rate, now = rate.plus(1.0, now), begins + 0.1 * (number + 1)
    assert rate.per_s(now) == pytest.approx(10.0, rel=0.15), "after 5 s"
    for number in range(50, 900):
        rate, now = rate.plus(1.0, now), begins + 0.1 * (number + 1)
    assert rate.per_s(now) == pytest.approx(10.0, rel=0.02)
    later = now + 100.0
    for _ in range(50):
        rate, later = rate.plus(1.0, later), later + 0.04
    assert rate.per_s(later) == pytest.approx(25.0, rel=0.15), "two seconds into another stream"
    assert rate.per_s(later + 60.0) < 0.5


def test_requests_with_targets_fade_from_what_is_protected() -> None:
    demand = Demand()
    quick = ServiceClass("quick", ttft_s=1.0, tpot_s=0.05, attainment=0.9)
    protected = demand.of_class(quick)
    assert protected.rate(5.0) == 0.0
    for number in range(100):
        protected.arrived(quick, 400.0, 100.0, float(number))
    protected.arrived(ServiceClass("quick", ttft_s=0.5, attainment=0.8), 400.0, 100.0, 100.0)
    assert (protected.ttft_s, protected.tpot_s, protected.attainment) == (0.5, 0.05, 0.9)
    assert (protected.prompt, protected.output) == (400.0, 100.0)
    assert protected.rate(100.5) == pytest.approx(1.0, rel=0.02)
    assert protected.rate(200.0) < 0.01
    for number in range(100):
        protected.arrived(quick, 400.0, 100.0, 9000.0 + number / 4)
    assert protected.rate(9025.0) == pytest.approx(4.0, rel=0.25), "it follows within half a minute"


def test_targets_that_were_loosened_count_within_as_many_requests_as_are_remembered() -> None:
    protected = Protected(ServiceClass("quick", ttft_s=1.0, tpot_s=0.05, attainment=0.99))
    loose = ServiceClass("quick", ttft_s=3.0, attainment=0.9)
    for number in range(130):
        protected.arrived(loose, 400.0, 100.0, float(number))
    assert (protected.ttft_s, protected.tpot_s, protected.attainment) == (3.0, math.inf, 0.9)


def test_the_tightest_class_is_first() -> None:
    demand = Demand()
    report, quick = ServiceClass("report", e2e_s=60.0), ServiceClass("quick", ttft_s=1.0, tpot_s=0.05)
    for number, service in enumerate((report, quick, report)):
        demand.of_class(service).arrived(service, 400.0, 100.0, float(number))
    assert [each.name for each in demand.protected] == ["quick", "report"]


@given(st.lists(st.booleans(), max_size=400), st.floats(0.5, 0.999))
def test_the_margin_rises_with_misses_alone_and_is_bounded(met: list[bool], attainment: float) -> None:
    service = ServiceClass("quick", ttft_s=1.0, attainment=attainment)
    asked = request(1, service=service, streamed=True)
    lease = dispatched(make_scheduler([spec("a")]).on_arrival(asked, 0.0))
    protected = Protected(service)
    for each in met:
        before = protected.margin
        lease.first_token_at = 0.5 if each else 2.0
        protected.answered(lease, 3.0, True)
        assert protected.margin <= before if each else protected.margin >= before
        assert 1.0 <= protected.margin < 20.1
    assert protected.hopeless == (len(met) >= 8 and not any(met))


def test_the_first_token_of_a_whole_answer_is_not_judged() -> None:
    """As `hetlb_class_requests_total` has it: a late one is no miss, and stops no background."""
    service = ServiceClass("quick", ttft_s=1.0)
    lease = dispatched(make_scheduler([spec("a")]).on_arrival(request(1, service=service), 0.0))
    lease.first_token_at = 20.0
    protected = Protected(service)
    for _ in range(20):
        protected.answered(lease, 20.0, True)
    assert (protected.margin, protected.hopeless) == (1.0, False)


def test_misses_fade_within_minutes() -> None:
    service = ServiceClass("quick", ttft_s=1.0)
    asked = request(1, service=service, streamed=True)
    lease = dispatched(make_scheduler([spec("a")]).on_arrival(asked, 0.0))
    protected = Protected(service)
    lease.first_token_at = 2.0
    for _ in range(20):
        protected.answered(lease, 3.0, True)
    before, lease.first_token_at = protected.margin, 0.5
    protected.answered(lease, 4.0, True)
    assert protected.margin > 0.9 * before
    protected.answered(lease, 304.0, True)
    assert protected.margin < 1.1


def test_misses_beside_background_do_not_say_that_targets_cannot_be_met() -> None:
    service = ServiceClass("quick", ttft_s=1.0)
    asked = request(1, service=service, streamed=True)
    lease = dispatched(make_scheduler([spec("a")]).on_arrival(asked, 0.0))
    lease.first_token_at = 2.0
    for alone in (False, True):
        protected = Protected(service)
        for _ in range(20):
            protected.answered(lease, 3.0, alone)
        assert protected.hopeless == alone


def test_costs_are_kept_for_present_speeds_alone() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "hetlb")
    mix, instances = Demand().mix, tuple(scheduler.instances)
    for step in range(1000):
        changed = instances[step % 3]
        changed.max_num_seqs = 16 + step
        changed.changed()
        costs = mix.fleet(instances).costs
        assert costs == [mix.costs(each) for each in instances]
    assert len(mix._costs) <= 32


def test_costs_of_many_small_fleets_are_looked_through_only_once_their_kinds_have_doubled() -> None:
    scheduler = make_scheduler([spec(f"i{number}") for number in range(100)], "hetlb")
    mix, instances = Demand().mix, scheduler.instances
    for number, each in enumerate(instances):
        each.max_num_seqs = 16 + number
        each.changed()
    looks = 0
    pairs = [tuple(instances[number : number + 2]) for number in range(0, 100, 2)]
    for pair in 3 * pairs:
        kept = mix._costs
        pair[0].changed()
        mix.fleet(pair)
        looks += mix._costs is not kept
    assert 0 < looks <= 3
