"""A placement for a person: layers by node, what a lost machine costs, the commands, what to trust."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hetlb.tables import table


def print_placement(document: dict[str, Any], console: Console) -> None:
    """Tables, figures and commands of `place_plan.document_of`."""
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
            f"{simulated['decode_latency_s'].get('p50', 0.0):.2f} s (medians)"
        )
    for command in document["commands"]:
        print(command)
    console.print(document["advice"])
    for command in (document["vllm"] or {"commands": ()})["commands"]:
        print(command)


def _nodes(document: dict[str, Any]) -> Any:
    through: dict[str, float] = {}
    for flow in document["flows"]:
        through[flow["to"]] = through.get(flow["to"], 0.0) + flow["tokens_per_s"]
    rows = [
        (name, f"{first}-{end - 1}", f"{through.get(name, 0.0):.1f}")
        for name, (first, end) in document["placement"].items()
    ]
    return table("layers by node", ("node", "layers", ">tokens/s"), rows)


def _failures(document: dict[str, Any]) -> Any:
    rows = []
    for loss in document["losses"]:
        nodes, move = loss["nodes"], loss["move"]
        names = nodes[0] if len(nodes) == 1 else f"{nodes[0]} or {len(nodes) - 1} alike"
        told = ""
        if move is not None:
            told = f"{move['node']}: {move['layers'][0]}-{move['layers'][1] - 1}, {move['tokens_per_s']:.0f}"
        rows.append((names, f"{loss['tokens_per_s']:.1f}", told))
    return table("when one is lost", ("node", ">tokens/s left", "best move then, tokens/s"), rows)
