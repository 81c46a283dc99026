"""A placement as a document (`--json`) and for a person: layers, costs of a lost machine, commands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hetlb.tools.plan.placement.flow import max_flow, pipelines
from hetlb.tools.plan.placement.heuristics import petals, separate_pipelines, swarm
from hetlb.tools.plan.placement.place_deploy import advice, stage_commands, vllm_plan
from hetlb.tools.plan.placement.place_plan import PlacePlan
from hetlb.tools.tables import document_table, print_report


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
            "known": plan.met,
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
        "commands": [] if cluster.unstaged else stage_commands(cluster, plan.chosen.placement, folder, fleet),
        "unstaged": cluster.unstaged or None,
        "vllm": vllm,
        "advice": advice(flow.tokens_per_s, vllm),
    }


_NODES = "node={node}|layers={layers}|>tokens/s={rate:.1f}"
_LOSSES = "node={names}|>tokens/s left={tokens_per_s:.1f}|best move then, tokens/s={told}"


def print_placement(document: dict[str, Any]) -> None:
    """Print the placement for a person: layers, costs of a lost machine, grounds, commands."""
    tables = [
        document_table("layers by node", _NODES, _nodes(document)),
        document_table("when one is lost", _LOSSES, map(_loss, document["losses"])),
    ]
    vllm = (document["vllm"] or {"commands": ()})["commands"]
    refused = document["unstaged"]
    advice = document["advice"] if refused is None else f"hetlb stage does not compute this model: {refused}"
    commands = [*document["commands"], advice, *vllm]
    print_report([], tables, [*_lines(document), *document["remarks"]], commands)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    gap, simulated = document["gap"], document["simulated"]
    yield (
        f"maximum flow {document['max_flow_tokens_per_s']:.1f} tokens/s (prompt and output); no placement has"
        f" more than {document['upper_bound_tokens_per_s']:.1f}"
        + ("" if gap is None else f" (gap {gap:.1%})")
        + f"; {len(document['pipelines'])} pipelines"
    )
    if document["interrupted"]:
        yield "interrupted: the best placement so far"
    if simulated is None:
        yield (
            "Chosen by flow, which says nothing of latency and KV: --simulate 600 has simulations choose, "
            "where --time-limit leaves time for them."
        )
        return
    yield (
        f"simulated ({simulated['scheduler']}, {simulated['load']}): "
        f"{simulated['decode_tokens_per_s']:.1f} output tokens/s, latency of a prompt "
        f"{simulated['prompt_latency_s'].get('p50', 0.0):.2f} s and of a token "
        f"{simulated['decode_latency_s'].get('p50', 0.0):.2f} s (medians, {simulated['seconds']:.0f} s)"
    )
    if document["candidates"]["known"]:
        yield _raced(document)


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


def _nodes(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    through: dict[str, float] = {}
    for flow in document["flows"]:
        through[flow["to"]] = through.get(flow["to"], 0.0) + flow["tokens_per_s"]
    for name, (first, end) in document["placement"].items():
        yield {"node": name, "layers": f"{first}-{end - 1}", "rate": through.get(name, 0.0)}


def _loss(loss: dict[str, Any]) -> dict[str, Any]:
    nodes, move = loss["nodes"], loss["move"]
    names = nodes[0] if len(nodes) == 1 else f"{nodes[0]} or {len(nodes) - 1} alike"
    told = None
    if move is not None:
        told = f"{move['node']}: {move['layers'][0]}-{move['layers'][1] - 1}, {move['tokens_per_s']:.0f}"
    return loss | {"names": names, "told": told}
