"""`hetlb rent`: which GPUs to rent for a budget, how to divide them into instances, which requests go where.

Every plan passed `plan/check.py` before it is printed, and says how far it may be from the best, how
its throughputs came about, and what the whole fleet serves in simulation. Ctrl-C prints the best plan so far.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hetlb.cli.flags import add_json, declare, integer, real, whole
from hetlb.cli.rent_plot import write_sweep
from hetlb.errors import ConfigError, InputError, PlanError
from hetlb.plan.check import check_rent
from hetlb.plan.highs import INFINITY, Interrupt, SolveLimits
from hetlb.plan.hours import read_hours, schedule
from hetlb.plan.market import Market, load_market
from hetlb.plan.planning import SolvedPlan, Table, make_plan, make_table
from hetlb.plan.rent_report import (
    baselines_document,
    budgets_document,
    budgets_grid,
    document_of,
    hours_document,
    hours_grid,
    print_plan,
    replanning_document,
    simulated_document,
)
from hetlb.plan.rent_servers import servers_of, write_fleet
from hetlb.plan.replan import MoveCost, Replanned, replan, require_known
from hetlb.plan.throughput import Measured, SloLimits, default_cache
from hetlb.plan.workloads import trace_rows
from hetlb.tables import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb rent`."""
    add, switch = declare(parser), parser.add_argument
    limit = real("a number from 0", lambda value: value >= 0)
    share = real("0 to 1", lambda value: 0 <= value <= 1)
    horizon = real("a number from 1", lambda value: value >= 1)
    switch("--config", type=Path, required=True, metavar="MARKET.yaml", help="market file: offers and budget")
    add("--trace", "requests, in place of the file's workloads", "T.csv", Path)
    add("--workloads", "types of request to find in the trace (default 9)", "N", whole(1, 1000), 9)
    add("--time-limit", "seconds for the solver (default 60)", "S", limit, 60.0)
    add("--gap", "relative gap at which the solver stops (default 1e-4)", "G", share, 1e-4)
    add("--seed", "seed of types, solver and simulation", "S", integer(), 0)
    add_json(parser)
    add("--write-fleet", "fleet file of the plan", "FLEET.yaml", Path)
    switch("--no-simulate", action="store_true", help="skip the simulation of the whole fleet")
    switch("--no-baselines", action="store_true", help="skip the baselines")
    add("--cache", "file of known throughputs (default: under ~/.cache)", "FILE", Path)
    switch("--no-cache", action="store_true", help="simulate all throughputs again")
    add = declare(parser.add_argument_group("sweeps"))
    add("--budgets", "budgets per hour, a plan for each", "B,B,...")
    add("--hours", "hours, a plan for each: hour,request_rate", "H.csv", Path)
    add("--plot", "picture of budgets or hours", "P.png", Path)
    add = declare(parser.add_argument_group("replanning"))
    add("--replan", "running plan (its --json)", "PLAN.json", Path)
    add("--load-time", "seconds to load a model (default 300)", "S", limit, 300.0)
    add("--horizon", "seconds until the next change (default 3600)", "S", horizon, 3600.0)
    add("--keep", "share of a plan from scratch that must be reached (default 0.95)", "SHARE", share, 0.95)


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    if sum(flag is not None for flag in (args.budgets, args.hours, args.replan)) > 1:
        raise InputError("--budgets, --hours, --replan: expected one of them")
    market = load_market(args.config)
    table, measured = read_table(args, market)
    interrupt = Interrupt()
    limits = SolveLimits(args.gap, time.monotonic() + args.time_limit, args.seed, interrupt)
    try:
        if args.budgets is not None:
            return sweep_budgets(args, table, measured, limits)
        if args.hours is not None:
            return plan_hours(args, table, limits)
        return plan_once(args, table, measured, limits, interrupt)
    except PlanError as error:
        if interrupt.requested:
            raise KeyboardInterrupt from error
        # No plan is an answer about the input: what is missing is in the market file.
        raise ConfigError(f"{args.config}: {error}") from error


