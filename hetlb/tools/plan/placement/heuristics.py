"""Placements by simple rules, to start a search from and to compare with.

Each gives a placement that fits every node, or None if its rule cannot be followed.

- Swarm (Ryabinin et al., ICML 2023): equal stages, as long as the smallest machine can hold; the next fastest
  machine joins the stage with the least throughput.
- Petals (Borzunov et al., 2023, appendix D): machines come in random order; each holds all it can, where the
  layers have the least throughput so far. Meant for partial inference.
- Separate pipelines: the machines of one kind in one region form pipelines of their own, each of equal parts.
"""

from __future__ import annotations

import math
import random

from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement


def swarm(cluster: PlaceCluster) -> Placement | None:
    """Return equal stages with machines spread by throughput, None with fewer machines than stages."""
    layers = cluster.model.layers
    most = min(cluster.most_layers(node) for node in cluster.nodes)
    length = next(length for length in range(most, 0, -1) if layers % length == 0)
    stages = layers // length
    if stages > len(cluster.nodes):
        return None
    rates = [0.0] * stages
    placement: Placement = {}
    for node in sorted(cluster.nodes, key=lambda node: -cluster.kind(node).rate(length)):
        stage = rates.index(min(rates))
        rates[stage] += cluster.kind(node).rate(length)
        placement[node.name] = (stage * length, (stage + 1) * length)
    return placement


def petals(cluster: PlaceCluster, rng: random.Random) -> Placement:
    """Place machines in random order, each with all it can hold at the layers with the least throughput."""
    layers = cluster.model.layers
    rates = [0.0] * layers
    placement: Placement = {}
    nodes = list(cluster.nodes)
    rng.shuffle(nodes)
    for node in nodes:
        length = cluster.most_layers(node)
        first = min(range(layers - length + 1), key=lambda at: sorted(rates[at : at + length]))
        placement[node.name] = (first, first + length)
        for layer in range(first, first + length):
            rates[layer] += cluster.kind(node).rate(length)
    return placement


def separate_pipelines(cluster: PlaceCluster) -> Placement | None:
    """Return pipelines of machines of one kind, then region. None if none hold all layers."""
    return _pipelines(cluster, by_region=True) or _pipelines(cluster, by_region=False)


def _pipelines(cluster: PlaceCluster, *, by_region: bool) -> Placement | None:
    placement: Placement = {}
    layers = cluster.model.layers
    for group in cluster.groups(by_region=by_region):
        nodes, length = group.nodes, math.ceil(layers / (len(group.rates) - 1))
        for index in range(len(nodes) // length):
            for stage, node in enumerate(nodes[index * length : (index + 1) * length]):
                placement[node.name] = (stage * layers // length, (stage + 1) * layers // length)
    return placement or None


def chains(cluster: PlaceCluster, rng: random.Random) -> Placement:
    """Place machines in random order by region, one pipeline after the other.

    Each holds all it can of the layers that its pipeline still lacks.
    """
    layers = cluster.model.layers
    regions = sorted({node.region for node in cluster.nodes})
    rng.shuffle(regions)
    nodes = list(cluster.nodes)
    rng.shuffle(nodes)
    nodes.sort(key=lambda node: regions.index(node.region))
    placement: Placement = {}
    at = 0
    for node in nodes:
        end = min(layers, at + cluster.most_layers(node))
        placement[node.name] = (at, end)
        at = end % layers
    return placement
