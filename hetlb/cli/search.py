"""`hetlb search`: the tensor-parallel degree of every machine of a cluster that gives the most throughput.

Every degree is listed, what does not fit with its reason and the missing bytes; the plan is
re-verified before it is printed. Exit status 2, with the table, where nothing fits anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hetlb.cli.search_plot import write_plot
from hetlb.config.cluster import Cluster, load_cluster
from hetlb.config.profile import Profile
from hetlb.core.latency import IterationRule
from hetlb.errors import ConfigError, InputError, ProfileError
from hetlb.plan.check import check
from hetlb.plan.tp_search import Estimator, MachinePlan, Rows, degrees, search, static_estimate
from hetlb.sim.engine import DEFAULT_MAX_NUM_SEQS, EngineLimits, EngineModel, Sequence
from hetlb.workload.traces import read_trace

#: The most rows of a trace that are estimated on.
MAX_ROWS = 2000
_FIRST_PORT = 8000
_BAR_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb search`."""
    parser.add_argument("--config", type=Path, required=True, metavar="CLUSTER.yaml", help="the machines")
    parser.add_argument("--trace", type=Path, required=True, metavar="T.csv", help="the requests to expect")
    parser.add_argument(
        "--estimate",
        choices=("simulate", "static"),
        default="simulate",
        help="hetlb's engine model (default), or the paper's algorithm 1: the order, not the figures",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=MAX_ROWS, metavar="N", help=f"rows to sample ({MAX_ROWS} at most)"
    )
    parser.add_argument("--write-fleet", type=Path, metavar="FLEET.yaml", help="the best layout as a fleet")
    parser.add_argument("--plot", type=Path, metavar="P.png", help="the ranking as bars")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    if not 1 <= args.num_prompts <= MAX_ROWS:
        raise InputError(f"--num-prompts: expected 1 to {MAX_ROWS}, got {args.num_prompts}")
    cluster = load_cluster(args.config)
    rows = sample_rows(cluster, args.trace, args.num_prompts)
    estimate = make_estimator(cluster.profiles, rows, args.estimate)
    kinds = {machine.kind: machine for machine in cluster.machines}
    total = sum(len(degrees(machine.gpus)) for machine in kinds.values())
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("searching", total=total)
        plans = search(cluster.model, cluster.machines, estimate, lambda: progress.advance(task))
    check(cluster.model, cluster.machines, plans)
    document = result_document(cluster, plans, args.estimate, len(rows))
    feasible = any(plan.best for plan in plans)
    if feasible and args.write_fleet is not None:
        write_fleet(args.write_fleet, cluster, plans)
    if args.plot is not None:
        write_plot(args.plot, plans, args.estimate)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        console = Console()
        console.print(_table(plans, args.estimate))
        for command in document["commands"]:
            print(command)
    if not feasible:
        print(f"hetlb search: {args.config}: expected a layout that fits, got none", file=sys.stderr)
        return 2
    return 0


