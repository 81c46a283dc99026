"""The search for the highest rate finds it from wherever it starts, and ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.loadtest.campaign import MAX_PROBES, RESOLUTION, RateSearch

RATES = st.floats(0.1, 1000.0)


def search(limit_rps: float, starts: list[float]) -> tuple[RateSearch, list[float]]:
    found, probes = RateSearch(1.0), []
    for rate in starts:
        found.add(rate, rate <= limit_rps)
    while (rate := found.next_rate_rps()) is not None:
        probes.append(rate)
        found.add(rate, rate <= limit_rps)
    return found, probes


@given(RATES, st.lists(RATES, min_size=1, max_size=4))
def test_it_finds_the_limit(limit_rps: float, starts: list[float]) -> None:
    found, probes = search(limit_rps, starts)
    assert len(probes) <= MAX_PROBES
    if found.highest_met_rps is not None:
        assert found.highest_met_rps <= limit_rps
    if found.lowest_missed_rps is not None:
        assert found.lowest_missed_rps > limit_rps
    if len(probes) < MAX_PROBES:
        assert found.highest_met_rps is not None
        assert found.lowest_missed_rps is not None
        assert found.lowest_missed_rps <= found.highest_met_rps * (1 + RESOLUTION)


def test_nothing_meets_or_nothing_misses() -> None:
    found, probes = search(0.0, [8.0])
    assert (found.highest_met_rps, len(probes)) == (None, MAX_PROBES)
    assert probes[:2] == [4.0, 2.0]
    found, probes = search(float("inf"), [8.0])
    assert (found.lowest_missed_rps, probes[:2]) == (None, [16.0, 32.0])


def test_a_rate_above_one_that_missed_is_not_the_answer() -> None:
    """A measurement may be lucky."""
    found = RateSearch(1.0)
    for rate, met in ((2.0, True), (4.0, False), (8.0, True)):
        found.add(rate, met)
    assert (found.highest_met_rps, found.lowest_missed_rps) == (2.0, 4.0)
    assert found.next_rate_rps() == pytest.approx(8**0.5)
