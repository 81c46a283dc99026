"""`hetlb profile --from proxy:URL`: a profile corrected by what a running proxy has seen of an instance."""

from __future__ import annotations

import argparse
import os
import re
import urllib.error
import urllib.request

import msgspec

from hetlb.config.profile import Source, load_profile
from hetlb.errors import InputError
from hetlb.profiler.sources import corrected, write_profile
from hetlb.sim.against import Corrections

#: Seconds expected of a part before it is corrected.
_LEAST_S = 30.0
_TIMEOUT_S = 10.0
_LINE = re.compile(r"hetlb_instance_model_(expected|seen)_seconds_total\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def from_proxy(args: argparse.Namespace, url: str) -> int:
    """Correct `--start` by the counters of `--server` on the admin listener at `url`, and write it."""
    for flag in ("start", "server"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a value with --from proxy:URL, got none")
    start = load_profile(args.start)
    seen = counters(page(url, args.api_key_env), args.server)
    if not seen:
        raise InputError(f"--server: expected an instance that has answered requests, got {args.server!r}")
    factors = {
        part: found["seen"] / found["expected"] if found.get("expected", 0.0) >= _LEAST_S else 1.0
        for part, found in seen.items()
    }
    left = [part for part, found in seen.items() if found.get("expected", 0.0) < _LEAST_S]
    if len(left) == len(seen):
        raise InputError(
            f"{url}: expected at least {_LEAST_S:.0f} s of some part on {args.server}, got "
            + ", ".join(f"{part} {found.get('expected', 0.0):.1f} s" for part, found in seen.items())
        )
    latency = Corrections(**factors).applied(start.latency)
    note = f"{start.name} corrected by what was seen: " + ", ".join(
        f"{part} x {factor:.3f}" for part, factor in factors.items()
    )
    profile = corrected(start, latency, Source(kind="proxy", name=args.server, note=note))
    if args.name:
        profile = msgspec.structs.replace(profile, name=args.name)
    write_profile(args.out, profile)
    print(note)
    for part in left:
        print(f"{part}: left as it is, under {_LEAST_S:.0f} s of it were seen")
    print(f"written to {args.out}")
    return 0


def page(url: str, token_env: str | None) -> str:
    """The metrics page of an admin listener. Raises `InputError`."""
    request = urllib.request.Request(url.rstrip("/") + "/metrics")
    if token_env is not None:
        request.add_header("authorization", f"Bearer {os.environ.get(token_env, '')}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            text: str = reply.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise InputError(f"--from: expected the admin listener of hetlb serve at {url}: {error}") from error
    return text


def counters(text: str, server: str) -> dict[str, dict[str, float]]:
    """Expected and seen seconds of an instance, by part."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        labels = dict(_LABEL.findall(match[2]))
        if labels.get("server") == server:
            found.setdefault(labels.get("part", ""), {})[match[1]] = float(match[3])
    return found
