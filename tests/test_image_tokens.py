"""Tokens of an image by the rules of published models.

The figures are what the processors of transformers 4.57.1 give for these sizes. 20,000 random sizes of 8 to
6,000 pixels a side agreed as well, for every rule.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.image_tokens import NAMED_RULES, LongestEdge, PixelBounds, Tiles

#: By width and height: qwen2.5-vl, qwen3-vl, llava-next, pixtral, mistral-small-3.1, internvl, llama-4.
RULES = ("qwen2.5-vl", "qwen3-vl", "llava-next", "pixtral", "mistral-small-3.1", "internvl", "llama-4")
TOKENS = {
    (23, 23): (6, 66, 1176, 6, 2, 258, 147),
    (224, 224): (66, 66, 1176, 210, 72, 258, 147),
    (640, 480): (393, 302, 2340, 1230, 432, 3330, 727),
    (512, 1024): (668, 514, 1776, 2112, 740, 770, 1307),
    (1000, 1000): (1298, 963, 2928, 4032, 1332, 2562, 1452),
    (1920, 1080): (2693, 2042, 1948, 2340, 1736, 2306, 2322),
    (1080, 1920): (2693, 2042, 1968, 2368, 1760, 2306, 2322),
    (4000, 3000): (15303, 11752, 2340, 3120, 2352, 3330, 1887),
    (6000, 400): (2998, 2258, 868, 325, 224, 3330, 2322),
}


@pytest.mark.parametrize("size", TOKENS)
@pytest.mark.parametrize("name", RULES)
def test_the_processors_of_published_models(name: str, size: tuple[int, int]) -> None:
    assert NAMED_RULES[name].tokens(*size) == TOKENS[size][RULES.index(name)]


def test_models_of_one_size() -> None:
    assert NAMED_RULES["llava-1.5"].tokens(4000, 10) == 24 * 24
    assert NAMED_RULES["gemma-3"].tokens(4000, 10) == 256 + 4


@given(st.sampled_from(sorted(NAMED_RULES)), st.integers(1, 1 << 17), st.integers(1, 1 << 17))
def test_every_size_has_a_number_of_tokens(name: str, width: int, height: int) -> None:
    assert 1 <= NAMED_RULES[name].tokens(width, height) < 300_000


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_limits_bound_the_tokens(width: int, height: int) -> None:
    if max(width, height) <= 200 * min(width, height):
        bounded = PixelBounds(patch=14, merge=2, min_pixels=3136, max_pixels=1_003_520, markers=0)
        assert 4 <= bounded.tokens(width, height) <= 1280
    assert LongestEdge(patch=16, merge=1, longest_edge=512).tokens(width, height) <= 32 * 33
    assert Tiles(tile=448, tile_tokens=256, max_tiles=4, markers=0).tokens(width, height) <= 5 * 256
