"""Admit prompts to vLLM's own KV cache manager until it refuses one; print how many, and blocks in use.

Reads a list of {"full", "window" (groups of KV cache), "window_tokens", "blocks", "block_size", "batched",
"prompts"} as JSON. Each prompt is computed in parts of `batched` tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request


def admit(asked: dict[str, Any]) -> dict[str, int]:
    """Return how many of the prompts vLLM admits."""
    sizes = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    block, batched = asked["block_size"], asked["batched"]
    groups = [KVCacheGroupSpec([f"f{i}"], FullAttentionSpec(block, **sizes)) for i in range(asked["full"])]
    window = SlidingWindowSpec(block, sliding_window=asked["window_tokens"], **sizes)
    groups += [KVCacheGroupSpec([f"w{i}"], window) for i in range(asked["window"])]
    # One block of the pool is vLLM's own.
    config = KVCacheConfig(num_blocks=asked["blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config,
        max_model_len=1 << 17,
        scheduler_block_size=block,
        hash_block_size=block,
        max_in_flight_tokens=batched,
        enable_caching=False,
    )
    pool = manager.block_pool
    for number, tokens in enumerate(asked["prompts"]):
        request = Request(
            request_id=str(number),
            prompt_token_ids=[0] * tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
        )
        while request.num_computed_tokens < tokens:
            part = min(batched, tokens - request.num_computed_tokens)
            first = request.num_computed_tokens == 0
            if manager.allocate_slots(request, part, full_sequence_must_fit=first) is None:
                return {
                    "admitted": number,
                    "used": asked["blocks"] - manager.block_pool.get_num_free_blocks(),
                }
            request.num_computed_tokens += part
        manager.remove_skipped_blocks(request.request_id, tokens, num_prompt_tokens=tokens)
    return {"admitted": len(asked["prompts"]), "used": asked["blocks"] - pool.get_num_free_blocks()}


print(json.dumps([admit(each) for each in json.load(sys.stdin)]))
