"""`hetlb explain`: the numbers of a decision, on a fleet file or of a running proxy."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hetlb.balancer.config.fleet import Fleet, load_fleet
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import best
from hetlb.balancer.core.policies.baselines import COMBINE_FORMS, paper_terms
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.policies.sight import foreseen
from hetlb.balancer.core.ready import least_tokens, with_excluded
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Candidate, Health, Request
from hetlb.cli.adminclient import AdminClient, add_admin_argument
from hetlb.cli.flags import COUNT, MOST, add_json, declare, print_document, real, whole
from hetlb.cli.serving_options import OPTIONS
from hetlb.errors import ConfigError, InputError, visible
from hetlb.inputs import number_of
from hetlb.tools.tables import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    declare(source)("--config", "fleet file: explain a request on it", "FLEET.yaml", Path)
    add_admin_argument(source)
    add = declare(parser)
    add("--request", "one request of a running proxy: number or x-request-id", "ID")
    add("--last", "decisions of a running proxy, up to 1000 (default 10)", "N", whole(1, 1000))
    add("--policy", "scheduling policy (default: the file's)", "NAME", choices=POLICIES)
    add("--model", "model of the file (default: its first)")
    add("--input", "prompt tokens (default 512)", "TOKENS", COUNT, 512)
    output = real("a number of tokens from 0", lambda value: 0 <= value <= MOST)
    add("--output", "predicted output tokens (default 128)", "TOKENS", output, 128.0)
    add("--combine", "form of the workload formula", choices=tuple(COMBINE_FORMS))
    used = "reserved fraction of an instance's KV cache (repeatable)"
    add("--kv-used", used, "NAME=FRACTION", default=[], action="append")
    work = "work already assigned to an instance (repeatable)"
    add("--load", work, "NAME=SECONDS", default=[], action="append")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        if args.admin is None and args.last is None and args.request is None:
            raise InputError("expected --config FLEET.yaml, or --admin URL and --last N for a running proxy")
        return _explain_running(10 if args.last is None else args.last, args)
    for flag, value in (("--last", args.last), ("--request", args.request)):
        if value is not None:
            raise InputError(f"{flag}: expected it with --admin, a fleet file has no last decisions")
    fleet = load_fleet(args.config)
    policy = args.policy or fleet.file.policy.name
    found, chosen = _explain_made_up(fleet, policy, args)
    candidates = [each.document() for each in found]
    title = f"{args.input} prompt tokens, {args.output:g} output tokens predicted; policy {policy}"
    waits = "None now: the request waits at the proxy until one of them can take it."

    def show() -> None:
        Console().print(_candidates(title, candidates, chosen), *([waits] if chosen is None else []))

    return print_document(args, {"candidates": candidates, "chosen": chosen}, show)


def _explain_made_up(
    fleet: Fleet, policy: str, args: argparse.Namespace
) -> tuple[list[Candidate], str | None]:
    """Return candidates and choice for a request by flags, on an idle fleet. Raises `InputError`."""
    if not fleet.instances:
        raise ConfigError(f"{fleet.path}: models: expected at least one instance, got none")
    params = fleet.policy_params
    params = replace(params, combine=args.combine or params.combine)
    scheduler = Scheduler(
        SchedulerSetup(
            fleet.instances,
            policy,
            params,
            fleet.queue_limits,
            seed=fleet.file.policy.seed,
            initial_health=Health.UP,
        ),
        splitting=OPTIONS.splitting,
    )
    names = {instance.name: instance for instance in scheduler.instances}
    for name, value in _assignments("--kv-used", args.kv_used, names):
        _use_kv(names[name], value)
    for name, value in _assignments("--load", args.load, names):
        names[name].work_ns = round(value * 1e9)
    model = args.model or fleet.instances[0].model
    if model not in scheduler.fleet.ready:
        raise ConfigError(f"--model: expected one of {', '.join(scheduler.fleet.ready)}, got {model!r}")
    for instance in scheduler.instances:
        if instance.spec.model == model and not instance.profiled:
            print(
                visible(f"{instance.name}: no profile; the default model of an unknown engine"),
                file=sys.stderr,
            )
    request = Request(
        id=0,
        model=model,
        prompt_tokens=args.input,
        longest_prompt_tokens=args.input,
        generates=args.output > 0,
        max_tokens=math.ceil(args.output) or None,
        prompt_exact=True,
    )
    longest = scheduler.fleet.ready[model].longest_prompt
    if least_tokens(request) > longest:
        raise InputError(
            f"--input: expected at most {longest - request.generates:.0f} tokens, the most that an instance "
            f"of {model} holds, got {args.input}"
        )
    return explained(scheduler, request, args.output, now=0.0)


def _use_kv(instance: Instance, share: float) -> None:
    """Book a share of an instance's KV cache without a lease."""
    tokens = round(share * instance.kv_cache_tokens)
    instance.keep(tokens)
    instance.promised_tokens = instance.prompt_tokens = tokens


