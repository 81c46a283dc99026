"""Clusters that are not Helix's: machines of its kinds in other numbers, regions and networks."""

from __future__ import annotations

import random
from dataclasses import replace

from hetlb.core.paths.stages import SINK, SOURCE, LinkSpec
from hetlb.plan.placement.flow import PlacementFlows
from hetlb.plan.placement.heuristics import chains, separate_pipelines, swarm
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement, PlaceNode


def generated(base: PlaceCluster, seed: int) -> tuple[PlaceCluster, Placement]:
    """A cluster of 16 to 28 machines in one to three regions, and the reference placement for it.

    The reference is the placement of the highest flow among 2,000 random chains and the heuristics.
    """
    rng = random.Random(seed)
    count = rng.randint(16, 28)
    cluster = regional(base, count, rng.randint(1, 3), rng)
    candidates = [chains(cluster, rng) for _ in range(2000)]
    candidates += [found for found in (swarm(cluster), separate_pipelines(cluster)) if found is not None]
    flows = PlacementFlows(cluster)
    return cluster, max(candidates, key=lambda each: flows.value(flows.held(each)))


def regional(base: PlaceCluster, count: int, regions: int, rng: random.Random) -> PlaceCluster:
    """Machines of all kinds in regions with fast links inside and slow ones between them, at random."""
    most = {node.kind: node.max_layers for node in base.nodes}
    nodes = tuple(
        PlaceNode(f"n{i}", kind, f"r{rng.randrange(regions)}", most[kind], 1e10, 1e10)
        for i, kind in enumerate(rng.choices(sorted(base.kinds), weights=[1, 2, 3], k=count))
    )
    links = {}
    for a in nodes:
        for b in nodes:
            if a is not b:
                near = a.region == b.region
                rate = rng.uniform(0.9e9, 1.4e9) if near else rng.uniform(1e7, 4e7)
                links[a.name, b.name] = LinkSpec(rate, 0.001 if near else rng.uniform(0.02, 0.06))
        links[SOURCE, a.name] = LinkSpec(1e9, 0.001)
        links[a.name, SINK] = LinkSpec(1e9, 0.001)
    return PlaceCluster(base.model, nodes, base.kinds, links)


def many(base: PlaceCluster, counts: dict[str, int]) -> PlaceCluster:
    """So many machines of each kind in one region, linked as the first two of `base` are."""
    like = {node.kind: node for node in base.nodes}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    nodes = tuple(replace(like[kind], name=f"n{i}", region="r0") for i, kind in enumerate(kinds))
    first, second = base.nodes[0].name, base.nodes[1].name
    names = [node.name for node in nodes]
    links = {(a, b): base.links[first, second] for a in names for b in names if a != b}
    for name in names:
        links[SOURCE, name] = base.links[SOURCE, first]
        links[name, SINK] = base.links[first, SINK]
    return PlaceCluster(base.model, nodes, base.kinds, links)
