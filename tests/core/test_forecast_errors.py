"""Errors of forecasts: answers correct the next forecasts, and bounds hold as often as said."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.forecast_errors import Ratios


def test_before_the_first_answer() -> None:
    ratios = Ratios()
    assert (ratios.factor, ratios.bias, ratios.coverage, ratios.samples) == (1.0, None, None, 0)


@pytest.mark.parametrize("share", [0.5, 1.3])
def test_a_lasting_error_is_corrected(share: float) -> None:
    """Forecasts off by the same share: corrected ones are not."""
    ratios, rng = Ratios(), random.Random(3)
    for _ in range(1000):
        raw_s = rng.uniform(0.1, 1.0)
        ratios.add(raw_s, share * raw_s * rng.lognormvariate(-0.02, 0.2))
    assert ratios.factor == pytest.approx(share, rel=0.3)
    assert ratios.bias == pytest.approx(0.0, abs=0.06)
    assert ratios.coverage == pytest.approx(0.9, abs=0.06)


def drifting(seed: int) -> Ratios:
    """120 answers the times of which grow by half, as they do while a fleet fills up."""
    ratios, rng = Ratios(), random.Random(seed)
    for i in range(120):
        ratios.add(10.0, 10.0 * (1.0 + i / 240.0) * rng.lognormvariate(-0.32, 0.8))
    return ratios


def test_bias_and_coverage_hold_while_times_grow() -> None:
    """A mean of the newest 200 lags behind by a seventh, and a fixed quantile covers too few."""
    found = [drifting(seed) for seed in range(40)]
    assert sum(abs(each.bias or 0.0) <= 0.1 for each in found) >= 38
    assert sum(0.87 <= (each.coverage or 0.0) <= 0.93 for each in found) >= 36


def test_forecasts_that_are_exact_keep_a_bound() -> None:
    ratios = Ratios()
    for _ in range(1000):
        ratios.add(1.0, 1.0)
    assert (ratios.bound, ratios.coverage) == (1.0, 1.0)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=8, max_size=300))
def test_the_factor_is_a_mean_of_what_was_seen(times: list[tuple[float, float]]) -> None:
    ratios = Ratios()
    for raw_s, true_s in times:
        ratios.add(raw_s, true_s)
    seen = [true_s / raw_s for raw_s, true_s in times]
    assert min(seen) * (1.0 - 1e-9) <= ratios.factor <= max(seen) * (1.0 + 1e-9)


@given(st.lists(st.floats(0.01, 100.0), max_size=7))
def test_few_answers_correct_nothing(true_s: list[float]) -> None:
    ratios = Ratios()
    for each in true_s:
        ratios.add(1.0, each)
    assert ratios.factor == 1.0