def sample_rows(cluster: Cluster, trace: Path, count: int) -> list[tuple[int, int]]:
    """Rows spread evenly over the trace, in its order, of those within the cluster's limits."""
    model = cluster.model
    rows = [(row.input_tokens, max(1, row.output_tokens)) for row in read_trace(trace)]
    within = [(i, o) for i, o in rows if i <= model.max_input_tokens and o <= model.max_output_tokens]
    if not within:
        raise ConfigError(
            f"{cluster.path}: limits: expected some row of {trace} within {model.max_input_tokens} input and "
            f"{model.max_output_tokens} output tokens, got none of {len(rows)}"
        )
    if len(within) < len(rows):
        left_out = len(rows) - len(within)
        print(f"{left_out} of {len(rows)} rows exceed the cluster's limits and are left out", file=sys.stderr)
    if len(within) <= count:
        return within
    return [within[index * len(within) // count] for index in range(count)]


def make_estimator(profiles: dict[str, Profile], rows: Rows, kind: str) -> Estimator:
    """Tokens/s of a machine: its instances times one instance's on these rows."""

    def static(profile: str, kv_cache_tokens: int, instances: int) -> float:
        seqs = profiles[profile].engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        return instances * static_estimate(profiles[profile].latency, rows, kv_cache_tokens, seqs)

    def simulated(profile: str, kv_cache_tokens: int, instances: int) -> float:
        return instances * simulated_estimate(profiles[profile], rows, kv_cache_tokens)

    estimators: dict[str, Callable[[str, int, int], float]] = {"static": static, "simulate": simulated}
    return estimators[kind]


def simulated_estimate(profile: Profile, rows: Rows, kv_cache_tokens: int) -> float:
    """Tokens/s (input and output) of one engine of this profile with all rows waiting at the start."""
    capacity = profile.capacity
    try:
        limits = EngineLimits.from_capacity(
            type(capacity)(
                kv_cache_tokens=kv_cache_tokens,
                block_size=capacity.block_size,
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
            )
        )
    except ValueError as error:
        raise ProfileError(f"{profile.name}: {error}") from error
    engine = EngineModel(profile.latency, limits, IterationRule.TOKEN)
    tokens, seconds = 0, 0.0
    for input_tokens, output_tokens in rows:
        if engine.fits(input_tokens, output_tokens):
            engine.submit(Sequence(input_tokens, output_tokens))
            tokens += input_tokens + output_tokens
    while (stretch := engine.begin_run()) is not None:
        seconds += stretch.duration_s
        engine.end_iteration()
    return tokens / seconds if seconds > 0 else 0.0


def result_document(cluster: Cluster, plans: list[MachinePlan], estimate: str, rows: int) -> dict[str, Any]:
    """The figures of the contract."""
    return {
        "machines": [
            {
                "name": plan.machine.name,
                "ranking": [
                    {
                        "tensor_parallel_size": option.tensor_parallel_size,
                        "instances": option.instances,
                        "throughput_tok_s": option.throughput_tok_s,
                        "kv_cache_tokens": option.kv_cache_tokens,
                        "feasible": option.feasible,
                        "reason": option.reason,
                        "missing_bytes": option.missing_bytes,
                    }
                    for option in plan.ranking
                ],
            }
            for plan in plans
        ],
        "best": {plan.machine.name: plan.best.tensor_parallel_size for plan in plans if plan.best},
        "throughput_tok_s": sum(plan.best.throughput_tok_s for plan in plans if plan.best),
        "commands": [command for plan in plans for command in commands(cluster, plan)],
        "estimate": estimate,
        "requests": rows,
    }


def commands(cluster: Cluster, plan: MachinePlan) -> list[str]:
    """One `vllm serve` per instance of the best layout of a machine."""
    best = plan.best
    if best is None:
        return []
    degree, machine, model = best.tensor_parallel_size, plan.machine, cluster.model
    seqs = cluster.profiles[dict(machine.profiles)[degree]].engine.max_num_seqs
    lines = []
    for index in range(best.instances):
        gpus = ",".join(str(gpu) for gpu in range(index * degree, (index + 1) * degree))
        words = ["vllm", "serve", model.name, "--tensor-parallel-size", str(degree)]
        words += ["--gpu-memory-utilization", f"{machine.gpu_memory_utilization:g}"]
        words += ["--max-model-len", str(model.max_input_tokens + model.max_output_tokens)]
        words += ["--max-num-seqs", str(seqs)] if seqs is not None else []
        words += ["--port", str(_FIRST_PORT + index)]
        lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {shlex.join(words)}  # on {machine.name}")
    return lines


def write_fleet(path: Path, cluster: Cluster, plans: list[MachinePlan]) -> None:
    """The best layout as a fleet file: machine names are taken as host names."""
    instances = []
    for plan in plans:
        if plan.best is None:
            continue
        degree = plan.best.tensor_parallel_size
        profile = cluster.path.parent / dict(plan.machine.profiles)[degree]
        relative = os.path.relpath(profile.resolve(), path.resolve().parent)
        instances += [
            {
                "name": f"{plan.machine.name}-tp{degree}-{index}",
                "url": f"http://{plan.machine.name}:{_FIRST_PORT + index}",
                "profile": relative,
            }
            for index in range(plan.best.instances)
        ]
    fleet = {"version": 1, "models": [{"name": cluster.model.name, "instances": instances}]}
    heading = f"# Written by `hetlb search` from {cluster.path.name}: machine names stand for hosts.\n"
    try:
        path.write_text(heading + yaml.safe_dump(fleet, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a place to write to: {error.strerror}") from error


def _table(plans: list[MachinePlan], estimate: str) -> Table:
    table = Table(title=f"tensor-parallel degrees, by {estimate} estimate", title_justify="left")
    for column in ("machine", "TP", "instances", "KV tokens", "tokens/s", ""):
        table.add_column(column, justify="left" if column in ("machine", "") else "right")
    groups: dict[tuple[object, ...], list[MachinePlan]] = {}
    for plan in plans:
        groups.setdefault(plan.machine.kind, []).append(plan)
    for alike in groups.values():
        plan = alike[0]
        name = plan.machine.name if len(alike) == 1 else f"{plan.machine.name} and {len(alike) - 1} alike"
        most = max((option.throughput_tok_s for option in plan.ranking), default=0.0)
        for index, option in enumerate(plan.ranking):
            bar = "█" * max(1, round(_BAR_WIDTH * option.throughput_tok_s / most)) if option.feasible else ""
            table.add_row(
                name if index == 0 else "",
                str(option.tensor_parallel_size),
                str(option.instances),
                str(option.kv_cache_tokens),
                f"{option.throughput_tok_s:.1f}" if option.feasible else "-",
                bar or option.reason,
                style="bold" if option is plan.best else "" if option.feasible else "dim",
            )
        table.add_section()
    return table
