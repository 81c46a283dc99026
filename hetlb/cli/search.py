"""`hetlb search`: layouts of the machines of a cluster that give the most throughput, or meet a target best.

Every degree is listed, what vLLM refuses or memory does not hold with the reason; the plan is re-verified
before it is printed. Exit status 2, with the table, where nothing runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hetlb.cli.search_plot import write_plot
from hetlb.config.cluster import Cluster, load_cluster
from hetlb.config.profile import Profile
from hetlb.core.latency import IterationRule
from hetlb.errors import ConfigError, InputError, ProfileError
from hetlb.plan.check import check
from hetlb.plan.fleet_file import FleetWriter
from hetlb.plan.layouts import (
    Evaluated,
    Fleet,
    FleetChoice,
    Instance,
    Layout,
    Part,
    Target,
    Worth,
    choose_together,
    counted,
    gpus_of,
    instances_of,
    layout_name,
)
from hetlb.plan.throughput import SloLimits
from hetlb.plan.tp_search import (
    Estimator,
    Machine,
    MachinePlan,
    Rows,
    degrees,
    search,
    static_estimate,
)
from hetlb.sim.engine import DEFAULT_MAX_NUM_SEQS, EngineLimits, EngineModel
from hetlb.sim.engine import Sequence as EngineSequence
from hetlb.workload.traces import read_trace

#: The most rows of a trace that are estimated on.
MAX_ROWS = 2000
#: The part of a trace's rows that must be within the cluster's limits.
_LEAST_PART = 0.5
_MOST_STAGES = 8
_SHOWN_LAYOUTS = 8
_FIRST_PORT = 8000
_BAR_WIDTH = 24
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb search`."""
    parser.add_argument("--config", type=Path, required=True, metavar="CLUSTER.yaml", help="cluster file")
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="T.csv",
        help="expected requests: arrival_s,input_tokens,output_tokens",
    )
    parser.add_argument(
        "--estimate",
        choices=("simulate", "static"),
        default="simulate",
        help="engine model (default), or the paper's algorithm 1 (order, not figures)",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=MAX_ROWS,
        metavar="N",
        help=f"rows to sample (default and most: {MAX_ROWS})",
    )
    parser.add_argument("--request-rate", metavar="R", help="requests/s of the whole fleet; ranks by goodput")
    parser.add_argument("--slo", metavar="TARGET", help="latency limits: ttft=500ms,tpot=50ms")
    parser.add_argument(
        "--pipeline-parallel",
        type=int,
        metavar="N",
        help="most stages of an instance (default: 1, more where GPUs would be left over)",
    )
    parser.add_argument(
        "--data-parallel", action="store_true", help="put equal instances of a machine behind one URL"
    )
    parser.add_argument(
        "--write-fleet", type=Path, metavar="FLEET.yaml", help="fleet file of the best layouts"
    )
    parser.add_argument("--plot", type=Path, metavar="P.png", help="picture of the ranking")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


@dataclass(frozen=True)
class Sample:
    """Rows of a trace that are estimated on; `within` of its `total` rows are within the cluster's limits."""

    rows: list[tuple[int, int]]
    within: int
    total: int


