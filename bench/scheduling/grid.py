"""The scheduler on the grid of cases: `hetlb` against every other policy, `bound` and `split`, recorded.

`python bench/scheduling/grid.py --data DIR` with `DIR/hw` (measured grids) and `DIR/traces`; writes
`bench/results/scheduling.json`, section by section, and the tables of bench/scheduling/RESULTS.md.
Sections not asked for (`--only`) stay as they were recorded. With `--runs FILE` finished runs are kept, so
that a second call goes on where the first stopped. All sections but the ones that take an ingredient out
(`INTERPRETED`) run several times as fast with hetlb compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cases import FLEETS, Lab
from measure import (
    HELD_OUT,
    HELD_OUT_SEED,
    Case,
    Runs,
    ablate,
    at_once,
    compiled,
    held_out_fleets,
    mishaps,
    moderate,
    simulate,
    uncorrected,
)
from show import RESULT, verdicts, write_page


class Grid:
    """The sections by name, and what several of them need."""

    def __init__(self, lab: Lab, runs: Runs, seeds: int, fleets: int) -> None:
        self._lab = lab
        self._runs = runs
        self._seeds = range(1, 1 + seeds)
        self.sections: dict[str, Callable[[], list[Any]]] = {
            "at_once": lambda: at_once(runs, FLEETS, ("normal", "empirical", "online", "oracle"), 0),
            "held_out": lambda: at_once(
                runs, held_out_fleets(lab.layouts), ("empirical", "oracle"), HELD_OUT_SEED
            ),
            "moderate": lambda: moderate(runs, self.full, self._seeds),
            "mishaps": lambda: mishaps(runs, self.full),
            "uncorrected": lambda: uncorrected(runs, self.full),
            "ablations": lambda: ablate(runs, dict(list(held_out_fleets(lab.layouts).items())[:fleets])),
        }

    def _cases(self) -> dict[tuple[str, str], Case]:
        keys = [(fleet, trace) for fleet in FLEETS for trace in ("sharegpt", "azure")]
        return {key: Case(key[0], FLEETS[key[0]], key[1], "empirical", "hetlb") for key in keys}

    @cached_property
    def full(self) -> dict[tuple[str, str], float]:
        """Requests/s of `hetlb` with all requests at once, by fleet and trace."""
        cases = self._cases()
        figures = self._runs(simulate, cases.values(), "full rate")
        return {key: figures[case]["request_throughput"] for key, case in cases.items()}


#: Sections that take an ingredient of `hetlb` out by its name, which compiled code has not.
INTERPRETED = ("uncorrected", "ablations")
SECTIONS = ("at_once", "held_out", "moderate", "mishaps", *INTERPRETED)


def main() -> int:
    """Run, record, print the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section, may be repeated")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keeps finished runs of the same sources")
    parser.add_argument("--per-instance", type=int, default=1500, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of the moderate rates")
    parser.add_argument("--fleets", type=int, default=HELD_OUT, metavar="N", help="of the ablations")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--page-only", action="store_true", help="write the page from the recorded result")
    args = parser.parse_args()
    if args.page_only:
        write_page()
        return 0
    wanted = args.only or SECTIONS
    if compiled() and not set(wanted).isdisjoint(INTERPRETED):
        parser.error(f"--only: {', '.join(INTERPRETED)} need hetlb interpreted, and it is compiled")
    lab = Lab(args.data / "hw", args.data / "traces")
    runs = Runs(args.data, args.per_instance, args.jobs, args.runs)
    grid = Grid(lab, runs, args.seeds, args.fleets)
    try:
        for name in wanted:
            began = time.monotonic()
            _record(name, grid.sections[name](), began, args.per_instance)
    finally:
        runs.close()
    document = json.loads(RESULT.read_text())
    if all(name in document for name in SECTIONS):
        write_page()
        for asked, measured in verdicts(document):
            print(f"{asked}: {measured}")
    return 0


def _record(name: str, rows: list[Any], began: float, per_instance: int) -> None:
    """Put a section into the record, beside what it holds already."""
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    document.setdefault("made", {})[name] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python bench/scheduling/grid.py --data DIR --only {name}",
        "python": platform.python_version(),
        "compiled": compiled(),
        "requests_per_instance": per_instance,
        "took_s": round(time.monotonic() - began),
    }
    document[name] = rows
    ordered = {key: document[key] for key in ("made", *SECTIONS) if key in document}
    text = json.dumps(ordered, indent=1, allow_nan=False) + "\n"
    new = RESULT.with_suffix(".new")
    new.write_text(text)
    new.replace(RESULT)


if __name__ == "__main__":
    sys.exit(main())
