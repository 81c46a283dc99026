"""What a proxy costs: the same work through hetlb and its peers, in turns on the same core.

`python bench/proxies/run.py --proxies hetlb,vllm-router,envoy` installs and starts the peers, runs every
scenario through each of them in rounds, writes `bench/results/proxies.json` and, with `--page`, the tables of
bench/proxies/RESULTS.md. Within a round all proxies run a scenario one right after the other; ratios are
taken within each round, then their median; a run with a wrong answer counts nowhere.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from document import about, save
from peers import PEERS, ROOT, peer
from report import tables, write_page
from rig import DIRECT, Rig, cores, one_at_a_time
from scenarios import HEADLINES, half_load, scenarios

OUT = ROOT / "bench" / "results" / "proxies.json"


def main() -> int:
    """Run the rounds, print as it goes, record."""
    args = _arguments()
    if args.page_only:
        write_page(json.loads(args.out.read_text()))
        return 0
    names = args.proxies.split(",")
    for name in names:
        peer(name).install()
    document: dict[str, Any] = {"about": about("bench/proxies/run.py", map(peer, names)), "runs": []}
    for instances in map(int, args.instances.split(",")):
        with Rig(instances, args.proxy_core, args.generator_core) as rig:
            for number in range(args.rounds):
                for row in _round(rig, names, number, args):
                    document["runs"].append({"instances": instances, "round": number, **row})
                save(document, args.out)
    print(tables(document))
    if args.page:
        write_page(document)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a proxy costs: hetlb and its peers on the same work.")
    parser.add_argument("--proxies", default="hetlb,vllm-router,aiohttp-relay", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--instances", default="2", help="engines behind the proxy: 2,8 runs both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help=f"of {', '.join(HEADLINES)} in each round")
    parser.add_argument("--requests", type=int, default=20000, help="plain requests of one measurement")
    parser.add_argument(
        "--window", type=float, default=3.0, metavar="S", help="seconds of a paced measurement"
    )
    parser.add_argument("--quiet", type=float, default=3.0, metavar="S", help="window of the idle CPU")
    parser.add_argument("--only", default="*", help="scenarios, as patterns: 'plain@32,paced5@*,half'")
    parser.add_argument("--proxy-core", type=cores, default="0", metavar="CORES")
    parser.add_argument("--generator-core", type=cores, default="1", metavar="CORES")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", action="store_true", help="renew the tables of bench/proxies/RESULTS.md")
    parser.add_argument("--page-only", action="store_true", help="renew them from the recorded result")
    args = parser.parse_args()
    for name in args.proxies.split(","):
        try:
            peer(name)
        except ValueError as error:
            parser.error(f"--proxies: {error}")
    return args


def _round(rig: Rig, names: Sequence[str], number: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every wanted scenario through every proxy, in another order each time; printed as they come."""
    with one_at_a_time():
        failed = rig.place(names, args.quiet)
    for error in failed.values():
        print(f"not measured: {error}", file=sys.stderr)
    names = [name for name in names if name not in failed]
    fast, slow = (scenarios(args.requests, args.window, slow) for slow in (False, True))
    closed: dict[str, float] = {}

    def measure(name: str, scenario: str, load: dict[str, Any], label: str = "") -> dict[str, Any]:
        row = {"proxy": label or name, "scenario": scenario, **rig.measure(name, **load)}
        print(_line(row), flush=True)
        return row

    for turn, scenario in enumerate(fast):
        if not _wanted(scenario, args.only):
            continue
        for repeat in range(args.repeats if scenario in HEADLINES else 1):
            first = (turn + number + repeat) % len(names)
            with one_at_a_time():
                for name in (DIRECT, *names[first:], *names[:first]):
                    loads = slow if name != DIRECT and peer(name).slow else fast
                    if scenario in loads:
                        row = {"repeat": repeat, **measure(name, scenario, loads[scenario])}
                        if scenario == "plain@32" and "wall_s" in row:
                            closed[name] = row["answers"] / row["wall_s"]
                        yield row
    if _wanted("half", args.only):
        for name in names:
            if name in closed:
                load = half_load(closed[name], args.window)
                with one_at_a_time():
                    yield measure(name, "half", load)
                    yield measure(DIRECT, "half-direct", load, label=name)
    rig.remove()


def _wanted(scenario: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(scenario, pattern) for pattern in patterns.split(","))


def _line(run: dict[str, Any]) -> str:
    cost = f"{run['us']:8.1f} us" if "us" in run else "       - us"
    p50 = (run["latency_ms"] or run["gap_ms"]).get("p50", 0.0)
    return (
        f"{run['proxy']:14s} {run['scenario']:13s} {cost}  p50 {p50:7.3f} ms"
        f"  proxy {run.get('proxy_busy', 0):4.0%} generator {run.get('generator_busy', 0):4.0%}"
        f" others {run.get('others', 0):4.0%}  {run.get('void', '')}"
    )


if __name__ == "__main__":
    sys.exit(main())
