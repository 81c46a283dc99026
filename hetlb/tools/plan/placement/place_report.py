"""A placement as a document (`--json`) and for a person: layers, costs of a lost machine, commands."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hetlb.errors import visible_lines
from hetlb.tools.plan.placement.flow import max_flow, pipelines
from hetlb.tools.plan.placement.heuristics import petals, separate_pipelines, swarm
from hetlb.tools.plan.placement.place_deploy import advice, stage_commands, vllm_plan
from hetlb.tools.plan.placement.place_plan import PlacePlan
from hetlb.tools.tables import Console, table


def document_of(
    plan: PlacePlan,
    *,
    scheduler: str,
    load: str,
    seed: int,
    solve_s: float,
    folder: str,
    fleet: Path | None = None,
) -> dict[str, Any]:
    """Return the figures of the contract, and their grounds under further keys."""
    cluster, flow, highest, result = plan.cluster, plan.chosen.flow, plan.highest_flow, plan.result
    separate = separate_pipelines(cluster)
    vllm = vllm_plan(cluster, plan.chosen.placement, flow, separate)
    entered_anywhere = replace(cluster, partial_inference=True)
    baselines = {
        "swarm": (cluster, swarm(cluster)),
        "separate-pipelines": (cluster, separate),
        "petals": (entered_anywhere, petals(cluster, random.Random(seed))),
    }
    ran = {
        each.rule: {"decode_tokens_per_s": each.simulated, "seconds": each.window_s}
        for each in plan.candidates
        if each.rule and each.simulated is not None
    }
    return {
        "model": None if cluster.source is None else cluster.source.known.json(),
        "remarks": list(cluster.remarks),
        "max_flow_tokens_per_s": flow.tokens_per_s,
        "upper_bound_tokens_per_s": plan.bound,
        "gap": plan.bound / flow.tokens_per_s - 1.0 if flow.tokens_per_s else None,
        "partial_inference": cluster.partial_inference,
        "placement": plan.chosen.placement,
        "flows": [
            {"from": sender, "to": receiver, "tokens_per_s": rate}
            for (sender, receiver), rate in flow.links.items()
        ],
        "pipelines": [asdict(pipeline) for pipeline in pipelines(flow)],
        "simulated": None
        if result is None
        else {"scheduler": scheduler, "load": load, "seconds": result.window_s, **result.document()},
        "candidates": {
            "known": len(plan.candidates),
            "simulated": sum(each.simulated is not None for each in plan.candidates),
        },
        "highest_flow": None
        if highest is None
        else {"max_flow_tokens_per_s": highest.flow.tokens_per_s, "placement": highest.placement},
        "baselines": {
            name: {"max_flow_tokens_per_s": max_flow(of, placement).tokens_per_s, **ran.get(name, {})}
            for name, (of, placement) in baselines.items()
            if placement is not None
        },
        "losses": [asdict(loss) for loss in plan.losses],
        "solve_s": solve_s,
        "interrupted": plan.interrupted,
        "commands": stage_commands(cluster, plan.chosen.placement, folder, fleet),
        "vllm": vllm,
        "advice": advice(flow.tokens_per_s, vllm),
    }


def print_placement(document: dict[str, Any], console: Console) -> None:
    console.print(_nodes(document))
    if document["losses"]:
        console.print(_failures(document))
    gap = document["gap"]
    console.print(
        f"maximum flow {document['max_flow_tokens_per_s']:.1f} tokens/s (prompt and output); no placement has"
        f" more than {document['upper_bound_tokens_per_s']:.1f}"
        + ("" if gap is None else f" (gap {gap:.1%})")
        + f"; {len(document['pipelines'])} pipelines"
    )
    simulated = document["simulated"]
    if document["interrupted"]:
        console.print("interrupted: the best placement so far")
    if simulated is None:
        console.print(
            "Chosen by flow, which says nothing of latency and KV: --simulate 600 has simulations choose, "
            "where --time-limit leaves time for them."
        )
    else:
        console.print(
            f"simulated ({simulated['scheduler']}, {simulated['load']}): "
            f"{simulated['decode_tokens_per_s']:.1f} output tokens/s, latency of a prompt "
            f"{simulated['prompt_latency_s'].get('p50', 0.0):.2f} s and of a token "
            f"{simulated['decode_latency_s'].get('p50', 0.0):.2f} s (medians, {simulated['seconds']:.0f} s)"
        )
        if document["candidates"]["known"]:
            console.print(_raced(document))
    for line in document["remarks"]:
        console.print(line)
    for command in document["commands"]:
        print(visible_lines(command))
    console.print(document["advice"])
    for command in (document["vllm"] or {"commands": ()})["commands"]:
        print(visible_lines(command))


def _raced(document: dict[str, Any]) -> str:
    """Return a line with the number of simulations, and the results of simple rules."""
    count = document["candidates"]
    text = f"{count['simulated']} of {count['known']} candidates simulated"
    rules = [
        f"{name} {each['decode_tokens_per_s']:.1f} ({each['seconds']:.0f} s)"
        for name, each in document["baselines"].items()
        if "decode_tokens_per_s" in each
    ]
    return f"{text}; output tokens/s of simple rules: {', '.join(rules)}" if rules else text


def _nodes(document: dict[str, Any]) -> Table:
    through: dict[str, float] = {}
    for flow in document["flows"]:
        through[flow["to"]] = through.get(flow["to"], 0.0) + flow["tokens_per_s"]
    rows = [
        (name, f"{first}-{end - 1}", f"{through.get(name, 0.0):.1f}")
        for name, (first, end) in document["placement"].items()
    ]
    return table("layers by node", ("node", "layers", ">tokens/s"), rows)


def _failures(document: dict[str, Any]) -> Table:
    rows = []
    for loss in document["losses"]:
        nodes, move = loss["nodes"], loss["move"]
        names = nodes[0] if len(nodes) == 1 else f"{nodes[0]} or {len(nodes) - 1} alike"
        told = ""
        if move is not None:
            told = f"{move['node']}: {move['layers'][0]}-{move['layers'][1] - 1}, {move['tokens_per_s']:.0f}"
        rows.append((names, f"{loss['tokens_per_s']:.1f}", told))
    return table("when one is lost", ("node", ">tokens/s left", "best move then, tokens/s"), rows)
