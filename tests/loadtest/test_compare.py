"""Paired differences: only within a round, with the interval of Student's t."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.loadtest.campaign import FIGURES, comparisons, paired, turns


def run(policy: str, number: int, value: float, rate: float | str = 4.0) -> dict[str, Any]:
    return {
        "policy": policy,
        "round": number,
        "request_rate": rate,
        "client": {"verdict": "VALID"},
        **dict.fromkeys(FIGURES, value),
    }


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(1, 1e3)), min_size=2, max_size=12))
def test_the_interval_equals_a_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    from scipy import stats  # a second, which every process would spend on finding the tests

    values, baseline = (list(side) for side in zip(*pairs, strict=True))
    found = paired(values, baseline)
    differences = np.subtract(values, baseline)
    assert found["difference"] == pytest.approx(differences.mean())
    if differences.std() > 1e-9:
        low, high = stats.t.interval(
            0.95, len(pairs) - 1, loc=differences.mean(), scale=stats.sem(differences)
        )
        assert found["low"] == pytest.approx(low, abs=1e-6)
        assert found["high"] == pytest.approx(high, abs=1e-6)


def test_one_round_has_no_interval_and_nothing_no_share() -> None:
    assert paired([3.0], [2.0]) == {
        "mean": 3.0, "baseline_mean": 2.0, "difference": 1.0, "low": None, "high": None, "relative": 0.5,
    }  # fmt: skip
    assert paired([3.0], [0.0])["relative"] is None


def test_every_policy_against_the_first_at_every_rate() -> None:
    runs = [
        run(policy, number, 10.0 * number + offset, rate)
        for rate in (4.0, 8.0)
        for number in (1, 2, 3)
        for offset, policy in ((0.0, "rr"), (2.0, "paper"), (5.0, "hetlb"))
    ]
    found = comparisons(runs, ["rr", "paper", "hetlb"])
    assert [(each["request_rate"], each["policy"]) for each in found] == [
        (4.0, "paper"), (4.0, "hetlb"), (8.0, "paper"), (8.0, "hetlb"),
    ]  # fmt: skip
    for each in found:
        assert (each["baseline"], each["rounds"]) == ("rr", 3)
        figure = each["figures"]["p99_ttft_ms"]
        # Rounds differ by far more than policies do: pairs take that out.
        assert figure["low"] == pytest.approx(figure["high"]) == pytest.approx(figure["difference"])


def test_every_policy_begins_a_round() -> None:
    policies = ["a", "b", "c"]
    orders = [turns(policies, number) for number in range(1, 4)]
    assert orders[0] == policies
    assert {order[0] for order in orders} == set(policies)
    assert all(sorted(order) == policies for order in orders)
