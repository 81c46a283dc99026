"""The scheduler on the grid of cases: `hetlb` against every other policy, `bound` and `split`, recorded.

`python bench/scheduling/grid.py --data DIR` with `DIR/hw` (measured grids) and `DIR/traces`; writes
`bench/results/scheduling.json` and the tables of docs/evidence-simulation.md.
The page says what the recorded result says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from cases import FLEETS, Lab
from decisions import decision_times
from measure import (
    HELD_OUT_SEED,
    Case,
    Runs,
    ablate,
    at_once,
    held_out_fleets,
    mishaps,
    moderate,
    simulate,
)
from show import RESULT, verdicts, write_page


def main() -> int:
    """Run, record, print the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    parser.add_argument("--per-instance", type=int, default=1500, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of the moderate rates")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--page-only", action="store_true", help="write the page from the recorded result")
    args = parser.parse_args()
    if args.page_only:
        write_page()
        return 0
    lab = Lab(args.data / "hw", args.data / "traces")
    runs = Runs(args.data, args.per_instance, args.jobs)
    began = time.monotonic()
    try:
        grid = at_once(runs, FLEETS, ("normal", "empirical", "online", "oracle"), 0)
        held_out = at_once(runs, held_out_fleets(lab.layouts), ("empirical", "oracle"), HELD_OUT_SEED)
        keys = [(f, t) for f in FLEETS for t in ("sharegpt", "azure")]
        once = runs(simulate, (Case(f, FLEETS[f], t, "empirical", "hetlb") for f, t in keys), "full rate")
        full = {(case.fleet, case.trace): figures["request_throughput"] for case, figures in once.items()}
        bounds = {(r["fleet"], r["trace"]): r["bound"] for r in grid}
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", "bench/scheduling/grid.py", "--data", "DIR", *sys.argv[3:]]),
            "python": platform.python_version(),
            "requests_per_instance": args.per_instance,
            "at_once": grid,
            "held_out": held_out,
            "moderate": moderate(runs, full, range(1, 1 + args.seeds)),
            "mishaps": mishaps(runs, full),
            "ablations": ablate(runs, full, bounds),
            "decisions": decision_times(args.data),
        }
    finally:
        runs.close()
    document["took_s"] = round(time.monotonic() - began)
    RESULT.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_page()
    for asked, measured in verdicts(document):
        print(f"{asked}: {measured}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
