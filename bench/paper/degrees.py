"""Section 5.1: the tensor-parallel degrees of one machine, estimated and simulated.

As the text says: 1,000 requests, each of them 8 times in a row, all sent at once and dealt in turn, so that
every instance has the same work; the estimate (algorithm 1, from k1..k8 alone) on 200 requests; two seeds.
The simulation is not told the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from fleets import MAX_NUM_SEQS, Layout, make_study, measured, sample, sharegpt, v100
from report import IMAGES, table

from hetlb.tools.plan.trace_throughput import static_estimate
from hetlb.tools.plots import new_figure, save_figure
from hetlb.tools.sim.simulation_sweep import StudyCell, run_sweep

GPUS, DEGREES, SEEDS = 8, (1, 2, 4, 8), (0, 1)
DISTINCT, COPIES, ESTIMATED = 1000, 8, 200
MACHINES: dict[str, Callable[[int], Layout]] = {
    "8 x V100-32GB, roofline": v100,
    "8 x A100 80 GB": lambda tp: measured("a100_sxm", tp),
    "8 x H100 80 GB": lambda tp: measured("h100_sxm", tp),
    "8 x L40S 48 GB": lambda tp: measured("l40s", tp),
}
_COLOURS = {"estimated": "#a8b4c4", "simulated": "#1f6feb"}


def run(jobs: int) -> dict[str, Any]:
    """Every machine at every degree, for both seeds."""
    machines = []
    for name, layout_of in MACHINES.items():
        degrees = [_degree(layout_of(tp), tp, seed, jobs) for seed in SEEDS for tp in DEGREES]
        machines.append({"name": name, "origin": layout_of(1).origin, "degrees": degrees})
    return {"requests": DISTINCT * COPIES, "estimated_on": ESTIMATED, "seeds": SEEDS, "machines": machines}


def _degree(layout: Layout, tp: int, seed: int, jobs: int) -> dict[str, Any]:
    rows = [row for row in sample(sharegpt(), DISTINCT, seed) for _ in range(COPIES)]
    instances = GPUS // tp
    ran = run_sweep(make_study([layout] * instances, rows), [StudyCell("rr", math.inf, seed)], jobs=jobs)[0]
    lengths = [(row.input_tokens, row.output_tokens) for row in sample(sharegpt(), ESTIMATED, seed + 1000)]
    estimated = static_estimate(layout.latency, lengths, layout.kv_cache_tokens, MAX_NUM_SEQS)
    ends = [each["last_finish_s"] for each in ran.summary["instances"]]
    return {
        "tensor_parallel_size": tp,
        "seed": seed,
        "instances": instances,
        "kv_cache_tokens": layout.kv_cache_tokens,
        "estimated_tok_s": instances * estimated,
        "simulated_tok_s": ran.summary["total_token_throughput"],
        "steady_tok_s": ran.summary["steady"]["total_token_throughput"],
        "first_end_s": min(ends),
        "last_end_s": max(ends),
    }


def of_seed(machine: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The degrees of one seed."""
    return [each for each in machine["degrees"] if each["seed"] == seed]


def order(machine: Mapping[str, Any], kind: str, seed: int) -> list[int]:
    """The degrees, best first."""
    ranked = sorted(of_seed(machine, seed), key=lambda each: -each[f"{kind}_tok_s"])
    return [each["tensor_parallel_size"] for each in ranked]


def agreement(machine: Mapping[str, Any], seed: int) -> float:
    """Kendall's tau of estimate and simulation, -1..1."""
    pairs = list(combinations(of_seed(machine, seed), 2))
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
        by_seed = [
            [" > ".join(map(str, order(machine, kind, seed))) for seed in document["seeds"]]
            for kind in ("estimated", "simulated")
        ]
        orders = ["; ".join(dict.fromkeys(each)) for each in by_seed]
        tau = ", ".join(f"{agreement(machine, seed):.2f}" for seed in document["seeds"])
        rows.append([machine["name"], *orders, tau])
    return "\n\n".join(
        [
            "Order of the degrees (both seeds, where they agree) and Kendall's tau for each of two seeds:",
            table(["machine", "estimated", "simulated", "tau"], rows),
            "![Section 5.1](img/paper-5.1.png)",
        ]
    )


def draw(document: Mapping[str, Any]) -> None:
    """Bars for every machine: `docs/img/paper-5.1.png`."""
    machines = document["machines"]
    figure = new_figure(11, 3.2)
    axes = figure.subplots(1, len(machines))
    for axis, machine in zip(axes, machines, strict=True):
        for shift, (kind, colour) in zip((-0.2, 0.2), _COLOURS.items(), strict=True):
            values = [each[f"{kind}_tok_s"] / 1e3 for each in of_seed(machine, 0)]
            positions = [position + shift for position in range(len(values))]
            axis.bar(positions, values, width=0.4, color=colour, label=kind)
        axis.set_xticks(range(len(DEGREES)), [f"TP {tp}" for tp in DEGREES])
        axis.set_title(machine["name"], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", alpha=0.3, linewidth=0.5)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("thousand tokens/s of the machine", fontsize=8)
    axes[-1].legend(fontsize=8)
    save_figure(figure, IMAGES / "paper-5.1.png")
