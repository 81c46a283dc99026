"""Positions of prefix keys: alike as far as prompts are alike, of bounded number, at the ends of parts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.clients.prompt_keys import _MOST_KEYS, FIRST_TOKENS, cuts

FIRSTS = st.sampled_from((1, 16, FIRST_TOKENS))
PARTS = st.lists(st.integers(1, 20_000), max_size=12)


def ends_of(parts: list[int]) -> list[int]:
    return [sum(parts[: i + 1]) for i in range(len(parts))]


@given(PARTS, PARTS, PARTS, FIRSTS)
def test_prompts_that_begin_alike_are_cut_alike_up_to_where_they_part(
    common: list[int], one: list[int], other: list[int], first: int
) -> None:
    parted = sum(common)
    found = []
    for rest in (one, other):
        ends = ends_of(common + rest)
        found.append([cut for cut in cuts(ends, ends[-1] if ends else 0, first) if cut <= parted])
    assert found[0] == found[1]


@given(PARTS, FIRSTS, st.integers(0, 5000))
def test_cuts_ascend_within_the_prompt_and_are_few(parts: list[int], first: int, lacking: int) -> None:
    ends = ends_of(parts)
    length = max(0, sum(parts) - lacking)
    found = list(cuts(ends, length, first))
    assert found == sorted(set(found))
    assert all(first <= cut <= length for cut in found)
    assert len(found) <= _MOST_KEYS


@given(PARTS, FIRSTS)
def test_every_part_ends_with_a_cut_unless_one_is_close_before(parts: list[int], first: int) -> None:
    ends = ends_of(parts)
    length = sum(parts)
    found = list(cuts(ends, length, first))
    if len(found) == _MOST_KEYS:
        return
    for end in ends:
        before = max((cut for cut in found if cut < end), default=0)
        assert end in found or end - before < max(first if not before else 1, before // 64)


@given(st.integers(1, 1 << 20), FIRSTS)
def test_inside_one_long_part_at_most_an_eighth_lies_between_cuts(length: int, first: int) -> None:
    found = list(cuts([length], length, first))
    if len(found) == _MOST_KEYS:
        return
    last = 0
    for cut in (*found, length):
        assert cut - last <= max(first, last // 8)
        last = cut


def test_the_number_of_keys_grows_with_the_logarithm_of_the_length() -> None:
    """Each doubling of a long part has about six cuts, so that no prompt has hundreds."""
    counts = [len(list(cuts([1 << power], 1 << power, FIRST_TOKENS))) for power in range(12, 18)]
    assert all(5 <= after - before <= 8 for before, after in pairwise(counts))
