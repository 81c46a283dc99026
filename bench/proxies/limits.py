"""What a proxy bears: many streams, large bodies, long service, several workers.

`python bench/proxies/limits.py streams|open|bodies|growth|workers [--proxies hetlb]` runs one of

- streams: 1,000 streams at 20 tokens a second; inter-token times against the same run without a proxy
- open: 5,000 open streams; errors, resident memory of each
- bodies: 8 MiB of JSON, 64 MiB multipart, 300,000 token ids, one-byte chunks both ways, 1 MB events; CPU per
  byte
- growth: resident memory over 500,000 requests after warm-up
- workers: CPU per request of `--workers 1` and 2 on the same cores, shares of the instances

and writes `bench/results/proxies-NAME.json`. Promise: an answer that was not right is told, its run is void.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from document import about, save
from peers import ROOT, peer
from rig import DIRECT, Rig, cores, one_at_a_time
from scenarios import paced, scenarios

Row = dict[str, Any]
Measure = Callable[..., Row]
_MIB = 1 << 20


def main() -> int:
    """Run one of the measurements, print and record it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(_MEASUREMENTS))
    parser.add_argument("--proxies", help="default hetlb; workers: hetlb,hetlb-workers2")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="growth: always 1")
    parser.add_argument("--proxy-core", type=cores, default="0", metavar="CORES")
    parser.add_argument("--generator-core", type=cores, default="1", metavar="CORES")
    args = parser.parse_args()
    default = "hetlb,hetlb-workers2" if args.name == "workers" else "hetlb"
    names = (args.proxies or default).split(",")
    try:
        for name in names:
            peer(name).install()
    except ValueError as error:
        parser.error(f"--proxies: {error}")
    document: dict[str, Any] = {"about": about("bench/proxies/limits.py", map(peer, names)), "runs": []}
    with Rig(args.instances, args.proxy_core, args.generator_core) as rig:
        for number in range(1 if args.name == "growth" else args.rounds):
            for name in (DIRECT, *names) if args.name in ("streams", "open", "bodies") else names:
                with one_at_a_time():
                    if failed := rig.place([] if name == DIRECT else [name], 2.0):
                        print(f"not measured: {failed[name]}", file=sys.stderr)
                        return 1
                    for row in _MEASUREMENTS[args.name](functools.partial(rig.measure, name)):
                        document["runs"].append({"proxy": name, "round": number, **row})
                        print(_line(document["runs"][-1]), flush=True)
                    rig.remove()
    save(document, ROOT / "bench" / "results" / f"proxies-{args.name}.json")
    print(_summary(args.name, document["runs"], names))
    return 0


def _streams(measure: Measure) -> list[Row]:
    return [{"scenario": "1000 x 20/s", **measure(**paced(1000, 50, 20.0))}]


def _open(measure: Measure) -> list[Row]:
    few = measure(**paced(1, 1000, 2.0))
    many = measure(**paced(5000, 1000, 10.0))
    per_stream = (many.get("rss", 0) - few.get("rss", 0)) / 4999
    return [{"scenario": "5000 open", "stream_bytes": per_stream, **many}]


#: Name, load, bytes that pass in one request.
_BODIES: tuple[tuple[str, Row, int], ...] = (
    ("8 MiB JSON", {"mode": "json", "size": 8 * _MIB - 4096, "requests": 30}, 8 * _MIB),
    ("64 MiB multipart", {"mode": "multipart", "size": 63 * _MIB, "requests": 8}, 63 * _MIB),
    ("300,000 token ids", {"mode": "tokens", "size": 300_000, "requests": 30}, 2_250_000),
    # More of them than a request may have would be refused.
    ("15,000 one-byte chunks up", {"mode": "bytewise-up", "size": 15_000, "requests": 130}, 15_000),
    ("100,000 one-byte chunks down", {"mode": "bytewise", "chunks": 400, "requests": 20}, 100_000),
)


