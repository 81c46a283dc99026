"""Predictions are expectations under the client's cap, and none but the oracle knows a true length."""

import dataclasses
import random
import statistics

import pytest
from helpers import request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.predictor import (
    PREDICTORS,
    PRIOR_OUTPUT_TOKENS,
    LengthDistribution,
    OnlinePredictor,
    _bucket,
    make_predictor,
)
from hetlb.core.types import Request

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 4000)))
def test_capped_mean_is_the_mean_of_capped_lengths(lengths: list[int], cap: int | None) -> None:
    expected = statistics.fmean(length if cap is None else min(length, cap) for length in lengths)
    assert LengthDistribution(lengths).mean_capped(cap) == pytest.approx(expected, rel=1e-12)


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 4000)), st.integers(0, 9))
def test_every_prediction_is_at_least_one_and_at_most_the_cap(
    lengths: list[int], cap: int | None, seed: int
) -> None:
    sample = LengthDistribution(lengths)
    for name in PREDICTORS:
        predictor = make_predictor(name, rng=random.Random(seed), lengths=sample, oracle={1: 7})
        for length in lengths:
            predictor.observe(request(2), length)
        predicted = predictor.predict(request(1, max_tokens=cap))
        assert predicted >= 1
        assert name == "oracle" or cap is None or predicted <= cap


@given(st.integers(0, 1 << 31))
def test_buckets_are_in_order_and_narrow(tokens: int) -> None:
    assert _bucket(tokens) <= _bucket(tokens + 1) <= _bucket(tokens) + 1
    assert _bucket(tokens) < _bucket(tokens + max(2, tokens // 7))


def test_online_starts_at_its_prior_and_learns() -> None:
    predictor = OnlinePredictor()
    assert predictor.predict(request(1, max_tokens=None)) == PRIOR_OUTPUT_TOKENS
    assert predictor.predict(request(1, max_tokens=16)) == 16
    rng = random.Random(3)
    lengths = [max(1, round(rng.lognormvariate(5, 0.8))) for _ in range(3000)]
    for length in lengths:
        predictor.observe(request(1), length)
    for cap in (None, 300, 100, 20):
        expected = statistics.fmean(length if cap is None else min(length, cap) for length in lengths)
        assert predictor.predict(request(1, max_tokens=cap)) == pytest.approx(expected, rel=0.05)


def test_online_keeps_models_apart_and_forgets_slowly() -> None:
    predictor = OnlinePredictor()
    for _ in range(200):
        predictor.observe(request(1, model="a"), 1000)
        predictor.observe(request(1, model="b"), 10)
    assert predictor.predict(request(1, model="a", max_tokens=None)) > 900
    assert predictor.predict(request(1, model="b", max_tokens=None)) < 30
    for _ in range(20_000):
        predictor.observe(request(1, model="a"), 50)
    assert predictor.predict(request(1, model="a", max_tokens=None)) == pytest.approx(50, rel=0.05)


def test_normal_draws_have_the_sample_s_moments() -> None:
    sample = LengthDistribution([900, 1000, 1100])
    predictor = make_predictor("normal", rng=random.Random(1), lengths=sample)
    draws = [predictor.predict(request(1, max_tokens=None)) for _ in range(4000)]
    assert statistics.fmean(draws) == pytest.approx(sample.mean, rel=0.01)
    assert statistics.pstdev(draws) == pytest.approx(sample.std, rel=0.05)


def test_no_request_holds_its_true_output_length() -> None:
    names = {field.name for field in dataclasses.fields(Request)}
    assert names == {
        "id", "model", "prompt_tokens", "max_tokens", "sequences", "longest_prompt_tokens", "generates",
        "body_bytes", "prompt_exact", "pinned", "prefix_keys", "priority", "tenant", "samples",
        "blocks",
    }  # fmt: skip


def test_a_predictor_without_its_data_says_so() -> None:
    with pytest.raises(ValueError, match="'mean' needs a sample of output lengths"):
        make_predictor("mean", rng=random.Random(0))
    with pytest.raises(ValueError, match="true lengths"):
        make_predictor("oracle", rng=random.Random(0))


@given(st.lists(st.integers(1, 5000), max_size=120), st.one_of(st.none(), st.integers(1, 6000)))
def test_what_is_asked_at_once_is_what_is_asked_one_by_one(lengths: list[int], cap: int | None) -> None:
    predictor, asked = OnlinePredictor(), request(1, max_tokens=cap)
    for length in lengths:
        predictor.observe(asked, length)
        assert predictor.outlook(asked) == (
            predictor.predict(asked), predictor.long(asked), predictor.residual(asked),
        )  # fmt: skip
