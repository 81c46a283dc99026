"""A plan of groups as a document (`--json`) and for a person: groups, flows, whether to split, commands."""

from __future__ import annotations

import math
from typing import Any

from hetlb.tools.plan.common.remarks import remarks_on_machines
from hetlb.tools.plan.common.servers import VllmServer
from hetlb.tools.plan.disaggregation.split_cluster import Role, SplitCluster, SplitPlan
from hetlb.tools.plan.disaggregation.split_search import SplitsFound
from hetlb.tools.tables import document_table, print_report

_GROUPS = (
    "group={name}|GPUs={gpus}|>TP={tensor_parallel_size}|>PP={pipeline_parallel_size}|>DP={data_parallel_size}|layers={layers}|"
    ">requests/s={capacity_req_s:.4g}|>KV tokens={kv_cache_tokens}"
)
_FLOWS = "from={from}|to={to}|>share={share:.1%}|>requests/s={req_s:.4g}|>GB/s={bytes_per_s:G.3g}"


def document_of(
    cluster: SplitCluster, plan: SplitPlan, found: SplitsFound, servers: list[VllmServer], solve_s: float
) -> dict[str, Any]:
    """Return the figures of the contract, and their grounds under further keys."""
    rates = dict.fromkeys(Role, 0.0)
    for group in plan.groups:
        rates[group.role] += group.capacity
    split_s = math.fsum(plan.flows.values())
    return {
        "model": cluster.model.known.json(),
        "remarks": remarks_on_machines(cluster.model, cluster.machines),
        "throughput_req_s": plan.throughput,
        "throughput_tok_s": plan.throughput * cluster.workload.output_tokens,
        "bound_req_s": found.bound if math.isfinite(found.bound) else None,
        "template_bound_req_s": found.template_bound if math.isfinite(found.template_bound) else None,
        "capacity_req_s": {str(role): capacity for role, capacity in rates.items()},
        "split": plan.splits,
        "split_req_s": split_s,
        "groups": [
            {
                "name": server.name,
                "role": str(group.role),
                "gpus": {cluster.machines[m].name: n for m, n in group.composition},
                "tensor_parallel_size": group.tensor_parallel_size,
                "pipeline_parallel_size": len(group.stages),
                "data_parallel_size": group.ranks,
                "layers": [stage.layers for stage in group.stages],
                "capacity_req_s": group.capacity,
                "kv_cache_tokens": group.kv_cache_tokens * group.ranks,
            }
            for group, server in zip(plan.groups, servers, strict=True)
        ],
        "kv_flows": [
            {
                "from": servers[sender].name,
                "to": servers[receiver].name,
                "share": rate / split_s,
                "req_s": rate,
                "bytes_per_s": rate * cluster.kv_bytes,
            }
            for (sender, receiver), rate in plan.flows.items()
        ],
        "solve_s": solve_s,
        "commands": [server.command() for server in servers],
        "workload": {
            "input_tokens": cluster.workload.prompt_tokens,
            "output_tokens": cluster.workload.output_tokens,
            "requests": len(cluster.workload.rows),
        },
        "estimated": any(m.roofline is not None for m in cluster.machines),
    }


def print_plan(document: dict[str, Any]) -> None:
    """Print the plan for a person: groups, flows, the plan without splitting, its limits, commands."""
    tables = [
        document_table("groups", _GROUPS, document["groups"]),
        document_table("KV flows", _FLOWS, document["kv_flows"]),
    ]
    lines = [*document["remarks"], *trust_lines(document)]
    print_report([_headline(document)], tables, lines, document["commands"])


def _headline(document: dict[str, Any]) -> str:
    """Return the throughput and the gain over not splitting, both simulated if there was a simulation."""
    simulated, gain = document["simulated"], gain_of(document)
    if simulated is None:
        text = f"{document['throughput_req_s']:.4g} requests/s planned, not simulated"
    else:
        served, tokens = simulated["request_throughput"], simulated["output_throughput"]
        text = f"{served:.4g} requests/s, {tokens:.4g} output tokens/s in simulation"
    return text if gain is None else f"{text}: {gain:+.1%} over not splitting"


def gain_of(document: dict[str, Any]) -> float | None:
    """Return the gain over the best plan without splitting: simulated if both were, else planned."""
    colocated = document["colocated"]
    if not document["split"] or colocated is None:
        return None
    served, other = document["throughput_req_s"], colocated["throughput_req_s"]
    if document["simulated"] is not None and "simulated" in colocated:
        served, other = document["simulated"]["request_throughput"], max(colocated["simulated"].values())
    return served / other - 1.0 if other > 0.0 else None


def trust_lines(document: dict[str, Any]) -> list[str]:
    """Return the lines about the grounds of the plan, and whether to split at all."""
    lines = []
    rate, colocated = document["throughput_req_s"], document["colocated"]
    if not document["split"]:
        lines.append("do not split: no plan with separate prefill and decode serves more than this one")
    elif colocated is None:
        lines.append("no plan whose groups all do both was found")
    else:
        lines.append(f"planned: {rate:.4g} requests/s, without splitting {colocated['throughput_req_s']:.4g}")
    if (simulated := document["simulated"]) is not None:
        served = simulated["request_throughput"]
        lines.append(
            f"in simulation under hetlb: {served:.4g} requests/s ({served / rate:.1%} of the plan), first "
            f"token after {simulated['mean_ttft_ms']:.0f} ms, {simulated['mean_tpot_ms']:.1f} ms per token"
        )
        if colocated is not None and "simulated" in colocated:
            lines.append(
                "without splitting, in simulation: "
                + ", ".join(f"{each:.4g} under {policy}" for policy, each in colocated["simulated"].items())
            )
    if document["bound_req_s"] is not None:
        lines.append(f"no plan serves more than {document['bound_req_s']:.4g} requests/s in this cost model")
    elif document["template_bound_req_s"] is not None:
        lines.append(
            f"no plan serves more than {document['template_bound_req_s']:.4g} requests/s in this cost model "
            "with groups inside a machine, over two, or over up to 8 with equally many GPUs of each"
        )
    if document["interrupted"]:
        lines.append("interrupted: the best plan so far")
    if document["estimated"]:
        lines.append("some speeds are estimated from peak figures, which no hardware has confirmed: measure")
    return lines
