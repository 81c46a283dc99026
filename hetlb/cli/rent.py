"""`hetlb rent`: which GPUs to rent for a budget, their division into instances, which requests go where."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetlb.cli.flags import INTEGER, add_json, declare, print_document, real, whole
from hetlb.cli.plan_limits import planning
from hetlb.errors import ConfigError, PlanError
from hetlb.inputs.yaml_file import read_object
from hetlb.output_files import fleet_path
from hetlb.tools.plan import rent_report
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.highs import INFINITY, SolveLimits
from hetlb.tools.plan.market import Market, load_market
from hetlb.tools.plan.planning import Table, first_plan, make_table, measure_table
from hetlb.tools.plan.rent_baselines import baselines
from hetlb.tools.plan.rent_program import SolvedPlan
from hetlb.tools.plan.rent_report import in_short
from hetlb.tools.plan.rent_search import PlanSearch
from hetlb.tools.plan.rent_servers import servers_of, write_fleet
from hetlb.tools.plan.replan import Replanned, replan, require_known
from hetlb.tools.plan.throughput import Measured, SloLimits, default_cache
from hetlb.tools.plan.workloads import trace_rows
from hetlb.tools.tables import PlanProgress

#: Shares of the time limit until configurations are measured, plans found, other plans compared.
_MEASURED_SHARE, _PLANNED_SHARE, _COMPARED_SHARE = 0.5, 0.75, 0.85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    limit = real("a number from 0", lambda value: value >= 0)
    add("--config", "market file: offers and budget", "MARKET.yaml", Path, required=True)
    add("--trace", "requests, in place of the file's workloads", "T.csv", Path)
    add("--workloads", "types of request to find in the trace (default 9)", "N", whole(1, 1000), 9)
    add("--time-limit", "seconds for everything (default 60)", "S", limit, 60.0)
    add("--seed", "seed of types, solver and simulation", "S", INTEGER, 0)
    add_json(parser)
    add("--write-fleet", "fleet file of the plan", "FLEET.yaml", fleet_path)
    add("--no-simulate", "skip the simulation of the whole fleet, and the baselines", action="store_true")
    add("--no-cache", "simulate all throughputs again", action="store_true")
    add("--replan", "running plan (its --json), to change with few moves", "PLAN.json", Path)


def run(args: argparse.Namespace) -> int:
    market = load_market(args.config)
    with planning(args, "configurations", args.time_limit, seed=args.seed) as (limits, progress):
        try:
            table, planned, document = plan_once(args, market, limits, progress)
        except PlanError as error:
            if limits.interrupted:
                raise KeyboardInterrupt from error
            # No plan is an answer about the input: what is missing is in the market file.
            raise ConfigError(f"{args.config}: {error}") from error
    servers = servers_of(table, planned.plan)
    document["commands"] = [server.command() for server in servers] if market.file.models else []
    if args.write_fleet is not None:
        simulated = document["simulated"]
        divided = simulated is None or simulated["worth"]
        write_fleet(args.write_fleet, table, planned.plan, servers, divided=divided)
    return print_document(args, document, lambda: rent_report.print_plan(table, planned, document))


def plan_once(
    args: argparse.Namespace, market: Market, limits: SolveLimits, progress: PlanProgress
) -> tuple[Table, SolvedPlan, dict[str, Any]]:
    """Solve one plan and return it with its document; with `--replan`, begin from an earlier plan."""
    measured = Measured(None if args.no_cache else default_cache(), slo_limits(market))
    rows = None if args.trace is None else trace_rows(args.trace)
    table = make_table(market, measured, rows=rows, count=args.workloads, seed=args.seed)

    def until(share: float) -> SolveLimits:
        return replace(limits, deadline=args.began_s + share * args.time_limit)

    def bound(best: float, bound: float) -> None:
        progress.at(f"planning: best {best:.5g}, bound {bound:.5g}")

    if table.simulated:
        if (first := first_plan(table.problem, limits)) is not None:
            progress.plan(f"first plan, by estimates: {in_short(first)}")
        measuring = partial(progress.at, "measuring configurations")
        table = measure_table(table, measured, until(_MEASURED_SHARE), measuring)
    search = PlanSearch(
        table,
        measured,
        until(_PLANNED_SHARE),
        bound,
        lambda plan: progress.plan(f"best measured plan so far: {in_short(plan)}"),
    )
    replanned: Replanned | None = None
    if args.replan is None:
        planned = search.solved()
    else:
        old = require_known(table.problem, read_counts(args.replan))
        replanned = replan(table.problem, old, market.file.replanning, search.limits, bound)
        check_rent(table.problem, replanned.plan)
        planned = SolvedPlan(table.problem, replanned.plan)
    document = rent_report.document_of(table, planned, time.monotonic() - args.began_s)
    if replanned is not None:
        document["replanning"] = rent_report.replanning_document(replanned)
    if not args.no_simulate:
        search.limits = until(_COMPARED_SHARE)
        progress.at("baselines")
        document["baselines"] = baselines(planned, search.plan_of, table.ties)
        progress.at("simulation of the whole fleet")
        document |= rent_report.simulated_document(table, planned.plan, args.seed, measured.slo, limits)
    document["interrupted"] = limits.interrupted
    return table, planned, document


def slo_limits(market: Market) -> SloLimits | None:
    """Return the latencies that the market asks for."""
    if (slo := market.file.slo) is None:
        return None
    return SloLimits((slo.ttft_ms or INFINITY) / 1e3, (slo.tpot_ms or INFINITY) / 1e3, slo.attainment)


def read_counts(path: Path) -> dict[str, int]:
    """Return the instances by configuration of a plan that `--json` printed. Raises `ConfigError`."""
    try:
        return {str(each["configuration"]): int(each["count"]) for each in read_object(path)["instances"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: instances: expected the JSON of `hetlb rent`: {type(error).__name__}"
        ) from error
