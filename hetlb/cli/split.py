"""`hetlb split`: groups of GPUs for prefill and for decode, their parallelism, and the KV flows between them.

The plan passed `plan/check.py`. It is beside the best plan whose groups all do both, and says so
where that one is better. Ctrl-C prints the best plan so far. Exit status 2 and one line where no group holds
the model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hetlb.errors import ConfigError, InputError
from hetlb.plan.check import check_split
from hetlb.plan.disaggregation.cluster import Cluster, Plan, Role
from hetlb.plan.disaggregation.cost import CostModel, GroupTable, PaperCost, ProfileCost
from hetlb.plan.disaggregation.deploy import Instance, commands, lay_out, write_fleet
from hetlb.plan.disaggregation.exhaustive import Exhaustive
from hetlb.plan.disaggregation.files import load_split
from hetlb.plan.disaggregation.search import Found, Search
from hetlb.plan.disaggregation.simulation import LOAD, Judged, can_judge, different, judge, simulate_plan
from hetlb.plan.highs import Interrupt, SolveLimits
from hetlb.workload.traces import read_trace

#: Rows of a trace that a plan is made from; of more, every n-th is taken.
_MOST_ROWS = 20_000
#: GPUs of a cluster that is searched exhaustively.
_MOST_EXHAUSTIVE = 8
#: Seconds for the search where none are given: for so many GPUs, per GPU beyond, and at most.
_SMALL_GPUS, _SMALL_S, _GPU_S, _MOST_S = 24, 4.0, 0.75, 240.0
#: Weight of a plan that splits in simulation: it has more that can fail, so it must serve a good deal more.
_WORTH = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb split`."""
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="CLUSTER.yaml",
        help="cluster file: machines, links, model, workload",
    )
    add("--trace", type=Path, metavar="T.csv", help="requests, in place of the file's workload")
    add(
        "--cost-model",
        choices=("profiles", "paper"),
        help="latency profiles (default), or HexGen-2's appendix A",
    )
    add("--exhaustive", action="store_true", help=f"try every plan (up to {_MOST_EXHAUSTIVE} GPUs)")
    add(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for the search (default: 4 up to 24 GPUs, then more)",
    )
    add("--simulate", type=int, default=4, metavar="N", help="plans that are simulated (default 4; 0: none)")
    add("--seed", type=int, default=0, metavar="N", help="seed of search and simulation (default 0)")
    add("--write-fleet", type=Path, metavar="FLEET.yaml", help="fleet file of the plan")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    if args.time_limit is not None and not 0.0 < args.time_limit < math.inf:
        raise InputError(f"--time-limit: expected seconds greater than 0, got {args.time_limit:g}")
    rows = None
    if args.trace is not None:
        every = [(max(1, row.input_tokens), max(1, row.output_tokens)) for row in read_trace(args.trace)]
        rows = every[:: max(1, math.ceil(len(every) / _MOST_ROWS))]
    cluster = load_split(args.config, rows)
    cost = _cost_model(args, cluster)
    if args.simulate < 0:
        raise InputError(f"--simulate: expected a number of plans from 0, got {args.simulate}")
    if args.exhaustive and cluster.gpus > _MOST_EXHAUSTIVE:
        raise InputError(f"--exhaustive: expected at most {_MOST_EXHAUSTIVE} GPUs, got {cluster.gpus}")
    began = time.monotonic()
    interrupt = Interrupt()
    limits = SolveLimits(deadline=began + _time_limit(args, cluster), seed=args.seed, interrupt=interrupt)
    table = GroupTable(cluster, cost)
    with interrupt.catching(), _bar() as show:
        found = _exhaustive(table, limits) if args.exhaustive else _search(table, limits, args.seed, show)
    if not found.plans and interrupt.requested:
        raise KeyboardInterrupt
    if not found.plans:
        raise ConfigError(_nothing_fits(args.config, cluster))
    solve_s = time.monotonic() - began
    for each in (*found.plans, *([] if found.colocated is None else [found.colocated])):
        check_split(cluster, each, cost.capacity)
    plan, simulated = _judged(args, cluster, found, interrupt)
    instances = lay_out(cluster, plan)
    document = document_of(cluster, plan, found, instances, solve_s) | simulated
    document |= {"cost_model": args.cost_model or "profiles", "interrupted": interrupt.requested}
    if args.write_fleet is not None:
        write_fleet(args.write_fleet, cluster, plan, instances, ProfileCost(cluster))
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print_plan(cluster, document, Console())
    return 0


def _cost_model(args: argparse.Namespace, cluster: Cluster) -> CostModel:
    if args.cost_model != "paper":
        return ProfileCost(cluster)
    for m, machine in enumerate(cluster.machines):
        if machine.roofline is None:
            raise ConfigError(
                f"{args.config}: machines[{m}].roofline: expected peak figures for --cost-model paper, "
                "got none"
            )
    return PaperCost(cluster)


