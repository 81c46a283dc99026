"""`hetlb place`: layers of a model that no single machine can hold, over several machines.

The plan passed `plan/check.py`, and so did every path of a simulation. An interrupt prints the best
plan so far. Exit status 2 and one line where no placement lets a token through.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hetlb.config.place import load_place
from hetlb.core.paths.scheduler import PATH_POLICIES
from hetlb.errors import ConfigError, InputError
from hetlb.plan.check import check_placement
from hetlb.plan.placement.balance import balanced_flow
from hetlb.plan.placement.bounds import flow_bound
from hetlb.plan.placement.cluster import Cluster
from hetlb.plan.placement.deploy import advice, stage_commands, vllm_plan, write_fleet
from hetlb.plan.placement.estimate import Estimator
from hetlb.plan.placement.failures import Loss, losses
from hetlb.plan.placement.files import load_lengths, load_placement
from hetlb.plan.placement.flow import max_flow, pipelines
from hetlb.plan.placement.heuristics import Intervals, petals, separate_pipelines, swarm
from hetlb.plan.placement.milp import solve
from hetlb.plan.placement.search import Candidate, Found, Search
from hetlb.plan.placement.simulator import PlacementSimulator
from hetlb.sim.pipelines import PipelineResult

#: Without a file of lengths every request has those that Helix plans for: prompt and output tokens.
_USUAL_LENGTHS = [(750, 240)]
#: Share of the time limit for the integer program, which ends at once where the bound can be reached.
_SOLVER_SHARE = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb place`."""
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="PLACE.yaml", help="file of machines, links and model")
    add("--placement", type=Path, metavar="P.json", help="placement to evaluate instead of searching")
    add(
        "--partial-inference",
        choices=("on", "off"),
        default="off",
        help="requests may enter a machine behind its first layer (default off)",
    )
    add("--simulate", type=float, metavar="SECONDS", help="seconds of the simulations that choose the plan")
    add("--scheduler", choices=tuple(PATH_POLICIES), default="hetlb", help="path policy (default hetlb)")
    add(
        "--lengths",
        type=Path,
        metavar="L.csv",
        help="requests: input_tokens,output_tokens (default 750 and 240)",
    )
    add(
        "--load",
        default="offline",
        metavar="offline|RATE",
        help="as much as fits, or requests/s (default offline)",
    )
    add("--time-limit", type=float, default=60.0, metavar="S", help="seconds for the search (default 60)")
    add("--seed", type=int, default=0, metavar="N", help="seed of search and simulation (default 0)")
    add("--write-fleet", type=Path, metavar="FLEET.yaml", help="fleet file of separate pipelines")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Search or evaluate, and print."""
    rate = _check_arguments(args)
    cluster = load_place(args.config)
    lengths = load_lengths(args.lengths) if args.lengths else _USUAL_LENGTHS
    simulator = PlacementSimulator(
        cluster,
        lengths,
        scheduler=args.scheduler,
        rate=rate,
        seed=args.seed,
        partial_inference=args.partial_inference == "on",
    )
    partial = simulator.partial_inference
    room = sum(cluster.most_layers(node) for node in cluster.nodes)
    if room < cluster.model.layers:
        raise ConfigError(
            f"{args.config}: nodes: expected room for {cluster.model.layers} layers, got {room}: "
            f"{cluster.model.layers - room} layers are missing"
        )
    began = time.monotonic()
    bound, alternative = flow_bound(cluster), None
    if args.placement is not None:
        placement = load_placement(args.placement, cluster)
        chosen = Candidate(placement, balanced_flow(cluster, placement, partial_inference=partial))
    else:
        found, bound = _search(cluster, lengths, simulator, bound, args)
        if not found.candidates:
            raise ConfigError(
                f"{args.config}: links: expected a way from source through all layers to sink, got none"
            )
        chosen, alternative = found.best, found.highest_flow
    check_placement(cluster, chosen.placement, chosen.flow, bound, partial_inference=partial)
    solve_s = time.monotonic() - began
    result = simulator.run(chosen.placement, chosen.flow, args.simulate) if args.simulate else None
    document = _document(cluster, chosen, alternative, bound, simulator, result, solve_s, args)
    if args.write_fleet is not None:
        write_fleet(args.write_fleet, cluster, pipelines(chosen.flow))
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        _print(document, Console())
    return 0


def _check_arguments(args: argparse.Namespace) -> float:
    """The rate of `--load`, infinite for offline. Raises `InputError`."""
    for name, value in (("--simulate", args.simulate), ("--time-limit", args.time_limit)):
        if value is not None and not 0.0 < value < math.inf:
            raise InputError(f"{name}: expected seconds greater than 0, got {value}")
    if args.load == "offline":
        return math.inf
    try:
        rate = float(args.load)
    except ValueError:
        rate = math.nan
    if not 0.0 < rate < math.inf:
        raise InputError(f"--load: expected offline or requests per second, got {args.load!r}")
    return rate


def _search(
    cluster: Cluster,
    lengths: list[tuple[int, int]],
    simulator: PlacementSimulator,
    bound: float,
    args: argparse.Namespace,
) -> tuple[Found, float]:
    """Candidates, and an upper bound on the flow of any placement: `bound`, or the solver's."""
    began = time.monotonic()
    judge = simulator.judge(args.simulate) if args.simulate else None
    starts = []
    if not simulator.partial_inference:
        solved = solve(cluster, args.time_limit * _SOLVER_SHARE, bound, seed=args.seed)
        bound = min(bound, solved.bound)
        if solved.placement is not None:
            starts.append(("solver", solved.placement))
    search = Search(
        cluster,
        Estimator(cluster, lengths),
        judge,
        partial_inference=simulator.partial_inference,
        starts=starts,
        enough=bound,
        seed=args.seed,
        clock=time.monotonic,
        progress=_progress(),
    )
    found = search.run(args.time_limit - (time.monotonic() - began))
    return found, bound


