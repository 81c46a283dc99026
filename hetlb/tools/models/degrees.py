"""Degrees of tensor, expert and pipeline parallelism that vLLM accepts for a model.

The rules come from vLLM 0.32: heads (`ModelConfig.verify_with_parallel_config`), KV heads
(`QKVParallelLinear`), the vocabulary padded to 64 (`VocabParallelEmbedding`), feed-forward sizes
(`ColumnParallelLinear`, `RowParallelLinear`), and blocks or groups of quantised weights: a GPU holds whole
ones. `tests/vllm/test_degrees.py` holds them against the installed package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from hetlb.tools.models.layer import Heads

#: vLLM pads a vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`).
_VOCAB_PADDING_TOKENS: Final = 64
#: Largest listed tensor-parallel group, in GPUs.
MOST_DEGREE: Final = 64


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model split over GPUs, each once: (key, size) pairs.

    `experts`: sizes that expert parallelism leaves whole. `block` is (rows, columns) of a block of quantised
    weights, 1 if they have none; `loose`: fused queries, keys and values may end within a block.
    """

    layers: int
    heads: tuple[Heads, ...]
    vocab_size: int
    feed_forward: tuple[tuple[str, int], ...] = ()
    experts: tuple[tuple[str, int], ...] = ()
    whole: tuple[tuple[str, int], ...] = ()
    block: tuple[int, int] = (1, 1)
    loose: bool = False


def refusal(
    shape: ModelShape,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    expert_parallel: bool = False,
) -> str:
    """Return why vLLM does not start with these degrees; empty if it does."""
    t = tensor_parallel_size
    if pipeline_parallel_size > shape.layers:
        return f"{shape.layers} layers are fewer than {pipeline_parallel_size} pipeline stages"
    if expert_parallel and not shape.experts:
        return "a model without routed experts has no expert parallelism"
    for heads in shape.heads:
        if heads.queries % t:
            return f"{heads.queries} attention heads are not divisible by {t}"
        if heads.keys and max(heads.keys, t) % min(heads.keys, t):
            return f"{heads.keys} KV heads cannot be spread evenly over {t} GPUs"
    padded = math.ceil(shape.vocab_size / _VOCAB_PADDING_TOKENS) * _VOCAB_PADDING_TOKENS
    if padded % t:
        return f"a vocabulary of {shape.vocab_size}, padded to {padded}, is not divisible by {t}"
    split = shape.feed_forward + (() if expert_parallel else shape.experts)
    for key, size in (*split, *shape.whole):
        if size % t:
            return f"{key} {size} is not divisible by {t}"
    return _blocks_refusal(shape, split, t) if t > 1 else ""


def refused_degree(shape: ModelShape, tensor_parallel_size: int) -> str:
    """Return why vLLM does not start with a degree, with whole experts or without; empty if it does."""
    why = refusal(shape, tensor_parallel_size)
    return why if why and refusal(shape, tensor_parallel_size, expert_parallel=True) else ""


def needs_whole_experts(shape: ModelShape | None, tensor_parallel_size: int) -> bool:
    """Return True if vLLM takes a degree only with whole experts on each GPU."""
    return (
        shape is not None
        and bool(refusal(shape, tensor_parallel_size))
        and not refused_degree(shape, tensor_parallel_size)
    )


def _blocks_refusal(shape: ModelShape, split: tuple[tuple[str, int], ...], t: int) -> str:
    rows, columns = shape.block
    for key, size in split:
        for block in (rows, columns):
            if (size // t) % block:
                return f"{key} {size} over {t} GPUs is no multiple of a block of {block} quantised weights"
    for heads in shape.heads:
        out = heads.queries * heads.value_size // t
        parts = [("attention output", out, columns)]
        if not shape.loose:
            parts.append(
                ("queries", heads.queries * (heads.key_size if heads.keys else heads.value_size) // t, rows)
            )
            if heads.keys:
                parts.append(("keys", max(1, heads.keys // t) * heads.key_size, rows))
        for what, size, block in parts:
            if size % block:
                return (
                    f"{what} of {size} values a GPU are no multiple of a block of {block} quantised weights"
                )
    return ""


def accepted(shape: ModelShape, expert_parallel: bool = False) -> list[int]:
    """Return the tensor-parallel degrees up to `MOST_DEGREE` that vLLM takes."""
    return [t for t in range(1, MOST_DEGREE + 1) if not refusal(shape, t, expert_parallel=expert_parallel)]
