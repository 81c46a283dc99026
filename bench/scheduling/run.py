"""Cases of traffic under every policy: `python bench/scheduling/run.py --data DIR --only shared`.

`DIR/hw` and `DIR/traces` hold the measured grids and the public traces. Prints a line per case as it is
done, and writes the figures and ratios as JSON (`--out`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traffic import CASES, FIGURES, POLICIES, Bench, Case, compare

_bench: Bench | None = None


def _start(data: Path) -> None:
    global _bench
    _bench = Bench(data)


def _run(task: tuple[Case, tuple[str, ...], tuple[int, ...]]) -> tuple[Case, dict[str, Any]]:
    """One case under all policies: the bound and the plans are made once."""
    assert _bench is not None, "expected the data to be read"
    case, policies, seeds = task
    began = time.monotonic()
    figures = {policy: [_bench.run(case, policy, seed) for seed in seeds] for policy in policies}
    document = {"case": case.name, "fleet": case.fleet, "traffic": case.traffic, "rate": _bench.rate(case)}
    if document["rate"] == float("inf"):
        document["rate"] = "inf"
    return case, {**document, **compare(figures), "took_s": round(time.monotonic() - began, 1)}


def _table_line(name: str, document: dict[str, Any]) -> str:
    """The ratios that count, `hetlb` to the best other policy; absolute figures where there is none."""
    cells = [f"{name:34s}"]
    for key, label in (
        ("total_token_throughput", "tok/s"), ("mean_ttft_ms", "mean TTFT"), ("p99_ttft_ms", "p99 TTFT"),
        ("p99_e2el_ms", "p99 E2E"), ("mean_tpot_ms", "TPOT"),
    ):  # fmt: skip
        found = document["ratios"].get(key)
        if found is not None and found["ratio"] is not None:
            shown = found["hetlb"] if key == "total_token_throughput" else found["hetlb"] / 1e3
            cells.append(f"{label} {found['ratio']:5.2f} x {found['by']} ({shown:.4g})")
    own = document["policies"].get("hetlb")
    if own is not None:
        cells.append(f"preempted {own['preemptions']:.0f} failed {own['failed']:.0f}")
        if own["slowest_group_s"]:
            best = document["ratios"].get("slowest_group_s", {}).get("best_other", 0.0)
            cells.append(f"slowest group {own['slowest_group_s']:.1f} s (other {best:.1f})")
    return " | ".join([*cells, f"{document['took_s']} s"])


def _results(
    data: Path, tasks: list[tuple[Case, tuple[str, ...], tuple[int, ...]]], jobs: int
) -> Iterator[tuple[Case, dict[str, Any]]]:
    if jobs == 1:
        _start(data)
        yield from map(_run, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _start, (data,)) as pool:
        yield from pool.imap(_run, tasks)


def write(path: Path, documents: list[dict[str, Any]], seeds: int) -> None:
    """The record as JSON, a case to a line, in five digits."""
    today = datetime.now(UTC).date().isoformat()
    command = "python bench/scheduling/run.py --data DIR"
    head = json.dumps({"date": today, "command": command, "seeds": seeds, "figures": list(FIGURES)})
    cases = ",\n".join(json.dumps(_rounded(document)) for document in documents)
    path.write_text(f'{head[:-1]}, "cases": [\n{cases}\n]}}\n')


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> int:
    """Run what is asked for, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="holds hw/ and traces/")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name it matches anywhere")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds of each, for medians")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    args = parser.parse_args()
    chosen = [case for case in CASES if re.search(args.only, case.name)]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if args.data is None:
        parser.error("--data: expected a folder with hw/ and traces/")
    policies = tuple(args.policies.split(","))
    tasks = [(case, policies, tuple(range(1, args.seeds + 1))) for case in chosen]
    documents = []
    for case, document in _results(args.data, tasks, args.jobs):
        documents.append(document)
        print(_table_line(case.name, document), flush=True)
    if args.out is not None:
        write(args.out, documents, args.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
