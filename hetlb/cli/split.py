"""`hetlb split`: groups of GPUs for prefill and for decode, their parallelism, the KV flows between them."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from hetlb.cli.flags import FINITE, INTEGER, add_json, declare, print_document, whole
from hetlb.cli.plan_limits import planning
from hetlb.errors import ConfigError, InputError
from hetlb.output_files import fleet_path
from hetlb.tools.plan.check import check_split
from hetlb.tools.plan.cluster import load_split
from hetlb.tools.plan.common.servers import write_servers
from hetlb.tools.plan.disaggregation.cost import CostModel, GroupTable, PaperCost, ProfileCost
from hetlb.tools.plan.disaggregation.split_cluster import SplitCluster
from hetlb.tools.plan.disaggregation.split_report import document_of, gain_of, print_plan
from hetlb.tools.plan.disaggregation.split_search import search
from hetlb.tools.plan.disaggregation.split_servers import servers_of
from hetlb.tools.plan.disaggregation.split_simulation import choose, why_nothing
from hetlb.tools.plan.workloads import trace_rows

#: Largest cluster whose plans are all seen, in GPUs.
_MOST_EXHAUSTIVE_GPUS = 8
#: Seconds for everything if none are given: per GPU, at least and at most.
_GPU_S, _LEAST_S, _MOST_S = 0.75, 30.0, 240.0
#: Share of the time limit for the search, if plans are simulated after it.
_SEARCH_SHARE = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    files = "cluster file: machines, links, model, workload"
    add("--config", files, "CLUSTER.yaml", Path, required=True)
    add("--trace", "requests, in place of the file's workload", "T.csv", Path)
    models = "latency profiles (default), or HexGen-2's appendix A"
    add("--cost-model", models, default="profiles", choices=("profiles", "paper"))
    add(
        "--exhaustive",
        f"see every plan, however long (up to {_MOST_EXHAUSTIVE_GPUS} GPUs)",
        action="store_true",
    )
    add("--time-limit", "seconds for everything (default: 30 to 240, by GPUs)", "S", FINITE)
    add("--simulate", "plans that are simulated (default 4; 0: none)", "N", whole(0), 4)
    add("--seed", "seed of search and simulation (default 0)", "N", INTEGER, 0)
    add("--write-fleet", "fleet file of the plan", "FLEET.yaml", fleet_path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    cluster = load_split(args.config, None if args.trace is None else trace_rows(args.trace))
    cost = _cost_model(args, cluster)
    if args.exhaustive and cluster.gpus > _MOST_EXHAUSTIVE_GPUS:
        raise InputError(f"--exhaustive: expected at most {_MOST_EXHAUSTIVE_GPUS} GPUs, got {cluster.gpus}")
    table = GroupTable(cluster, cost)
    with planning(args, "planning", _time_limit(args, cluster), seed=args.seed) as (limits, progress):
        share = _SEARCH_SHARE if args.simulate else 1.0
        searching = limits.within(share * limits.left_s)

        def show(best: float, bound: float) -> None:
            most = f", bound {bound:.5g}" if math.isfinite(bound) else ""
            progress.at(f"planning: best {best:.5g} requests/s{most}")
            if math.isfinite(best):
                progress.plan(f"best plan so far: {best:.4g} requests/s")

        with searching.stopping():
            found = search(table, searching, on_progress=show)
        if not found.plans and limits.interrupted:
            raise KeyboardInterrupt
        if not found.plans:
            raise ConfigError(f"{args.config}: {why_nothing(cluster)}")
        solve_s = time.monotonic() - args.began_s
        progress.plan(f"best plan so far: {found.plans[0].throughput:.4g} requests/s, before simulation")
        plan, simulated = choose(cluster, found, limits, args.simulate)
    for each in (*found.plans, *([] if found.colocated is None else [found.colocated])):
        check_split(cluster, each, cost.capacity)
    servers = servers_of(cluster, plan)
    document = document_of(cluster, plan, found, servers, solve_s) | simulated
    document |= {"cost_model": args.cost_model, "interrupted": limits.interrupted}
    document["gain"] = gain_of(document)
    if args.write_fleet is not None:
        heading = f"Written by `hetlb split` from {args.config.name}."
        write_servers(args.write_fleet, heading, servers, {"name": "hetlb"})
    return print_document(args, document, lambda: print_plan(document))


def _cost_model(args: argparse.Namespace, cluster: SplitCluster) -> CostModel:
    if args.cost_model != "paper":
        return ProfileCost(cluster)
    for m, machine in enumerate(cluster.machines):
        if machine.roofline is None:
            raise ConfigError(
                f"{args.config}: machines[{m}].roofline: expected peak figures for --cost-model paper, "
                "got none"
            )
    return PaperCost(cluster)


def _time_limit(args: argparse.Namespace, cluster: SplitCluster) -> float:
    if args.time_limit is not None:
        return float(args.time_limit)
    if args.exhaustive:
        return math.inf
    return min(_MOST_S, max(_LEAST_S, _GPU_S * cluster.gpus))
