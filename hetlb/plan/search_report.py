"""Layouts of a cluster as a document (`--json`) and for a person: degrees, layouts, the fleet, commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from hetlb.config.plan_tables import Machine
from hetlb.plan.cluster_layouts import LayoutsFound
from hetlb.plan.common.servers import VllmServer
from hetlb.plan.layouts import Evaluated, Layout, Part, Worth, counted, gpus_of, layout_name
from hetlb.plan.tp_search import MachinePlan
from hetlb.tables import table

_SHOWN_LAYOUTS = 8
_BAR_WIDTH = 24


def result_document(found: LayoutsFound, servers: list[VllmServer]) -> dict[str, Any]:
    """The figures of the contract, and those of layouts."""
    choice, target = found.choice, found.target
    running = {machine.name: found.instances[machine.kind] for machine in found.cluster.machines}
    return {
        "machines": [
            {
                "name": plan.machine.name,
                "ranking": [asdict(option) for option in plan.ranking],
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
        "commands": [server.command() for server in servers],
        "estimate": found.estimate,
        "requests": len(found.sample.rows),
        "rows": {"total": found.sample.total, "within_limits": found.sample.within},
        "request_rate": None if math.isinf(target.request_rate) else target.request_rate,
        "degrees_checked": found.cluster.model.shape is not None,
    }


def _parts_document(layout: Layout) -> list[dict[str, int]]:
    return [{**asdict(part), "count": count} for part, count in counted(layout)]


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
    return asdict(worth) | {"goodput_req_s": worth.goodput_req_s or None}


def print_result(found: LayoutsFound, document: Mapping[str, Any]) -> None:
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


def _simulated_line(found: LayoutsFound) -> str:
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


def _table(found: LayoutsFound) -> Table:
    rows = []
    plans = {plan.machine.name: plan for plan in found.plans}
    for machine, alike in _kinds(found.plans):
        plan = plans[machine.name]
        most = max((option.throughput_tok_s for option in plan.ranking), default=0.0)
        for index, option in enumerate(plan.ranking):
            cells = [
                _named(machine, alike) if index == 0 else "",
                str(option.tensor_parallel_size),
                str(option.instances),
                str(option.kv_cache_tokens),
            ]
            if option.feasible:
                bar = "█" * max(1, round(_BAR_WIDTH * option.throughput_tok_s / most))
                cells += [f"{option.throughput_tok_s:.1f}", bar]
            else:
                cells += ["-", option.reason]
            rows.append(_bold(cells) if option is plan.best else cells)
    title = "tensor-parallel degrees; tokens/s: prompt and output of the whole machine while requests wait, "
    columns = ("machine", ">TP", ">instances", ">KV tokens", ">tokens/s", "")
    return table(f"{title}{found.estimate} estimate", columns, rows)


def _layouts_table(found: LayoutsFound, machine: Machine, alike: int) -> Table:
    evaluated = found.evaluated[machine.name]
    at_rate, priced = evaluated[0].worth is not None, evaluated[0].cost_per_hour is not None
    title = f"layouts of {_named(machine, alike)}"
    title += ", each at its share of the rate" if at_rate and len(found.evaluated) > 1 else ""
    columns = ["layout", ">GPUs", ">tokens/s"]
    columns += [">goodput, requests/s", ">met"] if at_rate else []
    columns += [">per hour", ">per 1M tokens"] if priced else []
    rows = []
    for each in evaluated[:_SHOWN_LAYOUTS]:
        cells = [layout_name(each.layout), str(gpus_of(each.layout)), f"{each.throughput_tok_s:,.0f}"]
        if each.worth is not None:
            cells += [f"{each.worth.goodput_req_s:.3g}", f"{each.worth.slo_attainment:.1%}"]
        if each.cost_per_hour is not None:
            cells += [f"{each.cost_per_hour:.2f}", f"{_per_million(each):.3f}"]
        chosen = each.layout == found.choice.layouts.get(machine.name)
        rows.append(_bold(cells) if chosen else cells)
    return table(title, columns, rows)


def _bold(cells: list[str]) -> list[str]:
    return [f"[bold]{cell}[/bold]" for cell in cells]
