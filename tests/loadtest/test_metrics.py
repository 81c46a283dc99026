"""The figures that a run adds to vLLM's, on made-up records; and what the pictures show of them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.loadtest.htmlreport import against_rate, distribution, in_flight, output_rate
from hetlb.loadtest.load_result import LoadResult, peak_concurrency
from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.records import RequestResult
from hetlb.workload.rows import Row


def record(
    at: float, *, late: float = 0.0, ttft: float = 0.1, name: str = "a", ok: bool = True
) -> RequestResult:
    """Three tokens, 10 ms apart; `ttft` counts from when it was sent."""
    first = at + late + ttft
    return RequestResult(
        scheduled_s=at,
        prompt_tokens=5,
        output_tokens=3,
        first_token_s=first,
        last_token_s=first + 0.02,
        instance=name,
        ok=ok,
        sent_s=at + late,
        end_s=first + 0.02,
        error="" if ok else "timeout",
        itl_s=array("d", [0.01, 0.01]),
    )


def result(*records: RequestResult) -> LoadResult:
    plan = [PlannedRequest(i, each.scheduled_s, Row(None, 5, 3)) for i, each in enumerate(records)]
    return LoadResult(plan, list(records), 0.1, [0.0])


def test_latency_from_the_due_time_and_from_the_sent_time() -> None:
    figures = result(record(0.0, late=0.05), record(1.0, late=0.05)).figures()
    assert figures["mean_ttft_ms"] == pytest.approx(150)
    assert figures["from_sent"]["mean_ttft_ms"] == pytest.approx(100)
    assert figures["mean_e2el_ms"] - figures["from_sent"]["mean_e2el_ms"] == pytest.approx(50)
    assert figures["mean_client_queue_time_ms"] == pytest.approx(50)


def test_a_request_that_failed_met_no_limit() -> None:
    records = [record(float(i), ttft=0.1 * i) for i in range(4)] + [record(4.0, ok=False)]
    figures = result(*records).figures(goodput_slo_s={"ttft": 0.25})
    assert figures["slo_attainment"] == pytest.approx(3 / 5)
    assert result(*records).figures()["slo_attainment"] is None
    assert result(records[-1]).figures(goodput_slo_s={"ttft": 0.25})["slo_attainment"] == 0.0


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpys(ttfts: list[float], percent: float) -> None:
    figures = result(*(record(0.0, ttft=ttft) for ttft in ttfts)).figures(percentiles=[percent])
    assert figures[f"p{percent:g}_ttft_ms"] == pytest.approx(1e3 * np.percentile(ttfts, percent))
    assert figures[f"p{percent:g}_itl_ms"] == pytest.approx(10)


def test_every_instance_by_itself_also_one_that_got_nothing() -> None:
    records = record(0.0), record(0.0, ttft=0.3), record(0.0, ttft=0.5, name="b"), record(0.0, ok=False)
    run = result(*records).figures(instances=["a", "b", "c"])
    a, b, c = run["instances"]
    assert (a["completed"], a["failed"], a["median_ttft_ms"]) == (2, 1, pytest.approx(200))
    assert (b["completed"], b["failed"], b["p99_ttft_ms"]) == (1, 0, pytest.approx(500))
    assert (c["completed"], c["median_ttft_ms"]) == (0, 0.0)


def test_the_most_requests_in_flight() -> None:
    assert peak_concurrency([record(0.0), record(0.05), record(5.0)]) == 2
    assert peak_concurrency([]) == 0
    open_end = record(0.0)
    open_end.end_s = None
    assert peak_concurrency([open_end, record(5.0)]) == 2


def test_details_of_every_request() -> None:
    never_sent = RequestResult(scheduled_s=1.0, prompt_tokens=5, error="connect: refused")
    of_two = result(record(0.0), never_sent)
    of_two.plan = [PlannedRequest(0, 0.0, Row(None, 5, 3, session="a", turn="2")), of_two.plan[1]]
    found = of_two.details()
    assert found["output_lens"] == [3, 0]
    assert found["errors"] == ["", "connect: refused"]
    assert found["start_times"] == [0.0, None]
    assert found["itls"] == [[0.01, 0.01], []]
    assert {len(values) for values in found.values()} == {2}
    assert (found["session_ids"], found["turns"]) == (["a", None], ["2", None])
    assert "turns" not in result(record(0.0)).details()


# --- pictures -----------------------------------------------------------------------------------------


def measured(policy: str | None, rate: float | str, ttft_ms: float, *records: RequestResult) -> LoadResult:
    client = {"verdict": "VALID"}
    found = result(*records)
    found.run = {"policy": policy, "request_rate": rate, "p99_ttft_ms": ttft_ms, "client": client}
    return found


def test_rounds_are_averaged_and_what_has_no_rate_is_left_out() -> None:
    runs = [
        measured("rr", 2.0, 10.0),
        measured("rr", 2.0, 20.0),
        measured("rr", 1.0, 5.0),
        measured("p2c", "inf", 9.0),
    ]
    lines = against_rate(runs, "p99_ttft_ms")
    assert lines == {"rr": [(1.0, 5.0), (2.0, 15.0)], "p2c": []}


@given(st.lists(st.floats(0.001, 10), max_size=1000))
def test_a_distribution_rises_to_one(ttfts: list[float]) -> None:
    points = distribution([measured("rr", 2.0, 0.0, *(record(0.0, ttft=ttft) for ttft in ttfts))], "ttft")
    assert bool(points) == bool(ttfts)
    assert points == sorted(points)
    if points:
        assert points[-1] == (pytest.approx(1e3 * max(ttfts)), 1.0)


def test_timelines_count_everything_once() -> None:
    records = [record(0.1 * i, name="ab"[i % 2]) for i in range(20)]
    rates = output_rate(records, ["a", "b"])
    for points in rates.values():
        (start, _), (then, _) = points[:2]
        assert sum(value for _, value in points) * (then - start) == pytest.approx(30)
    lines = in_flight(records, ["a", "b"])
    assert list(lines) == ["a", "b"]
    assert all(points[-1][1] == 0 for points in lines.values())
    assert max(value for points in lines.values() for _, value in points) == 1
    assert list(in_flight(records, [])) == ["all"]
    assert {value for _, value in in_flight([], [])["all"]} == {0}
