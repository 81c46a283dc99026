"""Degrees of tensor and pipeline parallelism that vLLM accepts for a model, by its `config.json`.

The rules are those of vLLM 0.32: heads (`ModelConfig.verify_with_parallel_config`), KV heads
(`QKVParallelLinear`), the vocabulary padded to 64 (`VocabParallelEmbedding`), feed-forward sizes
(`ColumnParallelLinear`, `RowParallelLinear`), and blocks or groups of quantised weights, of which a GPU holds
whole ones. `tests/vllm/test_degrees.py` holds them against the installed package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetlb.errors import ConfigError

#: vLLM pads a vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`).
_VOCAB_PADDING = 64
#: Keys of the experts of a mixture, whose layers need not have a dense part.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that are split over GPUs. `feed_forward` are (key, size) pairs.

    `kv_heads` is 0 for a latent cache (MLA), `vocab_size` where it is not known. `block` is (rows, columns)
    of a block of quantised weights, 1 where they have none.
    """

    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    feed_forward: tuple[tuple[str, int], ...]
    block: tuple[int, int] = (1, 1)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the language model."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def read_shape(raw: Mapping[str, Any]) -> ModelShape:
    """The shape in a `config.json`. Raises `ConfigError` naming the key that is missing."""
    config = text_config(raw)

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: expected a whole number from 1, got {value!r}")
        return value

    heads = whole("num_attention_heads")
    latent = "kv_lora_rank" in config
    head_dim = (
        whole("v_head_dim", 128) if latent else whole("head_dim", max(1, whole("hidden_size") // heads))
    )
    return ModelShape(
        whole("num_hidden_layers"),
        heads,
        0 if latent else whole("num_key_value_heads", heads),
        head_dim,
        whole("vocab_size") if "vocab_size" in config else 0,
        tuple(_feed_forward(config, whole)),
        _block(raw, config),
    )


def _feed_forward(config: Mapping[str, Any], whole: Any) -> Iterator[tuple[str, int]]:
    experts = any(config.get(key) for key in _EXPERT_KEYS)
    own_size = experts and config.get("moe_intermediate_size") is not None
    sparse_only = own_size and not config.get("first_k_dense_replace") and not config.get("mlp_only_layers")
    split = {
        "intermediate_size": config.get("intermediate_size") is not None and not sparse_only,
        "moe_intermediate_size": own_size,
        "shared_expert_intermediate_size": experts and config.get("shared_expert_intermediate_size"),
    }
    yield from ((key, whole(key)) for key, held in split.items() if held)


def _block(raw: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows (output) and columns (input) of which a GPU must hold whole blocks."""
    quantization = config.get("quantization_config") or raw.get("quantization_config") or {}
    size = quantization.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) for each in size):
        return size[0], size[1]
    group = quantization.get("group_size")
    return (1, group) if isinstance(group, int) and group > 0 else (1, 1)


def refusal(shape: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> str:
    """Reason for which vLLM does not start with these degrees; empty where it does."""
    t = tensor_parallel_size
    if pipeline_parallel_size > shape.layers:
        return f"{shape.layers} layers are fewer than {pipeline_parallel_size} pipeline stages"
    if shape.attention_heads % t:
        return f"{shape.attention_heads} attention heads are not divisible by {t}"
    more, fewer = max(shape.kv_heads, t), min(shape.kv_heads, t)
    if shape.kv_heads and more % fewer:
        return f"{shape.kv_heads} KV heads cannot be spread evenly over {t} GPUs"
    padded = math.ceil(shape.vocab_size / _VOCAB_PADDING) * _VOCAB_PADDING
    if padded % t:
        return f"a vocabulary of {shape.vocab_size}, padded to {padded}, is not divisible by {t}"
    for key, size in shape.feed_forward:
        if size % t:
            return f"{key} {size} is not divisible by {t}"
    return _blocks_refusal(shape, t) if t > 1 else ""


def _blocks_refusal(shape: ModelShape, t: int) -> str:
    rows, columns = shape.block
    for key, size in shape.feed_forward:
        for block in (rows, columns):
            if (size // t) % block:
                return f"{key} {size} over {t} GPUs is no multiple of a block of {block} quantised weights"
    attention = shape.attention_heads * shape.head_dim // t
    kv = max(1, shape.kv_heads // t) * shape.head_dim if shape.kv_heads else 0
    for what, size, block in (
        ("queries", attention, rows),
        ("attention output", attention, columns),
        ("keys", kv, rows),
    ):
        if size % block:
            return f"{what} of {size} values a GPU are no multiple of a block of {block} quantised weights"
    return ""
