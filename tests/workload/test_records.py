"""The figures of a run are what NumPy and `vllm bench serve` would give for the same requests."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.workload.records import (
    Gaps,
    RequestResult,
    latency_figures,
    percentile,
    summarize,
    tokens_within,
    weighted_percentile,
)

seconds = st.floats(min_value=0.0, max_value=1e4)


def record(
    scheduled: float, first: float | None, last: float, output: int, *, name: str = "a"
) -> RequestResult:
    return RequestResult(
        scheduled_s=scheduled,
        prompt_tokens=10,
        output_tokens=output,
        first_token_s=first,
        last_token_s=last,
        end_s=last,
        instance=name,
        ok=True,
    )


def failed(scheduled: float, end: float | None = None) -> RequestResult:
    return RequestResult(
        scheduled_s=scheduled, prompt_tokens=10, output_tokens=3, error="http 503", end_s=end
    )


@given(st.lists(seconds, min_size=1, max_size=50), st.floats(min_value=0, max_value=100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-9)


@given(
    st.lists(st.tuples(seconds, st.integers(min_value=1, max_value=5)), min_size=1, max_size=20),
    st.floats(min_value=0, max_value=100),
)
def test_weighted_percentiles_equal_the_values_written_out(
    pairs: list[tuple[float, int]], percent: float
) -> None:
    written_out = sorted(value for value, count in pairs for _ in range(count))
    assert weighted_percentile(sorted(pairs), percent) == pytest.approx(percentile(written_out, percent))


@given(st.lists(seconds, min_size=1, max_size=50))
def test_latency_figures_are_numpys_in_milliseconds(values: list[float]) -> None:
    figures = latency_figures("x", values)
    expected = {
        "mean_x_ms": np.mean(values),
        "median_x_ms": np.median(values),
        "std_x_ms": np.std(values),
        "p90_x_ms": np.percentile(values, 90),
        "p99_x_ms": np.percentile(values, 99),
    }
    assert figures == {key: pytest.approx(1e3 * value, abs=1e-3) for key, value in expected.items()}


@given(
    st.lists(
        st.tuples(seconds, seconds, st.integers(1, 4), st.integers(1, 3)),
        min_size=1,
        max_size=10,
    ),
    st.lists(seconds, max_size=10),
)
def test_stretches_and_single_gaps_give_the_figures_of_all_gaps_written_out(
    stretches: list[tuple[float, float, int, int]], singles: list[float]
) -> None:
    gaps = Gaps()
    written_out = list(singles)
    for single in singles:
        gaps.add(single)
    for first, increment, steps, count in stretches:
        gaps.add(first, increment, steps, count)
        written_out += [first + step * increment for step in range(steps) for _ in range(count)]
    expected = latency_figures("itl", written_out)
    assert gaps.figures() == {key: pytest.approx(value, abs=1e-3) for key, value in expected.items()}
    assert sum(count for _, count in gaps.weighted()) == len(written_out)


def test_a_run_by_hand() -> None:
    """Two requests that complete and one that fails: throughput over the whole, latency of the two."""
    records = [record(1.0, 1.5, 3.5, 5), record(2.0, 4.0, 5.0, 1, name="b"), failed(2.0, end=11.0)]
    summary = summarize(records, goodput_slo_s={"ttft": 0.6})
    assert summary["duration"] == 10.0
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (20, 6)
    assert summary["request_throughput"] == pytest.approx(0.2)
    assert summary["output_throughput"] == pytest.approx(0.6)
    assert summary["total_token_throughput"] == pytest.approx(2.6)
    assert summary["request_goodput"] == pytest.approx(0.1)
    assert summary["mean_ttft_ms"] == pytest.approx(1250.0)
    assert summary["mean_tpot_ms"] == pytest.approx(500.0)  # the single token has no TPOT
    assert summary["median_e2el_ms"] == pytest.approx(2750.0)
    assert summary["mean_itl_ms"] == 0.0
    assert summary["instances"] == [
        {
            "name": "a",
            "completed": 1,
            "total_output_tokens": 5,
            "last_finish_s": 2.5,
            "preemptions": None,
            "kv_peak": None,
        },
        {
            "name": "b",
            "completed": 1,
            "total_output_tokens": 1,
            "last_finish_s": 4.0,
            "preemptions": None,
            "kv_peak": None,
        },
    ]


def test_every_key_of_the_contract_is_there() -> None:
    summary = summarize([])
    for key in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "p90", "p99"):
            assert summary[f"{figure}_{key}_ms"] == 0.0
    assert summary["duration"] == summary["request_throughput"] == summary["request_goodput"] == 0.0
    assert summary["instances"] == []


def test_latency_counts_from_the_due_time_not_from_the_sending() -> None:
    late = record(0.0, 2.5, 3.0, 2)
    late.sent_s = 2.0
    assert late.lateness_s == 2.0
    assert summarize([late])["median_ttft_ms"] == pytest.approx(2500.0)


def test_failed_requests_are_in_no_percentile_and_never_good() -> None:
    good = [record(0.0, 0.1, 1.0, 2) for _ in range(10)]
    alone = summarize(good, goodput_slo_s={"e2el": 5.0})
    both = summarize([*good, *(failed(0.0, end=1.0) for _ in range(10))], goodput_slo_s={"e2el": 5.0})
    differing = {key for key in alone if alone[key] != both[key]}
    assert differing == {"failed"}


def test_a_failure_without_an_end_leaves_the_duration_alone() -> None:
    assert summarize([record(0.0, 0.1, 1.0, 2), failed(0.0)])["duration"] == 1.0


def test_an_answer_that_came_whole_has_no_ttft_and_is_judged_by_its_end() -> None:
    whole = record(0.0, None, 1.0, 8)
    assert (whole.ttft_s, whole.tpot_s) == (None, None)
    summary = summarize([whole], goodput_slo_s={"ttft": 0.5})
    assert summary["mean_ttft_ms"] == summary["mean_tpot_ms"] == 0.0
    assert summary["mean_e2el_ms"] == 1000.0
    assert summary["request_goodput"] == 0.0
    assert summarize([whole], goodput_slo_s={"ttft": 1.0})["request_goodput"] == 1.0


def test_gaps_of_the_records_are_used_when_none_were_counted_for_the_run() -> None:
    first, second, lost = record(0.0, 0.1, 1.0, 3), record(0.0, 0.1, 1.0, 3), failed(0.0)
    first.itl_s, second.itl_s = array("d", [0.1, 0.3]), array("d", [0.2, 0.4])
    lost.itl_s = array("d", [9.0])
    summary = summarize([first, second, lost])
    assert summary["mean_itl_ms"] == pytest.approx(250.0)
    assert summary["p90_itl_ms"] == pytest.approx(1e3 * float(np.percentile([0.1, 0.2, 0.3, 0.4], 90)))


def test_named_instances_are_reported_even_when_they_did_nothing() -> None:
    summary = summarize(
        [record(0.0, 0.1, 1.0, 2)], instances=["idle", "a"], counted={"a": {"preemptions": 3, "kv_peak": 0.5}}
    )
    idle, a = summary["instances"]
    assert (idle["name"], idle["completed"], idle["last_finish_s"]) == ("idle", 0, 0.0)
    assert (a["preemptions"], a["kv_peak"]) == (3, 0.5)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 20), st.floats(0, 50), st.integers(1, 400)), min_size=1
    ),
    st.lists(st.floats(-1, 300), max_size=5),
)
def test_windows_side_by_side_hold_every_token_once(
    requests: list[tuple[float, float, float, int]], cuts: list[float]
) -> None:
    done = [record(due, due + wait, due + wait + run, output) for due, wait, run, output in requests]
    edges = [-1.0, *sorted(cuts), 1e4]
    found = sum(tokens_within(r, a, b) for r in done for a, b in pairwise(edges))
    assert found == pytest.approx(sum(r.prompt_tokens + r.output_tokens for r in done))


def test_the_steady_part_of_a_steady_stream_has_no_drain() -> None:
    """Ten requests a second of 10 + 91 tokens, 5 s long each, for 60 s; one answer goes on for 100 s."""
    stream = [record(i / 10, i / 10 + 0.5, i / 10 + 5.5, 91) for i in range(600)]
    summary = summarize([*stream, record(59.0, 59.5, 160.0, 91)])
    steady = summary["steady"]
    assert steady["to_s"] == pytest.approx(59.9)
    assert steady["from_s"] == pytest.approx(0.2 * 59.9)
    assert steady["drain_s"] == pytest.approx(100.1)
    assert steady["total_token_throughput"] == pytest.approx(1010, rel=0.01)
    assert steady["offered_token_throughput"] == pytest.approx(1010, rel=0.01)
    assert steady["request_throughput"] == pytest.approx(10, rel=0.01)
    assert summary["total_token_throughput"] < 400


def test_all_at_once_is_steady_while_something_waits() -> None:
    steady = summarize([record(0.0, float(i), i + 1.0, 1) for i in range(1, 11)])["steady"]
    assert steady["to_s"] == 10.0
    assert steady["drain_s"] == 1.0
    assert steady["offered_token_throughput"] is None
    assert summarize([])["steady"]["total_token_throughput"] == 0.0
