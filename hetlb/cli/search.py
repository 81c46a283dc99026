"""`hetlb search`: layouts of the machines of a cluster that give the most throughput, or meet a target best.

Every degree is listed, what vLLM refuses or memory does not hold with the reason; the plan is re-verified
before it is printed. Exit status 2, with the table, where nothing runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from itertools import count
from pathlib import Path

from hetlb.cli.flags import add_json, declare, whole
from hetlb.config.cluster import load_cluster
from hetlb.errors import InputError
from hetlb.plan.check import check
from hetlb.plan.cluster_layouts import MOST_STAGES, Throughputs, lay_out, sample_rows
from hetlb.plan.common.servers import write_servers
from hetlb.plan.layout_servers import servers_of
from hetlb.plan.layouts import LayoutTarget
from hetlb.plan.search_report import print_result, result_document
from hetlb.plan.throughput import SloLimits
from hetlb.plan.tp_search import degrees, search
from hetlb.tables import bar

#: The most rows of a trace that are estimated on.
MAX_ROWS = 2000
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb search`."""
    add, switch = declare(parser), parser.add_argument
    switch("--config", type=Path, required=True, metavar="CLUSTER.yaml", help="cluster file")
    rows = "expected requests: arrival_s,input_tokens,output_tokens"
    switch("--trace", type=Path, required=True, metavar="T.csv", help=rows)
    estimate = "engine model (default), or the paper's algorithm 1 (order, not figures)"
    switch("--estimate", choices=("simulate", "static"), default="simulate", help=estimate)
    sample = f"rows to sample (default and most: {MAX_ROWS})"
    add("--num-prompts", sample, "N", whole(1, MAX_ROWS), MAX_ROWS)
    add("--request-rate", "requests/s of the whole fleet; ranks by goodput", "R")
    add("--slo", "latency limits: ttft=500ms,tpot=50ms", "TARGET")
    stages = "most stages of an instance (default: 1, more where GPUs would be left over)"
    add("--pipeline-parallel", stages, "N", whole(1, MOST_STAGES))
    parallel = "put equal instances of a machine behind one URL"
    switch("--data-parallel", action="store_true", help=parallel)
    add("--write-fleet", "fleet file of the best layouts", "FLEET.yaml", Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    target = read_target(args.request_rate, args.slo)
    cluster = load_cluster(args.config)
    sample = sample_rows(cluster, args.trace, args.num_prompts)
    kinds = {machine.kind: machine for machine in cluster.machines}
    total = sum(len(degrees(machine)) for machine in kinds.values())
    with bar("searching") as show:
        done = count(1)
        throughputs = Throughputs(sample.rows, args.estimate)
        plans = search(cluster, throughputs.of, lambda: show(completed=next(done), total=total))
        check(cluster, plans)
        show(description="simulating layouts", total=None)
        found = lay_out(cluster, sample, target, plans, throughputs, args.pipeline_parallel)
    servers = servers_of(found, args.data_parallel)
    document = result_document(found, servers)
    if servers and args.write_fleet is not None:
        write_servers(args.write_fleet, f"Written by `hetlb search` from {args.config.name}.", servers)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print_result(found, document)
    if not found.choice.layouts:
        print(f"hetlb search: {args.config}: expected a layout that fits, got none", file=sys.stderr)
        return 2
    return 0


# --- input ----------------------------------------------------------------------------------------------


def read_target(rate: str | None, slo: str | None) -> LayoutTarget:
    """`--request-rate` and `--slo`. Raises `InputError`."""
    if rate is None:
        if slo is not None:
            raise InputError("--slo: expected --request-rate with it: latencies depend on the rate")
        return LayoutTarget(math.inf, SloLimits())
    try:
        requests_s = float(rate)
    except ValueError:
        requests_s = math.nan
    if not (math.isfinite(requests_s) and requests_s > 0):
        raise InputError(f"--request-rate: expected requests per second above 0, got {rate!r}")
    limits: dict[str, float] = {}
    for part in [] if slo is None else slo.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*[=:]\s*([0-9.]+)\s*(ms|s|)\s*", part)
        try:
            seconds = float(match[2]) * _SECONDS[match[3]] if match else 0.0
        except ValueError:
            seconds = 0.0
        if match is None or not seconds > 0 or match[1] in limits:
            raise InputError(f"--slo: expected ttft=500ms,tpot=50ms or one of them, got {slo!r}")
        limits[match[1]] = seconds
    return LayoutTarget(requests_s, SloLimits(limits.get("ttft", math.inf), limits.get("tpot", math.inf)))
