"""Evidence for `hetlb split`: search against exhaustive search, time, random swaps, the paper's settings.

    python bench/split/run.py PART [PART ...] [--out bench/results/split.json]

Parts: exhaustive, twenty, scale64, scale320, swaps, paper. Every part takes less than five minutes on one
core and replaces its entry in the file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import clusters

from hetlb.plan.check import check_split
from hetlb.plan.disaggregation.cluster import Cluster, Role
from hetlb.plan.disaggregation.cost import CostModel, GroupTable, PaperCost, ProfileCost
from hetlb.plan.disaggregation.exhaustive import Exhaustive
from hetlb.plan.disaggregation.search import Found, Search
from hetlb.plan.highs import SolveLimits

SPLIT_ROLES = (Role.PREFILL, Role.DECODE)


def search(of: Cluster, cost: CostModel, seconds: float, **options: Any) -> tuple[Found, float]:
    """One search from nothing, its plans checked, and its seconds."""
    began = time.monotonic()
    found = Search(GroupTable(of, cost), **options).run(SolveLimits(deadline=began + seconds))
    elapsed = time.monotonic() - began
    for plan in found.plans:
        check_split(of, plan, cost.capacity)
    return found, elapsed


def best(found: Found) -> float:
    """Requests/s of the best plan."""
    return found.plans[0].throughput if found.plans else 0.0


def exhaustive() -> Any:
    """Small clusters, both cost models: the search finds what exhaustive search finds."""
    rows = []
    for index, of in enumerate(clusters.small(30)):
        for cost in (ProfileCost(of), PaperCost(of)):
            every = Exhaustive(GroupTable(of, cost))
            began = time.monotonic()
            plan = every.run(SolveLimits())
            seconds = time.monotonic() - began
            found, elapsed = search(of, cost, 4.0)
            most = 0.0 if plan is None else plan.throughput
            rows.append(
                {
                    "cluster": index,
                    "machines": [f"{m.gpus} {m.gpu}" for m in of.machines],
                    "model": of.model.name,
                    "cost_model": type(cost).__name__,
                    "exhaustive_req_s": most,
                    "search_req_s": best(found),
                    "equal": math.isclose(most, best(found), rel_tol=1e-6),
                    "splits": bool(plan and plan.splits),
                    "exhaustive_s": seconds,
                    "search_s": elapsed,
                }
            )
    return {"equal": sum(row["equal"] for row in rows), "of": len(rows), "rows": rows}


def twenty() -> Any:
    """Settings of up to 24 GPUs: 4 s against 20 s with another seed (60 s in part `sixty`)."""
    return _against(20.0)


def sixty() -> Any:
    """Two settings: 4 s against 60 s."""
    return _against(60.0, ("het1", "het3"))


def _against(seconds: float, names: tuple[str, ...] = ("het1", "het2", "het3", "het4", "het5")) -> Any:
    rows = []
    for name in names:
        of = clusters.setting(name, "online")
        cost = ProfileCost(of)
        short, elapsed = search(of, cost, 4.0)
        long, _ = search(of, cost, seconds, seed=1)
        rows.append(
            {
                "setting": name,
                "gpus": of.gpus,
                "short_s": elapsed,
                "short_req_s": best(short),
                "long_s": seconds,
                "long_req_s": best(long),
                "short_over_long": best(short) / best(long),
            }
        )
    return rows


def _scale(gpus: int, seconds: float) -> Any:
    of = clusters.large(gpus)
    found, elapsed = search(of, ProfileCost(of), seconds)
    coarse = found.colocated.throughput if found.colocated else None
    return {"gpus": gpus, "seconds": elapsed, "req_s": best(found), "colocated_req_s": coarse}


def scale64() -> Any:
    """64 GPUs: a tenth of the time against all of it."""
    return [_scale(64, 5.0), _scale(64, 48.0)]


def scale320() -> Any:
    """320 GPUs."""
    return [_scale(320, 60.0), _scale(320, 180.0)]


def swaps() -> Any:
    """The search against the paper's truncated variant (random swaps from the partition), equal time."""
    rows = []
    for name in clusters.SETTINGS:
        for workload in ("HPLD", "LPHD", "online"):
            of = clusters.setting(name, workload)
            for cost in (ProfileCost(of),):
                guided, _ = search(of, cost, 4.0, roles=SPLIT_ROLES)
                random, _ = search(of, cost, 4.0, roles=SPLIT_ROLES, guided=False)
                rows.append(
                    {
                        "setting": name,
                        "workload": workload,
                        "guided_req_s": best(guided),
                        "random_req_s": best(random),
                        "ratio": best(guided) / best(random) if best(random) else None,
                    }
                )
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    return {"mean_ratio": statistics.fmean(ratios), "rows": rows}


def paper() -> Any:
    """HexGen-2's settings: output tokens/s of split and colocated plans, over those of 8 H100."""
    rows = []
    for workload in clusters.WORKLOADS:
        figures: dict[str, dict[str, float]] = {}
        for name in clusters.SETTINGS:
            of = clusters.setting(name, workload)
            entry = figures[name] = {}
            for label, cost in (("profiles", ProfileCost(of)), ("paper", PaperCost(of))):
                split, _ = search(of, cost, 2.0, roles=SPLIT_ROLES)
                any_role, _ = search(of, cost, 2.0)
                entry[f"{label}_split"] = best(split) * of.workload.output_tokens
                entry[f"{label}_any"] = best(any_role) * of.workload.output_tokens
                colocated = any_role.colocated
                entry[f"{label}_colocated"] = (
                    colocated.throughput * of.workload.output_tokens if colocated else 0.0
                )
        rows.append({"workload": workload, "tokens_per_s": figures})
    return rows


PARTS = {part.__name__: part for part in (exhaustive, twenty, sixty, scale64, scale320, swaps, paper)}


def main() -> None:
    """Run parts and keep their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/split.json"))
    args = parser.parse_args()
    for name in args.parts:
        began = time.monotonic()
        result = PARTS[name]()
        known = json.loads(args.out.read_text()) if args.out.is_file() else {}
        known[name] = {"seconds": time.monotonic() - began, "result": result}
        args.out.write_text(json.dumps(known, indent=1) + "\n")
        print(name, json.dumps(result)[:2000])


if __name__ == "__main__":
    main()
