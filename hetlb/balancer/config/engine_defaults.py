"""Limits that `vllm serve` takes without flags: the one home of them.

Sources: `EngineArgs.get_batch_defaults` of vLLM 0.32 for an API server, `CacheConfig` for blocks.
"""

from __future__ import annotations

from typing import Final

#: Tokens of a block of the KV cache.
DEFAULT_BLOCK_TOKENS: Final = 16
#: Limits of small GPUs, and of unknown ones.
DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 2048
_GIB: Final = 1 << 30
#: By the least memory of a GPU: tokens of a batch, sequences.
_BY_MEMORY: Final = ((160 * _GIB, 16_384, 1024), (70 * _GIB, 8192, 1024))
#: GiB of GPUs that a profile names without their memory, by a part of the name; the first that fits counts.
_GIB_BY_NAME: Final = (
    ("b300", 268), ("b200", 178), ("h200", 139), ("gh200", 94), ("h100", 79), ("h800", 79), ("h20", 94),
    ("mi325", 255), ("mi300", 191), ("mi35", 287), ("rtx pro 6000", 95), ("a100", 79),
)  # fmt: skip


def batch_limits(gpu: str | None, memory_bytes: float | None) -> tuple[int, int]:
    """Return `max_num_batched_tokens` and `max_num_seqs` that vLLM takes on a GPU."""
    name = (gpu or "").lower().replace("_", " ").replace("-", " ")
    if memory_bytes is None:
        memory_bytes = next((_GIB * size for part, size in _GIB_BY_NAME if part in name), 0)
    for least, tokens, sequences in _BY_MEMORY:
        # An A100 of 80 GB is slower with larger batches: vLLM goes by its name.
        if memory_bytes >= least and (least > 100 * _GIB or "a100" not in name):
            return tokens, sequences
    return DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