def _bodies(measure: Measure) -> list[Row]:
    rows = []
    for name, load, size in _BODIES:
        found = measure(connections=1, warmup=2, **load)
        if not found["errors"]:
            found.pop("void", None)  # the cost of a byte does not depend on who was the slowest
        rows.append({"scenario": name, "bytes": load["requests"] * size, **found})
    events = measure(mode="paced", connections=2, chunks=60, pace_us=50_000, padding=1_000_000, window_s=2.0)
    rows.append({"scenario": "1 MB events", "bytes": events["events"] * 1_000_250, **events})
    for row in rows:
        if "void" not in row:
            row["ns_per_byte"] = (row["cpu_ns"] - row["idle_ns"]) / row["bytes"]
    return rows


def _growth(measure: Measure) -> list[Row]:
    plain: Row = {"mode": "plain", "connections": 32, "requests": 90_000, "timeout_s": 600.0}
    streams: Row = {
        "mode": "coalesced",
        "connections": 32,
        "chunks": 16,
        "requests": 10_000,
        "timeout_s": 600.0,
    }
    measure(**{**plain, "requests": 40_000})
    measure(**streams)
    rows = []
    for number in range(5):
        measure(**plain)
        rows.append({"scenario": f"after {(number + 1) * 100_000:,}", **measure(**streams)})
    return rows


def _workers(measure: Measure) -> list[Row]:
    wanted = ("plain@32", "plain@512", "paced5@32")
    return [
        {"scenario": name, **measure(**load)}
        for name, load in scenarios(20_000, 3.0).items()
        if name in wanted
    ]


_MEASUREMENTS: dict[str, Callable[[Measure], list[Row]]] = {
    "streams": _streams,
    "open": _open,
    "bodies": _bodies,
    "growth": _growth,
    "workers": _workers,
}


def _line(row: Row) -> str:
    """One run in one line."""
    told = [f"{row['proxy']:15s} {row['scenario']:28s}"]
    if "us" in row:
        told.append(f"{row['us']:9.1f} us")
    told.append(f"errors {sum(row['errors'].values())}")
    if "ns_per_byte" in row:
        told.append(f"{row['ns_per_byte']:.3f} ns a byte")
    if row["gap_ms"]:
        told.append(f"gaps p50 {row['gap_ms']['p50']:.3f} p99 {row['gap_ms']['p99']:.3f} ms")
    if "stream_bytes" in row:
        told.append(f"{row['stream_bytes'] / 1024:.1f} KiB a stream")
    if row.get("rss"):
        told.append(f"RSS {row['rss'] / _MIB:.2f} MiB")
    served = row["engine"]["served"]
    if len(served) > 1:
        told.append("shares " + " ".join(f"{count / sum(served):.1%}" for count in served))
    return "  ".join([*told, row.get("void", "")])


def _summary(name: str, runs: list[Row], names: list[str]) -> str:
    """What the acceptance asks of the measurement, from the runs that count."""

    def values(proxy: str, value: Callable[[Row], float], scenario: str = "") -> list[float]:
        return [
            value(row)
            for row in runs
            if row["proxy"] == proxy and "void" not in row and scenario in ("", row["scenario"])
        ]

    def median(found: list[float]) -> float:
        return statistics.median(found) if found else float("nan")

    lines = []
    for proxy in names:
        if name == "streams":
            p99, bare = (values(who, lambda row: row["gap_ms"]["p99"]) for who in (proxy, DIRECT))
            added = median([a - b for a, b in zip(p99, bare, strict=False)])
            lines.append(f"{proxy}: inter-token p99 {median(p99):.2f} ms, {added:.2f} ms added (at most 20)")
        elif name == "open":
            size = median(values(proxy, lambda row: row["stream_bytes"] / 1024))
            lines.append(f"{proxy}: {size:.1f} KiB a stream (at most 64)")
        elif name == "growth":
            rss = values(proxy, lambda row: row["rss"] / _MIB)
            growth = (rss[-1] - rss[0]) / (len(rss) - 1) if len(rss) > 1 else float("nan")
            lines.append(f"{proxy}: {growth:.2f} MiB per 100,000 requests (at most 1)")
        elif name == "workers" and proxy != names[0]:
            for scenario in dict.fromkeys(row["scenario"] for row in runs):
                ours, one = (values(who, lambda row: row["us"], scenario) for who in (proxy, names[0]))
                ratio = median([a / b for a, b in zip(ours, one, strict=False)])
                most = 1.05 if scenario.startswith("paced") else 1.45
                lines.append(f"{proxy} {scenario}: {ratio:.2f} x {names[0]} (at most {most})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
