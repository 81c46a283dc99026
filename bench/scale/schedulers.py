"""Several schedulers over one fleet, with news of each other after a delay, against one scheduler.

`python bench/scale/schedulers.py --counts 2,4,8 --delays 1,10,100 --load 0.8 --seeds 5` prints a line a run:
throughput and TTFT as ratios to one scheduler's, with and without the assumption that peers do alike, and
blind; then the mean of each cell over the seeds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from fleet import MODEL, fleet, load, rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from options.peers.shared_simulation import SharedSimulation

from hetlb.build import compiled
from hetlb.tools.sim.fleet_simulation import FleetSimulation

FIGURES = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "p99_e2el_ms",
)  # fmt: skip
OUT = Path(__file__).parents[1] / "results" / "scale-schedulers.json"


def figures(result: Any) -> dict[str, float]:
    """The pairs that are compared."""
    summary = result.summary()
    return {key: summary[key] for key in FIGURES}


def means(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per cell and figure: the mean over the seeds, the least and the most."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        if run["schedulers"] > 1:
            cells.setdefault((run["schedulers"], run["delay"], run["expects"]), []).append(run)
    found = []
    for (count, delay, expects), cell in cells.items():
        row: dict[str, Any] = {"schedulers": count, "delay": delay, "expects": expects, "seeds": len(cell)}
        for key in FIGURES:
            values = [each[key] for each in cell]
            row[key] = [round(value, 3) for value in (statistics.mean(values), min(values), max(values))]
        found.append(row)
    return found


def main() -> None:
    """Run the cells, print and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument(
        "--load", type=float, default=0.8, help="share of what all at once reaches; 0: at once"
    )
    parser.add_argument("--counts", default="2,4,8")
    parser.add_argument("--delays", default="1,10,100", help="ms")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []

    def add(line: dict[str, Any]) -> None:
        runs.append(line)
        print(json.dumps(line), flush=True)

    lengths = rows()
    setup, engines = fleet(args.instances, lengths)
    for seed in range(args.seeds):
        at_once = load(lengths, args.requests, 0.0, seed)
        most = figures(FleetSimulation(setup, engines, at_once, model=MODEL).run())["request_throughput"]
        plan = load(lengths, args.requests, args.load * most, seed) if args.load else at_once
        one = figures(FleetSimulation(setup, engines, plan, model=MODEL).run())
        add({"seed": seed, "schedulers": 1, "rate": args.load * most, **one})
        for count in map(int, args.counts.split(",")):
            for mode in ("blind", *args.delays.split(",")):
                for expects in (False,) if mode == "blind" else (False, True):
                    began = time.perf_counter()
                    delay_s = 0.0 if mode == "blind" else float(mode) / 1e3
                    simulation = SharedSimulation(
                        setup, engines, plan, model=MODEL, count=count, delay_s=delay_s,
                        blind=mode == "blind", expects=expects,
                    )  # fmt: skip
                    each = figures(simulation.run())
                    ratios = {key: round(each[key] / one[key], 4) for key in one}
                    took = round(time.perf_counter() - began, 1)
                    line = {"seed": seed, "schedulers": count, "delay": mode, "expects": expects, **ratios}
                    add({**line, "wall_s": took})
    for row in means(runs):
        print(json.dumps(row))
    document = {
        "instances": args.instances,
        "requests": args.requests,
        "load": args.load,
        "compiled": compiled(),
    }
    args.out.write_text(json.dumps({**document, "means": means(runs), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
