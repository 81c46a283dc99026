"""Series and points: sums that a plain count confirms, however often and late they are read."""

from __future__ import annotations

import math
import random

import pytest
from helpers import make_scheduler, spec
from proxy.dashboard.rows import ended

from hetlb.core.types import Outcome
from hetlb.proxy.dashboard import figures
from hetlb.proxy.dashboard.figures import POINTS, Accuracy, Series
from hetlb.proxy.dashboard.samples import BIN_S, BINS, Levels
from hetlb.proxy.telemetry.history import History


def test_rates_and_latencies_of_one_stretch() -> None:
    history = History()
    for number in range(4):
        history.add(ended(10.5, took_s=1.0 + number, ttft_s=0.1 * (number + 1), tokens=6))
    history.add(ended(11.0, outcome=Outcome.CLIENT_GONE, tokens=2))
    document = Series(history).document(12.5)
    assert document["end_s"] == 12.0
    assert document["outcomes"] == {"ok": 4, "client_gone": 1}
    last = {name: column[-1] for name, column in document.items() if isinstance(column, tuple)}
    assert last == {
        "ok_per_s": 4 / BIN_S,
        "not_ok_per_s": 1 / BIN_S,
        "output_tokens_per_s": 26 / BIN_S,
        "ttft_p50_s": 0.25,
        "ttft_p99_s": pytest.approx(0.397),
        "e2e_p50_s": 2.5,
        "e2e_p99_s": pytest.approx(3.97),
    }
    assert document["ttft_p50_s"][-2] is None
    assert {len(column) for column in document.values() if isinstance(column, tuple)} == {BINS}


def test_what_ends_in_the_running_stretch_counts_when_it_is_over() -> None:
    history = History()
    series = Series(history)
    history.add(ended(12.1))
    assert series.document(12.2)["outcomes"] == {}
    history.add(ended(13.9))
    assert series.document(14.0)["outcomes"] == {"ok": 2}


@pytest.mark.parametrize(
    "looks", [[900.0], [10.0, 400.0, 401.0, 900.0], [float(at) for at in range(5, 901, 5)]]
)
def test_the_sums_do_not_depend_on_how_often_they_are_read(
    monkeypatch: pytest.MonkeyPatch, looks: list[float]
) -> None:
    monkeypatch.setattr(figures, "ROWS_AT_ONCE", 50)
    rng = random.Random(3)
    times = sorted(rng.uniform(0, 900) for _ in range(3000))
    history, series = History(), Series(History())
    series = Series(history)
    left = iter(times)
    waiting = next(left, None)
    for look in looks:
        while waiting is not None and waiting < look:
            history.add(ended(waiting, tokens=1))
            waiting = next(left, None)
        document = series.document(look)
    for _ in range(BINS):  # older stretches come with the next looks
        document = series.document(looks[-1])
    expected = [0.0] * BINS
    for at in times:
        if (index := math.floor(at / BIN_S) - (450 - BINS)) >= 0:
            expected[index] += 1 / BIN_S
    assert list(document["ok_per_s"]) == expected
    assert document["output_tokens_per_s"] == document["ok_per_s"]


def test_one_look_reads_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROWS_AT_ONCE", 100)
    history = History()
    for number in range(6000):
        history.add(ended(number / 20))
    series = Series(history)
    known = [sum(value is not None for value in series.document(300.0)["ok_per_s"]) for _ in range(100)]
    # 40 rows a stretch: two whole stretches fit into a look.
    assert known[:3] == [2, 4, 6]
    assert known[-1] == BINS


def test_a_stretch_with_more_rows_than_one_look_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROWS_AT_ONCE", 10)
    history = History()
    for _ in range(100):
        history.add(ended(299.0))
    assert Series(history).document(300.0)["ok_per_s"][-1] == 50.0


def test_points_are_of_one_sequence_and_from_dispatch_on() -> None:
    history = History()
    history.add(ended(5.0, took_s=2.0, tokens=30, sequences=3, predicted=8.0, expected_s=1.5, instance="b"))
    history.add(ended(6.0, tokens=0))
    history.add(ended(6.0, outcome=Outcome.BROKEN_STREAM))
    history.add(ended(6.0, placed=False, outcome=Outcome.NO_INSTANCE))
    history.add(ended(7.0, instance="a"))
    document = Accuracy(history).document()
    assert document["instances"] == ["b", "a"]
    assert document["points"] == [(0, 8.0, 10.0, 1.5, 2.0), (1, 8.0, 10.0, 0.5, 1.0)]


def test_every_answer_is_a_point_once_and_the_newest_stay() -> None:
    history = History()
    accuracy = Accuracy(history)
    for round_ in range(5):
        for number in range(POINTS // 2):
            history.add(ended(round_ * 1000.0 + number, tokens=round_ + 1))
        tokens = [point[2] for point in accuracy.document()["points"]]
        assert tokens == [float(max(1, round_))] * (POINTS // 2 if round_ else 0) + [round_ + 1.0] * (
            POINTS // 2
        )
    assert accuracy.document() == accuracy.document()


def test_levels_are_kept_while_no_page_is_open_and_a_late_timer_leaves_no_gap() -> None:
    levels, scheduler = Levels(), make_scheduler([spec("a"), spec("b")])
    for at in (100.0, 102.1, 106.2):  # the timer left out the stretch of 104 s
        levels.sample(scheduler, at)
    document = levels.document(110.0)
    assert len(document["queue"]) == BINS
    assert document["queue"][-5:] == [0, 0, 0, 0, None]
    assert document["in_flight"]["a"][-5:] == [0, 0, 0, 0, None]
    assert document["queue"][0] is None
    levels.sample(scheduler, 1e6)
    assert [each for each in levels.document(1e6 + 2)["queue"] if each is not None] == [0]
