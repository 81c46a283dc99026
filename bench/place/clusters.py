"""Clusters that are not Helix's: machines of its kinds in other numbers, regions and networks."""

from __future__ import annotations

import random
from dataclasses import replace

from hetlb.tools.paths.stages import SINK, SOURCE, BatchLimits, Curve, LinkSpec
from hetlb.tools.plan.placement.flow import PlacementFlows
from hetlb.tools.plan.placement.heuristics import chains, separate_pipelines, swarm
from hetlb.tools.plan.placement.place_cluster import (
    Holding,
    LayeredModel,
    MachineKind,
    PlaceCluster,
    Placement,
    PlaceNode,
)


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


def made_up() -> PlaceCluster:
    """Return six machines of two kinds that hold a model of eight layers together."""
    limits = BatchLimits(4, 4096, 64, 100_000)
    kinds = {
        name: MachineKind(
            name,
            Curve((0.0, 1000.0), (0.0, seconds)),
            Curve((0.0, 1.0, 64.0), (0.0, seconds / 50.0, seconds / 20.0)),
            tuple(Holding(800.0 / seconds / held, 40_000 // held, limits) for held in range(1, most + 1)),
        )
        for name, seconds, most in (("fast", 0.05, 4), ("slow", 0.1, 3))
    }
    named = ["fast", "fast", "slow", "slow", "slow", "slow"]
    nodes = tuple(
        PlaceNode(f"n{i}", kind, "r0", len(kinds[kind].holdings), 1e9, 1e9) for i, kind in enumerate(named)
    )
    names = [node.name for node in nodes]
    links = {(a, b): LinkSpec(1e9, 0.001) for a in names for b in names if a != b}
    for name in names:
        links[SOURCE, name] = links[name, SINK] = LinkSpec(1e9, 0.001)
    return PlaceCluster(LayeredModel("made-up", 8, 8192, 2), nodes, kinds, links)


#: Machines of Helix's cluster of 42 nodes (section 6.1).
SEVEN_KINDS = {"A100": 4, "V100": 6, "L4": 8, "T4": 10, "2xL4": 4, "2xT4": 6, "4xT4": 4}
#: Kinds that Helix's public tables lack: the kind they are scaled from, time of a prompt and of a decode over
#: that kind's, and memory over it. A V100 of 16 GB by peak figures; tensor parallelism at 0.85 of ideal.
SCALED = {
    "V100": ("A100", 2.5, 1.75, 0.4),
    "2xL4": ("L4", 0.59, 0.59, 2.0),
    "2xT4": ("T4", 0.59, 0.59, 2.0),
    "4xT4": ("T4", 0.34, 0.34, 4.0),
}
#: Memory of a base kind, of a layer's weights, of a KV entry (bytes), and what stays free of layers.
_MEMORY = {"A100": 40e9, "L4": 24e9, "T4": 16e9}
_LAYER_BYTES, _KV_BYTES, _WEIGHTS_SHARE = 1.53e9, 4096, 0.5
#: Rules of the data's README for tokens/s: share of KV of a typical batch, mean lengths, rounds.
_KV_SHARE, _PROMPT, _OUTPUT, _ROUNDS = 0.3, 750, 240, 10


def seven_kinds(base: PlaceCluster) -> PlaceCluster:
    """Return 42 machines of seven kinds in one region: three kinds of `base`, four scaled from them."""
    kinds = {name: base.kinds[name] for name in ("A100", "L4", "T4")}
    for name, (like, prompt, decode, memory) in SCALED.items():
        kinds[name] = _scaled(name, base.kinds[like], prompt, decode, memory * _MEMORY[like])
    kinds = _with_rates(kinds, base.model.layers)
    pattern = base.nodes[0]
    named = [kind for kind, count in SEVEN_KINDS.items() for _ in range(count)]
    nodes = tuple(
        replace(pattern, name=f"n{i}", kind=kind, region="r0", max_layers=len(kinds[kind].holdings))
        for i, kind in enumerate(named)
    )
    names = [node.name for node in nodes]
    links = {(a, b): LinkSpec(1e9, 0.001) for a in names for b in names if a != b}
    for name in names:
        links[SOURCE, name] = links[name, SINK] = LinkSpec(1e9, 0.001)
    return PlaceCluster(base.model, nodes, kinds, links)


def _scaled(name: str, like: MachineKind, prompt: float, decode: float, memory: float) -> MachineKind:
    """Return a kind whose times are multiples of another's; it holds layers in half of its memory."""
    holdings = []
    most = int(_WEIGHTS_SHARE * memory // _LAYER_BYTES)
    for layers in range(1, most + 1):
        entries = int((0.9 * memory - layers * _LAYER_BYTES) / _KV_BYTES)
        limits = like.holdings[min(layers, len(like.holdings)) - 1].batch
        own = BatchLimits(limits.prompts, limits.prompt_tokens, limits.decodes, limits.decode_context)
        holdings.append(Holding(1.0, entries, own))
    times = (
        Curve(like.prompt.xs, tuple(prompt * y for y in like.prompt.ys)),
        Curve(like.decode.xs, tuple(decode * y for y in like.decode.ys)),
    )
    return MachineKind(name, *times, tuple(holdings))


def _with_rates(kinds: dict[str, MachineKind], layers: int) -> dict[str, MachineKind]:
    """Return kinds with the tokens/s of the data's README for this mix of machines."""
    typical = {name: max(1, round(0.67 * len(kind.holdings))) for name, kind in kinds.items()}
    rates = {name: 64.0 / kind.decode(64.0) for name, kind in kinds.items()}

    def rate(kind: MachineKind, held: int, mean: float) -> float:
        share = (held / rates[kind.name]) / (held / rates[kind.name] + (layers - held) * mean)
        entries = int(_KV_SHARE * kind.holdings[held - 1].kv_token_layers / held)
        batch = entries / (_PROMPT + _OUTPUT)
        decodes, prompts = round(batch * share), batch * share / _OUTPUT
        tokens = round(_PROMPT * prompts)
        if prompts > 1.0:
            prompts, tokens, decodes = 1.0, _PROMPT, _OUTPUT
        times = 1.0 / max(prompts, 1e-9)
        seconds = kind.prompt(float(int(times * tokens))) + times * kind.decode(float(decodes))
        return times * (tokens + decodes) / (held * seconds)

    found: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        weights = {name: SEVEN_KINDS[name] * typical[name] for name in kinds}
        mean = sum(weights[name] / rates[name] for name in kinds) / sum(weights.values())
        for name, kind in kinds.items():
            found[name] = [rate(kind, held, mean) for held in range(1, len(kind.holdings) + 1)]
        rates = {name: typical[name] * found[name][typical[name] - 1] for name in kinds}
    return {
        name: replace(
            kind,
            holdings=tuple(
                replace(each, tokens_per_s=own) for each, own in zip(kind.holdings, found[name], strict=True)
            ),
        )
        for name, kind in kinds.items()
    }
