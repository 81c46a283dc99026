"""`hetlb profile --from log:FILE` and `proxy:URL`: corrects a profile by observed times."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hetlb.cli.adminclient import AdminClient
from hetlb.config.profile_file import Profile, ProfileSource, load_profile
from hetlb.core.latency import LatencyModel
from hetlb.core.latency import corrected as corrected_model
from hetlb.errors import InputError, TraceError
from hetlb.profiler.sources import corrected, write_profile
from hetlb.sim.against import errors, fit_corrections, reach, replay, varies_enough
from hetlb.sim.against_logs import read_log
from hetlb.sim.study import engine_of

#: Least expected seconds of a part for a correction by a proxy.
_LEAST_S = 30.0
_PARTS = ("prefill", "mixed", "decode")
_LINE = re.compile(r"hetlb_instance_model_(expected|seen)_seconds_total\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Correction:
    """Corrected latency model, its source, lines to print, and further keys of the document."""

    latency: LatencyModel
    source: ProfileSource
    lines: list[str]
    warnings: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def write_corrected(args: argparse.Namespace, kind: str, origin: str) -> int:
    """Correct the profile `--start` by a log or a proxy and write it. Raises `InputError`."""
    if args.start is None:
        raise InputError(f"--start: expected the profile that is to be corrected (--from {kind}:), got none")
    start = load_profile(args.start)
    found = _by_log(args, start, Path(origin)) if kind == "log" else _by_proxy(args, start, origin)
    profile = corrected(start, found.latency, found.source)
    if args.name:
        profile = msgspec.structs.replace(profile, name=args.name)
    write_profile(args.out, profile)
    if args.json:
        document = {"out": str(args.out), "profile": msgspec.to_builtins(profile), **found.more}
        print(json.dumps({**document, "warnings": found.warnings}))
    else:
        print("\n".join([*found.lines, *found.warnings, f"written to {args.out}"]))
    return 0


def _by_log(args: argparse.Namespace, start: Profile, path: Path) -> Correction:
    """Correction by a log. Raises `TraceError` if it cannot separate prefill, mixed and decode steps."""
    log = read_log(path, args.hash_block_size)
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
    more = {"errors": changes, "tested": {**asdict(tested), "corrections": asdict(found)}}
    source = ProfileSource(kind="log", name=path.name, note=note)
    return Correction(latency, source, [*parts, holds, test, *told], more=more)


def _by_proxy(args: argparse.Namespace, start: Profile, url: str) -> Correction:
    """Correction by the counters of `--server` on the admin listener at `url`. Raises `InputError`."""
    if args.server is None:
        raise InputError("--server: expected a value with --from proxy:URL, got none")
    client = AdminClient(url, args.api_key_env, "--from", "--api-key-env")
    seen = counters(client.get("/metrics").decode("utf-8", "replace"), args.server)
    if not seen:
        raise InputError(f"--server: expected an instance that has answered requests, got {args.server!r}")
    factors = {
        part: found["seen"] / found["expected"]
        for part, found in seen.items()
        if found["expected"] >= _LEAST_S and found["seen"] > 0.0
    }
    if not factors:
        raise InputError(
            f"{client.url}: expected at least {_LEAST_S:.0f} s of some part on {args.server}, got "
            + ", ".join(f"{part} {found['expected']:.1f} s" for part, found in seen.items())
        )
    note = f"{start.name} corrected by what was seen: " + ", ".join(
        f"{part} x {factors.get(part, 1.0):.3f}" for part in seen
    )
    untouched = [part for part in seen if part not in factors]
    left = [f"{part}: left as it is, under {_LEAST_S:.0f} s of it were seen" for part in untouched]
    source = ProfileSource(kind="proxy", name=args.server, note=note)
    return Correction(corrected_model(start.latency, **factors), source, [note], left)


def counters(text: str, server: str) -> dict[str, dict[str, float]]:
    """Parse expected and observed seconds of an instance, by part."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        labels = dict(_LABEL.findall(match[2]))
        part = labels.get("part")
        if labels.get("server") == server and part in _PARTS:
            found.setdefault(part, {"expected": 0.0, "seen": 0.0})[match[1]] = float(match[3])
    return found