@dataclass(frozen=True)
class Found:
    """All that a search found."""

    cluster: Cluster
    sample: Sample
    estimate: str
    target: Target
    plans: list[MachinePlan]
    instances: dict[tuple[object, ...], dict[Part, Instance]]
    evaluated: dict[str, list[Evaluated]]
    choice: FleetChoice


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    if not 1 <= args.num_prompts <= MAX_ROWS:
        raise InputError(f"--num-prompts: expected 1 to {MAX_ROWS}, got {args.num_prompts}")
    if args.pipeline_parallel is not None and not 1 <= args.pipeline_parallel <= _MOST_STAGES:
        raise InputError(f"--pipeline-parallel: expected 1 to {_MOST_STAGES}, got {args.pipeline_parallel}")
    target = read_target(args.request_rate, args.slo)
    cluster = load_cluster(args.config)
    sample = sample_rows(cluster, args.trace, args.num_prompts)
    kinds = {machine.kind: machine for machine in cluster.machines}
    total = sum(len(degrees(machine)) for machine in kinds.values())
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("searching", total=total)
        estimate = make_estimator(cluster.profiles, sample.rows, args.estimate)
        plans = search(cluster.model, cluster.machines, estimate, lambda: progress.advance(task))
        check(cluster.model, cluster.machines, plans)
        progress.update(task, description="simulating layouts", total=None)
        found = lay_out(cluster, sample, target, plans, args.estimate, args.pipeline_parallel)
    document = result_document(found, args.data_parallel)
    if found.choice.layouts and args.write_fleet is not None:
        write_fleet(args.write_fleet, found, args.data_parallel)
    if args.plot is not None:
        write_plot(args.plot, plans, args.estimate)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print_result(found, document)
    if not found.choice.layouts:
        print(f"hetlb search: {args.config}: expected a layout that fits, got none", file=sys.stderr)
        return 2
    return 0


# --- input ----------------------------------------------------------------------------------------------


def read_target(rate: str | None, slo: str | None) -> Target:
    """`--request-rate` and `--slo`. Raises `InputError`."""
    if rate is None:
        if slo is not None:
            raise InputError("--slo: expected --request-rate with it: latencies depend on the rate")
        return Target(math.inf, SloLimits())
    try:
        requests_s = float(rate)
    except ValueError:
        requests_s = math.nan
    if not (math.isfinite(requests_s) and requests_s > 0):
        raise InputError(f"--request-rate: expected requests per second above 0, got {rate!r}")
    limits: dict[str, float] = {}
    for part in [] if slo is None else slo.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*[=:]\s*([0-9.]+)\s*(ms|s|)\s*", part)
        try:
            seconds = float(match[2]) * _SECONDS[match[3]] if match else 0.0
        except ValueError:
            seconds = 0.0
        if match is None or not seconds > 0 or match[1] in limits:
            raise InputError(f"--slo: expected ttft=500ms,tpot=50ms or one of them, got {slo!r}")
        limits[match[1]] = seconds
    return Target(requests_s, SloLimits(limits.get("ttft", math.inf), limits.get("tpot", math.inf)))