def _time_limit(args: argparse.Namespace, cluster: Cluster) -> float:
    if args.time_limit is not None:
        return float(args.time_limit)
    if args.exhaustive:
        return math.inf
    return _SMALL_S if cluster.gpus <= _SMALL_GPUS else min(_MOST_S, _GPU_S * cluster.gpus)


@contextmanager
def _bar() -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("planning", total=None)

        def show(best: float, bound: float) -> None:
            words = f"planning: best {best:.5g} requests/s"
            progress.update(task, description=words + (f", bound {bound:.5g}" if bound < math.inf else ""))

        yield show


def _search(table: GroupTable, limits: SolveLimits, seed: int, show: Any) -> Found:
    return Search(table, seed=seed, progress=show).run(limits)


def _exhaustive(table: GroupTable, limits: SolveLimits) -> Found:
    search = Exhaustive(table)
    best = search.run(limits)
    colocated = Exhaustive(table, (Role.BOTH,)).run(limits)
    if best is None:
        return Found()
    return Found([best], colocated, best.throughput if search.complete else math.inf)


def _judged(
    args: argparse.Namespace, cluster: Cluster, found: Found, interrupt: Interrupt
) -> tuple[Plan, dict[str, Any]]:
    """The best plan in simulation, and the figures of it and of the plan without splitting."""
    best, colocated = found.plans[0], found.colocated
    figures: dict[str, Any] = {
        "simulated": None,
        "colocated": None if colocated is None else {"throughput_req_s": colocated.throughput},
    }
    if args.simulate == 0 or interrupt.requested or not can_judge(cluster, best):
        return best, figures
    cost, limits = ProfileCost(cluster), SolveLimits(interrupt=interrupt)
    plans = different(found.plans, args.simulate)
    with interrupt.catching():
        judged = judge(cluster, plans, cost, limits, seed=args.seed)
        if colocated is not None and not limits.over:
            # At the load of the best split plan: what it does not serve of that, it cannot.
            rate = LOAD * max(best.throughput, colocated.throughput)
            by_policy = {
                policy: simulate_plan(cluster, colocated, cost, policy=policy, rate=rate, seed=args.seed)
                for policy in ("hetlb", "rr")
            }
            judged.append(Judged(colocated, by_policy["hetlb"]))
            figures["colocated"]["simulated"] = {
                policy: each.request_throughput for policy, each in by_policy.items()
            }
    chosen = max(
        judged, key=lambda each: each.simulated.request_throughput * (_WORTH if each.plan.splits else 1.0)
    )
    result = chosen.simulated
    figures["simulated"] = {
        "request_throughput": result.request_throughput,
        "output_throughput": result.output_throughput,
        "mean_ttft_ms": result.ttft_s * 1e3,
        "mean_tpot_ms": result.tpot_s * 1e3,
        "policy": "hetlb",
        "requests": result.requests,
        "candidates": [
            {"throughput_req_s": each.plan.throughput, "simulated_req_s": each.simulated.request_throughput}
            for each in judged
        ],
    }
    return chosen.plan, figures


def _nothing_fits(path: Path, cluster: Cluster) -> str:
    """One line that says what is missing."""
    room = sum(machine.gpus * max(0.0, machine.usable_bytes) for machine in cluster.machines)
    need = cluster.weight_bytes + cluster.kv_bytes_per_token * cluster.workload.longest_tokens
    words = (
        f"{need / 1e9:.4g} GB for {cluster.model.name} and one request of {cluster.workload.longest_tokens}"
    )
    if room < need:
        return f"{path}: machines: expected GPU memory of at least {words} tokens, got {room / 1e9:.4g} GB"
    return f"{path}: machines: expected a group of up to 16 GPUs with {words} tokens within the SLO, got none"


# --- results --------------------------------------------------------------------------------------------


