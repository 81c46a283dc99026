"""A load is the simulator's plan with its rows; a ramp goes from one rate to the other."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.workload.arrivals import Load, Ramp, Rate, make_load, make_plan
from hetlb.workload.traces import Row

ROWS = [Row(at, 10 + i, 1 + i) for i, at in enumerate((3.0, 1.0, 2.0, 1.0, 7.0))]


@given(st.sampled_from(["trace", math.inf, 7.0]), st.integers(1, 12), st.integers())
def test_a_load_is_the_plan_and_its_rows(rate: Rate, count: int, seed: int) -> None:
    load = make_load(ROWS, count, rate, random.Random(seed))
    plan = make_plan(ROWS, count, rate, random.Random(seed))
    assert load.plan == plan
    for planned in plan:
        row = load.rows[planned.index]
        assert (row.input_tokens, row.output_tokens) == (planned.prompt_tokens, planned.output_tokens)


def test_a_trace_without_times_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="has no arrival_s"):
        make_load([Row(None, 1, 1)], 1, "trace", random.Random(0))


def test_a_later_cycle_shares_nothing_with_the_first() -> None:
    rows = [Row(None, 5, 1, session="a"), Row(None, 5, 1, hash_ids=("1", "2")), Row(None, 5, 1)]
    load = make_load(rows, 9, math.inf, random.Random(0))
    assert load.rows[:3] == rows
    assert len({row.session for row in load.rows[::3]}) == 3
    assert len({name for row in load.rows[1::3] for name in row.hash_ids}) == 6
    assert load.rows[8] == rows[2]


def ramped(strategy: Literal["linear", "exponential"], burstiness: float = math.inf) -> Load:
    return make_load(ROWS, 10_000, Ramp(strategy, 2.0, 200.0), random.Random(1), burstiness)


def rate_between(load: Load, first: int, last: int) -> float:
    return (last - first) / (load.plan[last].scheduled_s - load.plan[first].scheduled_s)


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 101.0), ("exponential", 20.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(
    strategy: Literal["linear", "exponential"], halfway: float
) -> None:
    load = ramped(strategy)
    assert load.plan[0].scheduled_s == 0.0
    assert rate_between(load, 0, 10) == pytest.approx(2.0, rel=0.06)
    assert rate_between(load, 4990, 5010) == pytest.approx(halfway, rel=0.02)
    assert rate_between(load, 9989, 9999) == pytest.approx(200.0, rel=0.02)


def test_the_gaps_of_a_ramp_are_as_bursty_as_asked() -> None:
    load = ramped("linear", burstiness=1.0)
    ramp = Ramp("linear", 2.0, 200.0)
    times = [planned.scheduled_s for planned in load.plan]
    scaled = [(b - a) * ramp.rate_rps(i / 9999) for i, (a, b) in enumerate(pairwise(times))]
    mean = sum(scaled) / len(scaled)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in scaled) / len(scaled))
    assert mean == pytest.approx(1.0, rel=0.05)
    assert deviation / mean == pytest.approx(1.0, rel=0.05)


@given(st.integers(1, 5), st.integers())
def test_times_never_go_back(count: int, seed: int) -> None:
    load = make_load(ROWS, count, Ramp("exponential", 50.0, 1.0), random.Random(seed))
    times = [planned.scheduled_s for planned in load.plan]
    assert times == sorted(times)
    assert times[0] == 0.0
