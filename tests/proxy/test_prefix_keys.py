"""Names of what prompts begin with: alike where they are, told apart where they are not, of bounded cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetlb.proxy.prefix_keys import prefix_keys_of


def test_the_next_turn_begins_like_the_last_one() -> None:
    last = b'[{"role":"user","content":"' + b"x" * 5000 + b'"}]'
    following = last[:-1] + b',{"role":"assistant","content":"yes"}]'
    before, after = prefix_keys_of(None, last, 1250), prefix_keys_of(None, following, 1260)
    assert [name for name, _ in before] == [name for name, _ in after]
    assert [tokens for _, tokens in before] == [254, 508, 1017]


def test_a_session_stands_for_all_it_has_had() -> None:
    assert prefix_keys_of(b"chat-7", b"", 10) == (("session:chat-7", None),)
    for odd in (b"", b"two words", b"x" * 257, "ä".encode()):
        assert prefix_keys_of(odd, b"short", 10) == ()


@given(st.binary(min_size=1024, max_size=9000), st.binary(min_size=1024, max_size=9000), st.integers(1, 5000))
def test_names_agree_exactly_where_the_texts_do(one: bytes, other: bytes, tokens: int) -> None:
    names = prefix_keys_of(None, one, tokens)
    others = prefix_keys_of(None, other, tokens)
    sizes = [1024 << i for i in range(len(names))]
    for i, size in enumerate(sizes[: len(others)]):
        assert (names[i][0] == others[i][0]) == (one[:size] == other[:size])
    counts = [count for _, count in names]
    assert counts == sorted(counts)  # type: ignore[type-var]
    assert all(count is not None and 0 <= count <= tokens for count in counts)


def test_a_long_text_has_seven_names_at_most() -> None:
    assert len(prefix_keys_of(None, b"y" * (1 << 20), 1000)) == 7
