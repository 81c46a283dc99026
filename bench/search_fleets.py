"""Layouts of whole fleets chosen together against each machine's own best: `python bench/search_fleets.py`.

Machines of measured grids with Llama-3.1-8B; rates from light to nearly full, targets on the first token and
on each further one, real chat lengths. `hetlb search` chooses on one seed; both choices are then
simulated under the router on seeds that the choice has not seen. Writes bench/results/search-fleets.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from hetlb.cli.search import Sample, lay_out, make_estimator
from hetlb.config.cluster import Cluster, ClusterFile, ClusterLimits, ClusterModel
from hetlb.config.profile import load_profile
from hetlb.plan.layouts import Fleet, Target, layout_name
from hetlb.plan.throughput import SloLimits
from hetlb.plan.tp_search import Machine, PlanModel, search
from hetlb.workload.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench/results/search-fleets.json"
MODEL = PlanModel("Llama-3.1-8B", 8.03e9, 2, 131_072, 8192, 1024)
MEMORY = {"a100_sxm": 85_899_345_920, "h100_sxm": 85_899_345_920, "l40s": 48_305_799_168}
FLEETS = {
    "A100 x 4 and L40S x 4": (("a100_sxm", 4), ("l40s", 4)),
    "H100 x 2 and L40S x 8": (("h100_sxm", 2), ("l40s", 8)),
    "A100 x 6 and A100 x 2": (("a100_sxm", 6), ("a100_sxm", 2)),
    "H100 x 4, A100 x 4, L40S x 4": (("h100_sxm", 4), ("a100_sxm", 4), ("l40s", 4)),
}
SLOS = {"ttft 500 ms, tpot 30 ms": (0.5, 0.03), "ttft 200 ms, tpot 15 ms": (0.2, 0.015)}
#: Of what the machines do together at most.
LOADS = (0.3, 0.7, 0.95)
HELD_OUT = (11, 12, 13)


def machine(index: int, system: str, gpus: int) -> tuple[Machine, dict[str, Any]]:
    """A machine of a measured grid, and its profiles by path."""
    paths = {tp: f"profiling/{system}-llama-3.1-8b-tp{tp}.yaml" for tp in (1, 2, 4, 8) if tp <= gpus}
    profiles = {path: load_profile(ROOT / path) for path in paths.values()}
    name = f"{system.replace('_', '-')}-{index}"
    box = Machine(name, system, gpus, MEMORY[system], 0.9, 2_147_483_648, tuple(paths.items()))
    return box, profiles


def main() -> int:
    """Choose and compare."""
    rows = [
        (r.input_tokens, max(1, r.output_tokens))
        for r in read_trace(ROOT / "bench/data/azure-conv-sample.csv")
    ]
    rows = [(i, o) for i, o in rows if i <= 8192 and o <= 1024]
    results = []
    for name, boxes in FLEETS.items():
        machines, profiles = [], {}
        for index, (system, gpus) in enumerate(boxes):
            box, own = machine(index, system, gpus)
            machines.append(box)
            profiles |= own
        file = ClusterFile(
            version=1,
            model=ClusterModel(name=MODEL.name, parameters=8.03e9, kv_bytes_per_token=131_072),
            limits=ClusterLimits(max_input_tokens=8192, max_output_tokens=1024),
            machines=(),
        )
        cluster = Cluster(path=ROOT, file=file, model=MODEL, machines=tuple(machines), profiles=profiles)
        sample = Sample(rows, len(rows), len(rows))
        plans = search(MODEL, machines, make_estimator(profiles, rows, "simulate"))
        most_tok_s = sum(plan.best.throughput_tok_s for plan in plans if plan.best)
        most_req_s = most_tok_s / mean(i + o for i, o in rows)
        targets = [("", math.inf, SloLimits())] + [
            (words, load * most_req_s, SloLimits(*limits)) for words, limits in SLOS.items() for load in LOADS
        ]
        for words, rate, slo in targets:
            target = Target(rate, slo)
            found = lay_out(cluster, sample, target, plans, "simulate", None)
            choice = found.choice
            held = []
            for seed in HELD_OUT:
                fleet = Fleet(machines, found.instances, rows, target, seed)
                held.append(
                    [fleet.simulate(each, rate).figure for each in (choice.layouts, choice.one_by_one)]
                )
            assert choice.worth is not None
            assert choice.one_by_one_worth is not None
            result = {
                "fleet": name,
                "slo": words,
                "request_rate": None if math.isinf(rate) else rate,
                "together": {m: layout_name(each) for m, each in choice.layouts.items()},
                "one_by_one": {m: layout_name(each) for m, each in choice.one_by_one.items()},
                "ratio": choice.worth.figure / choice.one_by_one_worth.figure
                if choice.one_by_one_worth.figure
                else None,
                "held_out_ratio": mean(a for a, _ in held) / mean(b for _, b in held)
                if mean(b for _, b in held)
                else None,
                "attainment": choice.worth.slo_attainment,
                "simulations": choice.simulations,
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    OUT.write_text(json.dumps({"held_out_seeds": HELD_OUT, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
