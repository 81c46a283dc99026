"""Predictions are expectations under the client's cap, and none but the oracle knows a true length."""

import dataclasses
import random
import statistics
from collections.abc import Callable

import pytest
from helpers import request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.predictor import (
    MOST_TENANTS,
    PREDICTORS,
    PRIOR_OUTPUT_TOKENS,
    TENANT_WEIGHT,
    OnlinePredictor,
    _bucket,
    make_predictor,
)
from hetlb.balancer.core.types import Request

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


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(lambda length, rng: length, id="the length itself"),
        pytest.param(lambda length, rng: round(1.3 * length), id="a third more than the length"),
        pytest.param(lambda length, rng: 4096, id="one for all"),
        pytest.param(lambda length, rng: max(length, rng.randint(64, 8192)), id="any"),
        pytest.param(lambda length, rng: rng.choice((length, 4096)), id="two kinds of clients"),
    ],
)
def test_online_learns_how_answers_follow_limits(limits: Callable[[int, random.Random], int]) -> None:
    predictor, rng = OnlinePredictor(), random.Random(5)

    def answered() -> tuple[int, float, float]:
        length = max(1, round(rng.lognormvariate(5, 0.8)))
        asked = request(1, max_tokens=limits(length, rng))
        predicted, long = predictor.outlook(asked)
        predictor.observe(asked, length)
        return length, predicted, long

    for _ in range(100):
        answered()
    seen = [answered() for _ in range(1000)]
    assert sum(predicted for _, predicted, _ in seen) == pytest.approx(
        sum(length for length, *_ in seen), rel=0.15
    )
    assert sum(length <= long for length, _, long in seen) >= 950
    assert all(predicted <= long for _, predicted, long in seen)


def test_an_answer_of_no_limit_tells_nothing_of_limits() -> None:
    predictor = OnlinePredictor()
    for _ in range(100):
        predictor.observe(request(1, max_tokens=None), 200)
    assert predictor.predict(request(2, max_tokens=400)) == pytest.approx(200, rel=0.05)


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
        "body_bytes", "prompt_exact", "prefix_keys", "priority", "band", "tenant", "samples",
        "blocks", "splittable", "streamed", "places",
        "service", "generated", "path", "client", "features", "kept_from",
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
        assert predictor.outlook(asked) == (predictor.predict(asked), predictor.long(asked))


# --- tenants ---

ANSWERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4000)), min_size=1, max_size=150)


def taught(answers: list[tuple[str, int]]) -> OnlinePredictor:
    predictor = OnlinePredictor()
    for tenant, length in answers:
        predictor.observe(request(1, tenant=tenant, max_tokens=None), length)
    return predictor


def test_a_length_beyond_all_sense_is_the_longest() -> None:
    predictor = taught([("a", 5_555_555_555_555_555)])
    assert predictor.outlook(request(1, max_tokens=100))[0] <= 100


@given(ANSWERS, st.one_of(st.none(), st.integers(1, 5000)))
def test_a_tenant_s_prediction_lies_between_its_own_mean_and_the_model_s(
    answers: list[tuple[str, int]], cap: int | None
) -> None:
    predictor = taught(answers)
    model = predictor.predict(request(1, max_tokens=cap))
    assert predictor.predict(request(1, max_tokens=cap, tenant="new")) == model
    for tenant in {tenant for tenant, _ in answers}:
        own = statistics.fmean(min(length, cap or length) for name, length in answers if name == tenant)
        predicted = predictor.predict(request(1, max_tokens=cap, tenant=tenant))
        low, high = sorted((model, own))
        # Weights decay a little, newer answers count more; buckets are 12.5 % wide where a cap cuts one.
        assert low * 0.85 - 1 <= predicted <= high * 1.15 + 1


def test_a_tenant_is_half_its_own_after_as_many_answers_as_its_weight() -> None:
    predictor = OnlinePredictor()
    for _ in range(2000):
        predictor.observe(request(1, tenant="many"), 100)
    for _ in range(int(TENANT_WEIGHT)):
        predictor.observe(request(1, tenant="few"), 3000)
    model = predictor.predict(request(1, max_tokens=None))
    few = predictor.predict(request(1, max_tokens=None, tenant="few"))
    assert few == pytest.approx((model + 3000) / 2, rel=0.01)
    many = predictor.predict(request(1, max_tokens=None, tenant="many"))
    assert many == pytest.approx(100, rel=0.01)


def test_tenants_of_other_models_are_others() -> None:
    predictor = OnlinePredictor()
    for _ in range(100):
        predictor.observe(request(1, tenant="x", model="a"), 1000)
        predictor.observe(request(1, tenant="y", model="b"), 10)
    in_b = predictor.predict(request(1, tenant="x", model="b", max_tokens=None))
    assert in_b == predictor.predict(request(1, model="b", max_tokens=None))


def test_the_tenants_remembered_are_the_last_ones_and_bounded() -> None:
    predictor = OnlinePredictor()
    for _ in range(20):
        predictor.observe(request(1, tenant="kept"), 2000)
    for number in range(MOST_TENANTS + 10):
        predictor.observe(request(1, tenant=f"t{number}"), 10)
        if number % 100 == 0:
            predictor.observe(request(1, tenant="kept"), 2000)
    assert len(predictor._by_tenant) == MOST_TENANTS
    assert predictor.predict(request(1, tenant="kept", max_tokens=None)) > 1500
    forgotten, model = (predictor.predict(request(1, tenant=name, max_tokens=None)) for name in ("t0", None))
    assert forgotten == model
