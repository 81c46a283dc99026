"""`hetlb search`: layouts of a cluster's machines that give the most throughput, or meet a target best."""

from __future__ import annotations

import argparse
import math
import re
import sys
from itertools import count
from pathlib import Path

from hetlb.cli.flags import FINITE, add_json, declare, number, print_document, whole
from hetlb.errors import InputError
from hetlb.tools.plan.check import check
from hetlb.tools.plan.cluster import load_cluster
from hetlb.tools.plan.cluster_layouts import lay_out, servers_of
from hetlb.tools.plan.common.composition import MOST_STAGES
from hetlb.tools.plan.common.servers import write_servers
from hetlb.tools.plan.layouts import LayoutTarget
from hetlb.tools.plan.search_report import print_result, result_document
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import degrees, search
from hetlb.tools.plan.trace_throughput import Throughputs, sample_rows
from hetlb.tools.tables import bar

#: The most rows of a trace that are estimated on.
MAX_ROWS = 2000
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--config", "cluster file", "CLUSTER.yaml", Path, required=True)
    rows = "expected requests: arrival_s,input_tokens,output_tokens"
    add("--trace", rows, "T.csv", Path, required=True)
    estimate = "engine model (default), or the paper's algorithm 1 (order, not figures)"
    add("--estimate", estimate, default="simulate", choices=("simulate", "static"))
    sample = f"rows to sample (default and most: {MAX_ROWS})"
    add("--num-prompts", sample, "N", whole(1, MAX_ROWS), MAX_ROWS)
    add("--request-rate", "requests/s of the whole fleet; ranks by goodput", "R", FINITE)
    add("--slo", "latency limits: ttft=500ms,tpot=50ms", "TARGET")
    stages = "most stages of an instance (default: 1, more where GPUs would be left over)"
    add("--pipeline-parallel", stages, "N", whole(1, MOST_STAGES))
    add("--data-parallel", "put equal instances of a machine behind one URL", action="store_true")
    add("--write-fleet", "fleet file of the best layouts", "FLEET.yaml", Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    target = read_target(args.request_rate, args.slo)
    cluster = load_cluster(args.config)
    sample = sample_rows(cluster, args.trace, args.num_prompts)
    kinds = {machine.kind: machine for machine in cluster.machines}
    total = sum(len(degrees(machine)) for machine in kinds.values())
    with bar("searching") as show:
        done = count(1)
        throughputs = Throughputs(sample.rows, args.estimate)
        rankings = search(cluster, throughputs.of, lambda: show(completed=next(done), total=total))
        check(cluster, rankings)
        show(description="simulating layouts", total=None)
        found = lay_out(cluster, sample, target, rankings, throughputs, args.pipeline_parallel)
    servers = servers_of(found, args.data_parallel)
    document = result_document(found, servers)
    if servers and args.write_fleet is not None:
        write_servers(args.write_fleet, f"Written by `hetlb search` from {args.config.name}.", servers)
    print_document(args, document, lambda: print_result(found, document))
    if not found.choice.layouts:
        print(f"hetlb search: {args.config}: expected a layout that fits, got none", file=sys.stderr)
        return 2
    return 0


def read_target(rate: float | None, slo: str | None) -> LayoutTarget:
    """`--request-rate` and `--slo`. Raises `InputError`."""
    if rate is None:
        if slo is not None:
            raise InputError("--slo: expected --request-rate with it: latencies depend on the rate")
        return LayoutTarget(math.inf, SloLimits())
    limits: dict[str, float] = {}
    for part in [] if slo is None else slo.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*[=:]\s*([0-9.]+)\s*(ms|s|)\s*", part)
        seconds = number(match[2]) * _SECONDS[match[3]] if match else 0.0
        if match is None or not seconds > 0 or match[1] in limits:
            raise InputError(f"--slo: expected ttft=500ms,tpot=50ms or one of them, got {slo!r}")
        limits[match[1]] = seconds
    return LayoutTarget(rate, SloLimits(limits.get("ttft", math.inf), limits.get("tpot", math.inf)))
