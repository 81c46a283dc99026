"""A later cycle of a trace is new; a ramp goes from one rate to the other."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.workload.arrivals import PlannedRequest, Ramp, make_plan
from hetlb.tools.workload.rows import Row

ROWS = [Row(at, 10 + i, 1 + i) for i, at in enumerate((3.0, 1.0, 2.0, 1.0, 7.0))]


def test_a_later_cycle_shares_nothing_with_the_first() -> None:
    rows = [Row(None, 5, 1, session="a"), Row(None, 5, 1, hash_ids=("1", "2")), Row(None, 5, 1)]
    plan = make_plan(rows, 9, math.inf, random.Random(0), hash_block_tokens=2)
    asked = [planned.row for planned in plan]
    assert asked[:3] == rows
    assert len({row.session for row in asked[::3]}) == 3
    assert len({name for row in asked[1::3] for name in row.hash_ids}) == 6
    assert asked[8] == rows[2]
    spans = [[key for key, _ in planned.content.spans] for planned in plan]
    assert len({key for keys in spans for key in keys}) == sum(map(len, spans)) == 9


def ramped(strategy: Literal["linear", "exponential"], burstiness: float = math.inf) -> list[PlannedRequest]:
    return make_plan(ROWS, 10_000, Ramp(strategy, 2.0, 200.0), random.Random(1), burstiness)


def rate_between(load: list[PlannedRequest], first: int, last: int) -> float:
    return (last - first) / (load[last].scheduled_s - load[first].scheduled_s)


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 101.0), ("exponential", 20.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(
    strategy: Literal["linear", "exponential"], halfway: float
) -> None:
    load = ramped(strategy)
    assert load[0].scheduled_s == 0.0
    assert rate_between(load, 0, 10) == pytest.approx(2.0, rel=0.06)
    assert rate_between(load, 4990, 5010) == pytest.approx(halfway, rel=0.02)
    assert rate_between(load, 9989, 9999) == pytest.approx(200.0, rel=0.02)


def test_the_gaps_of_a_ramp_are_as_bursty_as_asked() -> None:
    load = ramped("linear", burstiness=1.0)
    ramp = Ramp("linear", 2.0, 200.0)
    times = [planned.scheduled_s for planned in load]
    scaled = [(b - a) * ramp.rate_rps(i / 9999) for i, (a, b) in enumerate(pairwise(times))]
    mean = sum(scaled) / len(scaled)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in scaled) / len(scaled))
    assert mean == pytest.approx(1.0, rel=0.05)
    assert deviation / mean == pytest.approx(1.0, rel=0.05)


@given(st.integers(1, 5), st.integers())
def test_times_never_go_back(count: int, seed: int) -> None:
    load = make_plan(ROWS, count, Ramp("exponential", 50.0, 1.0), random.Random(seed))
    times = [planned.scheduled_s for planned in load]
    assert times == sorted(times)
    assert times[0] == 0.0
