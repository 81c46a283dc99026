"""`hetlb place`: layers of a model that no single machine can hold, over several machines.

The plan passed `plan/check.py`, and so did every path of a simulation. Ctrl-C prints the best plan so far.
Exit status 2 and one line where no placement lets a token through.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from rich.console import Console

from hetlb.cli.flags import add_json, declare, integer, real
from hetlb.config.place_file import load_place
from hetlb.core.paths.path_scheduler import PATH_POLICIES
from hetlb.errors import ConfigError, InputError, PlanError
from hetlb.plan.highs import Interrupt, SolveLimits
from hetlb.plan.placement.place_deploy import write_stages
from hetlb.plan.placement.place_files import load_lengths, load_placement
from hetlb.plan.placement.place_plan import document_of, plan_placement
from hetlb.plan.placement.place_report import print_placement
from hetlb.plan.placement.place_search import PlacementCandidate
from hetlb.plan.placement.simulator import PlacementSimulator

#: Without a file of lengths every request has those that Helix plans for: prompt and output tokens.
_USUAL_LENGTHS = [(750, 240)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb place`."""
    add, switch = declare(parser), parser.add_argument
    add("--config", "file of machines, links and model", "PLACE.yaml", Path, required=True)
    add("--placement", "placement to evaluate instead of searching", "P.json", Path)
    partial = "requests may enter a machine behind its first layer (default off)"
    switch("--partial-inference", choices=("on", "off"), default="off", help=partial)
    seconds = real("seconds greater than 0", lambda value: 0 < value < math.inf)
    add("--simulate", "seconds of the simulations that choose the plan", "SECONDS", seconds)
    switch("--scheduler", choices=tuple(PATH_POLICIES), default="hetlb", help="path policy (default hetlb)")
    add("--lengths", "requests: input_tokens,output_tokens (default 750 and 240)", "L.csv", Path)
    add("--load", "as much as fits, or requests/s (default offline)", "offline|RATE", default="offline")
    add("--time-limit", "seconds for everything (default 60)", "S", seconds, 60.0)
    add("--seed", "seed of search and simulation (default 0)", "N", integer(), 0)
    add("--model-folder", "folder of the model on the machines (default: its name)", "DIR")
    add("--write-fleet", "fleet file of the stages", "FLEET.yaml", Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Search or evaluate, and print."""
    rate = _check_arguments(args)
    cluster = load_place(args.config)
    lengths = load_lengths(args.lengths) if args.lengths else _USUAL_LENGTHS
    room = sum(cluster.most_layers(node) for node in cluster.nodes)
    if room < cluster.model.layers:
        raise ConfigError(
            f"{args.config}: nodes: expected room for {cluster.model.layers} layers, got {room}: "
            f"{cluster.model.layers - room} layers are missing"
        )
    simulator = PlacementSimulator(
        cluster,
        lengths,
        scheduler=args.scheduler,
        rate=rate,
        seed=args.seed,
        partial_inference=args.partial_inference == "on",
    )
    given = None if args.placement is None else load_placement(args.placement, cluster)
    interrupt, began = Interrupt(), time.monotonic()
    limits = SolveLimits(deadline=began + args.time_limit, seed=args.seed, interrupt=interrupt)
    with interrupt.catching():
        try:
            plan = plan_placement(
                cluster,
                simulator,
                limits,
                lengths=lengths,
                simulate_s=args.simulate,
                given=given,
                on_phase=_show if sys.stderr.isatty() else None,
            )
        except PlanError as error:
            raise ConfigError(f"{args.config}: links: {error}") from error
    folder = args.model_folder or cluster.model.name.rpartition("/")[2]
    document = document_of(
        plan,
        scheduler=args.scheduler,
        load=args.load,
        solve_s=time.monotonic() - began,
        folder=folder,
    )
    if args.write_fleet is not None:
        write_stages(args.write_fleet, cluster, plan.chosen.placement, folder)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print_placement(document, Console())
    return 0


def _check_arguments(args: argparse.Namespace) -> float:
    """The rate of `--load`, infinite for offline. Raises `InputError`."""
    if args.load == "offline":
        return math.inf
    try:
        rate = float(args.load)
    except ValueError:
        rate = math.nan
    if not 0.0 < rate < math.inf:
        raise InputError(f"--load: expected offline or requests per second, got {args.load!r}")
    return rate


def _show(phase: str, best: PlacementCandidate | None) -> None:
    """A line that says how far the search is."""
    if best is not None:
        simulated = "" if best.simulated is None else f", simulated {best.simulated:.1f} output tokens/s"
        print(f"{phase}: flow {best.flow.tokens_per_s:.1f} tokens/s{simulated}", file=sys.stderr)
