"""Degrees that `hetlb search` takes for a model, held against the checks of the installed vLLM.

vLLM's own classes are asked in its own environment, on the meta device, with a pretended number of GPUs:
heads (`ModelConfig.verify_with_parallel_config`), KV heads, vocabulary and feed-forward sizes (its parallel
layers), blocks of quantised weights (`validate_fp8_block_shape`, the group test of Marlin).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from engines import VENV_PYTHON

from hetlb.plan.model_shape import read_shape, refusal

pytestmark = pytest.mark.vllm

CONFIGS = json.loads((Path(__file__).parents[1] / "plan/data/model_configs.json").read_text())
DEGREES = (2, 4, 6, 8)


@pytest.mark.timeout(1800)
def test_degrees_are_those_that_vllm_accepts() -> None:
    asked = {
        name: {**raw, "_sizes": [size for _, size in read_shape(raw).feed_forward]}
        for name, raw in CONFIGS.items()
    }
    script = Path(__file__).with_name("ask_degrees.py")
    done = subprocess.run(
        [str(VENV_PYTHON), str(script)],
        input=json.dumps({"models": asked, "degrees": DEGREES}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    wrong = []
    for name, raw in CONFIGS.items():
        shape = read_shape(raw)
        for degree in DEGREES:
            ours, theirs = refusal(shape, degree), said[name][str(degree)]
            if bool(ours) != bool(theirs):
                wrong.append(f"{name}, degree {degree}: hetlb {ours!r}, vLLM {theirs!r}")
    assert not wrong, "\n".join(wrong)
    assert any(refusal(read_shape(raw), 6) for raw in CONFIGS.values())
    assert any(not refusal(read_shape(raw), 6) for raw in CONFIGS.values())
