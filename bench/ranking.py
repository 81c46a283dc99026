"""How the three estimates order tensor-parallel degrees: static, simulated, and by plain least squares.

    python bench/ranking.py DIR [TRACE]

It writes bench/results/ranking.json and prints a summary.

DIR holds aic_vllm.csv and aic_kv_capacity.csv (NVIDIA aiconfigurator-core 0.12.0, Apache-2.0). Every
configuration is fitted on the default 12 + 12 points. A machine has 8 GPUs; degrees that do not fit in
memory are left out.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from hetlb.balancer.config.profile_file import EngineInfo, ProfileSource
from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.plan.trace_throughput import Throughputs, static_estimate
from hetlb.tools.profiler.fit import fit
from hetlb.tools.profiler.grid import DEFAULT_DECODE_GRID, DEFAULT_PREFILL_GRID, Point, StepKind
from hetlb.tools.profiler.sources import Measurements, make_profile
from hetlb.tools.workload.trace_formats import read_trace

RESULT = Path(__file__).parent / "results" / "ranking.json"
GPUS = 8
ROWS = 500
MAX_NUM_SEQS = 256
LONGEST = 8192


def kendall_tau(first: dict[int, float], second: dict[int, float]) -> float:
    """Agreement of two orders, -1..1."""
    pairs = list(combinations(first, 2))
    if not pairs:
        return 1.0
    signs = [(first[a] - first[b]) * (second[a] - second[b]) for a, b in pairs]
    return sum((s > 0) - (s < 0) for s in signs) / len(pairs)


def load(folder: Path) -> dict[tuple[str, str], dict[int, tuple[int, list[Point]]]]:
    """(system, model) -> degree -> (KV tokens, default points) of what fits."""
    with (folder / "aic_kv_capacity.csv").open() as file:
        capacity = {
            (r["system"], r["model"], int(r["tp"])): int(r["kv_tokens"])
            for r in csv.DictReader(file)
            if r["fits"] == "1"
        }
    points: dict[tuple[str, str, int], list[Point]] = defaultdict(list)
    with (folder / "aic_vllm.csv").open() as file:
        for r in csv.DictReader(file):
            size = (int(r["batch"]), int(r["length"]))
            grid = DEFAULT_PREFILL_GRID if r["phase"] == "prefill" else DEFAULT_DECODE_GRID
            if size in grid:
                key = (r["system"], r["model"], int(r["tp"]))
                points[key].append(Point(StepKind(r["phase"]), *size, float(r["latency_ms"]) / 1e3))
    groups: dict[tuple[str, str], dict[int, tuple[int, list[Point]]]] = defaultdict(dict)
    for (system, model, tp), kv in capacity.items():
        groups[system, model][tp] = (kv, points[system, model, tp])
    return groups


def estimates(kv: int, points: list[Point], rows: list[tuple[int, int]]) -> tuple[float, float, float]:
    """Tokens/s of one instance: static, simulated, plain least squares (static on a fit without bounds)."""
    result = fit(points)
    static = static_estimate(result.latency, rows, kv, MAX_NUM_SEQS)
    engine = EngineInfo(kv_cache_tokens=kv, max_num_seqs=MAX_NUM_SEQS)
    found = Measurements(points=tuple(points), source=ProfileSource(kind="csv"), engine=engine)
    profile = make_profile("p", found, result)
    simulated = Throughputs(rows, "simulate").of(profile)
    constants = []
    for phase in (StepKind.PREFILL, StepKind.DECODE):
        of_phase = [p for p in points if p.phase is phase]
        terms = [(p.batch * p.length, p.batch, p.length, 1.0) for p in of_phase]
        constants += np.linalg.lstsq(terms, [p.seconds for p in of_phase])[0].tolist()
    plain = static_estimate(LatencyModel(*constants), rows, kv, MAX_NUM_SEQS)
    return static, simulated, plain


def main() -> None:
    """Estimate, record, print."""
    folder = Path(sys.argv[1])
    trace = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "data/azure-conv-sample.csv"
    every = [(r.input_tokens, max(1, r.output_tokens)) for r in read_trace(trace)]
    every = [(i, o) for i, o in every if i + o <= LONGEST]
    rows = [every[k * len(every) // ROWS] for k in range(ROWS)]
    found = []
    for (system, model), degrees in sorted(load(folder).items()):
        by_kind: list[dict[int, float]] = [{}, {}, {}]
        for tp, (kv, points) in degrees.items():
            for table, value in zip(by_kind, estimates(kv, points, rows), strict=True):
                table[tp] = value * (GPUS // tp)
        static, simulated, plain = by_kind
        orders = [sorted(table, key=lambda tp: -table[tp]) for table in by_kind]
        best = orders[1][0]
        shown = (" > ".join(map(str, order)) for order in orders)
        found.append(
            {
                "gpu": system,
                "model": model,
                **dict(zip(("static", "simulated", "plain"), shown, strict=True)),
                "tau_static": kendall_tau(static, simulated),
                "tau_plain": kendall_tau(plain, simulated),
                "ratio": static[best] / simulated[best],
            }
        )
    RESULT.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    print(summary(found))


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two sentences and a table, a line for each GPU."""
    lines = ["| GPU | models | same order | static / simulated tokens/s |", "|---|---|---|---|"]
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        mine = [row for row in rows if row["gpu"] == gpu]
        same = sum(row["tau_static"] == 1.0 for row in mine)
        ratios = [row["ratio"] for row in mine]
        lines.append(f"| {gpu} | {len(mine)} | {same} | {min(ratios):.2f} to {max(ratios):.2f} |")
    text = []
    for name in ("static", "plain"):
        best = sum(row[name].split(" ")[0] == row["simulated"].split(" ")[0] for row in rows)
        tau = mean(row[f"tau_{name}"] for row in rows)
        text.append(f"- `{name}`: the simulation's best degree in {best} of {len(rows)}; mean tau {tau:.3f}.")
    return "\n".join([*text, "", *lines])


if __name__ == "__main__":
    main()