def _assignments(flag: str, pairs: list[str], names: Collection[str]) -> Iterator[tuple[str, float]]:
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        value = number_of(text)
        if not name or not 0 <= value <= MOST:
            raise InputError(f"{flag}: expected NAME=NUMBER with a number from 0, got {pair!r:.60}")
        if name not in names:
            raise ConfigError(f"{flag}: expected one of {', '.join(names)}, got {name!r}")
        yield name, value


def _explain_running(last: int, args: argparse.Namespace) -> int:
    query = f"last={last}" if args.request is None else f"request_id={quote(args.request, safe='')}"
    client = AdminClient(args.admin)
    return _show(client.document(f"/v1/decisions?{query}", "decisions", "clock_s"), args)


def _show(document: dict[str, Any], args: argparse.Namespace) -> int:
    shown = Group(*(_decision(each, document["clock_s"]) for each in document["decisions"]))
    none = "no decisions yet" if args.request is None else "no decision about it is kept"
    return print_document(args, document, lambda: Console().print(shown if document["decisions"] else none))


def _decision(decision: dict[str, Any], clock_s: float) -> Group:
    """Render one decision: the request, and per instance its terms and why it was chosen or not."""
    sequences, tokens = decision["sequences"], decision["output_tokens"]
    came = f"{tokens / sequences:.0f} generated" if decision["ended"] else f"{tokens / sequences:.0f} so far"
    title = (
        f"request {decision['request_id']}, {clock_s - decision['dispatched_at_s']:.1f} s ago: "
        f"{decision['prompt_tokens_per_sequence']} prompt tokens"
        f"{f' in each of {sequences} sequences' if sequences > 1 else ''}, "
        f"{decision['predicted_output']:.0f} output tokens predicted, {came}; policy {decision['policy']}"
    )
    return _candidates(title, decision["candidates"], decision["chosen"])


