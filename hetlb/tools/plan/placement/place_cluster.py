"""Machines, links and the model of a placement problem, and a placement of layers on them.

Plain values in tokens, seconds and bytes; nothing is read or searched here. `PlaceCluster.network` is the
one place where a placement becomes the stages that scheduler and simulator work with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from hetlb.balancer.config.engine_defaults import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from hetlb.tools.paths.stages import (
    SINK,
    SOURCE,
    BatchLimits,
    Curve,
    Edge,
    LinkSpec,
    StageNetwork,
    StageSpec,
    decode_curve,
)
from hetlb.tools.plan.common.plan_tables import Machine, Model

#: The layers [first, end) that a node holds.
Interval: TypeAlias = tuple[int, int]
#: The interval of every node that holds layers, by the node's name.
Placement: TypeAlias = dict[str, Interval]

_PROMPT_POINTS: Final = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_DECODE_POINTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Holding:
    """A machine with a given number of layers; prompt and decode tokens count alike in its rate."""

    tokens_per_s: float
    kv_token_layers: int
    batch: BatchLimits


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Equal machines. `holdings[j - 1]` describes one that holds j layers."""

    name: str
    prompt: Curve
    decode: Curve
    holdings: tuple[Holding, ...]

    def rate(self, layers: int) -> float:
        return self.holdings[layers - 1].tokens_per_s


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


@dataclass(frozen=True, slots=True)
class MachineGroup:
    """Equal machines. `rates[j]`: tokens/s with j layers, 0 without any."""

    nodes: tuple[PlaceNode, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class PlaceCluster:
    """A placement problem. With `partial_inference` requests may enter a node behind its first layer."""

    model: LayeredModel
    nodes: tuple[PlaceNode, ...]
    kinds: Mapping[str, MachineKind]
    links: Mapping[Edge, LinkSpec]
    partial_inference: bool = False
    source: Model | None = None
    remarks: tuple[str, ...] = ()
    #: The reason for which `hetlb stage` does not compute the model; empty if it does, or nothing tells.
    unstaged: str = ""

    def kind(self, node: PlaceNode) -> MachineKind:
        return self.kinds[node.kind]

    def most_layers(self, node: PlaceNode) -> int:
        """Return the most layers a node can hold: by its memory, its description and the model."""
        return min(node.max_layers, len(self.kind(node).holdings), self.model.layers)

    def rates(self, node: PlaceNode) -> tuple[float, ...]:
        """Return the tokens/s of a node by the layers that it holds."""
        return (0.0, *(self.kind(node).rate(j) for j in range(1, self.most_layers(node) + 1)))

    def groups(self, *, by_region: bool = False) -> list[MachineGroup]:
        """Return groups of machines that hold as many layers at the same rates, in all or by region."""
        alike: dict[tuple[str, str, int], list[PlaceNode]] = {}
        for node in self.nodes:
            key = (node.region if by_region else "", node.kind, self.most_layers(node))
            alike.setdefault(key, []).append(node)
        return [MachineGroup(tuple(nodes), self.rates(nodes[0])) for _, nodes in sorted(alike.items())]

    def link_bytes(self, edge: Edge) -> int:
        outside = edge[0] == SOURCE or edge[1] == SINK
        return self.model.token_bytes if outside else self.model.activation_bytes

    def link_rate(self, edge: Edge) -> float:
        """Return the tokens/s that a link carries, 0 if there is none."""
        link = self.links.get(edge)
        return 0.0 if link is None else link.bytes_per_s / self.link_bytes(edge)

    def network(self, placement: Placement, flows: Mapping[Edge, float]) -> StageNetwork:
        """Return the stages of a placement, in the order of the nodes. Nodes without layers are left out."""
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
            partial_inference=self.partial_inference,
            flows=dict(flows),
        )

    def subset(self, nodes: Sequence[PlaceNode]) -> PlaceCluster:
        """Return the same problem with some of its machines alone."""
        names = {node.name for node in nodes} | {SOURCE, SINK}
        links = {edge: link for edge, link in self.links.items() if edge[0] in names and edge[1] in names}
        return replace(self, nodes=tuple(nodes), links=links)


def machine_kind(machine: Machine, model: Model, input_tokens: float, output_tokens: float) -> MachineKind:
    """Return times and limits of one GPU by layers held, from the whole model's profile and memory.

    A machine with some of the layers takes their share of every time and every byte. The rates hold for
    requests of these mean lengths in the batches that the KV cache holds. Without holdings not even one layer
    fits.
    """
    profile, layers = machine.profiles[1], model.layers
    latency, engine = profile.latency, profile.engine
    most_seqs = engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    most_tokens = engine.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    context = input_tokens + output_tokens / 2.0
    prompts = [(float(n), latency.prefill_s(n) / layers) for n in _PROMPT_POINTS]
    decodes = [(float(n), latency.step_s(n, n * context) / layers) for n in _DECODE_POINTS]
    prompt = Curve((0.0, *(x for x, _ in prompts)), (0.0, *(y for _, y in prompts)))
    tokens = input_tokens + output_tokens
    each = model.kv_bytes_per_token * model.needed(tokens) / tokens
    holdings = []
    for held in range(1, layers + 1):
        left = machine.usable_bytes - model.weight_bytes * held / layers
        # A path books the tokens of a request on each layer, whatever the layer keeps of them.
        kv_token_layers = int(left / (each / layers)) if left > 0.0 else 0
        seats = int(kv_token_layers // (held * tokens))
        if seats < 1:
            break
        batch = min(seats, most_seqs)
        step_s = latency.step_s(batch, batch * context) / layers
        request_s = latency.prefill_s(input_tokens) / layers + output_tokens * step_s / batch
        limits = BatchLimits(most_seqs, most_tokens, most_seqs, kv_token_layers)
        rate = tokens / (held * request_s)
        holdings.append(Holding(rate, kv_token_layers, limits))
    return MachineKind(machine.name, prompt, decode_curve([(0.0, 0.0), *decodes]), tuple(holdings))
