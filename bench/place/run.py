"""Placements, the simulator of pipelines and path policies on Helix's clusters and on generated ones.

    python bench/place/run.py --data FOLDER [--only SECTION,SECTION,...] [--out FILE]

FOLDER holds Helix's clusters as CSV and JSON (see docs/placement.md); it is not part of the project. Times
are CPU seconds of this process. What each section shows stands in docs/placement.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusters import generated, many, regional

from hetlb.core.paths.path_scheduler import PathScheduler
from hetlb.core.paths.stages import Edge
from hetlb.core.predictor import LengthDistribution, MeanPredictor
from hetlb.plan.check import check_placement
from hetlb.plan.highs import SolveLimits
from hetlb.plan.placement.check_path import check_path
from hetlb.plan.placement.estimate import Estimator
from hetlb.plan.placement.even_flow import balanced_flow
from hetlb.plan.placement.flow import Flow, max_flow
from hetlb.plan.placement.flow_bounds import compute_bound, flow_bound
from hetlb.plan.placement.heuristics import Intervals, swarm
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.plan.placement.place_files import ClusterFiles, load_cluster, load_lengths, load_placement
from hetlb.plan.placement.place_search import PlacementCandidate, PlacementSearch
from hetlb.sim.pipelines import OfflineLoad, PipelineResult, PipelineSimulation
from hetlb.workload.arrivals import gaps_s

CLUSTERS = ("single24", "dist24", "cluster10")
#: Helix's settings: 240 output tokens expected; the high-water mark of the KV cache offline and online.
EXPECTED_OUTPUT = 240
OFFLINE_HIGH_WATER, ONLINE_HIGH_WATER = 0.85, 0.9
OFFLINE = OfflineLoad()
WARM_UP_S, MEASURED_S, SHORT_S = 60.0, 600.0, 240.0


class Data:
    """Helix's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths = load_lengths(folder / "request_lengths.csv")

    def cluster(self, name: str, *, pruned: bool = False) -> PlaceCluster:
        folder = self.folder / name
        return load_cluster(
            ClusterFiles(
                nodes=folder / "nodes.csv",
                links=folder / "links.csv",
                layer_times=folder / "layer_time.csv",
                limits=folder / "by_layers.csv",
                model=folder / "model.json",
            ),
            pruned=pruned,
        )

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
    partial: bool = False,
    load: OfflineLoad | float = OFFLINE,
    drop: bool = False,
    measured_s: float = MEASURED_S,
    seed: int = 0,
) -> PipelineResult:
    """One run; `load` is offline or requests/s, `drop` turns away what finds no path (Helix) instead of
    queueing.
    """
    network = cluster.network(placement, partial_inference=partial, flows=flows)
    offline = isinstance(load, OfflineLoad)
    scheduler = PathScheduler(
        network,
        MeanPredictor(LengthDistribution([EXPECTED_OUTPUT])),
        policy=policy,
        high_water=OFFLINE_HIGH_WATER if offline else ONLINE_HIGH_WATER,
        queue_limit=0 if drop else None,
        seed=seed,
    )
    run = PipelineSimulation(
        network,
        scheduler,
        data.draw(seed),
        watch=lambda dispatch, now: check_path(network, dispatch.lease.hops),
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


def flows(data: Data) -> list[dict[str, Any]]:
    """Every flow of the data against ours, and what bounds it."""
    rows = []
    for name in CLUSTERS:
        cluster, pruned = data.cluster(name), data.cluster(name, pruned=True)
        bound = flow_bound(cluster)
        for placement_name, entry in data.expected(name)["placements"].items():
            placement = data.placement(name, cluster, placement_name)
            for kind, expected in entry["max_flow_tokens_per_s"].items():
                flow = max_flow(
                    pruned if "pruned" in kind else cluster, placement, partial_inference=kind == "partial_on"
                )
                rows.append(
                    {
                        "cluster": name,
                        "placement": placement_name,
                        "flow": kind,
                        "expected": expected,
                        "ours": flow.tokens_per_s,
                        "error": abs(flow.tokens_per_s - expected),
                        "flow_bound": bound,
                        "compute_bound": compute_bound(cluster),
                    }
                )
    print("flows:", len(rows), "largest error", max(row["error"] for row in rows), flush=True)
    return rows


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


def published(data: Data) -> list[dict[str, Any]]:
    """Helix's published output tokens/s against the simulator's: any maximum flow, several of them, the
    balanced one.
    """
    rows = []
    for name, placement_name, partial, policy, load, figure, source in PUBLISHED:
        # Helix planned its own placements of dist24 on the links that it kept.
        pruned = name == "dist24" and placement_name in ("helix", "helix_scheduling_study")
        cluster = data.cluster(name, pruned=pruned)
        placement = data.placement(name, cluster, placement_name)
        tried = []
        for seed in range(4):
            # The first maximum flow that is found depends on the order of the nodes.
            nodes = list(cluster.nodes)
            random.Random(seed).shuffle(nodes)
            shuffled = PlaceCluster(cluster.model, tuple(nodes), cluster.kinds, cluster.links)
            flow = max_flow(shuffled, placement, partial_inference=partial)
            result = simulate(
                data, cluster, placement, flow.links, policy, partial=partial, load=load, drop=True
            )
            tried.append(result.decode_tokens_per_s)
            if policy == "swarm":
                break
        balanced = balanced_flow(cluster, placement, partial_inference=partial)
        result = simulate(
            data, cluster, placement, balanced.links, policy, partial=partial, load=load, drop=True
        )
        row = {
            "cluster": name, "placement": placement_name, "policy": policy, "source": source, "published":
            figure, "any_flow": tried, "balanced": result.decode_tokens_per_s,
            "prompt_latency_s": result.prompts.mean, "decode_latency_s": result.decodes.mean,
        }  # fmt: skip
        ratios = [round(value / figure, 3) for value in tried]
        print(
            "published:", name, placement_name, policy, figure, ratios, round(row["balanced"], 1), flush=True
        )
        rows.append(row)
    return rows


def plan(
    data: Data, cluster: PlaceCluster, seconds: float, policy: str, seed: int
) -> tuple[PlacementCandidate, float, float]:
    """A search with simulations as its judge: the best placement, the CPU seconds, the highest flow met."""

    def judge(placement: Intervals, flow: Flow, whole: bool, limits: SolveLimits) -> float:
        measured = MEASURED_S if whole else SHORT_S
        result = simulate(data, cluster, placement, flow.links, policy, measured_s=measured)
        return result.decode_tokens_per_s

    began = time.process_time()
    bound = flow_bound(cluster)
    limits = SolveLimits(deadline=began + seconds, seed=seed, clock=time.process_time)
    found = PlacementSearch(cluster, Estimator(cluster, data.lengths), judge, bound=bound).run(limits)
    best = found.best
    check_placement(cluster, best.placement, best.flow, bound, partial_inference=False)
    return best, time.process_time() - began, found.highest_flow.flow.tokens_per_s


def plans(data: Data, seconds: float, seeds: int) -> list[dict[str, Any]]:
    """Our placement against Helix's (or the best heuristic's), under the same policy, load and simulator."""
    rows = []
    cases: list[tuple[str, PlaceCluster, Placement]] = []
    for name in ("single24", "dist24"):
        cluster = data.cluster(name)
        cases.append((name, cluster, data.placement(name, cluster, "helix")))
    base = data.cluster("single24")
    for seed in (1, 2):
        cluster, reference = generated(base, seed)
        cases.append((f"generated-{seed}", cluster, reference))
    for name, cluster, reference in cases:
        reference_flow = balanced_flow(cluster, reference)
        for seed in range(seeds):
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
            print(
                "plans:", name, seed, f"flow {row['flow']:.1f} (highest {highest:.1f})",
                {p: {k: round(v, 3) for k, v in row[p].items()} for p in ("hetlb", "iwrr")}, f"{cpu_s:.0f} s",
                flush=True,
            )  # fmt: skip
            rows.append(row)
    return rows


#: Machines of each kind in one region, and machines, regions and seed of clusters in several; CPU seconds.
LARGE: tuple[tuple[dict[str, int] | tuple[int, int, int], float], ...] = (
    ({"A100": 4, "L4": 12, "T4": 26}, 10.0),
    ({"A100": 16, "L4": 33, "T4": 51}, 10.0),
    *(((100, 3, seed), 10.0) for seed in (21, 22, 23, 24, 25)),
    ({"A100": 40, "L4": 100, "T4": 160}, 20.0),
    *(((300, 3, seed), 20.0) for seed in (31, 32)),
)


def large(data: Data) -> list[dict[str, Any]]:
    """The highest flow of many machines against the bound, and against Swarm's."""
    rows = []
    base = data.cluster("single24")
    for made, seconds in LARGE:
        if isinstance(made, dict):
            cluster = many(base, made)
        else:
            cluster = regional(base, *made[:2], random.Random(made[2]))
        bound, placed = flow_bound(cluster), swarm(cluster)
        began = time.process_time()
        limits = SolveLimits(deadline=began + seconds, clock=time.process_time)
        found = PlacementSearch(cluster, Estimator(cluster, data.lengths), None, bound=bound).run(limits)
        flow = found.highest_flow.flow.tokens_per_s
        row = {
            "machines": made,
            "seconds": seconds,
            "cpu_s": time.process_time() - began,
            "flow": flow,
            "bound": bound,
            "over_bound": flow / bound,
            "swarm": 0.0 if placed is None else max_flow(cluster, placed).tokens_per_s,
            "by": found.highest_flow.origin,
        }
        print("large:", row, flush=True)
        rows.append(row)
    return rows


def paths(data: Data, planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Path policies on Helix's and our placements, offline and at 75 % of the offline throughput of
    `iwrr`.
    """
    rows = []
    mean_output = sum(output for _, output in data.lengths) / len(data.lengths)
    for name in ("single24", "dist24"):
        cluster = data.cluster(name)
        chosen = {"helix": data.placement(name, cluster, "helix")}
        for row in planned:
            if row["cluster"] == name and row["seed"] == 0:
                chosen["ours"] = {node: tuple(interval) for node, interval in row["placement"].items()}
        for label, placement in chosen.items():
            balanced, plain = balanced_flow(cluster, placement).links, max_flow(cluster, placement).links
            rate = 0.0
            for load in ("offline", "online"):
                for policy, weights in (
                    ("iwrr", "balanced"), ("iwrr", "plain"), ("hetlb", "balanced"), ("swarm", "balanced"),
                    ("random", "balanced"), ("shortest-queue", "balanced"),
                ):  # fmt: skip
                    result = simulate(
                        data,
                        cluster,
                        placement,
                        balanced if weights == "balanced" else plain,
                        policy,
                        load=OfflineLoad() if load == "offline" else rate,
                    )
                    if (load, policy, weights) == ("offline", "iwrr", "balanced"):
                        rate = 0.75 * result.decode_tokens_per_s / mean_output
                    rows.append(
                        {
                            "cluster": name, "placement": label, "load": load, "policy": policy, "weights":
                            weights, "decode_tokens_per_s": result.decode_tokens_per_s,
                            "prompt_p95_s": result.prompts.percentile(0.95),
                            "decode_p95_s": result.decodes.percentile(0.95),
                        }
                    )  # fmt: skip
                    print(
                        "paths:",
                        *(v if isinstance(v, str) else round(v, 2) for v in rows[-1].values()),
                        flush=True,
                    )
    _compare(rows)
    return rows


#: Generated clusters that nothing was tuned on, and seeds of their requests.
HELD_OUT, REQUEST_SEEDS = (11, 12, 13), (1, 2, 3)


def held_out(data: Data) -> list[dict[str, Any]]:
    """`hetlb` against `iwrr` with the most even flow, offline, on clusters that were kept back."""
    rows = []
    base = data.cluster("single24")
    for number, seed in itertools.product(HELD_OUT, REQUEST_SEEDS):
        cluster, placement = generated(base, number)
        links = balanced_flow(cluster, placement).links
        row: dict[str, Any] = {"cluster": number, "seed": seed}
        for policy in ("iwrr", "hetlb"):
            result = simulate(data, cluster, placement, links, policy, seed=seed)
            row[policy] = result.decode_tokens_per_s
        row["ratio"] = row["hetlb"] / row["iwrr"]
        print("held out:", row, flush=True)
        rows.append(row)
    return rows


def _compare(rows: list[dict[str, Any]]) -> None:
    """Print the means of the ratios of `hetlb` to `iwrr`."""
    keyed = {(r["cluster"], r["placement"], r["load"], r["policy"], r["weights"]): r for r in rows}
    for weights in ("balanced", "plain"):
        for figure in ("decode_tokens_per_s", "prompt_p95_s", "decode_p95_s"):
            ratios = [
                row[figure] / keyed[(*key[:3], "iwrr", weights)][figure]
                for key, row in keyed.items()
                if key[3] == "hetlb"
            ]
            mean = sum(ratios) / len(ratios)
            print(f"paths: {figure} against iwrr ({weights}): mean {mean:.3f}", [round(r, 3) for r in ratios])


def speed(data: Data) -> dict[str, Any]:
    """CPU seconds and memory of 11 minutes of load on 24 nodes, and of two hours."""
    cluster = data.cluster("single24")
    placement = data.placement("single24", cluster, "helix")
    links = balanced_flow(cluster, placement).links
    row: dict[str, Any] = {}
    for label, measured in (("11 minutes", MEASURED_S), ("two hours", 7200.0 - WARM_UP_S)):
        began = time.process_time()
        result = simulate(data, cluster, placement, links, "hetlb", measured_s=measured)
        row[label] = {
            "cpu_s": time.process_time() - began,
            "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "output_tokens": result.output_tokens,
        }
        print("speed:", label, row[label], flush=True)
    return row


def main() -> None:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder with Helix's clusters")
    parser.add_argument(
        "--only", default="flows,published,plans,large,paths,held_out,speed", help="sections, comma-separated"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of each search (60)")
    parser.add_argument("--seeds", type=int, default=2, help="searches per cluster (2)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "place.json")
    args = parser.parse_args()
    data = Data(args.data)
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for section in args.only.split(","):
        if section == "flows":
            results[section] = flows(data)
        elif section == "published":
            results[section] = published(data)
        elif section == "plans":
            results[section] = plans(data, args.seconds, args.seeds)
        elif section == "large":
            results[section] = large(data)
        elif section == "paths":
            results[section] = paths(data, results.get("plans", []))
        elif section == "held_out":
            results[section] = held_out(data)
        elif section == "speed":
            results[section] = speed(data)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
