"""Large fleets in virtual time: what a decision costs, and whether balance suffers.

`python bench/scale/large.py --instances 100,1000 --seconds 2` prints a line a fleet: the CPU of `on_arrival`
(mean and p99, microseconds), throughput per instance, TTFT, and the share of each kind of instance. With
`--repeats N` every fleet is asked for as many requests: the smaller ones run more often, with other seeds.
TTFT is then the mean of the repeats, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from fleet import KINDS, MODEL, fleet, load, rows

from hetlb.balancer.core.types import Command, Request
from hetlb.build import compiled
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.rows import Row


class Timed(FleetSimulation):
    """A fleet whose decisions are timed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.took_s: list[float] = []

    def _arrived(self, scheduler: Any, request: Request) -> list[Command]:
        began = time.thread_time()
        commands: list[Command] = scheduler.on_arrival(request, self._events.now)
        self.took_s.append(time.thread_time() - began)
        return commands


def run(count: int, args: argparse.Namespace, lengths: list[Row], seed: int) -> dict[str, Any]:
    """One fleet under one load: its figures, and the TTFT of every request in ms."""
    setup, engines = fleet(count, lengths)
    plan = load(lengths, int(count * args.rate * args.seconds), count * args.rate, seed)
    began = time.thread_time()
    simulation = Timed(setup, engines, plan, model=MODEL)
    result = simulation.run()
    cpu_s = time.thread_time() - began
    summary = result.summary()
    tokens: dict[str, float] = {}
    for each in summary["instances"]:
        kind = KINDS[int(each["name"][1:]) % len(KINDS)]
        tokens[kind] = tokens.get(kind, 0.0) + each["total_output_tokens"]
    return {
        "took_s": simulation.took_s,
        "cpu_s": cpu_s,
        "output_throughput": summary["output_throughput"],
        "ttft_ms": [1e3 * each.ttft_s for each in result.records if each.ttft_s is not None],
        "tokens": tokens,
    }


def pooled(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean and p99 of the TTFT of all requests of some runs, in ms."""
    ttfts = sorted(value for each in runs for value in each["ttft_ms"])
    return statistics.mean(ttfts), ttfts[int(0.99 * len(ttfts))]


def with_error(values: list[float]) -> list[float]:
    """The mean of some values, and its standard error where there are several."""
    found = [round(statistics.mean(values), 2)]
    return found if len(values) < 2 else [*found, round(statistics.stdev(values) / len(values) ** 0.5, 2)]


def main() -> None:
    """Run each fleet and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", default="100,1000")
    parser.add_argument("--rate", type=float, default=5.0, help="requests/s per instance")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    lengths = rows()
    counts = [int(each) for each in args.instances.split(",")]
    for count in counts:
        runs_each = max(counts) // count if args.repeats > 1 else 1
        repeats = [
            [run(count, args, lengths, repeat * runs_each + number) for number in range(runs_each)]
            for repeat in range(args.repeats)
        ]
        runs = [each for repeat in repeats for each in repeat]
        took = sorted(value for each in runs for value in each["took_s"])
        total = sum(sum(each["tokens"].values()) for each in runs)
        figures = [pooled(repeat) for repeat in repeats]
        print(
            json.dumps(
                {
                    "instances": count,
                    "rate": args.rate,
                    "seconds": args.seconds,
                    "requests": len(took),
                    "compiled": compiled(),
                    "decision_us": round(statistics.mean(took) * 1e6, 1),
                    "decision_p99_us": round(took[int(0.99 * len(took))] * 1e6, 1),
                    "cpu_s": round(sum(each["cpu_s"] for each in runs) / len(runs), 1),
                    "output_throughput_per_instance": round(
                        statistics.mean(each["output_throughput"] for each in runs) / count, 1
                    ),
                    "mean_ttft_ms": with_error([mean for mean, _ in figures]),
                    "p99_ttft_ms": with_error([p99 for _, p99 in figures]),
                    "shares": {
                        kind: round(sum(each["tokens"].get(kind, 0.0) for each in runs) / total, 4)
                        for kind in dict.fromkeys(KINDS)
                    },
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
