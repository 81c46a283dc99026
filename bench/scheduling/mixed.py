"""Mixed classes: `python bench/scheduling/mixed.py --data DIR`, the table of bench/scheduling/RESULTS.md.

Of the requests 30 % are interactive (first token within 1 s, 50 ms per further one), the rest is background,
at 90 and 120 % of what the fleet does of them all at once. Background prompts are as long as all others, or
2,000 to 6,000 tokens. Beside `hetlb` with the two classes stands the best fixed limit: `max_num_seqs` of all
servers the same, priorities, no classes, and the limit chosen afterwards for each case: the one with the
most background tokens that attains 0.95; else the one with the highest attainment.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cases import FLEETS, MODEL, Lab
from measure import compiled
from show import MIXED as RESULT
from show import mixed_rows, write_page

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import Request
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import summarize

MIXED = ("4 kinds tp2", "70B", "14B 3xl40s+a100")
LOADS = (0.9, 1.2)
PROMPTS = ("own", "long")
#: `max_num_seqs` of all servers; 0 is `hetlb` with classes.
LIMITS = (0, 8, 16, 32, 64, 128, 256)
SHARE = 0.3
ATTAINMENT = 0.95
CLASSES = {
    "interactive": ServiceClass("interactive", ttft_s=1.0, tpot_s=0.05, attainment=ATTAINMENT),
    "background": ServiceClass("background", background=True),
}


@dataclass(frozen=True, slots=True)
class Mixed:
    """One run; `rate` is requests/s."""

    fleet: str
    load: float
    prompts: str
    limit: int
    rate: float = math.inf


class Prioritised(FleetSimulation):
    """Priorities without classes."""

    def make_request(self, planned: PlannedRequest) -> Request:
        """The interactive go first."""
        priority = int(planned.row.service == "background")
        return replace(super().make_request(planned), priority=priority)


_lab: Lab | None = None
_per_instance = 0


def _start(data: Path, per_instance: int) -> None:
    global _lab, _per_instance
    _lab, _per_instance = Lab(data / "hw", data / "traces"), per_instance


def run(case: Mixed) -> dict[str, Any]:
    """Attainment and tokens/s of the classes, requests/s."""
    assert _lab is not None, "expected the data to be read"
    specs, engines = _lab.fleet(FLEETS[case.fleet])
    rng = random.Random(7)
    plan = []
    for planned in _lab.plan("sharegpt", _per_instance * len(specs), case.rate, 7):
        if rng.random() < SHARE:
            plan.append(replace(planned, row=replace(planned.row, service="interactive")))
            continue
        prompt = planned.prompt_tokens if case.prompts == "own" else rng.randint(2000, 6000)
        plan.append(replace(planned, row=replace(planned.row, service="background", input_tokens=prompt)))
    if case.limit:
        specs = tuple(
            replace(each, capacity=replace(each.capacity, max_num_seqs=case.limit)) for each in specs
        )
    setup = _lab.setup(specs, "hetlb", "empirical", "sharegpt", 7)
    if case.limit:
        result = Prioritised(setup, engines, plan, model=MODEL).run()
    else:
        result = FleetSimulation(setup, engines, plan, model=MODEL, classes=CLASSES).run()
    figures = summarize(result.records, classes=CLASSES)
    interactive, background = (figures["classes"][name] for name in CLASSES)
    return {
        "attainment": interactive["attainment"],
        "interactive_p99_ttft_ms": interactive["p99_ttft_ms"],
        "interactive_mean_tpot_ms": interactive["mean_tpot_ms"],
        "background_tok_s": background["output_throughput"],
        "request_throughput": figures["request_throughput"],
    }


def study(runs: dict[Mixed, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each fleet, load and kind of prompts."""
    rows = []
    for own in (case for case in runs if not case.limit):
        limits = {str(limit): runs[replace(own, limit=limit)] for limit in LIMITS if limit}
        attained = {name: min(each["attainment"], ATTAINMENT) for name, each in limits.items()}
        best = max(limits, key=lambda name: (attained[name], limits[name]["background_tok_s"]))
        rows.append(
            {
                "fleet": own.fleet, "load": own.load, "prompts": own.prompts, "hetlb": runs[own],
                "best_limit": best, "limits": limits,
            }
        )  # fmt: skip
    return rows


def main() -> int:
    """Run, record, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    parser.add_argument("--per-instance", type=int, default=800, metavar="N")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", action="append", choices=MIXED, help="a fleet; nothing is recorded")
    args = parser.parse_args()
    once = [Mixed(fleet, 1.0, prompts, 256) for fleet in args.only or MIXED for prompts in PROMPTS]
    with multiprocessing.get_context("spawn").Pool(args.jobs, _start, (args.data, args.per_instance)) as pool:
        full = dict(zip(once, pool.map(run, once, 1), strict=True))
        cases = [
            replace(case, load=load, limit=limit, rate=load * figures["request_throughput"])
            for case, figures in full.items()
            for load in LOADS
            for limit in LIMITS
        ]
        rows = study(dict(zip(cases, pool.map(run, cases, 1), strict=True)))
    for row in mixed_rows(rows):
        print(" | ".join(row))
    if not args.only:
        made = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "compiled": compiled(),
            "requests_per_instance": args.per_instance,
        }  # fmt: skip
        RESULT.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
        write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