def _candidates(title: str, candidates: list[dict[str, Any]], chosen: str | None) -> Group:
    """Return the table of candidates: weighted terms of the score, the forecast, why each was chosen or not.

    Terms of 0 everywhere are omitted; for policies without terms the paper's are shown.
    """
    terms = [each.get("terms") or {} for each in candidates]
    weights: dict[str, float] = next((each["weights"] for each in candidates if each.get("weights")), {})
    forecasts = [each.get("forecast") or {} for each in candidates]
    columns = [
        (_head(name, weights.get(name)), [each.get(name) for each in terms])
        for name in dict.fromkeys(chain(*terms))
        if any(each.get(name) for each in terms)
    ]
    if not columns:
        columns = [
            ("batch", [each["ideal_batch"] for each in candidates]),
            ("T\ns", [each["processing_s"] for each in candidates]),
            ("work\ns", [each["workload"] for each in candidates]),
        ]
    columns += [
        ("KV\nused", [each["kv_utilization"] for each in candidates]),
        ("end\ns", [each.get("end_s") for each in forecasts]),
        ("90 %\ns", [each.get("end_s_90") for each in forecasts]),
    ]
    columns = [(head, cells) for head, cells in columns if any(cell is not None for cell in cells)]
    best = next((each for each in candidates if each["instance"] == chosen), None)
    # Sentences are too long for a cell: they go below the table.
    reasons = [_why(each, best).partition(": ") for each in candidates]
    sentences = [
        f"{each['instance']} {why}: {rest}"
        for each, (why, _, rest) in zip(candidates, reasons, strict=True)
        if rest
    ]
    table = Table(box=None, pad_edge=False)
    for head in ("instance", "score", *(head for head, _ in columns), "why"):
        left = head in ("instance", "why")
        table.add_column(head, justify="left" if left else "right", vertical="bottom", no_wrap=True)
    for index, each in enumerate(candidates):
        figures = (_figure(cells[index]) for _, cells in columns)
        style = "bold" if each is best else ""
        table.add_row(each["instance"], _figure(each["score"]), *figures, reasons[index][0], style=style)
    _narrow(table)
    return Group(Text(title), table, *map(Text, sentences), Text())


def _narrow(table: Table) -> None:
    """Remove columns before the last, the nearest to it first, until the rest fits the terminal uncut."""
    console = Console()
    while Measurement.get(console, console.options.update(max_width=1000), table).minimum > console.width:
        if len(table.columns) == 2:
            return
        del table.columns[-2]


def _head(name: str, weight: float | None) -> str:
    """Return the column header of a term: weight, name, unit."""
    words = name.removesuffix("_s").replace("_", "\n") + "\ns" * name.endswith("_s")
    return words if weight is None else f"{weight:.3g} x\n{words}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _why(candidate: dict[str, Any], chosen: dict[str, Any] | None) -> str:
    """Return a short reason for choosing a candidate or not, for a column of the table."""
    if candidate is chosen:
        return "chosen"
    if chosen is None or not candidate["eligible"] or candidate["score"] is None or chosen["score"] is None:
        return candidate["reason"] or "not able"
    more = candidate["score"] - chosen["score"]
    if more == 0:
        return "equal, later"
    return f"{100 * more / chosen['score']:+.0f} %" if chosen["score"] > 0 else f"{more:+.3g}"


def explained(
    scheduler: Scheduler, request: Request, predicted: float, now: float
) -> tuple[list[Candidate], str | None]:
    """Return every instance of the request's model with all its terms, in file order, and the chosen one.

    Terms that the policy does not use are filled with the paper's. Policies that draw draw here too.
    """
    placement, ready = scheduler.placement, scheduler.fleet.ready.get(request.model)
    if ready is None:
        return [], None
    choices = placement.able(request, ready, now)
    ctx = placement.context(request, predicted, scheduler.queue.waiting(request.model), now)
    ctx.restraints = choices.restraints
    ctx.burst = 1.0 if ready.idle else ctx.burst + 1.0
    scored = placement.policy.score(ctx, choices.instances) if choices.instances else []
    candidates = with_excluded(scored, ready.instances, choices.excluded)
    for instance, candidate in zip(ready.instances, candidates, strict=True):
        if candidate.forecast is None:
            sight = foreseen(ctx, instance)
            candidate.forecast = instance.errors.corrected(sight.first_token_s, sight.step_s, sight.end_s)
        if candidate.ideal_batch is None:
            terms = paper_terms(instance, request, predicted, placement.policy.params)
            candidate.ideal_batch, candidate.processing_s = terms.ideal_batch, terms.processing_s
            candidate.kv_utilization, candidate.workload = terms.kv_utilization, terms.workload
    chosen = best(candidates)
    return candidates, None if chosen is None else candidates[chosen].instance
