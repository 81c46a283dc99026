"""Small clusters for tests, drawn at random or from Helix's data where that lies beside the project."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hetlb.tools.paths.stages import SINK, SOURCE, BatchLimits, Curve, LinkSpec
from hetlb.tools.plan.placement.place_cluster import (
    Holding,
    LayeredModel,
    MachineKind,
    PlaceCluster,
    PlaceNode,
)
from hetlb.tools.plan.placement.place_files import load_cluster

HELIX = Path(__file__).parents[2] / ".." / "shared" / "data" / "helix"

needs_helix = pytest.mark.skipif(
    not HELIX.is_dir(), reason="Helix's data does not lie in ../shared/data/helix"
)


def helix_cluster(name: str, *, pruned: bool = False) -> PlaceCluster:
    folder = HELIX / name
    names = {"nodes": "nodes.csv", "links": "links.csv", "layer_times": "layer_time.csv"}
    names |= {"limits": "by_layers.csv", "model": "model.json"}
    return load_cluster({key: folder / file for key, file in names.items()}, pruned=pruned)


def helix_expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((HELIX / name / "expected.json").read_text())
    return document


def kind(name: str, rates: list[float], decode_ms: float = 5.0, kv: int = 1_000_000) -> MachineKind:
    """Machines that hold as many layers as there are rates."""
    limits = BatchLimits(prompts=1, prompt_tokens=4096, decodes=64, decode_context=100_000)
    return MachineKind(
        name,
        prompt=Curve((0, 1000), (0.0, decode_ms * 4 / 1000)),
        decode=Curve((0, 1, 101), (0.0, decode_ms / 1000, decode_ms * 2 / 1000)),
        holdings=tuple(Holding(rate, kv // (j + 1), limits) for j, rate in enumerate(rates)),
    )


def small_cluster(
    machines: list[str],
    kinds: list[MachineKind],
    layers: int,
    *,
    rates: dict[tuple[str, str], float] | None = None,
) -> PlaceCluster:
    """A cluster with every link at 1e9 bytes/s and 1 ms, but for `rates` (bytes/s)."""
    by_name = {each.name: each for each in kinds}
    nodes = tuple(
        PlaceNode(f"n{i}", name, "r0", len(by_name[name].holdings), 1e10, 1e10)
        for i, name in enumerate(machines)
    )
    names = [node.name for node in nodes]
    edges = [(a, b) for a in names for b in names if a != b]
    edges += [(SOURCE, name) for name in names] + [(name, SINK) for name in names]
    links = {edge: LinkSpec((rates or {}).get(edge, 1e9), 0.001) for edge in edges}
    return PlaceCluster(LayeredModel("m", layers, 1000, 2), nodes, by_name, links)


def random_cluster(rng: random.Random, *, nodes: int, layers: int) -> PlaceCluster:
    """Two kinds with falling rates, and links of which some bind and some are not there."""
    kinds = []
    for name in ("fast", "slow"):
        top = rng.uniform(50.0, 500.0)
        most = rng.randint(2, 4)
        kinds.append(kind(name, [top / j * rng.uniform(0.8, 1.0) for j in range(1, most + 1)]))
    cluster = small_cluster([rng.choice(("fast", "slow")) for _ in range(nodes)], kinds, layers)
    links = {
        edge: LinkSpec(rng.choice((1e9, rng.uniform(1e4, 3e5))), 0.001)
        for edge in cluster.links
        if rng.random() < 0.95
    }
    return PlaceCluster(cluster.model, cluster.nodes, cluster.kinds, links)


def random_placement(rng: random.Random, cluster: PlaceCluster) -> dict[str, tuple[int, int]]:
    placement = {}
    for node in cluster.nodes:
        length = rng.randint(1, cluster.most_layers(node))
        first = rng.randint(0, cluster.model.layers - length)
        placement[node.name] = (first, first + length)
    return placement


class Steps:
    """A clock that advances by a tick at every look: a search of a fixed number of steps."""

    def __init__(self, tick: float = 1.0) -> None:
        self._tick = tick
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self._tick
        return self.now
