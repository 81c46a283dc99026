"""`hetlb explain`: one decision in numbers, of a fleet file or of a running proxy.

Promise: the figures are the scheduler's own, unrounded in JSON; nothing is sent to an engine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hetlb.config import Fleet, load_fleet
from hetlb.core.policies import COMBINE_FORMS, POLICIES
from hetlb.core.predictor import OnlinePredictor
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Candidate, Health, Request
from hetlb.errors import ConfigError, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb explain`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FLEET.yaml", help="explain a request on this fleet")
    source.add_argument("--url", metavar="ADMIN", help="a running proxy's admin address: its last decisions")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="with --url: how many (default 10)")
    parser.add_argument("--policy", choices=tuple(POLICIES), help="default: the file's")
    parser.add_argument("--model", help="default: the first of the file")
    parser.add_argument(
        "--input", type=int, default=512, metavar="TOKENS", help="prompt tokens (default 512)"
    )
    parser.add_argument(
        "--output", type=float, default=128, metavar="TOKENS", help="predicted output tokens (default 128)"
    )
    parser.add_argument("--combine", choices=tuple(COMBINE_FORMS), help="form of the workload formula")
    parser.add_argument("--theta", type=float, help="constant of the workload formula")
    parser.add_argument(
        "--kv-used",
        action="append",
        default=[],
        metavar="NAME=FRACTION",
        help="promised fraction of an instance's KV cache (repeatable)",
    )
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="work already assigned to an instance (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Explain and print."""
    if args.url is not None:
        return _explain_running(args.url, args.last, args.json)
    candidates, chosen = explain_fleet(
        load_fleet(args.config),
        policy=args.policy,
        model=args.model,
        input_tokens=args.input,
        output_tokens=args.output,
        combine=args.combine,
        theta=args.theta,
        kv_used=_assignments("--kv-used", args.kv_used),
        load=_assignments("--load", args.load),
    )
    if args.json:
        document = {"candidates": [c.document() for c in candidates], "chosen": chosen}
        print(json.dumps(document, allow_nan=False))
    else:
        console = Console()
        console.print(_table([c.document() for c in candidates], chosen))
        if chosen is None:
            console.print("Nobody now: the request waits at the proxy until one of them can take it.")
    return 0


def explain_fleet(
    fleet: Fleet,
    *,
    policy: str | None,
    model: str | None,
    input_tokens: int,
    output_tokens: float,
    combine: str | None,
    theta: float | None,
    kv_used: dict[str, float],
    load: dict[str, float],
) -> tuple[list[Candidate], str | None]:
    """Candidates and choice for one request on a fleet that is up. Raises `InputError`."""
    if input_tokens < 1:
        raise InputError(f"--input: expected at least 1 token, got {input_tokens}")
    if not math.isfinite(output_tokens) or output_tokens < 0:
        raise InputError(f"--output: expected a number of tokens from 0, got {output_tokens}")
    if theta is not None and not (math.isfinite(theta) and theta > 0):
        raise InputError(f"--theta: expected a number above 0, got {theta}")
    params = fleet.policy_params
    params = replace(params, combine=combine or params.combine, theta=theta or params.theta)
    rng = random.Random(fleet.policy.seed)
    scheduler = Scheduler(
        fleet.instances,
        policy or fleet.policy.name,
        params=params,
        limits=fleet.queue_limits,
        predictor=OnlinePredictor(),
        rng=rng,
        initial_health=Health.UP,
    )
    names = {instance.name: instance for instance in scheduler.instances}
    for flag, state in (("--kv-used", kv_used), ("--load", load)):
        for name, value in state.items():
            if name not in names:
                raise ConfigError(f"{flag}: expected one of {', '.join(names)}, got {name!r}")
            if flag == "--load":
                names[name].assume(work_s=value)
            else:
                names[name].assume(kv_utilization=value)
    if model is None:
        model = fleet.instances[0].model
    elif model not in scheduler.models:
        raise ConfigError(f"--model: expected one of {', '.join(scheduler.models)}, got {model!r}")
    for instance in scheduler.instances:
        if instance.spec.model == model and not instance.profiled:
            print(f"{instance.name}: no profile; the default model of an unknown engine", file=sys.stderr)
    request = Request(
        id=0,
        model=model,
        prompt_tokens=input_tokens,
        longest_prompt_tokens=input_tokens,
        generates=output_tokens > 0,
        max_tokens=math.ceil(output_tokens) or None,
        prompt_exact=True,
    )
    return scheduler.explain(request, output_tokens, now=0.0)


def _assignments(flag: str, pairs: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not equals or not name or not math.isfinite(value) or value < 0:
            raise InputError(f"{flag}: expected NAME=NUMBER with a number from 0, got {pair!r}")
        values[name] = value
    return values


def _table(candidates: list[dict[str, Any]], chosen: str | None, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("instance", "batch", "processing s", "KV used", "workload s", "score", ""):
        table.add_column(column, justify="left" if column in ("instance", "") else "right")
    for c in candidates:
        mark = "chosen" if c["instance"] == chosen else c["reason"]
        cells = (c["ideal_batch"], c["processing_s"], c["kv_utilization"], c["workload"], c["score"])
        texts = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
        table.add_row(c["instance"], *texts, mark, style="bold" if c["instance"] == chosen else "")
    return table


def _explain_running(url: str, last: int, as_json: bool) -> int:
    target = f"{url.rstrip('/')}/v1/decisions?last={last}"
    if not target.startswith(("http://", "https://")) or last < 1:
        raise InputError(f"--url: expected http://HOST:PORT and --last at least 1, got {url!r} and {last}")
    try:
        with urllib.request.urlopen(target, timeout=10) as reply:
            document = json.load(reply)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise InputError(
            f"--url: expected the admin address of a running proxy, got {url!r}: {error}"
        ) from error
    if as_json:
        print(json.dumps(document))
        return 0
    console = Console()
    for decision in document["decisions"]:
        title = (
            f"request {decision['request_id']}: {decision['prompt_tokens']} prompt tokens, "
            f"{decision['predicted_output']:.4g} predicted output tokens, policy {decision['policy']}"
        )
        console.print(_table(decision["candidates"], decision["chosen"], title))
    if not document["decisions"]:
        console.print("no decisions yet")
    return 0
