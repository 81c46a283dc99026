"""Placements, the simulator of pipelines and path policies on Helix's clusters and on generated ones.

    python bench/place/run.py --data FOLDER [--only SECTION,SECTION,...] [--fresh] [--out FILE]

FOLDER holds Helix's clusters as CSV and JSON (see docs/placement.md); it is not part of the project. Times
are CPU seconds of this process. What each section shows stands in docs/placement.md. Every row is written
when it is done, and a section that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusters import by_kind, generated, made_up, many, regional, seven_kinds, thirty_b

from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor
from hetlb.tools.paths.path_scheduler import PathScheduler
from hetlb.tools.paths.stages import SINK, Edge
from hetlb.tools.plan.check import check_path, check_placement
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.placement.estimate import Estimator
from hetlb.tools.plan.placement.flow import PlacementFlows, max_flow
from hetlb.tools.plan.placement.flow_bounds import compute_bound, flow_bound
from hetlb.tools.plan.placement.heuristics import separate_pipelines, swarm
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.tools.plan.placement.place_files import load_cluster, load_placement
from hetlb.tools.plan.placement.place_plan import PlacementSimulator
from hetlb.tools.plan.placement.place_search import PlacementCandidate, PlacementSearch
from hetlb.tools.plan.workloads import trace_rows
from hetlb.tools.sim.pipelines import OfflineLoad, PipelineResult, PipelineSimulation
from hetlb.tools.workload.arrivals import gaps_s

CLUSTERS = ("single24", "dist24", "cluster10")
#: Helix's settings: 240 output tokens expected; the high-water mark of the KV cache offline and online.
EXPECTED_OUTPUT = 240
OFFLINE_HIGH_WATER, ONLINE_HIGH_WATER = 0.85, 0.9
OFFLINE = OfflineLoad()
WARM_UP_S, MEASURED_S = 60.0, 600.0


FILES = {
    "nodes": "nodes.csv", "links": "links.csv", "layer_times": "layer_time.csv", "limits": "by_layers.csv",
    "model": "model.json",
}  # fmt: skip


class Data:
    """Helix's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths = trace_rows(folder / "request_lengths.csv")

    def cluster(self, name: str, *, pruned: bool = False) -> PlaceCluster:
        folder = self.folder / name
        return load_cluster({key: folder / file for key, file in FILES.items()}, pruned=pruned)

    def expected(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / name / "expected.json").read_text())
        return document

    def placement(self, name: str, cluster: PlaceCluster, placement: str) -> Placement:
        return load_placement(self.folder / name / "placements" / f"{placement}.json", cluster)

    def draw(self, seed: int) -> Iterator[tuple[int, int]]:
        rng = random.Random(seed)
        while True:
            yield rng.choice(self.lengths)


def simulate(
    data: Data,
    cluster: PlaceCluster,
    placement: Placement,
    flows: Mapping[Edge, float],
    policy: str,
    *,
    load: OfflineLoad | float = OFFLINE,
    drop: bool = False,
    measured_s: float = MEASURED_S,
    seed: int = 0,
) -> PipelineResult:
    """One run; `load` is offline or requests/s, `drop` turns away what finds no path (Helix) instead of
    queueing.
    """
    network = cluster.network(placement, flows)
    offline = isinstance(load, OfflineLoad)
    scheduler = PathScheduler(
        network,
        SamplePredictor(LengthDistribution([EXPECTED_OUTPUT]), capped=False),
        policy=policy,
        high_water=OFFLINE_HIGH_WATER if offline else ONLINE_HIGH_WATER,
        queue_limit=0 if drop else None,
        seed=seed,
    )
    run = PipelineSimulation(
        network,
        scheduler,
        data.draw(seed),
        watch=lambda lease: check_path(network, lease.hops),
    )
    if isinstance(load, OfflineLoad):
        result = run.run_offline(load, warm_up_s=WARM_UP_S, measured_s=measured_s)
    else:
        count = int(load * (WARM_UP_S + measured_s))
        arrivals = itertools.accumulate(gaps_s(count, load, 1.0, random.Random(seed + 100)), initial=0.0)
        result = run.run_online(list(arrivals), warm_up_s=WARM_UP_S, measured_s=measured_s)
    scheduler.check_integrity()
    return result


# --- sections ---


