"""Memory of instances: bytes that GPUs leave for a model, tokens of KV cache, and layers by stage.

Computed in exact fractions, so that limits agree with a hand computation to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def exact(value: float) -> Fraction:
    """Return the decimal that was written, not its binary neighbour: 0.9 is 9/10."""
    return Fraction(repr(value))


def usable_bytes(gpus: int, memory_bytes: float, utilization: float, reserved_bytes: int) -> Fraction:
    """Return the bytes for weights and KV cache: GPUs x (utilization x memory - reserved)."""
    return gpus * (exact(utilization) * exact(memory_bytes) - reserved_bytes)


def kv_bytes(stages: Iterable[tuple[Fraction, Fraction]], weight_bytes: Fraction) -> Fraction:
    """Return the bytes of KV cache of all layers, by usable bytes and share of the layers of each stage.

    Below 0 if the weights do not fit.
    """
    return min((usable - weight_bytes * share) / share for usable, share in stages if share)


def kv_cache_tokens(
    stages: Iterable[tuple[Fraction, Fraction]], weight_bytes: Fraction, kv_bytes_per_token: Fraction
) -> int:
    """Return the tokens of the KV cache of an instance of these stages; 0: no room."""
    return max(0, math.floor(kv_bytes(stages, weight_bytes) / kv_bytes_per_token))


def divide_layers(weights: Sequence[float | Fraction], layers: int | None) -> list[Fraction]:
    """Return shares of the layers in proportion to weights; of known `layers` whole ones, one at least."""
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
