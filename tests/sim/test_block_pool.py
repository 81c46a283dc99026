"""Shows that the block pool conserves blocks: never negative, never above the total, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.sim.block_pool import BlockPool, blocks_for
from hetlb.tools.sim.engine_limits import EngineLimits


@pytest.mark.parametrize(
    ("tokens", "block_size", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)]
)
def test_blocks_for(tokens: int, block_size: int, blocks: int) -> None:
    assert blocks_for(tokens, block_size) == blocks


def test_limits_round_down_to_whole_blocks_and_hold_at_least_one() -> None:
    assert EngineLimits(100, 16).kv_blocks == 6
    for tokens, size in ((0, 16), (15, 16), (4, 0), (-1, 16), (4, -16)):
        with pytest.raises(ValueError, match="expected at least"):
            EngineLimits(tokens, size)


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.extend(0, 40)
    assert not pool.extend(0, 17)
    assert not pool.extend(40, 65)
    assert (pool.used_blocks, pool.free_blocks, pool.usage) == (3, 1, 0.75)
    assert pool.extend(40, 48)  # the same three blocks
    assert pool.extend(48, 49)
    assert pool.free_blocks == 0
    pool.release(49)
    assert pool.used_blocks == 0


def test_our_own_bugs_are_assertions() -> None:
    pool = BlockPool(4, 16)
    assert pool.extend(0, 16)
    with pytest.raises(AssertionError, match="at most 1 blocks back"):
        pool.release(17)
    with pytest.raises(AssertionError, match="expected 4 free blocks"):
        pool.take(4)
    with pytest.raises(AssertionError, match="to grow"):
        pool.extend(16, 15)
    assert pool.used_blocks == 1


@given(
    total=st.integers(1, 30),
    size=st.integers(1, 20),
    actions=st.lists(st.tuples(st.sampled_from("rgx"), st.integers(0, 200), st.integers(0, 9))),
)
def test_blocks_are_conserved(total: int, size: int, actions: list[tuple[str, int, int]]) -> None:
    """Any mix of new holders, growth and release: used is the sum over the holders, within the total."""
    pool = BlockPool(total, size)
    held: list[int] = []
    for action, tokens, which in actions:
        if action == "r":
            fits = blocks_for(tokens, size) <= pool.free_blocks
            assert pool.extend(0, tokens) is fits
            if fits:
                held.append(tokens)
        elif held and action == "g":
            index = which % len(held)
            if pool.extend(held[index], held[index] + tokens):
                held[index] += tokens
        elif held:
            pool.release(held.pop(which % len(held)))
        assert pool.used_blocks == sum(blocks_for(tokens, size) for tokens in held) <= total
    for tokens in held:
        pool.release(tokens)
    assert pool.used_blocks == 0
