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

from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.plan.cluster import Cluster, ClusterLimits
from hetlb.tools.plan.common.plan_tables import Machine, Model
from hetlb.tools.plan.layouts import LayoutFleet, LayoutTarget, lay_out, layout_name
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import search, whole_tok_s
from hetlb.tools.plan.trace_throughput import RowSample, Throughputs
from hetlb.tools.workload.trace_formats import read_trace

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench/results/search-fleets.json"
MODEL = Model(name="Llama-3.1-8B", parameters=8.03e9, kv_bytes_per_token=131_072)
LIMITS = ClusterLimits(max_input_tokens=8192, max_output_tokens=1024)
MEMORY = {"a100_sxm": 85_899_345_920, "h100_sxm": 85_899_345_920, "l40s": 48_305_799_168}
FLEETS = {
    "A100 x 4 and L40S x 4": (("a100_sxm", 4), ("l40s", 4)),
    "H100 x 2 and L40S x 8": (("h100_sxm", 2), ("l40s", 8)),
    "A100 x 6 and A100 x 2": (("a100_sxm", 6), ("a100_sxm", 2)),
}
SLOS = {"ttft 500 ms, tpot 30 ms": (0.5, 0.03), "ttft 200 ms, tpot 15 ms": (0.2, 0.015)}
#: Of what the machines do together at most.
LOADS = (0.4, 0.8)
HELD_OUT = (11, 12, 13)


def machine(index: int, system: str, gpus: int) -> Machine:
    """A machine of a measured grid."""
    profiles = {
        tp: load_profile(ROOT / f"profiling/{system}-llama-3.1-8b-tp{tp}.yaml")
        for tp in (1, 2, 4, 8)
        if tp <= gpus
    }
    name = f"{system.replace('_', '-')}-{index}"
    return Machine(name, system, gpus, MEMORY[system], 0.9, 2_147_483_648, profiles)


def cases() -> list[tuple[str, str, float]]:
    """Fleet, words of the target, load; an infinite load has no target."""
    return [
        (name, words, load)
        for name in FLEETS
        for words, load in [("", math.inf), *((words, load) for words in SLOS for load in LOADS)]
    ]


def evaluate(name: str, words: str, load: float) -> dict[str, Any]:
    """One case: choose, then hold both choices against seeds that were not seen."""
    trace = read_trace(ROOT / "bench/data/azure-conv-sample.csv")
    rows = [(row.input_tokens, max(1, row.output_tokens)) for row in trace]
    rows = [(i, o) for i, o in rows if i <= LIMITS.max_input_tokens and o <= LIMITS.max_output_tokens][::2]
    machines = [machine(index, *each) for index, each in enumerate(FLEETS[name])]
    cluster = Cluster(path=ROOT, model=MODEL, limits=LIMITS, machines=tuple(machines))
    throughputs = Throughputs(rows, "simulate")
    rankings = search(cluster, throughputs.of)
    most_tok_s = sum(whole_tok_s(each, rankings[each.kind][0]) for each in machines)
    rate = load * most_tok_s / mean(i + o for i, o in rows)
    target = LayoutTarget(rate, SloLimits(*SLOS[words]) if words else SloLimits())
    found = lay_out(cluster, RowSample(rows, len(rows), len(rows)), target, rankings, throughputs, None)
    choice = found.choice
    held = [
        [
            LayoutFleet(machines, found.instances, rows, target, seed).simulate(layouts, rate).figure
            for layouts in (choice.layouts, found.one_by_one.layouts)
        ]
        for seed in HELD_OUT
    ]
    assert choice.worth is not None
    assert found.one_by_one.worth is not None
    return {
        "fleet": name,
        "slo": words,
        "load": None if math.isinf(load) else load,
        "request_rate": None if math.isinf(rate) else rate,
        "together": {m: layout_name(each) for m, each in choice.layouts.items()},
        "one_by_one": {m: layout_name(each) for m, each in found.one_by_one.layouts.items()},
        "ratio": choice.worth.figure / found.one_by_one.worth.figure,
        "held_out_ratio": mean(a for a, _ in held) / mean(b for _, b in held),
        "attainment": choice.worth.slo_attainment,
    }


def main() -> int:
    """Evaluate every case, or the given numbers; results of the others are kept."""
    known = json.loads(OUT.read_text())["results"] if OUT.exists() else []
    every = cases()
    for number in [int(each) for each in sys.argv[1:]] or range(len(every)):
        name, words, load = every[number]
        result = evaluate(name, words, load)
        known = [e for e in known if (e["fleet"], e["slo"], e["load"]) != (name, words, result["load"])]
        known.append(result)
        print(json.dumps(result), flush=True)
        OUT.write_text(json.dumps({"held_out_seeds": HELD_OUT, "results": known}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
