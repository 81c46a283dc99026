"""The ring of ended requests: what is taken down, what makes way, and how a stretch of time is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from proxy.dashboard.rows import ended

from hetlb.core.types import Outcome
from hetlb.proxy.telemetry.history import History


def test_a_row_holds_what_came_of_a_request() -> None:
    history = History()
    history.add(ended(5.0, took_s=2.0, ttft_s=0.5, used=120, tokens=33, expected_s=1.5))
    [row] = history.copy()
    assert (row.arrived_at, row.dispatched_at, row.first_byte_at, row.ended_at) == (3.0, 3.0, 3.5, 5.0)
    assert (row.prompt_tokens_total, row.output_tokens, row.predicted_output) == (120, 33, 8.0)
    assert (row.instance, row.model, row.outcome, row.expected_s) == ("a", "m", "ok", 1.5)


def test_what_no_instance_had_has_no_name_that_a_client_made_up() -> None:
    history = History()
    history.add(ended(5.0, placed=False, outcome=Outcome.REJECTED_FULL))
    [row] = history.copy()
    assert (row.instance, row.model, row.dispatched_at, row.output_tokens) == ("", "", None, 0)


def test_the_oldest_make_way() -> None:
    history = History(3)
    for at in range(5):
        assert history.full == (at > 2)
        history.add(ended(float(at)))
    assert [row.ended_at for row in history.copy()] == [2.0, 3.0, 4.0]
    assert [row.ended_at for row in history.newest_first()] == [4.0, 3.0, 2.0]
    assert (len(history), history.added) == (3, 5)


@given(
    times=st.lists(st.integers(0, 50), max_size=30).map(sorted),
    start=st.integers(-1, 51),
    end=st.integers(-1, 51),
    size=st.integers(1, 40),
)
def test_a_stretch_of_time_is_what_a_plain_search_finds(
    times: list[int], start: int, end: int, size: int
) -> None:
    history = History(size)
    for at in times:
        history.add(ended(float(at)))
    kept = times[-size:]
    found = [row.ended_at for row in history.between(start, end)]
    assert found == [at for at in kept if start <= at < end]
    assert max(0, history.count(start, end)) == len(found)
    before = [at for at in kept if at < end]
    for number in range(1, len(before) + 1):
        assert history.nth_before(end, number) == before[-number]
