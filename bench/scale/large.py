"""Large fleets in virtual time: what a decision costs, and whether balance suffers.

`python bench/scale/large.py --instances 100,1000 --seconds 2` prints a line a fleet: the CPU of `on_arrival`
(mean and p99, microseconds), throughput per instance, TTFT, and the share of each kind of instance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from fleet import KINDS, MODEL, fleet, load, rows

from hetlb.build import compiled
from hetlb.core.types import Command, Request
from hetlb.sim.fleet import FleetSimulation


class Timed(FleetSimulation):
    """A fleet whose decisions are timed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.took_s: list[float] = []

    def _arrived(self, scheduler: Any, request: Request) -> list[Command]:
        began = time.thread_time()
        commands: list[Command] = scheduler.on_arrival(request, self._now)
        self.took_s.append(time.thread_time() - began)
        return commands


def main() -> None:
    """Run each fleet and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", default="100,1000")
    parser.add_argument("--rate", type=float, default=5.0, help="requests/s per instance")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    lengths = rows()
    for count in map(int, args.instances.split(",")):
        setup, engines = fleet(count, lengths)
        plan = load(lengths, int(count * args.rate * args.seconds), count * args.rate)
        began = time.thread_time()
        simulation = Timed(setup, engines, plan, model=MODEL)
        result = simulation.run()
        cpu_s = time.thread_time() - began
        summary = result.summary()
        tokens: dict[str, list[float]] = {}
        for each in summary["instances"]:
            kind = KINDS[int(each["name"][1:]) % len(KINDS)]
            tokens.setdefault(kind, []).append(each["total_output_tokens"])
        took = sorted(simulation.took_s)
        print(
            json.dumps(
                {
                    "instances": count,
                    "requests": len(plan),
                    "compiled": compiled(),
                    "decision_us": round(statistics.mean(took) * 1e6, 1),
                    "decision_p99_us": round(took[int(0.99 * len(took))] * 1e6, 1),
                    "cpu_s": round(cpu_s, 1),
                    "output_throughput_per_instance": round(summary["output_throughput"] / count, 1),
                    "mean_ttft_ms": round(summary["mean_ttft_ms"], 2),
                    "p99_ttft_ms": round(summary["p99_ttft_ms"], 2),
                    "shares": {
                        kind: round(sum(each) / summary["total_output_tokens"], 4)
                        for kind, each in tokens.items()
                    },
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
