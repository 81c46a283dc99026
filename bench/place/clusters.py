"""Clusters that are not Helix's: machines of its kinds in other numbers, regions and networks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate

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
    """Return a number of machines of each kind in one region, linked like the first two of `base`."""
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
#: Kinds of the 42 that form no pipeline by themselves (section 6.5): one mixed pipeline in "SP+".
UNABLE = ("V100", "T4", "2xT4")
#: Bytes that weights and KV cache share, and nominal ones, by kind: as the data's KV entries have them. The
#: A100 has 1.2 GB more, so that 20 of its layers leave the cache with which Helix ran them (20 requests).
_USABLE = {"A100": 35.6e9, "L4": 19.15e9, "T4": 12.05e9}
_NOMINAL = {"A100": 40e9, "L4": 24e9, "T4": 16e9}
for _name, (_like, _, _, _share) in SCALED.items():
    _USABLE[_name], _NOMINAL[_name] = _share * _USABLE[_like], _share * _NOMINAL[_like]
#: Bytes of a layer's weights and of a KV entry (one token in one layer), by layers of the model.
_LAYER_BYTES, _KV_BYTES = {80: 1.711e9, 60: 1.07e9}, {80: 4096, 60: 26624}
#: Share of the nominal memory that a planner gives to weights; requests that must fit beside them.
_WEIGHTS_SHARE, _LEAST_REQUESTS = 0.5, 2
#: Rules of the data's README for tokens/s: share of KV of a typical batch, mean lengths, rounds.
_KV_SHARE, _PROMPT, _OUTPUT, _ROUNDS = 0.3, 750, 240, 10
#: Decodes of the batch by whose time layers of a mixed pipeline are divided.
_BATCH = 64.0


def seven_kinds(base: PlaceCluster) -> PlaceCluster:
    """Return 42 machines of seven kinds in one region: three kinds of `base`, four scaled from them."""
    kinds = {name: base.kinds[name] for name in ("A100", "L4", "T4")}
    for name, (like, prompt, decode, _) in SCALED.items():
        known = base.kinds[like]
        times = (
            Curve(known.prompt.xs, tuple(prompt * y for y in known.prompt.ys)),
            Curve(known.decode.xs, tuple(decode * y for y in known.decode.ys)),
        )
        kinds[name] = MachineKind(name, *times, ())
        kinds[name] = _filled(kinds[name], known, base.model.layers, _WEIGHTS_SHARE)
    kinds = _with_rates(kinds, SEVEN_KINDS, base.model.layers)
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


def thirty_b(base: PlaceCluster, small: PlaceCluster) -> PlaceCluster:
    """Return machines and links of `base` (LLaMA-2-70B) with the model of `small` (LLaMA-1-30B).

    Its A100 is in no table: its 70B times, times what an L4 takes with 30B over what it takes with 70B.
    """
    times = []
    for phase in ("prompt", "decode"):
        known, large = getattr(base.kinds["A100"], phase), getattr(base.kinds["L4"], phase)
        light = getattr(small.kinds["L4"], phase)
        ys = (y * light(x) / large(x) if y else 0.0 for x, y in zip(known.xs, known.ys, strict=True))
        times.append(Curve(known.xs, tuple(ys)))
    a100 = _filled(
        MachineKind("A100", times[0], times[1], ()), base.kinds["A100"], small.model.layers, _WEIGHTS_SHARE
    )
    kinds = _with_rates({**small.kinds, "A100": a100}, _counts(base), small.model.layers)
    nodes = tuple(replace(node, max_layers=len(kinds[node.kind].holdings)) for node in base.nodes)
    return PlaceCluster(small.model, nodes, kinds, base.links)


def _counts(cluster: PlaceCluster) -> dict[str, int]:
    return dict(Counter(node.kind for node in cluster.nodes))


def _filled(kind: MachineKind, like: MachineKind, layers: int, share: float) -> MachineKind:
    """Return a kind that also holds more layers, up to a share of its memory."""
    holdings, most = list(kind.holdings), int(share * _NOMINAL[kind.name] // _LAYER_BYTES[layers])
    for held in range(len(holdings) + 1, min(layers, most) + 1):
        entries = int((_USABLE[kind.name] - held * _LAYER_BYTES[layers]) / _KV_BYTES[layers])
        tokens = entries // held
        if tokens < _LEAST_REQUESTS * (_PROMPT + _OUTPUT):
            break
        known = like.holdings[min(held, len(like.holdings)) - 1].batch
        context = min(known.decode_context, tokens)
        decodes = min(known.decodes, max(1, context // (_PROMPT + _OUTPUT)))
        limits = BatchLimits(known.prompts, known.prompt_tokens, decodes, context)
        holdings.append(Holding(1.0, entries, limits))
    return replace(kind, holdings=tuple(holdings))


def by_kind(cluster: PlaceCluster, *, mixed: bool = False) -> tuple[PlaceCluster, Placement]:
    """Return Helix's separate pipelines (SP), in a cluster whose machines may be filled with weights.

    All machines of a kind form one pipeline; kinds that hold no model by themselves are left out,
    or (`mixed`, its SP+) form one together.
    """
    layers = cluster.model.layers
    kinds = {name: _filled(kind, kind, layers, 1.0) for name, kind in cluster.kinds.items()}
    kinds = _with_rates(kinds, _counts(cluster), layers)
    nodes = tuple(replace(node, max_layers=len(kinds[node.kind].holdings)) for node in cluster.nodes)
    full = replace(cluster, nodes=nodes, kinds=kinds)
    unable = UNABLE if set(UNABLE) <= set(kinds) else ()
    groups = [[node for node in nodes if node.kind == name] for name in kinds if name not in unable]
    groups += [[node for node in nodes if node.kind in unable]] if mixed else []
    placement: Placement = {}
    for group in groups:
        held = [0] * len(group)
        while sum(held) < layers:
            more = [at for at, node in enumerate(group) if held[at] < full.most_layers(node)]
            if not more:
                break
            held[min(more, key=lambda at: (held[at] + 1) * full.kind(group[at]).decode(_BATCH))] += 1
        if sum(held) == layers:
            ends = list(accumulate(held))
            placement |= {
                node.name: (end - count, end)
                for node, count, end in zip(group, held, ends, strict=True)
                if count
            }
    return full, placement


def _with_rates(kinds: dict[str, MachineKind], counts: dict[str, int], layers: int) -> dict[str, MachineKind]:
    """Return kinds with the tokens/s of the data's README for this mix of machines."""
    typical = {name: max(1, round(0.67 * len(kind.holdings))) for name, kind in kinds.items()}
    rates = {name: 64.0 / kind.decode(64.0) for name, kind in kinds.items()}

    def rate(kind: MachineKind, held: int, mean: float) -> float:
        share = (held / rates[kind.name]) / (held / rates[kind.name] + (layers - held) * mean)
        entries = int(_KV_SHARE * kind.holdings[held - 1].kv_token_layers / held)
        batch = entries / (_PROMPT + _OUTPUT)
        decodes, prompts = max(1, round(batch * share)), batch * share / _OUTPUT
        tokens = round(_PROMPT * prompts)
        if prompts > 1.0:
            prompts, tokens, decodes = 1.0, _PROMPT, _OUTPUT
        times = 1.0 / max(prompts, 1e-9)
        seconds = kind.prompt(float(int(times * tokens))) + times * kind.decode(float(decodes))
        return times * (tokens + decodes) / (held * seconds)

    found: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        weights = {name: counts[name] * typical[name] for name in kinds}
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
