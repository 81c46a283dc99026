"""Memory of instances: bytes that GPUs leave for a model, tokens of KV cache, and layers by stage.

Computed in exact fractions, so that limits agree with a hand computation to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def exact(value: float) -> Fraction:
    """The decimal that was written, not its binary neighbour: 0.9 is 9/10."""
    return Fraction(repr(value))


def usable_bytes(gpus: int, memory_bytes: float, utilization: float, reserved_bytes: int) -> Fraction:
    """Bytes for weights and KV cache: GPUs x (utilization x memory - reserved)."""
    return gpus * (exact(utilization) * exact(memory_bytes) - reserved_bytes)


def kv_cache_tokens(
    stages: Iterable[tuple[Fraction, Fraction]], weight_bytes: Fraction, kv_bytes_per_token: int
) -> int:
    """Tokens that the KV cache of an instance holds: that of the stage with the least room.

    `stages` are usable bytes and the share of the layers; 0 where the weights do not fit.
    """
    room = [
        (usable - weight_bytes * share) / (kv_bytes_per_token * share) for usable, share in stages if share
    ]
    return max(0, math.floor(min(room)))


def divide_layers(weights: Sequence[float | Fraction], layers: int | None) -> list[Fraction]:
    """Shares of the layers in proportion to weights; whole layers, one each at least, where their number is
    known.

    What rounding leaves goes to the largest remainders.
    """
    exactly = [Fraction(weight) for weight in weights]
    total = sum(exactly)
    shares = [weight / total for weight in exactly]
    if layers is None:
        return shares
    whole = [max(1, math.floor(share * layers)) for share in shares]
    order = sorted(range(len(shares)), key=lambda s: shares[s] * layers - whole[s], reverse=True)
    for s in order[: max(0, layers - sum(whole))]:
        whole[s] += 1
    while sum(whole) > layers:
        whole[max(range(len(whole)), key=lambda s: whole[s])] -= 1
    return [Fraction(each, layers) for each in whole]
