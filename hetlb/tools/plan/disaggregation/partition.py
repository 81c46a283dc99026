"""The first phase of HexGen-2 (section 3.2): groups with little bandwidth between them, then their roles.

Every GPU is in exactly one group, and the same seed gives the same groups.

Spectral partitioning (Alpert and Yao, 1995): GPUs are points whose coordinates are eigenvectors of the
bandwidth graph's Laplacian, clustered by k-means; swaps of two GPUs (Kernighan and Lin, 1970) then lower the
bandwidth that is cut and even out memory. Roles maximise the bandwidth between prefill and decode groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from hetlb.tools.plan.disaggregation.split_cluster import Composition, Role, SplitCluster

#: Memory of a replica beyond its weights, as a share of them: what the number of groups is computed with.
_KV_SHARE = 0.5
_SWAPS_PER_GPU = 20


def group_count(cluster: SplitCluster) -> int:
    """Return the paper's K: total memory over the memory of one replica."""
    total = sum(machine.gpus * machine.usable_bytes for machine in cluster.machines)
    return max(2, int(total / (cluster.model.weight_bytes * (1.0 + _KV_SHARE))))


def partition(cluster: SplitCluster, count: int, rng: random.Random) -> list[Composition]:
    """`count` groups at most (empty ones are left out)."""
    owner = [m for m, machine in enumerate(cluster.machines) for _ in range(machine.gpus)]
    rates = np.array(cluster.links.bytes_per_s)
    weights = rates[np.ix_(owner, owner)]
    weights = (weights + weights.T) / 2.0
    np.fill_diagonal(weights, 0.0)
    memory = np.array([cluster.machines[m].usable_bytes for m in owner])
    labels = _spectral(weights, min(count, len(owner)), rng)
    _swap(labels, weights, memory, rng)
    groups: list[Composition] = []
    for label in sorted(set(labels.tolist())):
        held: dict[int, int] = {}
        for m, own in zip(owner, labels.tolist(), strict=True):
            if own == label:
                held[m] = held.get(m, 0) + 1
        groups.append(tuple(sorted(held.items())))
    return groups


def _spectral(weights: NDArray[np.float64], count: int, rng: random.Random) -> NDArray[np.int32]:
    degrees = weights.sum(axis=1)
    scale = 1.0 / np.sqrt(np.maximum(degrees, 1e-12))
    laplacian = np.eye(len(weights)) - scale[:, None] * weights * scale[None, :]
    _, vectors = np.linalg.eigh(laplacian)
    points = vectors[:, :count]
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    points = points / np.maximum(norms, 1e-12)
    # Equal GPUs have equal coordinates: a little noise lets k-means divide them.
    noise = np.random.default_rng(rng.getrandbits(32))
    points = points + noise.normal(0.0, 1e-3, points.shape)
    _, labels = kmeans2(points, count, seed=noise, minit="++", missing="warn")
    return np.asarray(labels, dtype=np.int32)


def _swap(
    labels: NDArray[np.int32], weights: NDArray[np.float64], memory: NDArray[np.float64], rng: random.Random
) -> None:
    """Swap and move what lowers cut bandwidth and the imbalance of memory, both relative to their totals."""
    number = len(labels)
    count = int(labels.max()) + 1
    held = np.zeros(count)
    np.add.at(held, labels, memory)
    mean = held.sum() / count
    total = max(weights.sum(), 1e-12)

    def imbalance() -> float:
        return float(np.abs(held - mean).sum() / mean)

    for _ in range(_SWAPS_PER_GPU * number):
        a, b = rng.randrange(number), rng.randrange(number)
        x, y = int(labels[a]), int(labels[b])
        if x == y:
            continue
        before = imbalance()
        kept = weights[a, labels == x].sum() + weights[b, labels == y].sum()
        swap = rng.random() < 0.5
        held[x] -= memory[a]
        held[y] += memory[a]
        labels[a] = y
        if swap:
            held[y] -= memory[b]
            held[x] += memory[b]
            labels[b] = x
        now = weights[a, labels == labels[a]].sum() + weights[b, labels == labels[b]].sum()
        gain = (now - kept) / total + (before - imbalance()) / count
        if gain <= 0.0:
            held[:] = 0.0
            labels[a], labels[b] = x, y
            np.add.at(held, labels, memory)


def assign_roles(cluster: SplitCluster, groups: Sequence[Composition], rng: random.Random) -> list[Role]:
    """Prefill and decode, the most bandwidth between them (a maximum cut, by flips)."""
    rates = cluster.links.bytes_per_s

    def between(a: Composition, b: Composition) -> float:
        return math.fsum(n * k * rates[i][j] for i, n in a for j, k in b)

    roles = [rng.choice((Role.PREFILL, Role.DECODE)) for _ in groups]
    for _ in range(10 * len(groups)):
        g = rng.randrange(len(groups))
        same = other = 0.0
        for h, group in enumerate(groups):
            if h != g:
                weight = between(groups[g], group)
                same, other = (same + weight, other) if roles[h] is roles[g] else (same, other + weight)
        if same > other:
            roles[g] = Role.DECODE if roles[g] is Role.PREFILL else Role.PREFILL
    if len(groups) > 1 and len(set(roles)) == 1:
        roles[0] = Role.DECODE if roles[0] is Role.PREFILL else Role.PREFILL
    return roles
