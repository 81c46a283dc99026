"""`hetlb simulate --against LOG`: a log of a real server replayed on a profile, and how right that is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hetlb.cli.against_plot import write_against_plot
from hetlb.config.profile_file import Profile, load_profile
from hetlb.errors import ConfigError, ProfileError, TraceError
from hetlb.sim.against import Comparison, Engine, compare
from hetlb.sim.against_logs import Log, read_log
from hetlb.sim.engine_limits import EngineLimits


def run_against(args: argparse.Namespace) -> int:
    """Replay, compare and print."""
    log = read_log(args.against)
    profile = load_profile(args.profile) if args.profile is not None else None
    by_name = engines(args.against, log, profile)
    try:
        comparison = compare(log, by_name, args.hash_block_size)
    except TraceError as error:
        raise TraceError(f"{args.against}: {error}") from error
    if args.plot is not None:
        write_against_plot(args.plot, comparison)
    if args.json:
        print(json.dumps(document(log, profile, comparison), allow_nan=False))
    else:
        print_comparison(profile, comparison)
    return 0


def engines(path: Path, log: Log, profile: Profile | None) -> dict[str, Engine]:
    """The engines of a log by name: those of its set-up, or of the profile. Raises `InputError`."""
    names = sorted({each.instance for each in log.requests})
    if profile is not None:
        return dict.fromkeys(names, engine_of(profile))
    if log.setup is None:
        raise ConfigError(
            "--against: expected --profile P.yaml, the profile of the server that wrote the log"
        )
    specs = {spec.name: spec for spec in log.setup.specs}
    found = {}
    for name in names:
        spec = specs.get(name)
        if spec is None or spec.latency is None:
            raise ConfigError(
                f"{path}: {name}: expected an instance that had a profile when the log began, "
                "or --profile P.yaml for all"
            )
        try:
            found[name] = Engine(spec.latency, EngineLimits.from_capacity(spec.capacity))
        except ValueError as error:
            raise ConfigError(f"{path}: {name}: {error}") from error
    return found


def engine_of(profile: Profile) -> Engine:
    """The engine of a profile. Raises `ProfileError` naming what it lacks."""
    try:
        limits = EngineLimits.from_capacity(profile.capacity)
    except ValueError as error:
        raise ProfileError(f"{profile.name}: {error}") from error
    return Engine(profile.latency, limits)


def document(log: Log, profile: Profile | None, found: Comparison) -> dict[str, Any]:
    """The comparison as JSON; seconds, shares as fractions."""
    return {
        "log": log.kind,
        "profile": profile.name if profile is not None else None,
        "lacks": list(profile.lacks) if profile is not None else [],
        "requests": found.requests,
        "failed": found.failed,
        "preemptions": found.preemptions,
        "verdict": found.verdict,
        "errors": {name: asdict(error) for name, error in found.errors.items()},
        "split_e2e_s": found.split,
        "split_ttft_s": found.split_ttft,
        "corrections": asdict(found.corrections),
        "loads": {
            label: {name: asdict(error) for name, error in errors.items()}
            for label, errors in found.loads.items()
        },
        "kv_usage": [list(each) for each in found.kv],
        "per_request": [
            {
                "arrival_s": m.arrival_s,
                "input_tokens": m.input_tokens,
                "output_tokens": m.output_tokens,
                "measured": {"queue_s": m.queue_s, "ttft_s": m.ttft_s, "e2e_s": m.e2e_s},
                "simulated": {"queue_s": s.queue_s, "ttft_s": s.ttft_s, "e2e_s": s.e2e_s},
            }
            for m, s in zip(found.measured, found.simulated, strict=True)
        ],
    }


def print_comparison(profile: Profile | None, found: Comparison) -> None:
    """Tables for people, and the verdict."""
    console = Console(highlight=False)
    table = Table(title=f"{found.requests} requests, {found.preemptions} preemptions", title_justify="left")
    for column in ("", "measured", "simulated", "error", "per request", "median", "p95"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in found.errors.items():
        table.add_row(
            name.upper() if name != "queue" else name,
            f"{each.measured_s:.4g} s",
            f"{each.simulated_s:.4g} s",
            f"{100 * each.error:+.1f} %",
            f"{100 * each.per_request:.1f} %",
            f"{100 * each.median:.1f} %",
            f"{100 * each.p95:.1f} %",
        )
    table.caption = "per request: mean distance over the mean; median and p95 of each request's own"
    console.print(table)
    for title, name, split in (("E2E", "e2e", found.split), ("TTFT", "ttft", found.split_ttft)):
        mean_s = found.errors[name].measured_s
        parts = ", ".join(f"{part} {100 * seconds / mean_s:+.1f} %" for part, seconds in split.items())
        console.print(f"{title} error by part: {parts}")
    console.print("parts: " + ", ".join(found.corrections.described()))
    for label, errors in found.loads.items():
        parts = ", ".join(f"{name.upper()} {100 * each.error:+.1f} %" for name, each in errors.items())
        console.print(f"{label}: {parts}")
    for line in profile.lacks if profile is not None else ():
        console.print(f"the profile lacks {line}")
    for line in profile.assumed if profile is not None else ():
        console.print(f"assumed {line}")
    console.print(f"[bold]{found.verdict}[/bold]")
