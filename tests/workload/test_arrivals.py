"""Arrival processes have the rate and the burstiness they are asked for, and a seed decides everything."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hetlb.tools.workload.arrivals import gaps_s, make_plan
from hetlb.tools.workload.rows import Row

COUNT = 10_000


ROWS = [Row(None, 100 + i, 10 + i) for i in range(5)]


@pytest.mark.parametrize("shape", [0.25, 0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("rate", [0.1, 20.0])
def test_gaps_have_the_asked_for_rate_spread_and_no_memory(shape: float, rate: float) -> None:
    """The lag-1 correlation catches generators that repeat a gap once per worker."""
    gaps = np.array(gaps_s(COUNT, rate, shape, random.Random(1)))
    assert COUNT / gaps.sum() == pytest.approx(rate, rel=1e-9)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(shape), rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


def test_infinite_burstiness_is_a_metronome() -> None:
    assert gaps_s(4, 2.0, math.inf, random.Random(0)) == [0.5] * 4


def test_a_shape_near_zero_puts_all_the_time_into_one_gap() -> None:
    gaps = gaps_s(5, 1.0, 1e-9, random.Random(0))
    assert sum(gaps) == pytest.approx(5.0)
    assert max(gaps) == pytest.approx(5.0)


def test_a_plan_has_the_rate_asked_for_and_begins_at_once() -> None:
    plan = make_plan(ROWS, COUNT, 7.0, random.Random(3))
    due = [planned.scheduled_s for planned in plan]
    assert due == sorted(due)
    assert due[0] == 0.0
    assert (COUNT - 1) / due[-1] == pytest.approx(7.0, rel=0.01)


def test_the_seed_decides_the_plan() -> None:
    first, again, other = (make_plan(ROWS, 50, 3.0, random.Random(seed), 0.5) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_all_at_once_draws_nothing() -> None:
    rng = random.Random(5)
    plan = make_plan(ROWS, None, math.inf, rng)
    assert [planned.scheduled_s for planned in plan] == [0.0] * len(ROWS)
    assert rng.random() == random.Random(5).random()


def test_the_first_rows_are_used_and_cycled_if_there_are_fewer() -> None:
    lengths = [(p.index, p.prompt_tokens, p.output_tokens) for p in make_plan(ROWS, 7, 1.0, random.Random())]
    assert lengths == [
        (0, 100, 10),
        (1, 101, 11),
        (2, 102, 12),
        (3, 103, 13),
        (4, 104, 14),
        (5, 100, 10),
        (6, 101, 11),
    ]
    assert len(make_plan(ROWS, 2, 1.0, random.Random())) == 2
    assert make_plan(ROWS, 0, 1.0, random.Random()) == []


def test_a_replay_keeps_gaps_and_goes_on_after_its_end() -> None:
    rows = [Row(100.0, 1, 1), Row(101.0, 2, 2), Row(104.0, 3, 3)]
    plan = make_plan(rows, 5, "trace", random.Random())
    assert [planned.scheduled_s for planned in plan] == [0.0, 1.0, 4.0, 6.0, 7.0]
    assert [planned.prompt_tokens for planned in plan] == [1, 2, 3, 1, 2]


def test_a_replay_of_an_unsorted_trace_keeps_each_request_at_its_time() -> None:
    rows = [Row(4.0, 4, 4), Row(1.0, 1, 1), Row(2.0, 2, 2)]
    plan = make_plan(rows, None, "trace", random.Random())
    assert [(p.scheduled_s, p.prompt_tokens) for p in plan] == [(0.0, 1), (1.0, 2), (3.0, 4)]


def test_one_recorded_request_repeats_every_second() -> None:
    plan = make_plan([Row(9.0, 1, 1)], 3, "trace", random.Random())
    assert [planned.scheduled_s for planned in plan] == [0.0, 1.0, 2.0]


def test_a_replay_needs_arrival_times() -> None:
    with pytest.raises(ValueError, match="row 2 has no arrival_s"):
        make_plan([Row(0.0, 1, 1), Row(None, 1, 1)], None, "trace", random.Random())
    with pytest.raises(ValueError, match="'fast'"):
        make_plan(ROWS, None, "fast", random.Random())
