"""Degrees that vLLM accepts: public models by hand, and rules that hold for every shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.models.degrees import ModelShape, refusal
from hetlb.tools.models.layer import Heads
from hetlb.tools.models.model_facts import read_facts

CONFIGS = json.loads((Path(__file__).parent / "data/degrees.json").read_text())


def accepted(name: str) -> list[int]:
    shape = read_facts(CONFIGS[name], name).shape
    return [degree for degree in (1, 2, 4, 6, 8) if not refusal(shape, degree)]


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("meta-llama/Meta-Llama-3.1-70B", [1, 2, 4, 8]),  # 64 heads
        ("tiiuae/falcon-7b", [1]),  # 71 heads
        ("Qwen/Qwen2.5-7B", [1, 2, 4]),  # 28 heads
        ("microsoft/phi-4", [1, 2]),  # 10 KV heads
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", [1]),  # 29568 / 128 = 231 groups of weights
        ("Qwen/Qwen3-30B-A3B-FP8", [1, 2]),  # 768 = 6 blocks of 128, of which 2 GPUs hold whole ones
        ("Qwen/Qwen3-30B-A3B", [1, 2, 4, 8]),
    ],
)
def test_public_models(name: str, degrees: list[int]) -> None:
    assert accepted(name) == degrees


def test_every_config_is_read() -> None:
    assert len(CONFIGS) >= 30
    for name, raw in CONFIGS.items():
        assert 1 in accepted(name)
        assert read_facts({"text_config": raw}, name) == read_facts(raw, name)


@given(
    heads=st.integers(1, 96),
    group=st.integers(1, 8),
    vocab=st.integers(1, 300_000),
    size=st.integers(1, 60_000),
    degree=st.integers(1, 16),
)
def test_what_is_accepted_splits_evenly(heads: int, group: int, vocab: int, size: int, degree: int) -> None:
    kv_heads = max(1, heads // group)
    shape = ModelShape(32, (Heads(heads, kv_heads, 128, 128),), vocab, (("intermediate_size", size),))
    assert refusal(shape, 1) == ""
    if refusal(shape, degree):
        return
    padded = -(-vocab // 64) * 64
    assert (heads % degree, size % degree, padded % degree) == (0, 0, 0)
    assert kv_heads % degree == 0 or degree % kv_heads == 0
    assert "layers" in refusal(shape, degree, 33)