def document_of(
    cluster: Cluster, plan: Plan, found: Found, instances: list[Instance], solve_s: float
) -> dict[str, Any]:
    """The figures of the contract, and what they rest on under further keys."""
    names = {g: instance.name for g, instance in enumerate(instances)}
    rates = {Role.PREFILL: 0.0, Role.DECODE: 0.0, Role.BOTH: 0.0}
    for group in plan.groups:
        rates[group.role] += group.capacity
    split_s = math.fsum(plan.flows.values())
    return {
        "throughput_req_s": plan.throughput,
        "throughput_tok_s": plan.throughput * cluster.workload.output_tokens,
        "bound_req_s": found.bound if math.isfinite(found.bound) else None,
        "capacity_req_s": {str(role): capacity for role, capacity in rates.items()},
        "split": plan.splits,
        "split_req_s": split_s,
        "groups": [
            {
                "name": instance.name,
                "role": str(group.role),
                "gpus": {cluster.machines[m].name: n for m, n in group.composition},
                "tensor_parallel_size": group.tensor_parallel_size,
                "pipeline_parallel_size": len(group.stages),
                "layers": [stage.layers for stage in group.stages],
                "capacity_req_s": group.capacity,
                "kv_cache_tokens": group.kv_cache_tokens,
            }
            for group, instance in zip(plan.groups, instances, strict=True)
        ],
        "kv_flows": [
            {
                "from": names[sender],
                "to": names[receiver],
                "share": rate / split_s,
                "req_s": rate,
                "bytes_per_s": rate * cluster.kv_bytes,
            }
            for (sender, receiver), rate in plan.flows.items()
        ],
        "solve_s": solve_s,
        "commands": commands(cluster, plan, instances),
        "workload": {
            "input_tokens": cluster.workload.prompt_tokens,
            "output_tokens": cluster.workload.output_tokens,
            "requests": len(cluster.workload.rows),
        },
        "estimated": any(m.roofline is not None for m in cluster.machines),
    }


def print_plan(cluster: Cluster, document: dict[str, Any], console: Console) -> None:
    """The plan for a person: groups, flows, the plan without splitting, how far to trust it, commands."""
    console.print(
        f"{document['throughput_req_s']:.4g} requests/s, {document['throughput_tok_s']:.4g} output tokens/s",
        highlight=False,
        style="bold",
    )
    console.print(_group_grid(document))
    if document["kv_flows"]:
        console.print(_flow_grid(document))
    for line in trust_lines(document):
        console.print(line, highlight=False, soft_wrap=True)
    for command in document["commands"]:
        print(command)


def _group_grid(document: dict[str, Any]) -> Table:
    grid = Table(title="groups", title_justify="left")
    for column in ("group", "GPUs", "TP", "PP", "layers", "requests/s", "KV tokens"):
        grid.add_column(column, justify="left" if column in ("group", "GPUs", "layers") else "right")
    for each in document["groups"]:
        layers = each["layers"]
        grid.add_row(
            each["name"],
            " + ".join(f"{n} {name}" for name, n in each["gpus"].items()),
            str(each["tensor_parallel_size"]),
            str(each["pipeline_parallel_size"]),
            str(layers[0]) if len(set(layers)) == 1 else ",".join(map(str, layers)),
            f"{each['capacity_req_s']:.4g}",
            str(each["kv_cache_tokens"]),
        )
    return grid


def _flow_grid(document: dict[str, Any]) -> Table:
    grid = Table(title="KV flows", title_justify="left")
    for column in ("from", "to", "share", "requests/s", "GB/s"):
        grid.add_column(column, justify="left" if column in ("from", "to") else "right")
    for each in document["kv_flows"]:
        grid.add_row(
            each["from"],
            each["to"],
            f"{each['share']:.1%}",
            f"{each['req_s']:.4g}",
            f"{each['bytes_per_s'] / 1e9:.3g}",
        )
    return grid


def trust_lines(document: dict[str, Any]) -> list[str]:
    """Lines that say what the plan rests on and whether to split at all."""
    lines = []
    rate, colocated = document["throughput_req_s"], document["colocated"]
    if not document["split"]:
        lines.append("do not split: no plan with separate prefill and decode serves more than this one")
    elif colocated is None:
        lines.append("no plan whose groups all do both was found")
    else:
        other = colocated["throughput_req_s"]
        gain = f"{rate / other - 1:+.1%}" if other > 0 else "it serves nothing"
        lines.append(f"without splitting: {other:.4g} requests/s (this plan: {gain})")
    if (simulated := document["simulated"]) is not None:
        served = simulated["request_throughput"]
        lines.append(
            f"in simulation under hetlb: {served:.4g} requests/s ({served / rate:.1%} of the plan), first "
            f"token after {simulated['mean_ttft_ms']:.0f} ms, {simulated['mean_tpot_ms']:.1f} ms per token"
        )
        if colocated is not None and "simulated" in colocated:
            lines.append(
                "without splitting, in simulation: "
                + ", ".join(f"{each:.4g} under {policy}" for policy, each in colocated["simulated"].items())
            )
    if document["bound_req_s"] is not None:
        lines.append(f"no plan serves more than {document['bound_req_s']:.4g} requests/s in this cost model")
    if document["interrupted"]:
        lines.append("interrupted: the best plan so far")
    if document["estimated"]:
        lines.append("some speeds are estimated from peak figures, which no hardware has confirmed: measure")
    return lines