def sample_rows(cluster: Cluster, trace: Path, count: int) -> Sample:
    """Rows spread evenly over the trace, in its order, of those within the cluster's limits."""
    model = cluster.model
    rows = [(row.input_tokens, max(1, row.output_tokens)) for row in read_trace(trace)]
    within = [(i, o) for i, o in rows if i <= model.max_input_tokens and o <= model.max_output_tokens]
    if not within or len(within) < _LEAST_PART * len(rows):
        wanted, got = ("some row", "none") if not within else ("at least half of the rows", len(within))
        raise ConfigError(
            f"{cluster.path}: limits: expected {wanted} of {trace} within {model.max_input_tokens} input and "
            f"{model.max_output_tokens} output tokens, got {got} of {len(rows)}"
        )
    chosen = within
    if len(within) > count:
        chosen = [within[index * len(within) // count] for index in range(count)]
    return Sample(chosen, len(within), len(rows))


def make_estimator(profiles: Mapping[str, Profile], rows: Rows, kind: str) -> Estimator:
    """Tokens/s of a machine: its instances times one instance's on these rows."""
    known: dict[tuple[str, int], float] = {}

    def estimate(profile: str, kv_cache_tokens: int, instances: int) -> float:
        key = (profile, kv_cache_tokens)
        if key not in known:
            known[key] = estimate_one(profiles[profile], rows, kv_cache_tokens, kind)
        return instances * known[key]

    return estimate


def estimate_one(profile: Profile, rows: Rows, kv_cache_tokens: int, kind: str) -> float:
    """Tokens/s of one instance."""
    if kind == "simulate":
        return simulated_estimate(profile, rows, kv_cache_tokens)
    seqs = profile.engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    return static_estimate(profile.latency, rows, kv_cache_tokens, seqs)


def simulated_estimate(profile: Profile, rows: Rows, kv_cache_tokens: int) -> float:
    """Tokens/s (input and output) of one engine of this profile with all rows waiting at the start."""
    capacity = profile.capacity
    try:
        limits = EngineLimits.from_capacity(
            type(capacity)(
                kv_cache_tokens=kv_cache_tokens,
                block_size=capacity.block_size,
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
            )
        )
    except ValueError as error:
        raise ProfileError(f"{profile.name}: {error}") from error
    engine = EngineModel(profile.latency, limits, IterationRule.TOKEN)
    tokens, seconds = 0, 0.0
    for input_tokens, output_tokens in rows:
        if engine.fits(input_tokens, output_tokens):
            engine.submit(EngineSequence(input_tokens, output_tokens))
            tokens += input_tokens + output_tokens
    while (run := engine.begin_run()) is not None:
        seconds += run.duration_s
        engine.end_iteration()
    return tokens / seconds if seconds > 0 else 0.0


# --- layouts --------------------------------------------------------------------------------------------


def lay_out(
    cluster: Cluster,
    sample: Sample,
    target: Target,
    plans: list[MachinePlan],
    estimate: str,
    most_stages: int | None,
) -> Found:
    """Layouts of every machine by itself, then of all of them together."""
    known: dict[tuple[str, int], float] = {}

    def throughput(profile: Profile, tokens: int) -> float:
        key = (profile.name, tokens)
        if key not in known:
            known[key] = estimate_one(profile, sample.rows, tokens, estimate)
        return known[key]

    kinds = {machine.kind: machine for machine in cluster.machines}
    instances = {
        kind: _instances(cluster, machine, throughput, most_stages) for kind, machine in kinds.items()
    }
    fleet = Fleet(cluster.machines, instances, sample.rows, target)
    # Each machine gets its share of the rate by what it does at most.
    most = {kind: _most(machine, instances[kind]) for kind, machine in kinds.items()}
    total = sum(most[machine.kind] for machine in cluster.machines)
    by_kind = {
        kind: fleet.evaluate(machine, target.request_rate * most[kind] / total if total else None)
        for kind, machine in kinds.items()
    }
    evaluated = {machine.name: by_kind[machine.kind] for machine in cluster.machines}
    if estimate == "static" and math.isinf(target.request_rate):
        # The estimate needs constants alone; a simulation needs all that an engine has.
        layouts = {name: each[0].layout for name, each in evaluated.items() if each}
        choice = FleetChoice(layouts, None, layouts, None, 0)
    else:
        choice = choose_together(fleet, evaluated)
    return Found(cluster, sample, estimate, target, plans, instances, evaluated, choice)


def _instances(
    cluster: Cluster,
    machine: Machine,
    throughput: Callable[[Profile, int], float],
    most_stages: int | None,
) -> dict[Part, Instance]:
    """Instances that run on a machine; pipelines unasked where without them GPUs are left over."""
    found = instances_of(cluster.model, machine, cluster.profiles, throughput, most_stages or 1)
    if most_stages is None:
        sizes = {part.gpus for part in found}
        reached = {0}
        for used in range(1, machine.gpus + 1):
            if any(used - size in reached for size in sizes):
                reached.add(used)
        if machine.gpus not in reached:
            stages = min(_MOST_STAGES, machine.gpus)
            found = instances_of(cluster.model, machine, cluster.profiles, throughput, stages)
    return found


def _most(machine: Machine, instances: Mapping[Part, Instance]) -> float:
    """Tokens/s of a machine at best."""
    per_gpu = (each.throughput_tok_s / part.gpus for part, each in instances.items())
    return machine.gpus * max(per_gpu, default=0.0)


# --- results --------------------------------------------------------------------------------------------


def result_document(found: Found, data_parallel: bool) -> dict[str, Any]:
    """The figures of the contract, and those of layouts."""
    choice, target = found.choice, found.target
    running = {machine.name: found.instances[machine.kind] for machine in found.cluster.machines}
    return {
        "machines": [
            {
                "name": plan.machine.name,
                "ranking": [
                    {
                        "tensor_parallel_size": option.tensor_parallel_size,
                        "instances": option.instances,
                        "throughput_tok_s": option.throughput_tok_s,
                        "kv_cache_tokens": option.kv_cache_tokens,
                        "feasible": option.feasible,
                        "reason": option.reason,
                        "missing_bytes": option.missing_bytes,
                    }
                    for option in plan.ranking
                ],
                "layouts": [_layout_document(each) for each in found.evaluated[plan.machine.name]],
            }
            for plan in found.plans
        ],
        "best": {plan.machine.name: plan.best.tensor_parallel_size for plan in found.plans if plan.best},
        "throughput_tok_s": sum(
            running[name][part].throughput_tok_s for name, layout in choice.layouts.items() for part in layout
        ),
        "fleet": {
            "layouts": {name: _parts_document(layout) for name, layout in choice.layouts.items()},
            "simulated": _worth_document(choice.worth),
            "one_by_one": {
                "layouts": {name: _parts_document(layout) for name, layout in choice.one_by_one.items()},
                "simulated": _worth_document(choice.one_by_one_worth),
            },
        },
        "commands": commands(found, data_parallel),
        "estimate": found.estimate,
        "requests": len(found.sample.rows),
        "rows": {"total": found.sample.total, "within_limits": found.sample.within},
        "request_rate": None if math.isinf(target.request_rate) else target.request_rate,
        "degrees_checked": found.cluster.model.shape is not None,
    }


def _parts_document(layout: Layout) -> list[dict[str, int]]:
    return [
        {
            "tensor_parallel_size": part.tensor_parallel_size,
            "pipeline_parallel_size": part.pipeline_parallel_size,
            "count": count,
        }
        for part, count in counted(layout)
    ]


def _layout_document(each: Evaluated) -> dict[str, Any]:
    cost = each.cost_per_hour
    return {
        "instances": _parts_document(each.layout),
        "gpus": gpus_of(each.layout),
        "throughput_tok_s": each.throughput_tok_s,
        "cost_per_hour": cost,
        "cost_per_million_tokens": None if cost is None else _per_million(each),
        "simulated": _worth_document(each.worth),
    }


def _per_million(each: Evaluated) -> float:
    """Price of a million tokens: at the rate served where there is one, else with the layout full."""
    assert each.cost_per_hour is not None
    tokens_s = each.throughput_tok_s if each.worth is None else each.worth.total_token_throughput
    return each.cost_per_hour / (3600.0 * tokens_s) * 1e6 if tokens_s > 0 else 0.0


def _worth_document(worth: Worth | None) -> dict[str, Any] | None:
    if worth is None:
        return None
    at_rate = worth.goodput_req_s > 0
    return {
        "total_token_throughput": worth.total_token_throughput,
        "goodput_req_s": worth.goodput_req_s if at_rate else None,
        "slo_attainment": worth.slo_attainment,
        "requests": worth.requests,
    }


@dataclass(frozen=True)
class _Server:
    """One `vllm serve`: `replicas` data-parallel engines of a part."""

    machine: Machine
    part: Part
    replicas: int
    first_gpu: int
    port: int

    @property
    def name(self) -> str:
        return f"{self.machine.name}-{self.part.name}-{self.port - _FIRST_PORT}"


def servers(found: Found, data_parallel: bool) -> list[_Server]:
    """Servers of the chosen layouts, machine by machine."""
    result = []
    for machine in found.cluster.machines:
        gpu, port = 0, _FIRST_PORT
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            for replicas in [count] if data_parallel else [1] * count:
                result.append(_Server(machine, part, replicas, gpu, port))
                gpu += replicas * part.gpus
                port += 1
    return result


def commands(found: Found, data_parallel: bool = False) -> list[str]:
    """One `vllm serve` per server of the chosen layouts."""
    model, lines = found.cluster.model, []
    for server in servers(found, data_parallel):
        machine, part = server.machine, server.part
        profile = found.cluster.profiles[dict(machine.profiles)[part.tensor_parallel_size]]
        gpus = range(server.first_gpu, server.first_gpu + server.replicas * part.gpus)
        words = ["vllm", "serve", model.name, "--tensor-parallel-size", str(part.tensor_parallel_size)]
        if part.pipeline_parallel_size > 1:
            words += ["--pipeline-parallel-size", str(part.pipeline_parallel_size)]
        if server.replicas > 1:
            words += ["--data-parallel-size", str(server.replicas)]
        words += ["--gpu-memory-utilization", f"{machine.gpu_memory_utilization:g}"]
        words += ["--max-model-len", str(model.max_input_tokens + model.max_output_tokens)]
        seqs = profile.engine.max_num_seqs
        words += ["--max-num-seqs", str(seqs)] if seqs is not None else []
        words += ["--port", str(server.port)]
        visible = ",".join(map(str, gpus))
        lines.append(f"CUDA_VISIBLE_DEVICES={visible} {shlex.join(words)}  # on {machine.name}")
    return lines


def write_fleet(path: Path, found: Found, data_parallel: bool) -> None:
    """The chosen layouts as a fleet file: machine names are taken as host names. Raises `InputError`."""
    writer = FleetWriter(path)
    instances = [
        {
            "name": server.name,
            "url": f"http://{server.machine.name}:{server.port}",
            "profile": _profile_reference(found, server, writer),
        }
        for server in servers(found, data_parallel)
    ]
    heading = f"Written by `hetlb search` from {found.cluster.path.name}: machine names stand for hosts."
    writer.write(heading, [{"name": found.cluster.model.name, "instances": instances}])


def _profile_reference(found: Found, server: _Server, writer: FleetWriter) -> str:
    """The profile of a server as the fleet file names it; one of a pipeline is written, being composed."""
    part = server.part
    if part.pipeline_parallel_size == 1:
        written = dict(server.machine.profiles)[part.tensor_parallel_size]
        return writer.reference(found.cluster.path.parent / written)
    name = f"{server.machine.name}-{part.name}"
    profile = found.instances[server.machine.kind][part].profile
    return writer.add_profile(name, msgspec.structs.replace(profile, name=name))


# --- for people -----------------------------------------------------------------------------------------


def print_result(found: Found, document: Mapping[str, Any]) -> None:
    """Tables and commands."""
    console = Console(highlight=False)
    console.print(_table(found))
    for plan in found.plans:
        machine, evaluated = plan.machine, found.evaluated[plan.machine.name]
        chosen = found.choice.layouts.get(machine.name)
        uniform = (Part(plan.best.tensor_parallel_size),) * plan.best.instances if plan.best else None
        first = next(each for each, _ in _kinds(found.plans) if each.kind == machine.kind)
        if chosen is not None and machine is first and (evaluated[0].worth or chosen != uniform):
            console.print(_layouts_table(found, machine, dict(_kinds(found.plans))[machine]))
    if any(part.pipeline_parallel_size > 1 for each in found.choice.layouts.values() for part in each):
        print("pipelines are composed from profiles of tensor parallelism: estimates, not measurements")
    sample = found.sample
    print(
        f"estimated on {len(sample.rows)} of {sample.total} rows of the trace; "
        f"{sample.total - sample.within} exceed the cluster's limits"
    )
    if found.cluster.model.shape is None:
        print("degrees were not checked against vLLM's rules: give model.config, the model's config.json")
    if found.choice.worth is not None:
        print(_simulated_line(found))
    for command in document["commands"]:
        print(command)


def _simulated_line(found: Found) -> str:
    choice, worth = found.choice, found.choice.worth
    assert worth is not None
    words = f"the fleet under the router, simulated: {worth.total_token_throughput:,.0f} tokens/s"
    if worth.goodput_req_s > 0:
        words += f", {worth.slo_attainment:.1%} of {found.target.request_rate:g} requests/s meet the targets"
    if choice.one_by_one_worth is not None and choice.layouts != choice.one_by_one:
        before = choice.one_by_one_worth
        words += f" (each machine by itself: {before.total_token_throughput:,.0f} tokens/s"
        words += f", {before.slo_attainment:.1%})" if worth.goodput_req_s > 0 else ")"
    return words


def _kinds(plans: Sequence[MachinePlan]) -> list[tuple[Machine, int]]:
    """The first machine of every kind, and how many there are."""
    groups: dict[tuple[object, ...], list[Machine]] = {}
    for plan in plans:
        groups.setdefault(plan.machine.kind, []).append(plan.machine)
    return [(alike[0], len(alike)) for alike in groups.values()]


def _named(machine: Machine, alike: int) -> str:
    return machine.name if alike == 1 else f"{machine.name} and {alike - 1} alike"


def _table(found: Found) -> Table:
    title = "tensor-parallel degrees; tokens/s: prompt and output of the whole machine while requests wait, "
    table = Table(title=f"{title}{found.estimate} estimate", title_justify="left")
    for column in ("machine", "TP", "instances", "KV tokens", "tokens/s", ""):
        table.add_column(column, justify="left" if column in ("machine", "") else "right")
    plans = {plan.machine.name: plan for plan in found.plans}
    for machine, alike in _kinds(found.plans):
        plan = plans[machine.name]
        most = max((option.throughput_tok_s for option in plan.ranking), default=0.0)
        for index, option in enumerate(plan.ranking):
            bar = "█" * max(1, round(_BAR_WIDTH * option.throughput_tok_s / most)) if option.feasible else ""
            table.add_row(
                _named(machine, alike) if index == 0 else "",
                str(option.tensor_parallel_size),
                str(option.instances),
                str(option.kv_cache_tokens),
                f"{option.throughput_tok_s:.1f}" if option.feasible else "-",
                bar or option.reason,
                style="bold" if option is plan.best else "" if option.feasible else "dim",
            )
        table.add_section()
    return table


def _layouts_table(found: Found, machine: Machine, alike: int) -> Table:
    evaluated = found.evaluated[machine.name]
    at_rate = evaluated[0].worth is not None
    title = f"layouts of {_named(machine, alike)}"
    title += ", each at its share of the rate" if at_rate and len(found.evaluated) > 1 else ""
    table = Table(title=title, title_justify="left")
    table.add_column("layout")
    columns = ["GPUs", "tokens/s"]
    columns += ["goodput, requests/s", "met"] if at_rate else []
    columns += ["per hour", "per 1M tokens"] if evaluated[0].cost_per_hour is not None else []
    for column in columns:
        table.add_column(column, justify="right")
    for each in evaluated[:_SHOWN_LAYOUTS]:
        cells = [layout_name(each.layout), str(gpus_of(each.layout)), f"{each.throughput_tok_s:,.0f}"]
        if each.worth is not None:
            cells += [f"{each.worth.goodput_req_s:.3g}", f"{each.worth.slo_attainment:.1%}"]
        if each.cost_per_hour is not None:
            cells += [f"{each.cost_per_hour:.2f}", f"{_per_million(each):.3f}"]
        chosen = each.layout == found.choice.layouts.get(machine.name)
        table.add_row(*cells, style="bold" if chosen else "")
    return table
