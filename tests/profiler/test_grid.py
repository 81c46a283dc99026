"""Grids fit the server they are clipped to; the token budget is read from what iterations were counted."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.types import Capacity
from hetlb.tools.profiler.grid import DECODE_ROOM_TOKENS, DEFAULT_GRID, StepKind, clip, token_budget


def test_a_roomy_server_is_measured_on_the_default_grid() -> None:
    capacity = Capacity(kv_cache_tokens=2_000_000, block_size=16, max_num_seqs=1025, max_model_len=131072)
    assert set(clip(DEFAULT_GRID, capacity)) == set(DEFAULT_GRID)
    assert set(clip(DEFAULT_GRID, Capacity())) == set(DEFAULT_GRID)


@given(
    blocks=st.integers(40, 100_000),
    block=st.sampled_from([1, 16, 128]),
    seqs=st.integers(1, 300),
    longest=st.integers(300, 200_000),
)
def test_every_point_fits_the_server(blocks: int, block: int, seqs: int, longest: int) -> None:
    capacity = Capacity(
        kv_cache_tokens=blocks * block, block_size=block, max_num_seqs=seqs, max_model_len=longest
    )
    sizes = clip(DEFAULT_GRID, capacity)
    assert len(sizes) == len(set(sizes))
    for size in sizes:
        room = DECODE_ROOM_TOKENS if size.phase is StepKind.DECODE else 1
        assert 1 <= size.batch <= seqs
        assert size.length + room <= longest
        assert size.batch * math.ceil((size.length + room) / block) <= blocks


def test_mixed_steps_are_measured_at_the_most_sequences_of_the_server() -> None:
    capacity = Capacity(kv_cache_tokens=400_000, block_size=16, max_num_seqs=200, max_model_len=40_000)
    mixed = [size for size in clip(DEFAULT_GRID, capacity) if size.phase is StepKind.MIXED]
    assert max(size.batch for size in mixed) == 199  # and one prompt
    assert max(size.length for size in mixed) == 32768


def test_a_small_server_still_gets_enough_points() -> None:
    capacity = Capacity(kv_cache_tokens=29056, block_size=128, max_num_seqs=64, max_model_len=2048)
    for phase in StepKind:
        sizes = [size for size in clip(DEFAULT_GRID, capacity) if size.phase is phase]
        assert len(sizes) >= (8 if phase is StepKind.MIXED else 12)
        assert len({size.length for size in sizes}) >= 3


def iterations(batch: int, length: int, budget: int) -> int:
    """Return the number of passes of `budget` tokens over the prompts in order in which a prompt ends."""
    counted, left = 0, [length] * batch
    while left:
        room, ended = budget, False
        while left and room:
            taken = min(left[0], room)
            room -= taken
            left[0] -= taken
            if not left[0]:
                left.pop(0)
                ended = True
        counted += ended
    return counted


@given(budget=st.sampled_from([512, 1024, 2048, 4096, 8192, 16384]))
def test_the_token_budget_shows_in_the_default_grid(budget: int) -> None:
    observed = [
        (size.batch, size.length, iterations(size.batch, size.length, budget))
        for size in DEFAULT_GRID
        if size.phase is StepKind.PREFILL
    ]
    assert token_budget(observed) == budget


def test_an_unreadable_budget_is_not_guessed() -> None:
    assert token_budget([(1, 128, 1)]) is None  # any budget from 128
    assert token_budget([(16, 512, 7)]) is None  # none gives seven
