"""Binary search in ascending bounds, against the standard library's."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.binary_search import first_at_least

numbers = st.integers(-5, 5).map(float) | st.floats(allow_nan=False)


@given(st.lists(numbers).map(sorted), numbers)
def test_the_index_equals_bisect_left(bounds: list[float], value: float) -> None:
    assert first_at_least(bounds, value) == bisect_left(bounds, value)
