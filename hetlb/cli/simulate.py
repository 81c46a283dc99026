"""`hetlb simulate`: simulates a fleet under policies, rates and seeds, or replays an event log.

The scheduler is the proxy's own. The output depends on the arguments alone, not on the number of
processes. A replay exits with 0 only if every decision equals the recorded one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hetlb.cli.flags import add_json, add_load, declare, integer, whole
from hetlb.config.fleet import load_fleet
from hetlb.config.profile_file import load_profile
from hetlb.core.eventlog import Replay
from hetlb.core.latency import IterationRule
from hetlb.core.paths.path_log import dispatches, is_path_log
from hetlb.core.policies.registry import POLICIES
from hetlb.core.predictor import PREDICTORS
from hetlb.errors import InputError, PlanError, TraceError
from hetlb.loadtest.options import read_known, read_rates
from hetlb.loadtest.report import percent, runs_table
from hetlb.plan.placement.check_path import check_path
from hetlb.sim.simulation_sweep import TRACE, Ran, Study, StudyCell, StudyLoad, run_sweep
from hetlb.sim.study import by_policy_and_rate, make_study, median_run, run_document, watch
from hetlb.sim.sweep_plot import rate_in_words, write_sweep_plot
from hetlb.tables import bar
from hetlb.workload.content import PromptContent, contents_of
from hetlb.workload.traces import Row, read_trace

#: Requests over all runs for which starting another process pays.
_REQUESTS_WORTH_A_PROCESS = 4000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb simulate`."""
    add, switch = declare(parser), parser.add_argument
    add("--config", "fleet file; every instance needs a profile", "FLEET.yaml", Path)
    add_load(parser)
    rows = "rows of the trace, repeated where there are fewer (default: all)"
    add("--num-prompts", rows, "N", whole(1))
    add("--policy", "scheduling policies, a run each (default: the file's)", "A,B,C")
    predictor = "predictor of output lengths (default empirical)"
    switch("--predictor", choices=PREDICTORS, default="empirical", help=predictor)
    rule = "time of a mixed iteration: weights read once (token, default), or both summed (sum)"
    switch("--iteration", choices=tuple(IterationRule), default=IterationRule.TOKEN, help=rule)
    add("--queue-limit", "requests that may wait at the proxy (default: any number)", "N", whole(0))
    prefixes = "engines cache prefixes; the trace needs hash_ids or session_id"
    switch("--prefix-cache", action="store_true", help=prefixes)
    seed = integer(" (several: --seed 1 --seeds 3)")
    add("--seed", "seed of arrivals and random choices (default 0)", "S", seed, 0)
    add("--seeds", "number of seeds, from --seed on", "N", whole(1), 1)
    add("--jobs", "processes (default: one per core)", "N", whole(1))
    add("--model", "model of the file (default: its first)")
    add("--plot", "picture of throughput, latencies, KV use and queues", "P.png", Path)
    add("--event-log", "replay a recorded event log", "FILE", Path)
    add("--against", "compare the log of a real server with its profile", "LOG", Path)
    add("--profile", "profile of the server (--against)", "P.yaml", Path)
    figures = "find policy.weights of hetlb for mean_ttft_ms, p99_e2el_ms, attainment, ..."
    add("--tune", figures, "FIGURE")
    add("--write", "write the weights found, if they are a gain", "FILE", Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate or replay, and print."""
    if args.against is not None:
        return run_against(args)
    if args.event_log is not None:
        if args.config is not None or args.trace is not None:
            raise InputError("--event-log: expected alone; the log holds the fleet and the requests")
        return replay(args.event_log, args.json)
    if args.config is None or args.trace is None:
        raise InputError("expected --config and --trace, or --event-log, or --against")
    fleet = load_fleet(args.config)
    policies = read_known("--policy", args.policy, POLICIES) if args.policy else [fleet.file.policy.name]
    rates: dict[float | str, str] = {
        read_rates(text)[0]: text.strip() for text in args.request_rate.split(",")
    }
    seeds = list(range(args.seed, args.seed + args.seeds))
    if args.tune is not None:
        from hetlb.cli.simulate_tune import check_tune, run_tune

        check_tune(args, fleet)
        if len(rates) > 1 or args.policy not in (None, "hetlb"):
            raise InputError("--tune: expected one --request-rate, and no --policy but hetlb")
    elif args.write is not None:
        raise InputError("--write: expected it with --tune")
    cells = [StudyCell(policy, rate, seed) for rate in rates for policy in policies for seed in seeds]
    if args.plot is not None:
        cells = watch(cells)
    rows = read_trace(args.trace)
    if TRACE in rates and any(row.arrival_s is None for row in rows[: args.num_prompts]):
        raise TraceError(f"{args.trace}: arrival_s: expected a time in every row to replay")
    study = make_study(
        fleet,
        StudyLoad(rows, args.num_prompts, args.burstiness, read_contents(args, rows), args.waves),
        predictor=args.predictor,
        rule=IterationRule(args.iteration),
        model=args.model,
        queue_limit=args.queue_limit,
        prefix_cache=args.prefix_cache,
    )
    if args.tune is not None:
        return run_tune(args, fleet, study, next(iter(rates)), seeds)
    ran = sweep(study, cells, args.jobs)
    runs = [run_document(study, each, rates[each.cell.rate]) for each in ran]
    medians = [] if len(seeds) == 1 else [median_run(each) for each in by_policy_and_rate(runs).values()]
    if args.plot is not None:
        write_sweep_plot(args.plot, medians or runs, ran)
    if args.json:
        print(json.dumps({"runs": runs} | ({"medians": medians} if medians else {}), allow_nan=False))
    else:
        print_tables(medians or runs, list(rates.values()), len(seeds))
    return 0


def run_against(args: argparse.Namespace) -> int:
    """Compare the log of a real server with its profile and print the errors."""
    from hetlb.sim.against import compare  # scipy takes half a second
    from hetlb.sim.against_logs import read_log
    from hetlb.sim.against_report import comparison_document, engines, print_comparison, write_against_plot

    log = read_log(args.against, args.hash_block_size)
    profile = load_profile(args.profile) if args.profile is not None else None
    try:
        comparison = compare(log, engines(args.against, log, profile))
    except TraceError as error:
        raise TraceError(f"{args.against}: {error}") from error
    if args.plot is not None:
        write_against_plot(args.plot, comparison)
    if args.json:
        print(json.dumps(comparison_document(log, profile, comparison), allow_nan=False))
    else:
        print_comparison(profile, comparison)
    return 0


# --- flags ----------------------------------------------------------------------------------------------


def read_contents(args: argparse.Namespace, rows: Sequence[Row]) -> list[PromptContent] | None:
    """Prompt contents for `--prefix-cache`, None without it. Raises `InputError`."""
    if not args.prefix_cache:
        return None
    if not any(row.hash_ids or row.session for row in rows):
        raise TraceError(f"{args.trace}: --prefix-cache: expected the column hash_ids or session_id")
    return contents_of(rows, args.hash_block_size)


# --- runs -----------------------------------------------------------------------------------------------


def sweep(study: Study, cells: Sequence[StudyCell], jobs: int | None = None) -> list[Ran]:
    """Run the cells with a progress bar on stderr."""
    if jobs is None:
        worth = 1 + len(cells) * study.load.count // _REQUESTS_WORTH_A_PROCESS
        jobs = min(_cores(), worth)
    with bar(f"simulating {len(cells)} run" + "s" * (len(cells) > 1)) as show:
        return run_sweep(
            study, cells, jobs=jobs, on_progress=lambda done, total: show(completed=done, total=total)
        )


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_tables(runs: Sequence[Mapping[str, Any]], rates: Sequence[str], seeds: int) -> None:
    """Print one table per rate."""
    console = Console()
    for rate in rates:
        words = [] if len(rates) == 1 else [rate_in_words(rate)]
        words += [] if seeds == 1 else [f"medians of {seeds} seeds"]
        here = [each for each in runs if each["request_rate"] == rate]
        reference = here[0]["steady_bound"]["total_token_throughput"]
        table = runs_table(here, steady_tok_s=reference, title=", ".join(words) or None)
        if rate != rates[-1]:
            table = replace(table, caption=" ")  # the same under each
        console.print(table)
        if hits := [f"{each['policy']} {percent(_prefix_hits(each))}" for each in here if _has_hits(each)]:
            console.print(f"prompt tokens found in prefix caches: {', '.join(hits)}", soft_wrap=True)


def _has_hits(run: Mapping[str, Any]) -> bool:
    return any("prefix_hit_tokens" in each for each in run["instances"])


def _prefix_hits(run: Mapping[str, Any]) -> float:
    """Share of prompt tokens found in prefix caches."""
    hit, computed = (
        sum(each[key] for each in run["instances"]) for key in ("prefix_hit_tokens", "prefilled_tokens")
    )
    return hit / (hit + computed) if hit else 0.0


def _check_paths(path: Path, lines: Iterable[str], as_json: bool) -> int:
    """Check every path of a log; returns 0 if all are complete, else 1."""
    paths, wrong = 0, []
    for number, network, hops in dispatches(lines):
        paths += 1
        try:
            check_path(network, hops)
        except PlanError as error:
            wrong.append({"line": number, "error": str(error)})
    if as_json:
        print(json.dumps({"paths": paths, "wrong": wrong}))
    else:
        told = f"line {wrong[0]['line']}: {wrong[0]['error']}" if wrong else "every path is whole"
        print(f"{path}: {paths} paths: {told}")
    return 1 if wrong else 0


def replay(path: Path, as_json: bool) -> int:
    """Replay a recorded log; returns 0 if every decision equals the recorded one, else 1.

    For a log of paths through stages every path is checked instead.
    """
    facts = decisions = 0
    differing: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
            if is_path_log(lines.readline()):
                lines.seek(0)
                return _check_paths(path, lines, as_json)
            lines.seek(0)
            log = Replay(lines)
            for step in log:
                facts += 1
                decisions += len(step.recorded)
                if not step.same:
                    differing.append(step.line)
    except OSError as error:
        raise TraceError(f"{path}: expected a readable file: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path}: expected an event log of hetlb: {error}") from error
    log.scheduler.check_integrity()
    if as_json:
        print(json.dumps({"facts": facts, "decisions": decisions, "differing_lines": differing}))
    else:
        verdict = "every decision is the recorded one"
        if differing:
            verdict = f"{len(differing)} facts led to other decisions, the first on line {differing[0]}"
        print(f"{path}: {facts} facts, {decisions} decisions: {verdict}")
    return 1 if differing else 0
