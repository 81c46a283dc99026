"""Data-parallel servers with whole experts on each GPU (`--data-parallel-size`, `--enable-expert-parallel`).

Each of `dp` ranks has `tp` GPUs, the attention of its own requests and a KV cache of its own. The experts
lie on the GPUs of all ranks. A latent cache is kept once a rank, not on each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from hetlb.tools.models.degrees import refusal
from hetlb.tools.plan.common.capacity import exact
from hetlb.tools.plan.common.plan_tables import Model


class Degrees(NamedTuple):
    """GPUs of a rank, and ranks."""

    tp: int
    dp: int

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        return f"tp{self.tp}dp{self.dp}"


def data_parallel_degrees(model: Model, gpus: int) -> Iterator[Degrees]:
    """Yield the data-parallel layouts on powers of two of GPUs that vLLM takes for a model with experts."""
    if model.shape is None or not model.known.expert_parallel:
        return
    for total in (1 << power for power in range(1, gpus.bit_length())):
        for tp in (1 << power for power in range(total.bit_length() - 1)):
            if not refusal(model.shape, tp, expert_parallel=True):
                yield Degrees(tp, total // tp)


def copies_cache(model: Model, gpus: int) -> bool:
    """Return True if tensor parallelism over these GPUs keeps copies of the cache."""
    return model.known.replication(gpus) > 1.0


def rank_bytes(model: Model, usable: Fraction, degrees: Degrees) -> Fraction:
    """Return the bytes that the weights leave of a rank with `usable` bytes; below 0 if they do not fit."""
    experts = exact(model.weight_bytes) * model.known.expert_bytes / model.known.weight_bytes
    return usable - (exact(model.weight_bytes) - experts) - experts / degrees.dp


def rank_tokens(model: Model, usable: Fraction, degrees: Degrees) -> int:
    """Return the tokens of the KV cache of one rank, 0 if it has no room."""
    return max(0, math.floor(rank_bytes(model, usable, degrees) / exact(model.kv_bytes_at(degrees.tp))))
