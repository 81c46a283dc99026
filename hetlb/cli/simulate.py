"""`hetlb simulate`: simulates a fleet under policies, rates and seeds, or replays an event log."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import PREDICTORS
from hetlb.cli.flags import COUNT, INTEGER, add_json, declare, print_document, whole
from hetlb.cli.request_files import add_load, event_log, read_known, read_rates
from hetlb.cli.serving_options import OPTIONS
from hetlb.errors import InputError, PlanError, TraceError, visible
from hetlb.options.event_log.eventlog import Replay
from hetlb.tools.loadtest.result_tables import percent, runs_table
from hetlb.tools.paths.path_scheduler import dispatches, is_path_log
from hetlb.tools.plan.common.remarks import remarks_on_fleet
from hetlb.tools.plots import picture_path
from hetlb.tools.sim.integrity import check_scheduler
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import TRACE, Ran, Study, StudyCell, run_sweep
from hetlb.tools.sim.study import by_policy_and_rate, make_study, median_run, run_document, watch
from hetlb.tools.sim.sweep_plot import rate_in_words, write_sweep_plot
from hetlb.tools.tables import Console, bar
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.rows import block_tokens
from hetlb.tools.workload.trace_formats import read_trace

#: Least requests over all runs that pay for starting another process.
_REQUESTS_WORTH_A_PROCESS = 4000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--config", "fleet file; every instance needs a profile", "FLEET.yaml", Path)
    add_load(parser)
    rows = "rows of the trace, repeated if there are fewer (default: all)"
    add("--num-prompts", rows, "N", COUNT)
    add("--policy", "scheduling policies, a run each (default: the file's)", "A,B,C")
    predictor = "predictor of output lengths (default empirical)"
    add("--predictor", predictor, default="empirical", choices=PREDICTORS)
    rule = "time of a mixed iteration: weights read once (token, default), or both summed (sum)"
    add("--iteration", rule, default=IterationRule.TOKEN, choices=tuple(IterationRule))
    add("--queue-limit", "requests that may wait at the proxy (default: any number)", "N", whole(0))
    prefixes = "engines cache prefixes; the trace needs hash_ids or session_id"
    add("--prefix-cache", prefixes, action="store_true")
    add("--seed", "seed of arrivals and random choices (default 0)", "S", INTEGER, 0)
    add("--seeds", "number of seeds, from --seed on", "N", COUNT, 1)
    add("--model", "model of the file (default: its first)")
    add("--plot", "picture of throughput, latencies, KV use and queues", "P.png", picture_path)
    add("--event-log", "replay a recorded event log", "FILE", Path)
    add("--against", "compare the log of a real server with its profile", "LOG", Path)
    add("--profile", "profile of the server (--against)", "P.yaml", Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.against is not None:
        return run_against(args)
    if args.event_log is not None:
        if args.config is not None or args.trace is not None:
            raise InputError("--event-log: expected alone; the log holds the fleet and the requests")
        return replay(args)
    if args.config is None or args.trace is None:
        raise InputError("expected --config and --trace, or --event-log, or --against")
    fleet = load_fleet(args.config)
    policies = read_known("--policy", args.policy, POLICIES) if args.policy else [fleet.file.policy.name]
    rates: dict[float | str, str] = {
        read_rates(text)[0]: text.strip() for text in args.request_rate.split(",")
    }
    seeds = list(range(args.seed, args.seed + args.seeds))
    cells = [StudyCell(policy, rate, seed) for rate in rates for policy in policies for seed in seeds]
    if args.plot is not None:
        cells = watch(cells)
    rows = read_trace(args.trace)
    if TRACE in rates and any(row.arrival_s is None for row in rows[: args.num_prompts]):
        raise TraceError(f"{args.trace}: arrival_s: expected a time in every row to replay")
    if args.prefix_cache and not any(row.hash_ids or row.session for row in rows):
        raise TraceError(f"{args.trace}: --prefix-cache: expected the column hash_ids or session_id")
    hash_block = block_tokens(rows) if args.prefix_cache else None
    study = make_study(
        fleet,
        Load(rows, args.num_prompts, args.burstiness, hash_block, args.waves),
        predictor=args.predictor,
        rule=IterationRule(args.iteration),
        model=args.model,
        queue_limit=args.queue_limit,
        prefix_cache=args.prefix_cache,
    )
    for line in dict.fromkeys(remarks_on_fleet(fleet)):
        print(visible(f"warning: {line}"), file=sys.stderr)
    ran = sweep(study, cells)
    runs = [run_document(study, each, rates[each.cell.rate]) for each in ran]
    medians = [] if len(seeds) == 1 else [median_run(each) for each in by_policy_and_rate(runs).values()]
    if args.plot is not None:
        write_sweep_plot(args.plot, medians or runs, ran)
    document = {"runs": runs} | ({"medians": medians} if medians else {})
    return print_document(
        args, document, lambda: print_tables(medians or runs, list(rates.values()), len(seeds))
    )


def run_against(args: argparse.Namespace) -> int:
    """Compare the log of a real server with its profile and print the errors."""
    from hetlb.tools.sim.against import compare  # scipy takes half a second
    from hetlb.tools.sim.against_report import (
        comparison_document,
        engines,
        print_comparison,
        write_against_plot,
    )
    from hetlb.tools.workload.measured_logs import read_log

    log = read_log(args.against)
    profile = load_profile(args.profile) if args.profile is not None else None
    try:
        comparison = compare(log, engines(args.against, log, profile))
    except TraceError as error:
        raise TraceError(f"{args.against}: {error}") from error
    if args.plot is not None:
        write_against_plot(args.plot, comparison)
    document = comparison_document(log, profile, comparison)
    return print_document(args, document, lambda: print_comparison(profile, document))


def sweep(study: Study, cells: Sequence[StudyCell]) -> list[Ran]:
    """Run the cells with a progress bar on stderr, on as many cores as this process may use."""
    worth = 1 + len(cells) * study.load.count // _REQUESTS_WORTH_A_PROCESS
    jobs = min(len(os.sched_getaffinity(0)), worth)
    with bar(f"simulating {len(cells)} run" + "s" * (len(cells) > 1)) as show:
        return run_sweep(
            study, cells, jobs=jobs, on_progress=lambda done, total: show(completed=done, total=total)
        )


def print_tables(runs: Sequence[Mapping[str, Any]], rates: Sequence[str], seeds: int) -> None:
    """Print one table per rate."""
    console = Console()
    for rate in rates:
        words = [] if len(rates) == 1 else [rate_in_words(rate)]
        words += [] if seeds == 1 else [f"medians of {seeds} seeds"]
        here = [each for each in runs if each["request_rate"] == rate]
        reference = here[0]["bound"]["total_token_throughput"]
        table = runs_table(here, reference_tok_s=reference, title=", ".join(words) or None)
        if rate != rates[-1]:
            table.caption = " "  # the same under each
        console.print(table)
        hits = []
        for each in here:
            hit, computed = (
                sum(instance.get(key, 0) for instance in each["instances"])
                for key in ("prefix_hit_tokens", "prefilled_tokens")
            )
            if any("prefix_hit_tokens" in instance for instance in each["instances"]):
                hits.append(f"{each['policy']} {percent(hit / max(1, hit + computed))}")
        if hits:
            console.print(f"prompt tokens found in prefix caches: {', '.join(hits)}", soft_wrap=True)


def _check_paths(args: argparse.Namespace, lines: Iterable[str]) -> int:
    """Check every path of a log; returns 0 if all are complete, else 1."""
    from hetlb.tools.plan.check import check_path  # with the planners' solvers, which nothing else here needs

    paths, wrong = 0, list[dict[str, object]]()
    for number, network, hops in dispatches(lines):
        paths += 1
        try:
            check_path(network, hops)
        except PlanError as error:
            wrong.append({"line": number, "error": str(error)})
    told = f"line {wrong[0]['line']}: {wrong[0]['error']}" if wrong else "every path is whole"
    print_document(
        args,
        {"paths": paths, "wrong": wrong},
        lambda: print(visible(f"{args.event_log}: {paths} paths: {told}")),
    )
    return 1 if wrong else 0


def replay(args: argparse.Namespace) -> int:
    """Replay a recorded log; returns 0 if every decision equals the recorded one, else 1.

    For a log of paths through stages every path is checked instead.
    """
    path: Path = args.event_log
    facts = decisions = 0
    differing: list[int] = []
    with event_log(path) as lines:
        first = next(lines, "")
        whole = itertools.chain((first,), lines)
        if is_path_log(first):
            return _check_paths(args, whole)
        log = Replay(whole, OPTIONS.splitting)
        for step in log:
            facts += 1
            decisions += len(step.recorded)
            if not step.same:
                differing.append(step.line)
    check_scheduler(log.scheduler)
    verdict = "every decision is the recorded one"
    if differing:
        verdict = f"{len(differing)} facts led to other decisions, the first on line {differing[0]}"
    document = {"facts": facts, "decisions": decisions, "differing_lines": differing}
    print_document(
        args, document, lambda: print(visible(f"{path}: {facts} facts, {decisions} decisions: {verdict}"))
    )
    return 1 if differing else 0
