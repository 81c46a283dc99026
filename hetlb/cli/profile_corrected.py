"""`hetlb profile --from log:FILE`: corrects a profile by the times of a log."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from hetlb.balancer.config.profile_file import ProfileSource, load_profile
from hetlb.balancer.config.profile_writer import write_profile
from hetlb.cli.flags import print_document
from hetlb.cli.profile_facts import FactsFile
from hetlb.errors import InputError, TraceError
from hetlb.tools.profiler.sources import corrected
from hetlb.tools.sim.against import errors, fit_corrections, reach, replay, varies_enough
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.measured_logs import read_log


def write_corrected(args: argparse.Namespace, path: Path) -> int:
    """Correct the profile `--start` by a log and write it. Raises `TraceError` if the log is too poor."""
    if args.start is None:
        raise InputError("--start: expected the profile that is to be corrected (--from log:), got none")
    if args.facts.file != FactsFile(name=args.facts.file.name):
        raise InputError("--facts: expected `name` alone with --from log:FILE, as --start has the rest")
    start = load_profile(args.start)
    log = read_log(path)
    instances = sorted({each.instance for each in log.requests})
    if len(instances) > 1:
        raise TraceError(f"{path}: expected the log of one server, got {', '.join(instances)}")
    engine = engine_of(start)
    try:
        before = replay(log.requests, engine)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    if reason := varies_enough(before):
        raise TraceError(
            f"{path}: expected arrivals that vary (as at 2, 8 and 20 requests/s): {reason}, "
            "so prefill, mixed and decode steps cannot be told apart"
        )
    found = fit_corrections(log.requests, engine)
    tested = reach(log.requests, engine, found)
    test = (
        f"corrected by its quieter half, {tested.metric.upper()} of the busier half is off by "
        f"{100 * tested.after:+.1f} % (before {100 * tested.before:+.1f} %)"
    )
    if tested.harms:
        raise TraceError(
            f"{path}: expected a log that tells the parts of the model apart: {test}, so a correction would "
            "do harm at other loads; a log with more varied load may tell (2, 8 and 20 requests/s, say)"
        )
    latency = found.applied(engine.latency)
    after = replay(log.requests, replace(engine, latency=latency))
    holds = (
        f"holds up to {tested.sequences} sequences at once, {tested.times:g} times the log's rate"
        if tested.times
        else "holds at the log's own load alone: mixed steps of another form fit it as well"
    )
    parts = found.described()
    note = f"{start.name} corrected by {len(log.requests)} requests: {', '.join(parts)}; {holds}; {test}"
    old, new = errors(log.requests, before.requests), errors(log.requests, after.requests)
    changes = {name: (old[name].error, new[name].error) for name in old}
    told = [
        f"{name}: error of the mean {100 * was:+.1f} % before, {100 * now:+.1f} % after"
        for name, (was, now) in changes.items()
    ]
    profile = corrected(start, latency, ProfileSource(kind="log", name=path.name, note=note))
    if name := args.facts.file.name:
        profile = msgspec.structs.replace(profile, name=name)
    write_profile(args.out, profile)
    document = {
        "out": str(args.out),
        "profile": msgspec.to_builtins(profile),
        "errors": changes,
        "tested": {**asdict(tested), "corrections": asdict(found)},
        "warnings": [],
    }
    lines = [*parts, holds, test, *told, f"written to {args.out}"]
    return print_document(args, document, lambda: print("\n".join(lines)))
