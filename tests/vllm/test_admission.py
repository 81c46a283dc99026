"""Blocks that a sequence gets of a KV cache, and the number admitted, against vLLM's own code."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from forks import answered

from hetlb.balancer.config.profile_file import kv_need
from hetlb.tools.models.kv_groups import KvBytes, allocated, parts_of
from hetlb.tools.models.layer import Mixer, Scope
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.kv_blocks import KvBlocks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

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


def parsed(script: str, asked: Any) -> Any:
    """Return the answer of a script, as JSON."""
    return json.loads(answered(script, question=json.dumps(asked)).splitlines()[-1])


def test_as_many_prompts_are_admitted_as_by_vllm() -> None:
    asked = cases()
    for case, theirs in zip(asked, parsed("admit_windows.py", asked), strict=True):
        ours, used = admitted(case)
        what = {key: value for key, value in case.items() if key != "prompts"}
        assert abs(ours - theirs["admitted"]) <= max(1, 0.03 * theirs["admitted"]), (what, ours, theirs)
        assert abs(used - theirs["used"] / case["blocks"]) < 0.03, (what, used, theirs)


def models() -> list[list[Mixer]]:
    """Return layers of models, some as they are public, others drawn: values of 2 bytes."""
    rng = random.Random(2)
    gemma = [Mixer(Scope.WINDOW, window_tokens=1024, window=4096.0)] * 52
    gemma += [Mixer(Scope.FULL, grows=4096.0)] * 10
    nemotron = [Mixer(Scope.STATE, state_bytes=4_255_744)] * 23 + [Mixer(Scope.FULL, grows=512.0)] * 6
    kimi = [Mixer(Scope.STATE, state_bytes=1_245_184)] * 20 + [Mixer(Scope.LATENT, grows=576.0)] * 7
    found = [gemma, nemotron, kimi, [Mixer(Scope.LATENT, grows=576.0)] * 61]
    for _ in range(200):
        layers = [Mixer(Scope.FULL, grows=rng.choice((512.0, 1024.0, 1536.0)))] * rng.randint(1, 20)
        for scope in (Scope.WINDOW, Scope.CHUNK, Scope.STATE):
            if rng.random() < 0.5:
                tokens, values = rng.choice((128, 1024, 8192)), rng.choice((512.0, 768.0, 1024.0, 2048.0))
                one = Mixer(scope, window_tokens=tokens, window=values)
                if scope is Scope.STATE:
                    one = Mixer(scope, state_bytes=2 * rng.randint(1_000, 2_000_000))
                layers += [one] * rng.randint(1, 60)
        found.append(layers)
    return found


def test_sequences_are_given_as_much_as_by_vllm() -> None:
    asked = models()
    parts = [[[*part] for each in layers for part in parts_of(each, 2.0)] for layers in asked]
    for layers, theirs in zip(asked, parsed("group_layers.py", parts), strict=True):
        windows = tuple(sorted((int(tokens), size) for tokens, size in theirs["windows"].items()))
        known = KvBytes(theirs["per_token"], windows, theirs["state"])
        assert allocated(layers, 2.0) == known, {str(part) for each in layers for part in parts_of(each, 2.0)}
