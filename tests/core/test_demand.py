"""Sizes and rates: a steady stream is seen at its rate, a burst is not taken for one."""

from __future__ import annotations

import random

import pytest
from helpers import request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.demand import Demand, size_of
from hetlb.core.objective import ServiceClass


def test_a_prompt_token_weighs_less_than_an_output_token() -> None:
    assert size_of(request(1, prompt=200), 70.0) == pytest.approx(100.0)
    assert size_of(request(1, prompt=200, sequences=3), 70.0) == pytest.approx(300.0)
    assert size_of(request(1, prompt=1, generates=False), 0.0) == 1.0


@pytest.mark.parametrize("rate", [0.2, 2.0, 30.0, 1000.0])
def test_a_steady_stream_is_seen_at_its_rate(rate: float) -> None:
    """Poisson arrivals, sparse ones too; hardly ever are they taken for ended."""
    demand, rng, now = Demand(), random.Random(1), 100.0
    seen: list[float] = []
    for _ in range(max(2000, round(20 * rate))):
        now += rng.expovariate(rate)
        demand.arrived(10.0, now)
        if now > 103.0 + 40.0 / rate:
            seen.append(demand.rate(1e6, now))
    assert sum(seen) / len(seen) == pytest.approx(10.0 * rate, rel=0.2)
    assert seen.count(0.0) < 0.05 * len(seen)


@given(st.integers(1, 1000), st.floats(0.0, 0.2), st.floats(0.0, 2.0))
def test_a_burst_is_no_stream(count: int, spread_s: float, later_s: float) -> None:
    demand = Demand()
    for i in range(count):
        demand.arrived(10.0, 100.0 + i * spread_s / count)
    assert demand.rate(1e6, 100.0 + spread_s + later_s) == 0.0


def test_a_stream_ends_some_gaps_after_its_last_request_and_begins_anew() -> None:
    demand = Demand()
    for number in range(40):
        demand.arrived(10.0, 100.0 + number)
    assert demand.rate(16.0, 143.0) == pytest.approx(10.0)
    assert demand.rate(16.0, 145.5) == 0.0
    assert demand.rate(0.5, 143.0) == 0.0, "nothing is expected so soon"
    demand.arrived(10.0, 200.0)
    assert demand.rate(16.0, 200.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(1, 1e6)), max_size=60), st.floats(0.01, 1000))
def test_a_rate_is_never_negative_and_asking_changes_nothing(
    arrivals: list[tuple[float, float]], horizon: float
) -> None:
    asked, silent, now = Demand(), Demand(), 0.0
    for gap, size in arrivals:
        now += gap
        for each in (asked, silent):
            each.arrived(size, now)
        assert asked.rate(horizon, now + gap) >= 0.0
    assert asked.rate(horizon, now) == silent.rate(horizon, now)


def test_requests_with_targets_fade_from_what_is_protected() -> None:
    protected = Demand().protected
    quick = ServiceClass("quick", ttft_s=1.0, tpot_s=0.05, attainment=0.9)
    assert protected.rate(5.0) == 0.0
    for number in range(100):
        protected.arrived(quick, 400.0, 100.0, float(number))
    protected.arrived(ServiceClass("report", e2e_s=60.0, attainment=0.8), 400.0, 100.0, 100.0)
    assert (protected.ttft_s, protected.tpot_s, protected.attainment) == (1.0, 0.05, 0.9)
    assert (protected.prompt, protected.output) == (400.0, 100.0)
    assert protected.rate(100.5) == pytest.approx(1.0, rel=0.02)
    assert protected.rate(200.0) == pytest.approx(0.01)
