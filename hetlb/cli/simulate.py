"""`hetlb simulate`: a fleet in virtual time under one or several policies; or the replay of an event log.

Promise: the scheduler is the one the proxy runs; the same arguments give the same bytes. A replay exits
with 0 only if every decision is the recorded one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from hetlb.config import Fleet, load_fleet
from hetlb.core.admission import QueueLimits
from hetlb.core.arrivals import PlannedRequest, make_plan
from hetlb.core.eventlog import Replay, SchedulerSetup
from hetlb.core.latency import IterationRule
from hetlb.core.policies import POLICIES
from hetlb.core.predictor import PREDICTORS, LengthDistribution, make_predictor
from hetlb.core.types import Health
from hetlb.errors import ConfigError, InputError, ProfileError, TraceError
from hetlb.loadtest.report import runs_table
from hetlb.sim.engine import EngineLimits
from hetlb.sim.fleet import EngineSpec, FleetSimulation
from hetlb.sim.reference import References
from hetlb.traces import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb simulate`."""
    parser.add_argument("--config", type=Path, metavar="FLEET.yaml", help="the fleet; needs profiles")
    parser.add_argument("--trace", type=Path, metavar="T.csv", help="arrival_s,input_tokens,output_tokens")
    parser.add_argument(
        "--request-rate", default="inf", metavar="R", help="requests/s, inf (all at once) or trace"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="gamma shape of the gaps; 1 is Poisson")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="default: every row of the trace")
    parser.add_argument("--policy", metavar="A,B,C", help="one run each (default: the file's)")
    parser.add_argument("--predictor", choices=PREDICTORS, default="empirical")
    parser.add_argument("--iteration", choices=tuple(IterationRule), default=IterationRule.TOKEN)
    parser.add_argument("--queue-limit", type=int, metavar="N", help="requests that may wait (default: any)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="which model of the file (default: its first)")
    parser.add_argument("--event-log", type=Path, metavar="FILE", help="replay what a proxy recorded")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Simulate or replay, and print."""
    if args.event_log is not None:
        if args.config is not None or args.trace is not None:
            raise InputError("--event-log: expected alone; the log holds the fleet and the requests")
        return replay(args.event_log, args.json)
    if args.config is None or args.trace is None:
        raise InputError("expected --config and --trace, or --event-log")
    fleet = load_fleet(args.config)
    policies = args.policy.split(",") if args.policy else [fleet.policy.name]
    for policy in policies:
        if policy not in POLICIES:
            raise InputError(f"--policy: expected names out of {', '.join(POLICIES)}, got {policy!r}")
    runs = simulate(
        fleet,
        plan=plan_of(args),
        policies=policies,
        predictor=args.predictor,
        lengths=LengthDistribution(row.output_tokens for row in read_trace(args.trace)),
        rule=IterationRule(args.iteration),
        seed=args.seed,
        model=args.model,
        request_rate=args.request_rate,
        queue_limit=args.queue_limit,
    )
    if args.json:
        print(json.dumps({"runs": runs}, allow_nan=False))
    else:
        console = Console()
        console.print(runs_table(runs, reference_tok_s=runs[0]["bound"]["total_token_throughput"]))
    return 0


def plan_of(args: argparse.Namespace) -> list[PlannedRequest]:
    """The requests and when they are due. Raises `InputError`."""
    rate: float | str = args.request_rate
    if rate != "trace":
        try:
            rate = float(rate)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise InputError(
                f"--request-rate: expected requests/s above 0, inf or trace, got {args.request_rate!r}"
            )
    if args.num_prompts is not None and args.num_prompts < 1:
        raise InputError(f"--num-prompts: expected at least 1, got {args.num_prompts}")
    if not args.burstiness > 0:
        raise InputError(f"--burstiness: expected a number above 0, got {args.burstiness}")
    if args.queue_limit is not None and args.queue_limit < 0:
        raise InputError(f"--queue-limit: expected a number from 0, got {args.queue_limit}")
    rows = read_trace(args.trace)
    try:
        return make_plan(rows, args.num_prompts, rate, random.Random(args.seed), args.burstiness)
    except ValueError as error:
        raise TraceError(
            f"{args.trace}: arrival_s: expected a time in every row to replay: {error}"
        ) from error


def simulate(
    fleet: Fleet,
    *,
    plan: list[PlannedRequest],
    policies: list[str],
    predictor: str,
    lengths: LengthDistribution,
    rule: IterationRule,
    seed: int,
    model: str | None,
    request_rate: str,
    queue_limit: int | None,
) -> list[dict[str, Any]]:
    """One summary per policy. Raises `InputError` where the fleet lacks what a simulation needs."""
    models = list(dict.fromkeys(spec.model for spec in fleet.instances))
    name = models[0] if model is None else model
    if name not in models:
        raise ConfigError(f"--model: expected one of {', '.join(models)}, got {name!r}")
    setup = SchedulerSetup(
        specs=tuple(spec for spec in fleet.instances if spec.model == name),
        policy=policies[0],
        params=fleet.policy_params,
        limits=QueueLimits(max_requests=queue_limit, max_bytes=None, timeout_s=None),
        predictor=predictor,
        seed=seed,
        lengths=lengths,
        initial_health=Health.UP,
    )
    engines = {spec.name: engine_spec(fleet, spec.name) for spec in setup.specs}
    references = References(setup, engines, plan, model=name, rule=rule)
    bound = references.bound()
    split = None
    if request_rate == "inf" or (request_rate != "trace" and math.isinf(float(request_rate))):
        oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
        split = references.split(
            make_predictor(predictor, rng=random.Random(seed), lengths=lengths, oracle=oracle)
        )
    runs = []
    quiet = not sys.stderr.isatty()
    for policy in track(policies, "simulating", console=Console(stderr=True), disable=quiet, transient=True):
        simulation = FleetSimulation(replace(setup, policy=policy), engines, plan, model=name, rule=rule)
        result = simulation.run()
        runs.append(
            {
                "policy": policy,
                "seed": seed,
                **result.summary(),
                "request_rate": request_rate,
                "predictor": predictor,
                "iteration": rule.value,
                "bound": bound,
                "split": split,
            }
        )
    return runs


def engine_spec(fleet: Fleet, name: str) -> EngineSpec:
    """The simulated engine of an instance. Raises `InputError` naming what its profile lacks."""
    profile = fleet.profiles.get(name)
    if profile is None:
        raise ConfigError(f"{fleet.path}: {name}: profile: expected a latency profile to simulate, got none")
    try:
        return EngineSpec(profile.latency, EngineLimits.from_capacity(profile.capacity))
    except ValueError as error:
        raise ProfileError(f"{fleet.path}: {name}: {profile.name}: {error}") from error


def replay(path: Path, as_json: bool) -> int:
    """Feed a recorded log to the scheduler again: 0 if every decision is the recorded one, else 1."""
    facts = decisions = 0
    differing: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
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
