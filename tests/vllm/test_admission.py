"""Prompts of models with windows: as many are admitted in simulation as by vLLM's own KV cache manager."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines import VENV_PYTHON

from hetlb.balancer.core.kv_need import kv_need
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.kv_blocks import KvBlocks

pytestmark = pytest.mark.vllm

#: Groups of layers in full and of windows, and the window: gpt-oss, Gemma 3, EXAONE 4, Mistral 7B.
SHAPES = ((1, 1, 128), (1, 5, 1024), (1, 3, 4096), (0, 1, 4096), (2, 3, 512))


def cases() -> list[dict[str, Any]]:
    rng, found = random.Random(1), []
    for full, window, tokens in SHAPES:
        for longest in (300, 3000, 20_000):
            prompts = [rng.randint(1, longest) for _ in range(400)]
            sizes = {
                "full": full,
                "window": window,
                "window_tokens": tokens,
                "block_size": 16,
                "batched": 2048,
            }
            found.append({**sizes, "blocks": 60 * 128 * (full + window), "prompts": prompts})
    return found


def admitted(asked: dict[str, Any]) -> tuple[int, float]:
    """Return how many of the prompts run at once, and the share of the KV cache that they have."""
    full, window, block = asked["full"], asked["window"], asked["block_size"]
    need = kv_need(float(full), [(asked["window_tokens"], float(window))], 0.0)
    tokens = asked["blocks"] // (full or window) * block
    limits = EngineLimits(tokens, block, len(asked["prompts"]), asked["batched"], need=need)
    kv = KvBlocks(limits, shared=False)
    for number, tokens in enumerate(asked["prompts"]):
        sequence = EngineSequence(tokens, 1)
        kv.begin(sequence)
        if kv.find(sequence, tokens) is None:
            return number, kv.pool.usage
        assert kv.extend(0, tokens)
    return len(asked["prompts"]), kv.pool.usage


def test_as_many_prompts_are_admitted_as_by_vllm() -> None:
    asked = cases()
    script = Path(__file__).with_name("admit_windows.py")
    done = subprocess.run(
        [str(VENV_PYTHON), str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case, theirs in zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True):
        ours, used = admitted(case)
        what = {key: value for key, value in case.items() if key != "prompts"}
        assert abs(ours - theirs["admitted"]) <= max(1, 0.03 * theirs["admitted"]), (what, ours, theirs)
        assert abs(used - theirs["used"] / case["blocks"]) < 0.03, (what, used, theirs)