def _progress() -> Callable[[str, Candidate | None], None]:
    """A line on a terminal that says how far the search is; nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda phase, best: None

    def show(phase: str, best: Candidate | None) -> None:
        if best is not None:
            simulated = "" if best.simulated is None else f", simulated {best.simulated:.1f} output tokens/s"
            print(f"{phase}: flow {best.flow.tokens_per_s:.1f} tokens/s{simulated}", file=sys.stderr)

    return show


# --- results ---


def _document(
    cluster: Cluster,
    chosen: Candidate,
    alternative: Candidate | None,
    bound: float,
    simulator: PlacementSimulator,
    result: PipelineResult | None,
    solve_s: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    flow, partial = chosen.flow, simulator.partial_inference
    simulated = None
    if result is not None:
        simulated = {
            "scheduler": args.scheduler,
            "load": args.load,
            "seconds": args.simulate,
            **result.document(),
        }
    heuristics: dict[str, Intervals | None] = {
        "swarm": swarm(cluster),
        "separate-pipelines": separate_pipelines(cluster),
        "petals": petals(cluster, random.Random(args.seed)),
    }
    vllm = vllm_plan(cluster, chosen.placement, flow, heuristics["separate-pipelines"])
    return {
        "max_flow_tokens_per_s": flow.tokens_per_s,
        "upper_bound_tokens_per_s": bound,
        "gap": bound / flow.tokens_per_s - 1.0 if flow.tokens_per_s else None,
        "partial_inference": partial,
        "placement": {name: list(interval) for name, interval in chosen.placement.items()},
        "flows": [
            {"from": sender, "to": receiver, "tokens_per_s": rate}
            for (sender, receiver), rate in flow.links.items()
        ],
        "pipelines": [
            {"nodes": list(pipeline.nodes), "tokens_per_s": pipeline.tokens_per_s}
            for pipeline in pipelines(flow)
        ],
        "simulated": simulated,
        "highest_flow": None
        if alternative is None
        else {
            "max_flow_tokens_per_s": alternative.flow.tokens_per_s,
            "placement": {name: list(interval) for name, interval in alternative.placement.items()},
        },
        "baselines": {
            name: {
                "max_flow_tokens_per_s": max_flow(
                    cluster, placement, partial_inference=partial or name == "petals"
                ).tokens_per_s
            }
            for name, placement in heuristics.items()
            if placement is not None
        },
        "losses": [_loss(loss) for loss in losses(cluster, chosen.placement, partial_inference=partial)],
        "solve_s": solve_s,
        "commands": stage_commands(cluster, chosen.placement),
        "vllm": vllm,
        "advice": advice(flow.tokens_per_s, vllm),
    }


def _loss(loss: Loss) -> dict[str, Any]:
    move = loss.move
    return {
        "node": loss.node,
        "tokens_per_s": loss.tokens_per_s,
        "move": None
        if move is None
        else {
            "node": move.node,
            "layers": [move.first, move.end],
            "loaded": move.loaded,
            "tokens_per_s": move.tokens_per_s,
        },
    }


def _print(document: dict[str, Any], console: Console) -> None:
    table = Table(title="layers by node", title_justify="left")
    for column in ("node", "layers", "tokens/s", "left without it", "best move then"):
        table.add_column(column, justify="right" if "tokens" in column or "left" in column else "left")
    through: dict[str, float] = {}
    for flow in document["flows"]:
        through[flow["to"]] = through.get(flow["to"], 0.0) + flow["tokens_per_s"]
    lost = {loss["node"]: loss for loss in document["losses"]}
    for name, (first, end) in document["placement"].items():
        move = lost[name]["move"]
        told = (
            ""
            if move is None
            else (
                f"{move['node']}: {move['layers'][0]}-{move['layers'][1] - 1}, "
                f"{move['tokens_per_s']:.0f} tokens/s"
            )
        )
        table.add_row(
            name,
            f"{first}-{end - 1}",
            f"{through.get(name, 0.0):.1f}",
            f"{lost[name]['tokens_per_s']:.1f}",
            told,
        )
    console.print(table)
    console.print(
        f"maximum flow {document['max_flow_tokens_per_s']:.1f} tokens/s (prompt and output); no placement has"
        f" more than {document['upper_bound_tokens_per_s']:.1f}; {len(document['pipelines'])} pipelines"
    )
    simulated = document["simulated"]
    if simulated is None:
        console.print(
            "Chosen by flow, which says nothing of latency and KV: --simulate 600 has simulations choose."
        )
    else:
        console.print(
            f"simulated ({simulated['scheduler']}, {simulated['load']}): "
            f"{simulated['decode_tokens_per_s']:.1f} output tokens/s, latency of a prompt "
            f"{simulated['prompt_latency_s'].get('p50', 0.0):.2f} s and of a token "
            f"{simulated['decode_latency_s'].get('p50', 0.0):.2f} s (medians)"
        )
    for command in document["commands"]:
        print(command)
    console.print(document["advice"])
    for command in (document["vllm"] or {"commands": ()})["commands"]:
        print(command)
