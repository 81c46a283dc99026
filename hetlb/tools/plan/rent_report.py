"""A plan of instances to rent as a document (`--json`) and for a person: bill, instances, its grounds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rich.table import Table as Grid

from hetlb.tools.plan.common.fleet_run import OVERLOAD
from hetlb.tools.plan.common.remarks import remarks
from hetlb.tools.plan.highs import INFINITY, SolveLimits
from hetlb.tools.plan.planning import Table
from hetlb.tools.plan.rent_program import RentPlan, SolvedPlan, prune
from hetlb.tools.plan.rent_simulation import SimulatedFleet, simulate_plan
from hetlb.tools.plan.replan import Replanned
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.sim.deadline import StoppedError
from hetlb.tools.tables import document_table, print_report
from hetlb.tools.tables import table as grid

#: Least rate of a fleet with types divided by the worth of its instances, over the same fleet without.
_LEAST_DIVIDED = 0.98
#: Shares of the planned rate: the whole fleet is tried at each against its latencies, until enough are met.
_LOADS = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5)


_RENTED = (
    ">instances={count}|configuration={configuration}|GPUs={gpus}|>per hour={price:.2f}|"
    "throughputs from={origin}"
)
_OTHERS = "={name}|>requests/s={throughput_req_s:.4g}|>per hour={cost_per_hour:.2f}|>this plan={gain}"


def document_of(table: Table, planned: SolvedPlan, solve_s: float) -> dict[str, Any]:
    """Return the figures of the contract; their grounds under further keys."""
    plan, problem = planned.plan, planned.problem
    known = problem.by_name
    requests = table.market.file.requests
    totals: dict[str, float] = {}
    for (name, _), rate in plan.rates.items():
        totals[name] = totals.get(name, 0.0) + rate
    tokens = {kind.name: kind.input_tokens + kind.output_tokens for kind in table.problem.workloads}
    tokens_s = sum(tokens[name] * rate for name, rate in totals.items())
    target = problem.request_rate is not None
    gap = plan.gap(problem)
    models = [model.known.json() for model in table.market.models.values()]
    return {
        "model": models[0] if len(models) == 1 else None,
        "models": models,
        "remarks": _remarks(table),
        "cost_per_hour": plan.cost_per_hour,
        "throughput_req_s": plan.throughput,
        "makespan_s": None if requests is None else requests / plan.throughput,
        "instances": [
            {
                "configuration": name,
                "count": count,
                "gpus": dict(known[name].gpus),
                "price_per_hour": problem.price(known[name]),
            }
            for name, count in plan.counts.items()
        ],
        "assignment": [
            {"workload": name, "configuration": configuration, "share": rate / totals[name]}
            for (name, configuration), rate in plan.rates.items()
        ],
        "gap": gap if math.isfinite(gap) else None,
        "bound_req_s": (plan.throughput if target else plan.bound) if math.isfinite(plan.bound) else None,
        "bound_cost_per_hour": plan.bound if target else None,
        "solve_s": solve_s,
        "cost_per_million_tokens": plan.cost_per_hour / (tokens_s * 3600) * 1e6
        if table.lengths_known and tokens_s > 0
        else None,
        "simulated": None,
        "targets": None,
        "baselines": {},
        "commands": [],
        "throughput_table": {
            name: {
                "origin": table.problem.by_name[name].origin,
                "requests_per_s": table.problem.by_name[name].throughput,
            }
            for name in plan.counts
        },
        "configurations": {
            "all": len(problem.configurations),
            "pruned": len(prune(table.problem).configurations),
        },
        "mixes": {
            "configurations_measured": table.measured,
            "configurations": table.choosable,
            "plans_measured": planned.plans,
            "disagreement": planned.disagreement,
        },
        "workloads": _workloads(table),
        "clustering": None
        if table.clustering is None
        else {key: getattr(table.clustering, key) for key in ("explained", "input_error", "output_error")},
    }


def _workloads(table: Table) -> list[dict[str, Any]]:
    """Return the kinds of requests; their lengths where these are known."""
    return [
        {
            "name": kind.name,
            "model": kind.model,
            "share": kind.share,
            "input_tokens": kind.input_tokens if table.lengths_known else None,
            "output_tokens": kind.output_tokens if table.lengths_known else None,
        }
        for kind in table.problem.workloads
    ]


def _remarks(table: Table) -> list[str]:
    """Return remarks on the models, and on the profiles that the market names for them."""
    market, found = table.market, []
    for name, model in market.models.items():
        written = [path for offer in market.file.offers for path in offer.profiles.get(name, {}).values()]
        written += [
            each.profile
            for index, each in enumerate(market.file.configurations)
            if each.profile is not None and market.model_of(each.model, f"configurations[{index}]") == name
        ]
        found += remarks(model, (market.profiles[path] for path in written))
    return found


def in_short(plan: RentPlan) -> str:
    """Return a plan in a line."""
    rented = ", ".join(f"{count} x {name}" for name, count in plan.counts.items())
    return f"{plan.throughput:.4g} requests/s for {plan.cost_per_hour:.2f} per hour: {rented}"


def simulated_document(
    table: Table, plan: RentPlan, seed: int, slo: SloLimits | None, limits: SolveLimits
) -> dict[str, Any]:
    """Return the rates of the whole fleet under `hetlb`, with known and with unknown lengths of answers.

    With latencies asked for it has the share of requests that meet them, and the highest rate with enough.
    What the limits leave no time for is null.
    """
    found: dict[str, Any] = {"simulated": None, "targets": None}
    if not table.simulated or limits.over:
        return found
    simulate = partial(simulate_plan, table, plan, seed=seed)
    with contextlib.suppress(StoppedError), limits.stopping():
        if slo is not None:
            found["targets"] = _targets(plan, slo, simulate)
        # The worth of instances divides the types; where mixed types serve more together, it is left out.
        unknown, plain = simulate(), simulate(plain=True)
        divided = unknown.request_throughput >= _LEAST_DIVIDED * plain.request_throughput
        unknown = unknown if divided else plain
        known = simulate(predictor="oracle", plain=not divided)
        found["simulated"] = {
            "total_token_throughput": known.total_token_throughput,
            "request_throughput": known.request_throughput,
            "policy": "hetlb",
            "worth": divided,
            "predictor": "oracle",
            "requests": len(known.records),
            "makespan_s": known.makespan_s,
            "lengths_unknown": {
                "total_token_throughput": unknown.total_token_throughput,
                "request_throughput": unknown.request_throughput,
                "predictor": "empirical",
            },
        }
    return found


def _targets(plan: RentPlan, slo: SloLimits, simulate: Callable[..., SimulatedFleet]) -> dict[str, Any]:
    """Return the share of requests that meet the latencies at the planned rate, and the rate with enough."""
    found: dict[str, Any] = {
        "asked": slo.attainment,
        "met": None,
        "request_rate": plan.throughput,
        "requests": 0,
    }
    found |= {"met_up_to_req_s": None, "tried_down_to_req_s": None}
    for load in _LOADS:
        try:
            records = simulate(load=load).records
        except StoppedError:
            break
        found["tried_down_to_req_s"] = load * plan.throughput
        met = slo.share_met(records)
        if load == 1.0:
            found |= {"met": met, "requests": len(records)}
        if met >= slo.attainment:
            found["met_up_to_req_s"] = load * plan.throughput
            break
    return found


def replanning_document(replanned: Replanned) -> dict[str, Any]:
    return {
        "start": dict(replanned.moves.start),
        "stop": dict(replanned.moves.stop),
        "moves": replanned.moves.count,
        "from_scratch": {
            "throughput_req_s": replanned.scratch.throughput,
            "cost_per_hour": replanned.scratch.cost_per_hour,
            "moves": replanned.scratch_moves.count,
        },
    }


def print_plan(table: Table, planned: SolvedPlan, document: dict[str, Any]) -> None:
    """Print the plan for a person: the bill, the instances, what each serves, the others, its limits."""
    cost, rate = document["cost_per_hour"], document["throughput_req_s"]
    headlines = [f"{rate:.4g} requests/s for {cost:.2f} per hour"]
    if document["cost_per_million_tokens"] is not None:
        headlines.append(f"{document['cost_per_million_tokens']:.3g} per million tokens")
    if document["makespan_s"] is not None:
        headlines.append(f"{table.market.file.requests} requests in {document['makespan_s']:.10g} s")
    origins = document["throughput_table"]
    rented = [
        each | origins[each["configuration"]] | {"price": each["count"] * each["price_per_hour"]}
        for each in document["instances"]
    ]
    tables = [
        document_table("rent", _RENTED, rented),
        _share_grid(table, planned.plan, document),
        document_table("the same money spent otherwise", _OTHERS, _others(document)),
    ]
    lines = [*document["remarks"], *trust_lines(document)]
    if (moves := document.get("replanning")) is not None:
        lines.append(
            f"moves: {moves['moves']} (start {listed(moves['start'])}; stop {listed(moves['stop'])}); "
            f"a plan from scratch has {moves['from_scratch']['throughput_req_s']:.4g} requests/s "
            f"and {moves['from_scratch']['moves']} moves"
        )
    print_report(headlines, tables, lines, document["commands"])


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _share_grid(table: Table, plan: RentPlan, document: dict[str, Any]) -> Grid:
    shares = {(each["workload"], each["configuration"]): each["share"] for each in document["assignment"]}
    rows = []
    for kind in table.problem.workloads:
        known = (f"{kind.input_tokens:.0f}", f"{kind.output_tokens:.0f}")
        cells = [100 * shares.get((kind.name, name), 0.0) for name in plan.counts]
        lengths = known if table.lengths_known else ("", "")
        rows.append((kind.name, *lengths, f"{kind.share:.1%}", *(f"{c:.1f}" if c else "" for c in cells)))
    columns = ("type", ">prompt", ">answer", ">share", *(f">{name}" for name in plan.counts))
    return grid("which requests go where, % of each type", columns, rows)


def _others(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the other ways to spend the money, with the gain of this plan."""
    rate, cost = document["throughput_req_s"], document["cost_per_hour"]
    target = document["bound_cost_per_hour"] is not None
    for name, each in document["baselines"].items():
        served = each["throughput_req_s"]
        gain = each["cost_per_hour"] / cost - 1 if target else rate / served - 1 if served > 0 else INFINITY
        words = f"{gain:+.1%}" + (" cheaper" if target else "")
        yield each | {"name": name, "gain": words if gain < 100 else None}


