"""Degrees that `hetlb search` takes for a model, held against the checks of the installed vLLM.

vLLM's own classes are asked in its own environment, on the meta device, with a pretended number of GPUs:
heads (`ModelConfig.verify_with_parallel_config`), KV heads, vocabulary and feed-forward sizes (its parallel
layers), blocks of quantised weights (`validate_fp8_block_shape`, the group test of Marlin).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import answered

from hetlb.tools.models.degrees import ModelShape, refusal
from hetlb.tools.models.model_facts import read_facts

pytestmark = pytest.mark.vllm

CONFIGS = json.loads((Path(__file__).parents[1] / "models/data/degrees.json").read_text())
DEGREES = (2, 4, 6, 8)


def shape_of(name: str) -> ModelShape:
    return read_facts(CONFIGS[name], name).shape


@pytest.mark.timeout(1800)
def test_degrees_are_accepted_by_vllm() -> None:
    asked = {
        name: {**raw, "_sizes": [size for _, size in (*shape.feed_forward, *shape.experts)]}
        for name, raw in CONFIGS.items()
        if (shape := shape_of(name))
    }
    question = json.dumps({"models": asked, "degrees": DEGREES})
    said = json.loads(answered("ask_degrees.py", question=question).splitlines()[-1])
    wrong = []
    for name in CONFIGS:
        shape = shape_of(name)
        for degree in DEGREES:
            ours, theirs = refusal(shape, degree), said[name][str(degree)]
            if bool(ours) != bool(theirs):
                wrong.append(f"{name}, degree {degree}: hetlb {ours!r}, vLLM {theirs!r}")
    assert not wrong, "\n".join(wrong)
    assert any(refusal(shape_of(name), 6) for name in CONFIGS)
    assert any(not refusal(shape_of(name), 6) for name in CONFIGS)
