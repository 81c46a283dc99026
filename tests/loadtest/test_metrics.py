"""The figures that a run adds to vLLM's, on made-up records, and the picture of them."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.loadtest.load_result import LoadResult, peak_concurrency
from hetlb.tools.loadtest.result_tables import latency_table, write_load_plot
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import RequestResult
from hetlb.tools.workload.rows import Row


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


def measured(policy: str | None, rate: float | str, *records: RequestResult) -> LoadResult:
    found = result(*records)
    found.run = {"policy": policy, "round": 1, "request_rate": rate, **found.figures()}
    return found


@pytest.mark.parametrize("named", [True, False])
def test_the_picture_shows_every_run(tmp_path: Path, named: bool) -> None:
    names = "ab" if named else [""]
    records = [record(0.1 * i, name=names[i % len(names)]) for i in range(20)]
    runs = [
        measured("rr", 2.0, *records),
        measured("rr", 2.0, *records[:4]),
        measured("p2c", "inf", *records[4:]),
    ]
    runs.append(measured(None, 1.0))  # nothing ended well
    picture = tmp_path / "p.svg"
    write_load_plot(picture, runs)
    assert picture.read_bytes().startswith(b"<?xml")


def test_events_of_several_tokens_are_told() -> None:
    several = [record(float(i)) for i in range(10)]
    for each in several:
        each.output_tokens = 21
    run = result(*several).figures()
    assert run["tokens_per_event"] == 7.0
    whole = record(0.0)
    whole.itl_s, whole.first_token_s = None, None
    assert result(whole).figures()["tokens_per_event"] is None
    [alone] = [measured(None, 1.0, record(0.0)).run]
    assert alone["tokens_per_event"] == 1.0
    for figures, said in ((run | {"policy": None, "request_rate": 1.0, "round": 1}, True), (alone, False)):
        caption = str(latency_table([figures], ["ttft", "itl"], [99]).caption)
        assert ("which hold 7.0 tokens" in caption) == said
