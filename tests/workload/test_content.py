"""Keys of prompts are equal exactly as far as their text is."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.clients.prompt_keys import FIRST_TOKENS, cuts
from hetlb.tools.workload.rows import UNSHARED, PromptContent, Row, block_tokens, contents_of

#: A prompt as the choices made on its way down a tree; the name of a span says which way it went.
PATHS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([100, 256, 700])), min_size=1, max_size=6)


def prompt(path: list[tuple[int, int]]) -> PromptContent:
    return PromptContent(
        tuple(((turn, choice, length), length) for turn, (choice, length) in enumerate(path))
    )


def text(path: list[tuple[int, int]], own: int, tokens: int) -> list[object]:
    named = [(turn, *way, i) for turn, way in enumerate(path) for i in range(way[1])]
    return [*named, *(("own", own, i) for i in range(tokens))][:tokens]


@given(PATHS, PATHS, st.integers(0, 3000), st.integers(0, 3000))
def test_keys_agree_exactly_where_the_text_does(
    one: list[tuple[int, int]], other: list[tuple[int, int]], more: int, again: int
) -> None:
    lengths = [sum(length for _, length in path) + extra for path, extra in ((one, more), (other, again))]
    first, second = (
        {tokens: name for name, tokens in prompt(path).keys(own, length)}
        for own, (path, length) in enumerate(zip((one, other), lengths, strict=True))
    )
    ends = [*accumulate(length for _, length in one), lengths[0]]
    assert list(first) == list(cuts(ends, lengths[0], FIRST_TOKENS))
    for end in set(first) & set(second):
        alike = text(one, 0, lengths[0])[:end] == text(other, 1, lengths[1])[:end]
        assert (first[end] == second[end]) == alike, end


def test_a_session_is_named_first() -> None:
    content = contents_of([Row(None, 600, 5, session="s", turn="0")])[0]
    assert content.keys(0, 600)[0] == ("session:s", None)
    assert [tokens for _, tokens in content.keys(0, 600)[1:]] == [256, 512, 600]


def test_a_conversation_follows_what_its_blocks_name() -> None:
    rows = [
        Row(None, 700, 10, session="s", turn="0", hash_ids=("a=400", "b")),
        Row(None, 900, 10, session="s", turn="1"),
        Row(None, 950, 10, session="s", turn="2", hash_ids=("c=400",)),
    ]
    first, second, third = contents_of(rows, 100)
    assert first.spans[:2] == ((("", "a", 400), 400), (("", "b", 100), 100))
    assert second.spans[: len(first.spans) + 1] == (*first.spans, (first.answer, 10))
    assert [sum(length for _, length in content.spans) for content in (first, second, third)] == [
        700,
        900,
        950,
    ]
    assert third.spans[0] == (("", "c", 400), 400), "expected another beginning to begin anew"


def test_what_shares_nothing_is_unshared() -> None:
    assert contents_of([Row(None, 10, 10)])[0] is UNSHARED


@given(st.sampled_from([16, 32, 256, 512, 1024]), st.lists(st.integers(1, 40_000), min_size=1), st.booleans())
def test_the_size_of_a_block_is_read_from_the_lengths(size: int, lengths: list[int], whole: bool) -> None:
    lengths = [*lengths, 40 * size + 1]
    rows = [
        Row(None, tokens, 1, hash_ids=tuple(map(str, range((tokens + (size - 1) * whole) // size))))
        for tokens in lengths
    ]
    expected = size if whole else min(size, 512)
    assert block_tokens(rows) == expected


def test_the_size_of_a_block_without_blocks_is_mooncakes() -> None:
    assert block_tokens([Row(None, 5, 1), Row(None, 9, 1, hash_ids=("sys=3",))]) == 512
