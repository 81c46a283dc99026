"""Layouts of a cluster as a document (`--json`) and for a person: degrees, layouts, the fleet, commands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.common.remarks import remarks_on_machines
from hetlb.tools.plan.common.servers import VllmServer
from hetlb.tools.plan.layouts import (
    Evaluated,
    FleetLayouts,
    Layout,
    LayoutsFound,
    LayoutsWorth,
    counted,
    gpus_of,
    layout_name,
)
from hetlb.tools.plan.tp_search import Option, whole_tok_s
from hetlb.tools.tables import document_table, print_report

_SHOWN_LAYOUTS = 8
_BAR_WIDTH = 24
_OPTIONS = (
    "machine={name}|>TP={degrees}|>instances={instances}|>KV tokens={kv_cache_tokens}|>tokens/s={rate}|={bar}"
)
_LAYOUTS = "layout={name}|>GPUs={gpus}|>tokens/s={throughput_tok_s:,.0f}"
_AT_RATE = "|>goodput, requests/s={simulated[goodput_req_s]:.3g}|>met={simulated[slo_attainment]:.1%}"
_PRICED = "|>per hour={cost_per_hour:.2f}|>per 1M tokens={cost_per_million_tokens:.3f}"


def result_document(found: LayoutsFound, servers: list[VllmServer]) -> dict[str, Any]:
    """Return the figures of the contract, and figures of layouts."""
    target, machines = found.target, found.cluster.machines
    best = {machine.name: _best_degree(found, machine) for machine in machines}
    return {
        "model": found.cluster.model.known.json(),
        "remarks": remarks_on_machines(found.cluster.model, machines),
        "machines": [
            {
                "name": machine.name,
                "ranking": [_option_document(machine, option) for option in found.rankings[machine.kind]],
                "layouts": [_layout_document(each) for each in found.evaluated[machine.kind]],
            }
            for machine in machines
        ],
        "best": {name: option.part.tensor_parallel_size for name, option in best.items() if option},
        "throughput_tok_s": sum(
            found.instances[machine.kind][part].throughput_tok_s
            for machine in machines
            for part in found.choice.layouts.get(machine.name, ())
        ),
        "fleet": _fleet_document(found.choice) | {"one_by_one": _fleet_document(found.one_by_one)},
        "commands": [server.command() for server in servers],
        "estimate": found.estimate,
        "requests": len(found.sample.rows),
        "rows": {"total": found.sample.total, "within_limits": found.sample.within},
        "request_rate": None if math.isinf(target.request_rate) else target.request_rate,
        "degrees_checked": found.cluster.model.shape is not None,
    }


def _best(found: LayoutsFound, machine: Machine) -> Option | None:
    """Return the best degree or data-parallel layout of a machine, None if nothing fits."""
    first = found.rankings[machine.kind][0]
    return first if first.feasible else None


def _best_degree(found: LayoutsFound, machine: Machine) -> Option | None:
    """Return the best layout of tensor parallelism alone."""
    ranking = found.rankings[machine.kind]
    return next((each for each in ranking if each.feasible and each.part.data_parallel_size == 1), None)


def _option_document(machine: Machine, option: Option) -> dict[str, Any]:
    return {
        "tensor_parallel_size": option.part.tensor_parallel_size,
        "data_parallel_size": option.part.data_parallel_size,
        "estimated": option.estimated,
        "instances": machine.gpus // option.part.gpus,
        "throughput_tok_s": whole_tok_s(machine, option),
        "kv_cache_tokens": option.memory.kv_cache_tokens,
        "feasible": option.feasible,
        "reason": option.reason,
        "missing_bytes": option.memory.missing_bytes,
    }


def _fleet_document(fleet: FleetLayouts) -> dict[str, Any]:
    layouts = {name: _parts_document(layout) for name, layout in fleet.layouts.items()}
    return {"layouts": layouts, "simulated": _worth_document(fleet.worth)}


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
    """Return the price of a million tokens.

    It holds at the rate served if there is one, else while the layout is full.
    """
    assert each.cost_per_hour is not None
    tokens_s = each.throughput_tok_s if each.worth is None else each.worth.total_token_throughput
    return each.cost_per_hour / (3600.0 * tokens_s) * 1e6 if tokens_s > 0 else 0.0


def _worth_document(worth: LayoutsWorth | None) -> dict[str, Any] | None:
    if worth is None:
        return None
    return asdict(worth) | {"goodput_req_s": worth.goodput_req_s or None}


def print_result(found: LayoutsFound, document: Mapping[str, Any]) -> None:
    # The first machine of every kind stands for all of it.
    kinds = {machine.kind: machine for machine in reversed(found.cluster.machines)}
    shown = [machine for machine in found.cluster.machines if kinds[machine.kind] is machine]
    tables = [_table(found, shown)]
    for machine in shown:
        best, chosen = _best(found, machine), found.choice.layouts.get(machine.name)
        uniform = (best.part,) * (machine.gpus // best.part.gpus) if best else None
        if chosen is not None and (found.evaluated[machine.kind][0].worth or chosen != uniform):
            tables.append(_layouts_table(found, machine))
    print_report([], tables, _lines(found, document), document["commands"])


def _lines(found: LayoutsFound, document: Mapping[str, Any]) -> Iterator[str]:
    sample = found.sample
    if any(part.pipeline_parallel_size > 1 for each in found.choice.layouts.values() for part in each):
        yield "pipelines are composed from profiles of tensor parallelism: estimates, not measurements"
    options = (
        found.instances[machine.kind][part]
        for machine in found.cluster.machines
        for part in found.choice.layouts.get(machine.name, ())
    )
    for name in dict.fromkeys(each.part.name for each in options if each.estimated):
        yield f"{name}: estimated by peak figures, not measured; profiles.{name} states a profile"
    yield (
        f"estimated on {len(sample.rows)} of {sample.total} rows of the trace; "
        f"{sample.total - sample.within} exceed the cluster's limits"
    )
    yield from document["remarks"]
    if found.cluster.model.shape is None:
        yield "degrees were not checked against vLLM's rules: give model.config, the model's config.json"
    if found.choice.worth is not None:
        yield _simulated_line(found)
    elif found.choice.layouts and found.estimate == "simulate":
        yield "the fleet was not simulated: more requests fill it than are simulated; the degrees' sums stand"


def _simulated_line(found: LayoutsFound) -> str:
    worth, before = found.choice.worth, found.one_by_one.worth
    assert worth is not None
    words = (
        f"the fleet under the router, simulated: {worth.total_token_throughput:,.0f} tokens/s, steady part "
    )
    words += f"of {worth.requests:,} requests"
    if worth.goodput_req_s > 0:
        words += f", {worth.slo_attainment:.1%} of {found.target.request_rate:g} requests/s meet the targets"
    if before is not None and found.choice.layouts != found.one_by_one.layouts:
        words += f" (each machine by itself: {before.total_token_throughput:,.0f} tokens/s"
        words += f", {before.slo_attainment:.1%})" if worth.goodput_req_s > 0 else ")"
    return words


def _named(found: LayoutsFound, machine: Machine) -> str:
    alike = sum(other.kind == machine.kind for other in found.cluster.machines)
    return machine.name if alike == 1 else f"{machine.name} and {alike - 1} alike"


def _table(found: LayoutsFound, machines: list[Machine]) -> Table:
    rows = []
    for machine in machines:
        ranking, best = found.rankings[machine.kind], _best(found, machine)
        most = whole_tok_s(machine, ranking[0])
        for option in ranking:
            row = _option_document(machine, option)
            share = row["throughput_tok_s"] / most if option.feasible else 0.0
            told = {
                "name": _named(found, machine) if option is ranking[0] else None,
                "degrees": option.part.name.removeprefix("tp").replace("dp", " DP "),
                "rate": f"{row['throughput_tok_s']:.1f}" if option.feasible else "-",
                "bar": "█" * max(1, round(_BAR_WIDTH * share)) if option.feasible else option.reason,
                "bold": option is best,
            }
            rows.append(row | told)
    title = "tensor-parallel degrees; tokens/s: prompt and output of the whole machine while requests wait, "
    return document_table(f"{title}{found.estimate} estimate", _OPTIONS, rows)


def _layouts_table(found: LayoutsFound, machine: Machine) -> Table:
    evaluated = found.evaluated[machine.kind]
    at_rate, priced = evaluated[0].worth is not None, evaluated[0].cost_per_hour is not None
    title = f"layouts of {_named(found, machine)}"
    title += ", each at its share of the rate" if at_rate and len(found.cluster.machines) > 1 else ""
    columns = _LAYOUTS + _AT_RATE * at_rate + _PRICED * priced
    chosen = found.choice.layouts.get(machine.name)
    rows = [
        _layout_document(each) | {"name": layout_name(each.layout), "bold": each.layout == chosen}
        for each in evaluated[:_SHOWN_LAYOUTS]
    ]
    return document_table(title, columns, rows)
