"""`hetlb place`: layers of a model that no single machine can hold, over several machines."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

from hetlb.cli.flags import FINITE, INTEGER, add_json, declare, print_document
from hetlb.cli.plan_limits import planning
from hetlb.errors import ConfigError, InputError, PlanError
from hetlb.output_files import fleet_path
from hetlb.tools.paths.path_scheduler import PATH_POLICIES
from hetlb.tools.plan.placement.place_deploy import write_stages
from hetlb.tools.plan.placement.place_file import load_place
from hetlb.tools.plan.placement.place_files import load_placement
from hetlb.tools.plan.placement.place_plan import PlacementSimulator, plan_placement
from hetlb.tools.plan.placement.place_report import document_of, print_placement
from hetlb.tools.plan.placement.place_search import PlacementCandidate
from hetlb.tools.plan.workloads import trace_rows

#: Prompt and output tokens of every request without a file of lengths, as Helix plans for.
_USUAL_LENGTHS = [(750, 240)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--config", "file of machines, links and model", "PLACE.yaml", Path, required=True)
    add("--placement", "placement to evaluate instead of searching", "P.json", Path)
    partial = "requests may enter a machine behind its first layer (default off)"
    add("--partial-inference", partial, default="off", choices=("on", "off"))
    add("--simulate", "seconds of the simulations that choose the plan", "SECONDS", FINITE)
    add("--scheduler", "path policy (default hetlb)", default="hetlb", choices=tuple(PATH_POLICIES))
    add("--lengths", "requests, as --trace of others (default 750 and 240 tokens)", "L.csv", Path)
    load = "as much as fits, or requests/s (default offline)"
    add("--load", load, "offline|RATE", _read_load, math.inf)
    add("--time-limit", "seconds for everything (default 60)", "S", FINITE, 60.0)
    add("--seed", "seed of search and simulation (default 0)", "N", INTEGER, 0)
    written = "fleet file, and beside it the file of its stages (FLEET-stages.yaml)"
    add("--write-fleet", written, "FLEET.yaml", fleet_path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    cluster = replace(load_place(args.config), partial_inference=args.partial_inference == "on")
    lengths = trace_rows(args.lengths) if args.lengths else _USUAL_LENGTHS
    room = sum(cluster.most_layers(node) for node in cluster.nodes)
    if room < cluster.model.layers:
        raise ConfigError(
            f"{args.config}: nodes: expected room for {cluster.model.layers} layers, got {room}: "
            f"{cluster.model.layers - room} layers are missing"
        )
    simulator = PlacementSimulator(cluster, lengths, args.scheduler, args.load, args.seed)
    if args.write_fleet is not None and cluster.unstaged:
        raise InputError(f"--write-fleet: expected a model that hetlb stage computes, got {cluster.unstaged}")
    given = None if args.placement is None else load_placement(args.placement, cluster)
    with planning(args, "placing", args.time_limit, seed=args.seed) as (limits, progress):

        def show(phase: str, best: PlacementCandidate | None) -> None:
            progress.at(phase)
            if best is not None:
                simulated = (
                    "" if best.simulated is None else f", simulated {best.simulated:.1f} output tokens/s"
                )
                progress.plan(f"best plan so far: flow {best.flow.tokens_per_s:.1f} tokens/s{simulated}")

        try:
            plan = plan_placement(
                simulator,
                limits,
                simulate_s=args.simulate,
                given=given,
                on_phase=show,
            )
        except PlanError as error:
            raise ConfigError(f"{args.config}: links: {error}") from error
    folder = cluster.model.name.rpartition("/")[2]
    document = document_of(
        plan,
        scheduler=args.scheduler,
        load="offline" if args.load == math.inf else f"{args.load:g}",
        seed=args.seed,
        solve_s=time.monotonic() - args.began_s,
        folder=folder,
        fleet=args.write_fleet,
    )
    if args.write_fleet is not None:
        write_stages(args.write_fleet, cluster, plan.chosen.placement, folder)
    return print_document(args, document, lambda: print_placement(document))


def _read_load(text: str) -> float:
    """Return the value of `--load` in requests/s."""
    return math.inf if text == "offline" else FINITE(text)