def read_table(args: argparse.Namespace, market: Market) -> tuple[Table, Measured]:
    """The throughput table, with a bar while it is simulated."""
    rows = None if args.trace is None else trace_rows(args.trace)
    slo = market.file.slo
    measured = Measured(
        None if args.no_cache else args.cache or default_cache(),
        None
        if slo is None
        else SloLimits(
            INFINITY if slo.ttft_ms is None else slo.ttft_ms / 1e3,
            INFINITY if slo.tpot_ms is None else slo.tpot_ms / 1e3,
            slo.attainment,
        ),
    )
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


# --- one plan -------------------------------------------------------------------------------------------


def plan_once(
    args: argparse.Namespace, table: Table, measured: Measured, limits: SolveLimits, interrupt: Interrupt
) -> int:
    """One plan, or a plan that follows another."""
    began = time.monotonic()
    replanned: Replanned | None = None
    with interrupt.catching(), bar("planning") as change:

        def show(best: float, bound: float) -> None:
            change(description=f"planning: best {best:.5g}, bound {bound:.5g}")

        if args.replan is None:
            planned = make_plan(table, measured, limits, show)
        else:
            old = require_known(table.problem, read_counts(args.replan))
            cost = MoveCost(args.load_time, args.horizon, args.keep)
            replanned = replan(table.problem, old, cost, limits, show)
            check_rent(table.problem, replanned.plan)
            planned = SolvedPlan(table.problem, replanned.plan)
    solve_s = time.monotonic() - began
    stopped = interrupt.requested
    document = document_of(table, planned, solve_s)
    if not args.no_baselines and not stopped:
        quick = replace(limits, gap=max(limits.gap, 1e-3), deadline=time.monotonic() + args.time_limit)
        document["baselines"] = baselines_document(table, planned, quick)
    if not args.no_simulate and not stopped:
        document["simulated"] = simulated_document(table, planned.plan, args.seed)
    if replanned is not None:
        document["replanning"] = replanning_document(replanned)
    document["interrupted"] = stopped
    servers = servers_of(table, planned.plan)
    document["commands"] = [server.command() for server in servers] if table.market.file.models else []
    if args.write_fleet is not None:
        policy = (document["simulated"] or {"policy": "hetlb"})["policy"]
        write_fleet(args.write_fleet, table, planned.plan, servers, policy)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print_plan(table, planned, document)
    return 0


def read_counts(path: Path) -> dict[str, int]:
    """Instances by configuration of a plan that `--json` printed. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {str(each["configuration"]): int(each["count"]) for each in document["instances"]}
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: instances: expected the JSON of `hetlb rent`: {type(error).__name__}"
        ) from error


# --- sweeps ---------------------------------------------------------------------------------------------


def read_budgets(text: str) -> list[float]:
    """`--budgets`: each once, ascending. Raises `InputError`."""
    try:
        budgets = sorted({float(part) for part in text.split(",")})
    except ValueError:
        budgets = [math.nan]
    if not all(0.0 < budget < math.inf for budget in budgets):
        raise InputError(f"--budgets: expected numbers above 0 separated by commas, got {text!r}")
    return budgets


def sweep_budgets(args: argparse.Namespace, table: Table, measured: Measured, limits: SolveLimits) -> int:
    """A plan for every budget; those that another one beats in both cost and throughput are marked."""
    budgets = read_budgets(args.budgets)
    if table.problem.request_rate is not None:
        raise InputError("--budgets: expected a market with budget_per_hour, got one with target")
    points = budgets_document(table, measured, budgets, limits, args.time_limit)
    if args.plot is not None:
        write_sweep(args.plot, points)
    if args.json:
        print(json.dumps({"budgets": points}, allow_nan=False))
        return 0
    Console().print(budgets_grid(points))
    return 0


def plan_hours(args: argparse.Namespace, table: Table, limits: SolveLimits) -> int:
    """A rent schedule: every hour's plan follows the one before it."""
    hours = read_hours(args.hours, table.problem)
    cost = MoveCost(args.load_time, 3600.0, args.keep)
    found = schedule(table.problem, hours, cost, limits)
    document = hours_document(hours, found)
    if args.json:
        print(json.dumps(document, allow_nan=False))
        return 0
    console = Console()
    console.print(hours_grid(document))
    console.print(
        f"{document['cost']:.2f} in all; the dearest hour's fleet all day would cost "
        f"{document['cost_of_the_peak_all_day']:.2f}",
        highlight=False,
    )
    return 0
