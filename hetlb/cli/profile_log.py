"""`hetlb profile --from log:FILE`: a profile corrected by the log of the server that it is of."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from hetlb.cli.simulate_against import engine_of
from hetlb.config.profile_file import ProfileSource, load_profile
from hetlb.errors import InputError, TraceError
from hetlb.profiler.sources import corrected, write_profile
from hetlb.sim.against import errors, fit_corrections, reach, replay, varies_enough
from hetlb.sim.against_logs import read_log


def from_log(args: argparse.Namespace, path: Path) -> int:
    """Correct `--start` by the log and write it. Raises `TraceError` where the log cannot tell its parts."""
    if args.start is None:
        raise InputError("--start: expected the profile that is to be corrected, got none")
    start, log = load_profile(args.start), read_log(path)
    instances = sorted({each.instance for each in log.requests})
    if len(instances) > 1:
        raise TraceError(f"{path}: expected the log of one server, got {', '.join(instances)}")
    engine = engine_of(start)
    try:
        before = replay(log.requests, engine, args.hash_block_size)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    if reason := varies_enough(before):
        raise TraceError(
            f"{path}: expected arrivals that vary (as at 2, 8 and 20 requests/s): {reason}, "
            "so prefill, mixed and decode steps cannot be told apart"
        )
    found = fit_corrections(log.requests, engine, args.hash_block_size)
    tested = reach(log.requests, engine, found, args.hash_block_size)
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
    after = replay(log.requests, replace(engine, latency=latency), args.hash_block_size)
    holds = (
        f"holds up to {tested.sequences} sequences at once, {tested.times:g} times the log's rate"
        if tested.times
        else "holds at the log's own load alone: mixed steps of another form fit it as well"
    )
    parts = ", ".join(found.described())
    note = f"{start.name} corrected by {len(log.requests)} requests: {parts}; {holds}; {test}"
    source = ProfileSource(kind="log", name=path.name, note=note)
    profile = corrected(start, latency, source)
    if args.name:
        profile = msgspec.structs.replace(profile, name=args.name)
    write_profile(args.out, profile)
    old, new = errors(log.requests, before.requests), errors(log.requests, after.requests)
    changes = {name: (old[name].error, new[name].error) for name in old}
    if args.json:
        document = json.loads(msgspec.json.encode(profile))
        tested_document = {**asdict(tested), "corrections": asdict(found)}
        report = {"out": str(args.out), "profile": document, "errors": changes, "tested": tested_document}
        print(json.dumps({**report, "warnings": []}))
        return 0
    for line in found.described():
        print(line)
    print(f"{holds}\n{test}")
    for name, (was, now) in changes.items():
        print(f"{name}: error of the mean {100 * was:+.1f} % before, {100 * now:+.1f} % after")
    print(f"written to {args.out}")
    return 0
