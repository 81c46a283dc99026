"""Series and points: sums that a plain count confirms, of one process or of several."""

from __future__ import annotations

import math
import pickle
import random

import pytest
from helpers import make_scheduler, spec
from proxy.rows import ended

from hetlb.balancer.admin.dashboard.snapshot import accuracy, levels, model_factors, series
from hetlb.balancer.core.types import Outcome
from hetlb.balancer.telemetry.counters import InstanceTotals
from hetlb.balancer.telemetry.recent import BIN_S, BINS, KEPT_POINTS, Recent
from hetlb.options.peers.worker_service import add_recent

#: Latencies are counted in steps of 4.4 %.
NEAR = 0.045


def test_rates_and_latencies_of_one_stretch() -> None:
    recent = Recent()
    for number in range(4):
        recent.finished(ended(10.5, took_s=1.0 + number, ttft_s=0.1 * (number + 1), tokens=6))
    recent.finished(ended(11.0, outcome=Outcome.CLIENT_GONE, tokens=2))
    document = series(recent, 12.5)
    assert document["end_s"] == 12.0
    assert document["outcomes"] == {"ok": 4, "client_gone": 1}
    assert document["instances"]["a"][-1] == 26 / BIN_S
    columns = {name: column for name, column in document.items() if isinstance(column, list)}
    assert {name: column[-1] for name, column in columns.items()} == {
        "ok_per_s": 4 / BIN_S,
        "not_ok_per_s": 1 / BIN_S,
        "output_tokens_per_s": 26 / BIN_S,
        "ttft_p50_s": pytest.approx(0.25, rel=NEAR),
        "ttft_p99_s": pytest.approx(0.397, rel=NEAR),
        "e2e_p50_s": pytest.approx(2.5, rel=NEAR),
        "e2e_p99_s": pytest.approx(3.97, rel=NEAR),
    }
    assert document["ttft_p50_s"][-2] is None
    assert {len(column) for column in columns.values()} == {BINS}


def test_what_ends_in_the_running_stretch_counts_when_it_is_over() -> None:
    recent = Recent()
    recent.finished(ended(12.1))
    assert series(recent, 12.2)["outcomes"] == {}
    recent.finished(ended(13.9))
    assert series(recent, 14.0)["outcomes"] == {"ok": 2}


def test_what_no_instance_had_is_counted_and_has_no_share() -> None:
    recent = Recent()
    recent.finished(ended(5.0, placed=False, outcome=Outcome.REJECTED_FULL))
    document = series(recent, 6.0)
    assert (document["outcomes"], document["instances"]) == ({"rejected_full": 1}, {})


def test_the_last_five_minutes_stay_however_many_end_and_wherever() -> None:
    rng = random.Random(3)
    times = sorted(rng.uniform(0, 900) for _ in range(3000))
    parts = [Recent(), Recent(), Recent()]
    for at in times:
        rng.choice(parts).finished(ended(at, tokens=1))
    whole = Recent()
    for part in parts:
        assert len(part.stretches) <= BINS + 1
        add_recent(whole, pickle.loads(pickle.dumps(part)))
    document = series(whole, 900.0)
    expected = [0.0] * BINS
    for at in times:
        if (index := math.floor(at / BIN_S) - (450 - BINS)) >= 0:
            expected[index] += 1 / BIN_S
    assert document["ok_per_s"] == expected
    assert document["output_tokens_per_s"] == document["ok_per_s"]
    shares = whole.last(60.0, 900.5).shares
    assert shares["a"].ended == shares["a"].output_tokens == sum(at >= 842.0 for at in times)
    assert [point[0] for point in whole.points] == times[-KEPT_POINTS:]


def test_a_refused_client_of_any_process_is_seen() -> None:
    """Whichever process refused the last one: each has connections of its own."""
    own, sibling = Recent(), Recent()
    own.own = {"clients_refused": (3.0, "9 connections, ulimit -n"), "log_lost": (7.0, "request log: full")}
    sibling.own = {"clients_refused": (5.0, "8 connections, ulimit -n")}
    for parts in ((own, sibling), (sibling, own)):
        whole = Recent()
        for part in parts:
            add_recent(whole, pickle.loads(pickle.dumps(part)))
        assert whole.own == {
            "clients_refused": (5.0, "8 connections, ulimit -n"),
            "log_lost": own.own["log_lost"],
        }


def test_points_are_of_one_sequence_and_from_dispatch_on() -> None:
    recent = Recent()
    for each in (
        ended(5.0, took_s=2.0, tokens=30, sequences=3, predicted=8.0, expected_s=1.5, instance="b"),
        ended(6.0, tokens=0),
        ended(6.0, outcome=Outcome.BROKEN_STREAM),
        ended(6.0, placed=False, outcome=Outcome.NO_INSTANCE),
        ended(7.0, instance="a"),
    ):
        recent.finished(each)
    document = accuracy(recent)
    assert document["instances"] == ["b", "a"]
    assert document["points"] == [(0, 8.0, 10.0, 1.5, 2.0), (1, 8.0, 10.0, 0.5, 1.0)]


def test_the_newest_points_stay() -> None:
    recent = Recent()
    for number in range(5 * KEPT_POINTS):
        recent.finished(ended(float(number), tokens=number + 1))
    assert [point[2] for point in accuracy(recent)["points"]] == [
        number + 1.0 for number in range(4 * KEPT_POINTS, 5 * KEPT_POINTS)
    ]


def test_levels_are_kept_while_no_page_is_open_and_a_late_timer_leaves_no_gap() -> None:
    recent, scheduler = Recent(), make_scheduler([spec("a"), spec("b")])
    for at in (100.0, 102.1, 106.2):  # the timer left out the stretch of 104 s
        recent.sample(scheduler, at)
    document = levels(recent, 110.0)
    assert len(document["queue"]) == BINS
    assert document["queue"][-5:] == [0, 0, 0, 0, None]
    assert document["in_flight"]["a"][-5:] == [0, 0, 0, 0, None]
    assert document["queue"][0] is None
    recent.sample(scheduler, 1e6)
    assert [each for each in levels(recent, 1e6 + 2)["queue"] if each is not None] == [0]


def test_factors_need_evidence() -> None:
    totals = InstanceTotals()
    totals.ended(Outcome.OK)
    totals.took("prefill", 0.5, 0.6)
    assert model_factors(totals)["prefill"] is None
    totals.took("prefill", 1.5, 1.8)
    totals.took("mixed", 2.0, 1.0)
    assert model_factors(totals) == {"prefill": pytest.approx(1.2), "mixed": 0.5, "decode": None}
