"""Asks the installed vLLM which tensor-parallel degrees it accepts for models; run in its environment.

Reads {"models": {name: config}, "degrees": [..]} from stdin; its last line is {name: {degree: refusal}}.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.vocab_parallel_embedding as vocabulary
import vllm.model_executor.parameter as parameter
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.utils import divide
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    validate_fp8_block_shape,
    validate_fp8_block_shape_moe,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils import verify_group_size_divides_partition


def ask(config: dict[str, Any], degree: int) -> None:
    """Raise what vLLM raises."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    ModelConfig.verify_with_parallel_config(
        SimpleNamespace(  # type: ignore
            model_arch_config=SimpleNamespace(total_num_attention_heads=heads), multimodal_config=None
        ),
        SimpleNamespace(  # type: ignore
            enable_hc_sp=False,
            tensor_parallel_size=degree,
            enable_expert_parallel=False,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
    )
    vocabulary.VocabParallelEmbedding(config["vocab_size"], hidden)
    quantization = config.get("quantization_config", {})
    block, group = quantization.get("weight_block_size"), quantization.get("group_size")
    latent = "kv_lora_rank" in config
    head_dim = config.get("v_head_dim", 128) if latent else config.get("head_dim") or hidden // heads
    if not latent:
        qkv = linear.QKVParallelLinear(hidden, head_dim, heads, config.get("num_key_value_heads") or heads)
        if block:
            validate_fp8_block_shape(qkv, hidden, qkv.output_size, hidden, qkv.output_partition_sizes, block)
    out = linear.RowParallelLinear(heads * head_dim, hidden)
    rows = [out]
    for size in config["_sizes"]:
        divide(size, degree)
        up = linear.MergedColumnParallelLinear(hidden, [size, size])
        rows.append(linear.RowParallelLinear(size, hidden))
        if block:
            validate_fp8_block_shape(up, hidden, up.output_size, hidden, up.output_partition_sizes, block)
            validate_fp8_block_shape_moe(size // degree, block)
    for row in rows:
        if block:
            validate_fp8_block_shape(
                row, row.input_size, row.output_size, row.input_size_per_partition, [row.output_size], block
            )
        if group and not block:
            verify_group_size_divides_partition(row.input_size_per_partition, group)


def main() -> None:
    """Ask about every model at every degree."""
    asked = json.load(sys.stdin)
    said: dict[str, dict[str, str]] = {}
    import vllm.distributed as distributed

    with set_current_vllm_config(VllmConfig()), torch.device("meta"):
        for name, config in asked["models"].items():
            said[name] = {}
            for degree in asked["degrees"]:
                for module in (linear, vocabulary, parameter, distributed):
                    module.get_tensor_model_parallel_world_size = lambda degree=degree: degree  # type: ignore
                    module.get_tensor_model_parallel_rank = lambda: 0  # type: ignore
                try:
                    ask(config, degree)
                    said[name][str(degree)] = ""
                except (AssertionError, ValueError) as error:
                    said[name][str(degree)] = repr(error)[:200]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
