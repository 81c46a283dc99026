"""Records of several relays: all of them, in order, as far as every relay has reported."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from proxy.dashboard.rows import ended

from hetlb.core.types import Outcome
from hetlb.proxy.telemetry.history import History
from hetlb.workers.relay_reports import FleetRecords


def _rows(*times: float) -> list[tuple[Any, ...]]:
    history = History()
    for at in times:
        history.add(ended(at))
    return history.rows_since(0)


def test_a_row_comes_as_it_went() -> None:
    history = History()
    history.add(ended(0.1 + 0.2, used=120, tokens=33))
    history.add(ended(5.0, placed=False, outcome=Outcome.REJECTED_FULL))
    rows = FleetRecords()
    rows.add(2, msgspec.msgpack.encode(history.rows_since(0)))
    rows.complete_until = 5.0
    assert list(rows.history.copy()) == list(history.copy())
    assert all(type(row) is tuple for row in rows.history.rows_since(0))


def test_records_wait_for_relays_that_have_not_reported() -> None:
    rows = FleetRecords()
    rows.add(3, msgspec.msgpack.encode(_rows(1.0, 4.0, 6.0)))
    assert len(rows.history) == 0
    rows.complete_until = 4.0
    assert [row.ended_at for row in rows.history.copy()] == [1.0, 4.0]
    rows.add(2, msgspec.msgpack.encode(_rows(4.5, 5.0)))
    rows.complete_until = 6.0
    assert [row.ended_at for row in rows.history.copy()] == [1.0, 4.0, 4.5, 5.0, 6.0]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), st.booleans()), max_size=20),
    st.integers(1, 12),
)
def test_reading_changes_nothing(told: list[tuple[list[int], bool]], size: int) -> None:
    looked, not_looked, now, every = FleetRecords(size), FleetRecords(size), 0, []
    for gaps, looks in told:
        times = []
        for gap in gaps:
            now += gap
            times.append(float(now))
        every += times
        for rows in (looked, not_looked):
            if times:
                rows.add(len(times), msgspec.msgpack.encode(_rows(*times)))
            rows.complete_until = float(now)
        if looks:
            assert [row.ended_at for row in looked.history.copy()] == every[-size:]
            assert looked.history.added == len(every)
    assert list(looked.history.newest_first()) == list(not_looked.history.newest_first())
    assert [row.ended_at for row in not_looked.history.copy()] == every[-size:]
    assert not_looked.history.added == len(every)
