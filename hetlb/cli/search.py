"""`hetlb search`: layouts of a cluster's machines that give the most throughput, or meet a target best."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hetlb.cli.flags import FINITE, add_json, declare, print_document, whole
from hetlb.cli.plan_limits import planning
from hetlb.cli.request_files import read_goodput
from hetlb.errors import InputError, visible
from hetlb.output_files import fleet_path
from hetlb.tools.plan.check import check
from hetlb.tools.plan.cluster import load_cluster
from hetlb.tools.plan.common.composition import MOST_STAGES
from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.common.servers import write_servers
from hetlb.tools.plan.layouts import LayoutTarget, lay_out, servers_of
from hetlb.tools.plan.search_report import print_result, result_document
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import NOT_MEASURED, Option, Rankings, parts, search, whole_tok_s
from hetlb.tools.plan.trace_throughput import Throughputs, sample_rows

#: The most rows of a trace used for estimates.
MAX_ROWS = 2000


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
    add("--goodput", "latency limits at that rate: ttft, tpot", "NAME:MS", default=(), nargs="+")
    stages = "most stages of an instance (default: 1, more if GPUs would be left over)"
    add("--pipeline-parallel", stages, "N", whole(1, MOST_STAGES))
    add("--data-parallel", "put equal instances of a machine behind one URL", action="store_true")
    add("--time-limit", "seconds for everything (default: none)", "S", FINITE, math.inf)
    add("--write-fleet", "fleet file of the best layouts", "FLEET.yaml", fleet_path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    target = read_target(args.request_rate, args.goodput)
    cluster = load_cluster(args.config)
    sample = sample_rows(cluster, args.trace, args.num_prompts)
    kinds = {machine.kind: machine for machine in cluster.machines}
    total = sum(len(parts(cluster, machine)) for machine in kinds.values())
    with planning(args, "searching", args.time_limit) as (limits, progress):

        def ranked(throughputs: Throughputs, heading: str) -> Rankings:
            done, most = count(1), dict[str, float]()

            def show(machine: Machine, option: Option) -> None:
                progress.at("searching", next(done), total)
                rate = whole_tok_s(machine, option)
                if rate > most.get(machine.name, 0.0):
                    most[machine.name] = rate
                    instances = machine.gpus // option.part.gpus
                    words = f"{instances} x {option.part.name} on {machine.name}, {rate:,.0f} tokens/s"
                    progress.plan(f"{heading}: {words}")

            return search(cluster, throughputs.of, show)

        throughputs = Throughputs(sample.rows, "static")
        rankings = ranked(throughputs, "first plan, by algorithm 1")
        if args.estimate != throughputs.kind:
            measured = Throughputs(sample.rows, args.estimate)
            better = ranked(measured, "best plan so far")
            # Of a kind of machine without a measured option the order by algorithm 1 is all there is.
            reasons = [{option.reason for option in own} for own in better.values()]
            if all("" in each or NOT_MEASURED not in each for each in reasons):
                throughputs, rankings = measured, better
        check(cluster, rankings)
        progress.at("simulating layouts")
        found = lay_out(cluster, sample, target, rankings, throughputs, args.pipeline_parallel)
    servers = servers_of(found, args.data_parallel)
    document = result_document(found, servers) | {"interrupted": limits.interrupted}
    if servers and args.write_fleet is not None:
        write_servers(args.write_fleet, f"Written by `hetlb search` from {args.config.name}.", servers)
    print_document(args, document, lambda: print_result(found, document))
    if not found.choice.layouts:
        print(visible(f"hetlb search: {args.config}: expected a layout that fits, got none"), file=sys.stderr)
        return 2
    return 0


def read_target(rate: float | None, goodput: Sequence[str]) -> LayoutTarget:
    """Return the target of `--request-rate` and `--goodput`. Raises `InputError`."""
    limits_s = read_goodput(goodput)
    if rate is None and limits_s:
        raise InputError("--goodput: expected --request-rate with it: latencies depend on the rate")
    if "e2el" in limits_s:
        raise InputError("--goodput: expected ttft, tpot or both, got e2el")
    limits = SloLimits(limits_s.get("ttft", math.inf), limits_s.get("tpot", math.inf))
    return LayoutTarget(math.inf if rate is None else rate, limits)
