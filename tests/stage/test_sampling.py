"""Sampling against direct readings of what each parameter means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.stage.runner import CannotSample, choose
from hetlb.tools.stage.stage_messages import Sampling, pack

LOGITS = np.array([1.0, 3.0, 2.0, 0.0, 2.9], dtype=np.float32)


def tokens(count: int = 4000, **parameters: object) -> dict[int, float]:
    """Shares of the tokens that come out at many positions."""
    sampling = Sampling(1, temperature=1.0, seed=3, **parameters)  # type: ignore[arg-type]
    drawn = [choose(LOGITS, sampling, [], position)[0] for position in range(count)]
    return {token: drawn.count(token) / count for token in sorted(set(drawn))}


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert choose(LOGITS, Sampling(1), [], 0)[0] == 1
    assert choose(np.array([2.0, 2.0], dtype=np.float32), Sampling(1), [], 0)[0] == 0


def test_draws_follow_the_softmax() -> None:
    chances = np.exp(LOGITS) / np.exp(LOGITS).sum()
    for token, share in tokens().items():
        assert share == pytest.approx(chances[token], abs=0.03)


def test_cuts_leave_the_likely_tokens() -> None:
    assert set(tokens(500, top_k=2)) == {1, 4}
    assert set(tokens(500, top_p=0.4)) == {1}
    assert set(tokens(500, top_p=0.45)) == {1, 4}
    assert set(tokens(500, min_p=0.5)) == {1, 4}
    assert set(tokens(500, min_p=0.9)) == {1, 4}
    assert set(tokens(500, min_p=0.95)) == {1}
    assert set(tokens(500, top_k=3, top_p=0.99, min_p=0.1)) == {1, 2, 4}


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 20))
def test_a_choice_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    sampling = Sampling(1, temperature=1.3, seed=seed, top_p=0.9)
    assert choose(LOGITS, sampling, [], position) == choose(LOGITS.copy(), sampling, [], position)


def test_penalties() -> None:
    frequency = Sampling(2, frequency_penalty=1.0, history=pack((1, 1)))
    assert choose(LOGITS, frequency, [], 1)[0] == 1, "a prompt is not penalised by frequency"
    assert choose(LOGITS, frequency, [1], 2)[0] == 4
    assert choose(LOGITS, Sampling(2, presence_penalty=0.05, history=pack((0, 0))), [1], 2)[0] == 1
    assert choose(LOGITS, Sampling(2, presence_penalty=0.2, history=pack((0, 0))), [1], 2)[0] == 4
    repetition = Sampling(1, repetition_penalty=2.0, history=pack((1,)))
    assert choose(LOGITS, repetition, [], 0)[0] == 4, "a prompt is penalised by repetition"
    negative = np.array([-1.0, -1.5], dtype=np.float32)
    assert choose(negative, Sampling(1, repetition_penalty=2.0, history=pack((0,))), [], 0)[0] == 1
    # The answer so far, after a replay, stands behind the prompt.
    assert choose(LOGITS, Sampling(1, frequency_penalty=1.0, history=pack((0, 1))), [], 1)[0] == 4


def test_bias_ban_and_log_probabilities() -> None:
    bias = {"bias_tokens": pack([3]), "bias_values": np.float32(9.0).tobytes()}
    assert choose(LOGITS, Sampling(1, **bias), [], 0)[0] == 3
    banned = Sampling(4, min_tokens=2, stop=pack([1]))
    assert [choose(LOGITS, banned, [], position)[0] for position in (3, 4, 5)] == [4, 4, 1]
    token, found = choose(LOGITS, Sampling(1, logprobs=2, **bias), [], 0)
    assert token == 3
    assert found is not None
    assert [each for each, _ in found] == [3, 1, 4]
    expected = np.log(np.exp(LOGITS) / np.exp(LOGITS).sum())
    for each, value in found:
        assert value == pytest.approx(float(expected[each]), abs=1e-6)


def test_only_allowed_tokens_come() -> None:
    assert choose(LOGITS, Sampling(1, allowed=pack([0, 2])), [], 0)[0] == 2
    assert set(tokens(500, allowed=pack([0, 2, 3]))) == {0, 2, 3}


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop": pack(range(5)), "min_tokens": 4, "top_p": 0.9},
        {"allowed": pack([1]), "stop": pack([1]), "min_tokens": 4},
        {"allowed": pack([5])},
        {"stop": pack([-1]), "min_tokens": 4},
        {"stop": b"abc", "min_tokens": 4},
        {"bias_tokens": pack([1]), "bias_values": b""},
        {"bias_tokens": pack([1]), "bias_values": np.float32(np.inf).tobytes()},
    ],
)
def test_parameters_that_leave_no_token_are_one_error(parameters: dict[str, object]) -> None:
    with pytest.raises(CannotSample):
        choose(LOGITS, Sampling(1, temperature=1.0, **parameters), [], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_one_error(wrong: float) -> None:
    with pytest.raises(CannotSample):
        choose(np.array([1.0, wrong], dtype=np.float32), Sampling(1, temperature=1.0), [], 0)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.floats(0.0, 100.0),
    st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=2, max_size=2),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.integers(0, 9),
    st.floats(1e-9, 1e9),
)
def test_any_finite_logits_and_parameters_give_a_token(
    logits: list[float], temperature: float, bias: list[float], top_p: float, min_p: float, top_k: int,
    repetition: float,
) -> None:  # fmt: skip
    values = np.array(logits, dtype=np.float32)
    sampling = Sampling(
        1, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, repetition_penalty=repetition,
        bias_tokens=pack([0, len(logits) - 1]), bias_values=np.array(bias, dtype="<f4").tobytes(),
        history=pack([0]), presence_penalty=2.0, logprobs=1,
    )  # fmt: skip
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        token, found = choose(values, sampling, [0], 1)
    assert 0 <= token < len(logits)
    assert found is not None
    assert all(math.isfinite(value) for _, value in found)