def trust_lines(document: dict[str, Any]) -> list[str]:
    """Return the lines that say what the plan rests on and how far it can be trusted."""
    gap, mixes, rate = document["gap"], document["mixes"], document["throughput_req_s"]
    best = "the best plan of the measured rates" if mixes["configurations"] else "the best plan there is"
    lines = [
        f"solver: at most {gap:.2%} from {best}, {document['solve_s']:.1f} s"
        if gap is not None
        else "solver: no bound is known"
    ]
    if mixes["configurations"]:
        lines[0] += (
            f"; {mixes['configurations_measured']} of {mixes['configurations']} configurations measured "
            f"on the mix, {mixes['plans_measured']} plans on their own"
        )
        if not mixes["plans_measured"]:
            lines.append("no time was left to measure the plan: it rests on estimates")
    if mixes["disagreement"] > 0.005:
        lines.append(f"measured, the plan serves {1.0 - mixes['disagreement']:.1%} of the target")
    if document["interrupted"]:
        lines.append("interrupted: the best plan so far")
    if (targets := document["targets"]) is not None and targets["met"] is not None:
        verdict = "met" if targets["met"] >= targets["asked"] else "missed"
        enough = targets["met_up_to_req_s"]
        lines.append(
            f"latencies: {verdict}: {targets['met']:.1%} of the requests meet them at {rate:.4g} requests/s, "
            f"{targets['asked']:.1%} are asked ({targets['requests']} simulated requests, Poisson)"
            + (
                ""
                if verdict == "met"
                else f"; not at {targets['tried_down_to_req_s']:.4g} either"
                if enough is None
                else f"; enough meet them up to {enough:.4g} requests/s"
            )
        )
    simulated = document["simulated"]
    if simulated is not None:
        known = simulated["request_throughput"]
        unknown = simulated["lengths_unknown"]["request_throughput"]
        lines.append(
            f"simulation of the whole fleet under the policy {simulated['policy']}, steady part of "
            f"{simulated['requests']} requests at {OVERLOAD:g} times the plan's rate: {known:.4g} requests/s "
            f"({known / rate:.1%} of the plan) if answer lengths are known in advance, {unknown:.4g} "
            f"({unknown / rate:.1%}) if they are not"
        )
    if (clustering := document["clustering"]) is not None:
        lines.append(
            f"types: they explain {clustering['explained']:.0%} of the variance of the lengths; a request is "
            f"{clustering['input_error']:.0%} off its type's mean prompt, {clustering['output_error']:.0%} "
            "off its mean answer"
        )
    origins = sorted({each["origin"] for each in document["throughput_table"].values()})
    if any("roofline" in origin for origin in origins):
        lines.append("some throughputs come from rooflines, which no hardware has confirmed: measure before")
    return lines