def flows(data: Data, name: str) -> dict[str, Any]:
    """Every flow of a cluster's data against ours, and what bounds it."""
    cluster, pruned = data.cluster(name), data.cluster(name, pruned=True)
    rows = []
    for placement_name, entry in data.expected(name)["placements"].items():
        placement = data.placement(name, cluster, placement_name)
        for kind, expected in entry["max_flow_tokens_per_s"].items():
            of = pruned if "pruned" in kind else cluster
            flow = max_flow(replace(of, partial_inference=kind == "partial_on"), placement).tokens_per_s
            error = abs(flow - expected)
            rows.append(
                {
                    "placement": placement_name,
                    "flow": kind,
                    "expected": expected,
                    "ours": flow,
                    "error": error,
                }
            )
    bounds = {"flow_bound": flow_bound(cluster), "compute_bound": compute_bound(cluster)}
    return {"cluster": name, **bounds, "flows": rows, "largest_error": max(row["error"] for row in rows)}


PUBLISHED = (
    ("single24", "helix", False, "iwrr", OfflineLoad(), 252.1, "simulated"),
    ("single24", "helix_readme_demo", False, "iwrr", OfflineLoad(), 248.3, "simulated"),
    ("single24", "swarm", False, "swarm", OfflineLoad(180, constant=True), 124.7, "simulated"),
    ("single24", "petals", True, "iwrr", OfflineLoad(), 194.5, "prototype"),
    ("single24", "swarm", False, "iwrr", OfflineLoad(), 109.4, "prototype"),
    ("dist24", "helix", False, "iwrr", OfflineLoad(), 98.0, "simulated"),
    ("dist24", "helix_scheduling_study", False, "iwrr", OfflineLoad(), 99.8, "simulated"),
    ("dist24", "petals", True, "iwrr", OfflineLoad(), 66.6, "simulated"),
    ("dist24", "swarm", False, "iwrr", OfflineLoad(), 41.6, "simulated"),
    ("dist24", "swarm", False, "swarm", OfflineLoad(180, constant=True), 51.9, "simulated"),
    ("dist24", "helix_unpruned", False, "iwrr", OfflineLoad(), 74.92, "simulated"),
)


def published(
    data: Data,
    name: str,
    placement_name: str,
    partial: bool,
    policy: str,
    load: OfflineLoad,
    figure: float,
    source: str,
) -> dict[str, Any]:
    """Helix's published output tokens/s against the simulator's: any maximum flow, several of them, the
    balanced one.
    """
    # Helix planned its own placements of dist24 on the links that it kept.
    pruned = name == "dist24" and placement_name in ("helix", "helix_scheduling_study")
    cluster = replace(data.cluster(name, pruned=pruned), partial_inference=partial)
    placement = data.placement(name, cluster, placement_name)
    tried = []
    for seed in range(4):
        # The first maximum flow that is found depends on the order of the nodes.
        nodes = list(cluster.nodes)
        random.Random(seed).shuffle(nodes)
        flow = max_flow(replace(cluster, nodes=tuple(nodes)), placement)
        result = simulate(data, cluster, placement, flow.links, policy, load=load, drop=True)
        tried.append(result.decode_tokens_per_s)
        if policy == "swarm":
            break
    balanced = PlacementFlows(cluster).balanced(placement)
    result = simulate(data, cluster, placement, balanced.links, policy, load=load, drop=True)
    return {
        "cluster": name, "placement": placement_name, "policy": policy, "source": source, "published":
        figure, "any_flow": tried, "balanced": result.decode_tokens_per_s,
        "prompt_latency_s": result.prompts.mean, "decode_latency_s": result.decodes.mean,
    }  # fmt: skip


def plan(
    data: Data, cluster: PlaceCluster, seconds: float, policy: str, seed: int
) -> tuple[PlacementCandidate, float, float]:
    """A search with simulations as its judge: the best placement, the CPU seconds, the highest flow met."""

    simulator = PlacementSimulator(cluster, data.lengths, policy, seed=seed)
    began = time.process_time()
    bound = flow_bound(cluster)
    limits = SolveLimits(deadline=began + seconds, seed=seed, clock=time.process_time)
    search = PlacementSearch(
        cluster, Estimator(cluster, data.lengths), simulator.begin, longest_s=MEASURED_S, bound=bound
    )
    found = search.run(limits)
    best = found.best
    check_placement(cluster, best.placement, best.flow, bound)
    return best, time.process_time() - began, found.highest_flow.flow.tokens_per_s


