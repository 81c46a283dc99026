"""`hetlb profile --from proxy:URL`: a profile corrected by what a running proxy has seen of an instance."""

from __future__ import annotations

import argparse
import json
import re

import msgspec

from hetlb.cli.adminclient import AdminClient
from hetlb.config.profile_file import ProfileSource, load_profile
from hetlb.core.latency import corrected as corrected_model
from hetlb.errors import InputError
from hetlb.profiler.sources import corrected, write_profile

#: Seconds expected of a part before it is corrected.
_LEAST_S = 30.0
_PARTS = ("prefill", "mixed", "decode")
_LINE = re.compile(r"hetlb_instance_model_(expected|seen)_seconds_total\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def from_proxy(args: argparse.Namespace, text: str) -> int:
    """Correct `--start` by the counters of `--server` on the admin listener at `text`, and write it."""
    for flag in ("start", "server"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a value with --from proxy:URL, got none")
    start, client = load_profile(args.start), AdminClient(text, args.api_key_env, "--from", "--api-key-env")
    page = client.get("/metrics")
    seen = counters(page.decode("utf-8", "replace"), args.server)
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
    source = ProfileSource(kind="proxy", name=args.server, note=note)
    profile = corrected(start, corrected_model(start.latency, **factors), source)
    if args.name:
        profile = msgspec.structs.replace(profile, name=args.name)
    write_profile(args.out, profile)
    left = [
        f"{part}: left as it is, under {_LEAST_S:.0f} s of it were seen"
        for part in seen
        if part not in factors
    ]
    if args.json:
        document = json.loads(msgspec.json.encode(profile))
        print(json.dumps({"out": str(args.out), "profile": document, "warnings": left}))
        return 0
    for line in (note, *left, f"written to {args.out}"):
        print(line)
    return 0


def counters(text: str, server: str) -> dict[str, dict[str, float]]:
    """Expected and seen seconds of an instance, by part."""
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
