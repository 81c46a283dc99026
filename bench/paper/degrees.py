"""Section 5.1: the tensor-parallel degrees of one machine, estimated and simulated.

Shows: the order that the paper's algorithm 1 gives from k1..k8 alone, beside the throughput of as many
simulated servers as the machine holds at each degree, all requests at once.
Promises: both see the same requests; the simulation is not told the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from fleets import MAX_NUM_SEQS, SHAREGPT, Layout, lengths, make_study, measured, v100
from report import IMAGES, table

from hetlb.plan.tp_search import static_estimate
from hetlb.plots import new_figure, save_figure
from hetlb.sim.sweep import Cell, run_sweep

GPUS, DEGREES = 8, (1, 2, 4, 8)
REQUESTS = 12_000
MACHINES: dict[str, Callable[[int], Layout]] = {
    "8 x V100-32GB": v100,
    "8 x A100 80 GB": lambda tp: measured("a100_sxm", tp),
    "8 x H100 80 GB": lambda tp: measured("h100_sxm", tp),
    "8 x L40S 48 GB": lambda tp: measured("l40s", tp),
}
_COLOURS = {"estimated": "#a8b4c4", "simulated": "#1f6feb"}


def run(jobs: int) -> dict[str, Any]:
    """Every machine at every degree."""
    rows = [(row.input_tokens, row.output_tokens) for row in lengths(SHAREGPT)]
    machines = []
    for name, layout_of in MACHINES.items():
        degrees = []
        for tp in DEGREES:
            layout, instances = layout_of(tp), GPUS // tp
            study = make_study([layout] * instances, count=REQUESTS)
            ran = run_sweep(study, [Cell("rr", math.inf, 0)], jobs=jobs)[0]
            estimated = static_estimate(layout.latency, rows, layout.kv_cache_tokens, MAX_NUM_SEQS)
            degrees.append(
                {
                    "tensor_parallel_size": tp,
                    "instances": instances,
                    "kv_cache_tokens": layout.kv_cache_tokens,
                    "estimated_tok_s": instances * estimated,
                    "simulated_tok_s": ran.summary["total_token_throughput"],
                    "simulated_s": ran.summary["duration"],
                }
            )
        machines.append({"name": name, "origin": layout_of(1).origin, "degrees": degrees})
    return {"requests": REQUESTS, "trace": SHAREGPT.name, "machines": machines}


def order(machine: Mapping[str, Any], kind: str) -> list[int]:
    """The degrees, best first."""
    ranked = sorted(machine["degrees"], key=lambda each: -each[f"{kind}_tok_s"])
    return [each["tensor_parallel_size"] for each in ranked]


def agreement(machine: Mapping[str, Any]) -> float:
    """Kendall's tau of the two orders, -1..1."""
    pairs = list(combinations(machine["degrees"], 2))
    signs = [
        (a["estimated_tok_s"] - b["estimated_tok_s"]) * (a["simulated_tok_s"] - b["simulated_tok_s"])
        for a, b in pairs
    ]
    concordant: int = sum((sign > 0) - (sign < 0) for sign in signs)
    return concordant / len(pairs)


def show(document: Mapping[str, Any]) -> str:
    """The table, in Markdown."""
    rows = []
    for machine in document["machines"]:
        by_tp = {each["tensor_parallel_size"]: each for each in machine["degrees"]}
        cells = [
            f"{by_tp[tp]['estimated_tok_s'] / 1e3:.1f} / {by_tp[tp]['simulated_tok_s'] / 1e3:.1f}"
            for tp in DEGREES
        ]
        orders = [" > ".join(map(str, order(machine, kind))) for kind in ("estimated", "simulated")]
        rows.append([machine["name"], *cells, *orders, f"{agreement(machine):.2f}"])
    headings = ["machine", *(f"TP {tp}" for tp in DEGREES), "order estimated", "order simulated", "tau"]
    origins = "\n".join(f"- {machine['name']}: {machine['origin']}." for machine in document["machines"])
    parts = [
        f"Thousands of tokens/s, estimated / simulated; {document['requests']:,} requests at once:",
        table(headings, rows),
        origins,
        "![Section 5.1](img/paper-5.1.png)",
    ]
    return "\n\n".join(parts)


def draw(document: Mapping[str, Any]) -> None:
    """Bars for every machine: `docs/img/paper-5.1.png`."""
    machines = document["machines"]
    figure = new_figure(11, 3.2)
    axes = figure.subplots(1, len(machines))
    for axis, machine in zip(axes, machines, strict=True):
        for shift, (kind, colour) in zip((-0.2, 0.2), _COLOURS.items(), strict=True):
            values = [each[f"{kind}_tok_s"] / 1e3 for each in machine["degrees"]]
            places = [place + shift for place in range(len(values))]
            axis.bar(places, values, width=0.4, color=colour, label=kind)
        axis.set_xticks(range(len(DEGREES)), [f"TP {tp}" for tp in DEGREES])
        axis.set_title(machine["name"], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", alpha=0.3, linewidth=0.5)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("thousand tokens/s of the machine", fontsize=8)
    axes[-1].legend(fontsize=8)
    save_figure(figure, IMAGES / "paper-5.1.png")