def reference_of(data: Data, name: str) -> tuple[PlaceCluster, Placement]:
    """A cluster by name, and the placement of another planner (or the best heuristic's) for it."""
    if name.startswith("generated-"):
        return generated(data.cluster("single24"), int(name.partition("-")[2]))
    cluster = data.cluster(name)
    return cluster, data.placement(name, cluster, "helix")


def plans(data: Data, name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Our placement against the reference, under the same policy, load and simulator."""
    cluster, reference = reference_of(data, name)
    reference_flow = PlacementFlows(cluster).balanced(reference)
    best, cpu_s, highest = plan(data, cluster, seconds, "hetlb", seed)
    row: dict[str, Any] = {
        "cluster": name, "seed": seed, "seconds": seconds, "cpu_s": cpu_s, "flow":
        best.flow.tokens_per_s, "highest_flow": highest, "reference_flow":
        reference_flow.tokens_per_s, "placement": {node: list(interval) for node, interval in
        best.placement.items()},
    }  # fmt: skip
    for policy in ("hetlb", "iwrr"):
        ours = simulate(data, cluster, best.placement, best.flow.links, policy, seed=5)
        theirs = simulate(data, cluster, reference, reference_flow.links, policy, seed=5)
        row[policy] = {"ours": ours.decode_tokens_per_s, "reference": theirs.decode_tokens_per_s}
        row[policy]["ratio"] = ours.decode_tokens_per_s / theirs.decode_tokens_per_s
    return row


#: Path policy of each system with its own placement.
SYSTEMS = (("helix", "iwrr"), ("swarm", "swarm"), ("separate-pipelines", "round-robin"))


def placed(data: Data, cluster: PlaceCluster, name: str, system: str) -> Placement | None:
    """Return the placement of a system, None where its rule cannot be followed."""
    if system == "helix":
        return data.placement(name, cluster, "helix")
    return swarm(cluster) if system == "swarm" else separate_pipelines(cluster)


def cluster_of(data: Data, name: str) -> PlaceCluster:
    """Return a cluster of Helix's evaluation: of its data, or made from it."""
    base = data.cluster(name.removesuffix("-30b") if name != "seven-kinds" else "single24")
    if name == "seven-kinds":
        return seven_kinds(base)
    return thirty_b(base, data.cluster("cluster10")) if name.endswith("-30b") else base


#: CPU seconds of the search for a placement of hetlb's own.
SEARCH_S = 60.0


def compared(data: Data, name: str) -> Iterator[tuple[str, PlaceCluster, Placement, list[str]]]:
    """Yield the systems of Helix's figures 6 to 8: cluster, placement, policies of which the best counts."""
    cluster = cluster_of(data, name)
    best, _, _ = plan(data, cluster, SEARCH_S, "hetlb", 0)
    yield "hetlb", cluster, best.placement, ["hetlb"]
    if name in CLUSTERS:
        yield "helix", cluster, data.placement(name, cluster, "helix"), ["iwrr"]
    if (placement := swarm(cluster)) is not None:
        yield "swarm", cluster, placement, ["swarm"]
    yield "separate", *by_kind(cluster), ["hetlb", "iwrr"]
    if name == "seven-kinds":
        yield "separate and mixed", *by_kind(cluster, mixed=True), ["hetlb", "iwrr"]


def systems(data: Data, name: str) -> dict[str, Any]:
    """Each system offline, and online at 75 % of its own offline throughput and of the least of all."""
    output = sum(length for _, length in data.lengths) / len(data.lengths)
    row: dict[str, Any] = {"cluster": name}
    runs = {}
    for system, cluster, placement, policies in compared(data, name):
        flow = PlacementFlows(cluster).balanced(placement)
        tried = {each: simulate(data, cluster, placement, flow.links, each) for each in policies}
        policy = max(tried, key=lambda each: tried[each].decode_tokens_per_s)
        runs[system] = cluster, placement, flow.links, policy, tried[policy].decode_tokens_per_s / output
        entered = sum(rate for (_, to), rate in flow.links.items() if to != SINK)
        row[system] = {
            "policy": policy, "depth": entered / flow.tokens_per_s, "machines": len(placement),
            "offline": figures_of(tried[policy]),
        }  # fmt: skip
    least = min(most for *_, most in runs.values())
    for system, (cluster, placement, links, policy, most) in runs.items():
        for load, rate in (("own", 0.75 * most), ("same", 0.75 * least)):
            result = simulate(data, cluster, placement, links, policy, load=rate)
            row[system][load] = {"request_rate": rate, **figures_of(result)}
    return row


def figures_of(result: PipelineResult) -> dict[str, float]:
    """Return output tokens/s and mean seconds of a prompt and of a token."""
    return {
        "decode_tokens_per_s": result.decode_tokens_per_s, "prompt_s": result.prompts.mean,
        "decode_s": result.decodes.mean,
    }  # fmt: skip


#: Output tokens/s of simple rules by path policy, for each cluster and rule: every row has the same.
_SERVED: dict[tuple[str, str], dict[str, float]] = {}


def limits_of(data: Data, name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Return our placement after `seconds` of CPU over each simple rule (and Helix's), all under `hetlb`."""
    cluster = cluster_of(data, name)
    best, cpu_s, _ = plan(data, cluster, seconds, "hetlb", seed)
    links = best.flow.links
    ours = simulate(data, cluster, best.placement, links, "hetlb", seed=5).decode_tokens_per_s
    row: dict[str, Any] = {"cluster": name, "seconds": seconds, "seed": seed, "cpu_s": cpu_s, "ours": ours}
    for system, policy in SYSTEMS:
        if system == "helix" and name == "seven-kinds":
            continue
        if (name, system) not in _SERVED:
            placement = placed(data, cluster, name, system)
            _SERVED[name, system] = {}
            if placement is not None:
                flow = PlacementFlows(cluster).balanced(placement).links
                _SERVED[name, system] = {
                    each: simulate(data, cluster, placement, flow, each, seed=5).decode_tokens_per_s
                    for each in ("hetlb", policy)
                }
        if served := _SERVED[name, system]:
            row[system] = served
    return row


#: Machines of each kind in one region, and machines, regions and seed of clusters in several; CPU seconds.
LARGE: tuple[tuple[dict[str, int] | tuple[int, int, int], float], ...] = (
    ({"A100": 4, "L4": 12, "T4": 26}, 10.0),
    ({"A100": 16, "L4": 33, "T4": 51}, 10.0),
    *(((100, 3, seed), 10.0) for seed in (21, 22, 23, 24, 25)),
    ({"A100": 40, "L4": 100, "T4": 160}, 20.0),
    *(((300, 3, seed), 20.0) for seed in (31, 32)),
)


def large(data: Data, made: dict[str, int] | tuple[int, int, int], seconds: float) -> dict[str, Any]:
    """The highest flow of many machines against the bound, and against Swarm's."""
    base = data.cluster("single24")
    if isinstance(made, dict):
        cluster = many(base, made)
    else:
        cluster = regional(base, *made[:2], random.Random(made[2]))
    bound, placed = flow_bound(cluster), swarm(cluster)
    began = time.process_time()
    limits = SolveLimits(deadline=began + seconds, clock=time.process_time)
    found = PlacementSearch(cluster, Estimator(cluster, data.lengths), None, bound=bound).run(limits)
    flow = found.highest_flow.flow.tokens_per_s
    return {
        "machines": made,
        "seconds": seconds,
        "cpu_s": time.process_time() - began,
        "flow": flow,
        "bound": bound,
        "over_bound": flow / bound,
        "swarm": 0.0 if placed is None else max_flow(cluster, placed).tokens_per_s,
    }


#: Path policies with the weights of their flow: the most even of all maximum flows, or any.
PATHS = (
    ("iwrr", "balanced"), ("iwrr", "plain"), ("hetlb", "balanced"), ("swarm", "balanced"),
    ("random", "balanced"), ("shortest-queue", "balanced"),
)  # fmt: skip


def paths(data: Data, name: str, load: str, policy: str, weights: str) -> dict[str, Any]:
    """A path policy on Helix's placement, offline or at 75 % of the offline throughput of `iwrr`."""
    cluster, placement = reference_of(data, name)
    even = PlacementFlows(cluster)
    flow = (even.balanced(placement) if weights == "balanced" else even.flow(placement)).links
    rate: OfflineLoad | float = OFFLINE
    if load == "online":
        most = simulate(data, cluster, placement, even.balanced(placement).links, "iwrr").decode_tokens_per_s
        rate = 0.75 * most / (sum(output for _, output in data.lengths) / len(data.lengths))
    result = simulate(data, cluster, placement, flow, policy, load=rate)
    return {
        "cluster": name, "load": load, "policy": policy, "weights": weights,
        "decode_tokens_per_s": result.decode_tokens_per_s, "prompt_p95_s": result.prompts.percentile(0.95),
        "decode_p95_s": result.decodes.percentile(0.95),
    }  # fmt: skip


#: Generated clusters that nothing was tuned on, and seeds of their requests.
HELD_OUT, REQUEST_SEEDS = (11, 12, 13), (1, 2, 3)


def held_out(data: Data, number: int, seed: int) -> dict[str, Any]:
    """`hetlb` against `iwrr` with the most even flow, offline, on a cluster that was kept back."""
    cluster, placement = generated(data.cluster("single24"), number)
    links = PlacementFlows(cluster).balanced(placement).links
    row: dict[str, Any] = {"cluster": number, "seed": seed}
    for policy in ("iwrr", "hetlb"):
        row[policy] = simulate(data, cluster, placement, links, policy, seed=seed).decode_tokens_per_s
    return row | {"ratio": row["hetlb"] / row["iwrr"]}


def speed(data: Data, measured_s: float) -> dict[str, Any]:
    """CPU seconds and memory of a load on 24 nodes, after a minute of warming up."""
    cluster = data.cluster("single24")
    placement = data.placement("single24", cluster, "helix")
    links = PlacementFlows(cluster).balanced(placement).links
    began = time.process_time()
    result = simulate(data, cluster, placement, links, "hetlb", measured_s=measured_s)
    return {
        "measured_s": measured_s,
        "cpu_s": time.process_time() - began,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "output_tokens": result.output_tokens,
    }


def smoke() -> None:
    """Plan a few made-up machines, and print what the plan serves in simulation."""
    cluster = made_up()
    simulator = PlacementSimulator(cluster, [(100, 30), (40, 10)])
    limits = SolveLimits(deadline=time.process_time() + 1.0, clock=time.process_time)
    search = PlacementSearch(cluster, Estimator(cluster, simulator.lengths), simulator.begin, longest_s=40.0)
    best = search.run(limits).best
    check_placement(cluster, best.placement, best.flow, flow_bound(cluster))
    print(f"flow {best.flow.tokens_per_s:.1f} tokens/s, simulated {best.simulated} output tokens/s")


#: Section -> the function of its rows, and the arguments of each.
SECTIONS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "flows": (flows, [(name,) for name in CLUSTERS]),
    "published": (published, list(PUBLISHED)),
    "plans": (
        plans,
        [(n, seed, 60.0) for seed in (0, 1) for n in ("single24", "dist24", "generated-1", "generated-2")],
    ),
    "large": (large, list(LARGE)),
    "paths": (
        paths,
        [
            (name, load, *policy)
            for name in ("single24", "dist24")
            for load in ("offline", "online")
            for policy in PATHS
        ],
    ),
    "held_out": (held_out, list(itertools.product(HELD_OUT, REQUEST_SEEDS))),
    "systems": (
        systems,
        [(name,) for name in ("single24", "dist24", "single24-30b", "dist24-30b", "seven-kinds")],
    ),
    "limits": (
        limits_of,
        [("seven-kinds", seconds, 0) for seconds in (10.0, 30.0, 60.0)]
        + [(name, 60.0, 0) for name in ("single24", "dist24")]
        + [("seven-kinds", 180.0, 0)],
    ),
    "speed": (speed, [(MEASURED_S,), (7200.0 - WARM_UP_S,)]),
}


def named(text: str) -> list[str]:
    """Return the sections of a list with commas. Raises `ArgumentTypeError`."""
    found = text.split(",")
    if wrong := [each for each in found if each not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(SECTIONS)}, got {', '.join(wrong)}")
    return found


def main() -> None:
    """Run the sections and write their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the folder with Helix's clusters")
    parser.add_argument(
        "--only", type=named, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}, comma-separated"
    )
    parser.add_argument("--fresh", action="store_true", help="begin the sections anew")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "place.json")
    parser.add_argument("--smoke", action="store_true", help="a plan of six made-up machines in a second")
    args = parser.parse_args()
    if args.smoke:
        smoke()
        return
    if args.data is None:
        parser.error("--data: expected the folder with Helix's clusters")
    data = Data(args.data)
    for section in args.only:
        function, arguments = SECTIONS[section]
        results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
        rows = [] if args.fresh else results.get(section, [])
        for each in arguments[len(rows) :]:
            rows.append(function(data, *each))
            results = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.write_text(json.dumps(results | {section: rows}, indent=1) + "\n")
            print(section, json.dumps(rows[-1])[:600], flush=True)


if __name__ == "__main__":
    main()
