"""`hetlb rent`: which GPUs to rent for a budget, their division into instances, which requests go where."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from hetlb.cli.flags import INTEGER, add_json, declare, print_document, real, whole
from hetlb.errors import ConfigError, PlanError
from hetlb.inputs.yaml_file import read_object
from hetlb.output_files import fleet_path
from hetlb.tools.plan import rent_report
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.highs import INFINITY, Interrupt, SolveLimits
from hetlb.tools.plan.market import Market, load_market
from hetlb.tools.plan.planning import SolvedPlan, Table, baselines, make_plan, make_table
from hetlb.tools.plan.rent_servers import servers_of, write_fleet
from hetlb.tools.plan.replan import Replanned, replan, require_known
from hetlb.tools.plan.throughput import Measured, SloLimits, default_cache
from hetlb.tools.plan.workloads import trace_rows
from hetlb.tools.tables import bar

#: Relative gap at which the solver stops.
_RELATIVE_GAP = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    limit = real("a number from 0", lambda value: value >= 0)
    add("--config", "market file: offers and budget", "MARKET.yaml", Path, required=True)
    add("--trace", "requests, in place of the file's workloads", "T.csv", Path)
    add("--workloads", "types of request to find in the trace (default 9)", "N", whole(1, 1000), 9)
    add("--time-limit", "seconds for the solver (default 60)", "S", limit, 60.0)
    add("--seed", "seed of types, solver and simulation", "S", INTEGER, 0)
    add_json(parser)
    add("--write-fleet", "fleet file of the plan", "FLEET.yaml", fleet_path)
    add("--no-simulate", "skip the simulation of the whole fleet, and the baselines", action="store_true")
    add("--no-cache", "simulate all throughputs again", action="store_true")
    add("--replan", "running plan (its --json), to change with few moves", "PLAN.json", Path)


def run(args: argparse.Namespace) -> int:
    market = load_market(args.config)
    table, measured = read_table(args, market)
    interrupt = Interrupt()
    limits = SolveLimits(_RELATIVE_GAP, time.monotonic() + args.time_limit, args.seed, interrupt)
    try:
        return plan_once(args, table, measured, limits, interrupt)
    except PlanError as error:
        if interrupt.requested:
            raise KeyboardInterrupt from error
        # No plan is an answer about the input: what is missing is in the market file.
        raise ConfigError(f"{args.config}: {error}") from error


def read_table(args: argparse.Namespace, market: Market) -> tuple[Table, Measured]:
    """Return the throughput table, with a bar while it is simulated."""
    rows = None if args.trace is None else trace_rows(args.trace)
    limits = None
    if (slo := market.file.slo) is not None:
        ttft_ms, tpot_ms = slo.ttft_ms or INFINITY, slo.tpot_ms or INFINITY
        limits = SloLimits(ttft_ms / 1e3, tpot_ms / 1e3, slo.attainment)
    measured = Measured(None if args.no_cache else default_cache(), limits)
    with bar("throughputs of configurations") as show:
        table = make_table(
            market,
            measured,
            rows=rows,
            count=args.workloads,
            seed=args.seed,
            on_progress=lambda done, total: show(completed=done, total=total),
        )
    return table, measured


def plan_once(
    args: argparse.Namespace, table: Table, measured: Measured, limits: SolveLimits, interrupt: Interrupt
) -> int:
    """Return one plan, or a plan that follows another."""
    began = time.monotonic()
    replanned: Replanned | None = None
    with interrupt.catching(), bar("planning") as change:

        def show(best: float, bound: float) -> None:
            change(description=f"planning: best {best:.5g}, bound {bound:.5g}")

        if args.replan is None:
            planned = make_plan(table, measured, limits, show)
        else:
            old = require_known(table.problem, read_counts(args.replan))
            replanned = replan(table.problem, old, table.market.file.replanning, limits, show)
            check_rent(table.problem, replanned.plan)
            planned = SolvedPlan(table.problem, replanned.plan)
    solve_s = time.monotonic() - began
    stopped = interrupt.requested
    document = rent_report.document_of(table, planned, solve_s)
    if not args.no_simulate and not stopped:
        quick = replace(limits, gap=max(limits.gap, 1e-3), deadline=time.monotonic() + args.time_limit)
        document["baselines"] = baselines(planned, quick, table.ties)
        document["simulated"] = rent_report.simulated_document(table, planned.plan, args.seed)
    if replanned is not None:
        document["replanning"] = rent_report.replanning_document(replanned)
    document["interrupted"] = stopped
    servers = servers_of(table, planned.plan)
    document["commands"] = [server.command() for server in servers] if table.market.file.models else []
    if args.write_fleet is not None:
        write_fleet(args.write_fleet, table, planned.plan, servers)
    return print_document(args, document, lambda: rent_report.print_plan(table, planned, document))


def read_counts(path: Path) -> dict[str, int]:
    """Return the instances by configuration of a plan that `--json` printed. Raises `ConfigError`."""
    try:
        return {str(each["configuration"]): int(each["count"]) for each in read_object(path)["instances"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: instances: expected the JSON of `hetlb rent`: {type(error).__name__}"
        ) from error
