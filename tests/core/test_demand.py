"""Sizes and rates: a steady stream is seen at its rate, a burst is not taken for one."""

from __future__ import annotations

import random

import pytest
from helpers import request
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.core.demand import HORIZONS_S, Demand, size_of


def test_a_prompt_token_weighs_less_than_an_output_token() -> None:
    assert size_of(request(1, prompt=200), 70.0) == pytest.approx(100.0)
    assert size_of(request(1, prompt=200, sequences=3), 70.0) == pytest.approx(300.0)
    assert size_of(request(1, prompt=1, generates=False), 0.0) == 1.0


@pytest.mark.parametrize("horizon", HORIZONS_S)
def test_a_steady_stream_is_seen_at_its_rate(horizon: float) -> None:
    demand, rng, now = Demand(), random.Random(1), 0.0
    while now < 2 * horizon:
        now += rng.expovariate(400 / horizon)
        demand.arrived(10.0, now)
    assert demand.rate(horizon, now) == pytest.approx(4000 / horizon, rel=0.15)


@pytest.mark.parametrize("horizon", HORIZONS_S)
def test_a_burst_is_not_taken_for_a_stream(horizon: float) -> None:
    demand = Demand()
    for _ in range(1000):
        demand.arrived(10.0, 5.0)
    assert demand.rate(horizon, 5.0) == 0.0
    for i in range(1, 64):
        demand.arrived(1.0, 5.0 + i * horizon / 32)
    assert demand.rate(horizon, 5.0 + 63 * horizon / 32) == pytest.approx(32 / horizon, rel=0.2)


@pytest.mark.parametrize("rate", [6, 40, 2000])
def test_a_stream_has_begun_within_a_second_and_is_over_a_second_after_its_last_request(rate: int) -> None:
    demand = Demand()
    for i in range(rate + 1):
        demand.arrived(10.0, 100.0 + i / rate)
    assert demand.beginning(101.0)
    assert demand.rate(16.0, 101.0) == 0.0
    assert not demand.beginning(102.1)


@given(st.integers(1, 1000), st.floats(0.0, 0.06), st.floats(0.0, 2.0))
def test_a_burst_is_no_beginning(count: int, spread_s: float, later_s: float) -> None:
    demand = Demand()
    for i in range(count):
        demand.arrived(10.0, 100.0 + i * spread_s / count)
    assert not demand.beginning(100.0 + spread_s + later_s)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(1, 1e6)), max_size=60), st.floats(0.01, 1000))
def test_a_rate_is_never_negative_and_fades(arrivals: list[tuple[float, float]], horizon: float) -> None:
    demand, now = Demand(), 0.0
    for gap, size in arrivals:
        now += gap
        demand.arrived(size, now)
    assert demand.rate(horizon, now) >= 0.0
    assert demand.rate(horizon, now + 3 * HORIZONS_S[-1]) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.001, 0.3, 2.0, 30.0)), st.floats(1.0, 500.0), st.booleans()),
        min_size=1,
        max_size=300,
    ),
    st.sampled_from(HORIZONS_S),
    st.floats(0.01, 200.0),
)
def test_what_is_known_without_computing_it_is_what_would_be_computed(
    arrivals: list[tuple[float, float, bool]], horizon: float, limit: float
) -> None:
    asked, silent, now = Demand(), Demand(), 0.0
    for gap, size, ask in arrivals:
        now += gap
        asked.arrived(size, now)
        silent.arrived(size, now)
        if ask:
            below = asked.below(limit, horizon, now)
            least, most = asked.bounds(horizon, now)
            assert below == (asked.rate(horizon, now) < limit)
            assert least <= asked.rate(horizon, now) <= most
    for each in HORIZONS_S:
        assert asked.rate(each, now) == silent.rate(each, now)


@settings(max_examples=60)
@given(rate=st.integers(8, 40), silence=st.floats(0.0, 7.0))
def test_arrivals_that_stopped_are_no_rate(rate: int, silence: float) -> None:
    """The slots of 16 s keep the rate for 8 s after the last arrival; a silence of 16 arrivals ends it."""
    demand = Demand()
    for number in range(40 * rate):
        demand.mix.add(100.0, 85.0, 200.0, 85.0)
        demand.arrived(100.0, number / rate)
    last = demand.newest_s
    before, after = demand.rate(16.0, last), demand.rate(16.0, last + silence)
    least, most = demand.bounds(16.0, last + silence)
    assert least <= after <= most
    assert before == pytest.approx(100.0 * rate, rel=0.1)
    if silence * rate < 14.0:
        assert after > 0.8 * before
    if silence * rate > 18.0:
        assert after == 0.0
