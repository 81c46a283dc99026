"""Machines, links and the model of a placement problem, and a placement of layers on them.

Plain values in tokens, seconds and bytes; nothing is read or searched here. `Cluster.network` is the
one place where a placement becomes the stages that scheduler and simulator work with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hetlb.core.paths.stages import SINK, SOURCE, BatchLimits, Curve, Edge, LinkSpec, StageNetwork, StageSpec

#: The layers [first, end) of every node, by the node's name.
Placement: TypeAlias = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Holding:
    """A machine of one kind with a given number of layers.

    `tokens_per_s` is the rate at which it passes tokens (prompt and decode counted alike) through all of
    them.
    """

    tokens_per_s: float
    kv_token_layers: int
    batch: BatchLimits


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Machines that are alike. `holdings[j - 1]` describes one that holds j layers."""

    name: str
    prompt: Curve
    decode: Curve
    holdings: tuple[Holding, ...]

    def rate(self, layers: int) -> float:
        """Tokens/s of a machine with so many layers."""
        return self.holdings[layers - 1].tokens_per_s

    @property
    def layer_rate(self) -> float:
        """Most layers times tokens/s that one machine does."""
        return max(j * holding.tokens_per_s for j, holding in enumerate(self.holdings, start=1))


@dataclass(frozen=True, slots=True)
class PlaceNode:
    """One machine, or GPU `gpu` of the machine `host`."""

    name: str
    kind: str
    region: str
    max_layers: int
    nic_in_bytes_per_s: float
    nic_out_bytes_per_s: float
    host: str = ""
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """Facts of a model that placement needs."""

    name: str
    layers: int
    activation_bytes: int
    token_bytes: int


@dataclass(frozen=True)
class PlaceCluster:
    """A placement problem."""

    model: LayeredModel
    nodes: tuple[PlaceNode, ...]
    kinds: Mapping[str, MachineKind]
    links: Mapping[Edge, LinkSpec]

    def kind(self, node: PlaceNode) -> MachineKind:
        """The kind of a node."""
        return self.kinds[node.kind]

    def most_layers(self, node: PlaceNode) -> int:
        """Most layers a node can hold: by its memory, its description and the model."""
        return min(node.max_layers, len(self.kind(node).holdings), self.model.layers)

    def link_rate(self, edge: Edge, link: LinkSpec) -> float:
        """Tokens/s that a link carries."""
        outside = edge[0] == SOURCE or edge[1] == SINK
        return link.bytes_per_s / (self.model.token_bytes if outside else self.model.activation_bytes)

    def network(
        self,
        placement: Placement,
        *,
        partial_inference: bool = False,
        flows: Mapping[Edge, float] | None = None,
    ) -> StageNetwork:
        """The stages of a placement, in the order of the nodes. Nodes without layers are left out."""
        stages = []
        for node in self.nodes:
            if node.name not in placement:
                continue
            first, end = placement[node.name]
            kind = self.kind(node)
            holding = kind.holdings[end - first - 1]
            stages.append(
                StageSpec(
                    name=node.name,
                    first=first,
                    end=end,
                    prompt=kind.prompt,
                    decode=kind.decode,
                    kv_token_layers=holding.kv_token_layers,
                    batch=holding.batch,
                    nic_in_bytes_per_s=node.nic_in_bytes_per_s,
                    nic_out_bytes_per_s=node.nic_out_bytes_per_s,
                )
            )
        return StageNetwork(
            layers=self.model.layers,
            stages=tuple(stages),
            links=self.links,
            activation_bytes=self.model.activation_bytes,
            token_bytes=self.model.token_bytes,
            partial_inference=partial_inference,
            flows=dict(flows or {}),
        )


def alike(cluster: PlaceCluster) -> list[list[PlaceNode]]:
    """Machines that hold as many layers at the same rates, wherever they are."""
    groups: dict[tuple[str, int], list[PlaceNode]] = {}
    for node in cluster.nodes:
        groups.setdefault((node.kind, cluster.most_layers(node)), []).append(node)
    return list(groups.values())


def subset(cluster: PlaceCluster, nodes: Sequence[PlaceNode]) -> PlaceCluster:
    """The same problem with some of its machines alone."""
    names = {node.name for node in nodes} | {SOURCE, SINK}
    links = {edge: link for edge, link in cluster.links.items() if edge[0] in names and edge[1] in names}
    return replace(cluster, nodes=tuple(nodes), links=links)
