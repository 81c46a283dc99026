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
    assert ratios.factor == pytest.approx(share, rel=0.06)
    assert ratios.bias == pytest.approx(0.0, abs=0.06)
    assert ratios.coverage == pytest.approx(0.9, abs=0.06)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=8, max_size=300))
def test_sums_are_those_of_the_newest(times: list[tuple[float, float]]) -> None:
    """The factor is the ratio of the newest 200 answers."""
    ratios = Ratios()
    for raw_s, true_s in times:
        ratios.add(raw_s, true_s)
    newest = times[-200:]
    shown = sum(true_s for _, true_s in newest) / sum(raw_s for raw_s, _ in newest)
    assert ratios.factor == pytest.approx(shown, rel=1e-6)


@given(st.lists(st.floats(0.01, 100.0), max_size=7))
def test_few_answers_correct_nothing(true_s: list[float]) -> None:
    ratios = Ratios()
    for each in true_s:
        ratios.add(1.0, each)
    assert ratios.factor == 1.0
