"""Whether several workers balance as one does: the same load on the same emulated engines, in turns.

`python bench/workers_balance.py [--workers 4] [--rounds 3]` starts two engines of unequal speed (the ones of
the demo) and, over both, hetlb with one worker and with N. Every round sends each of them the same load: all
requests at once, and random arrivals at RATE, after a warm-up in which each learns the lengths. Prints
each run, then the medians: tokens/s and p99 (TTFT, E2E) of N against one, and by how many points the share
of the faster engine (of output tokens) differs. Writes `bench/results/workers-balance.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

import hetlb
from hetlb.build import compiled
from hetlb.tools.loadtest.processes import Helpers, helper_processes

OUT = Path(__file__).parent / "results" / "workers-balance.json"
MODEL = "m"
ENGINES = ("fast", "slow")


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=1200)
    parser.add_argument("--rate", type=float, default=40.0, metavar="RATE", help="requests/s")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with helper_processes() as helpers, resources.as_file(resources.files("hetlb.tools.demo")) as data:
        document = asyncio.run(_measure(args, helpers, data))
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


async def _measure(args: argparse.Namespace, helpers: Helpers, data: Path) -> dict[str, Any]:
    engines = [
        helpers.start(
            f"engine {name}", "engine", "--profile", str(data / f"{name}.yaml"), "--port", "0",
            "--served-model-name", MODEL,
        )
        for name in ENGINES
    ]  # fmt: skip
    for engine in engines:
        await engine.ready()
    instances = [
        {"name": name, "url": engine.urls[0], "profile": str(data / f"{name}.yaml")}
        for name, engine in zip(ENGINES, engines, strict=True)
    ]
    fleet = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [{"name": MODEL, "instances": instances}],
    }
    file = args.out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(fleet))
    proxies = {}
    try:
        for workers in (1, args.workers):
            proxies[workers] = helpers.start(
                f"{workers} workers", "serve", "--config", str(file), "--workers", str(workers)
            )
            await proxies[workers].ready()
    finally:
        file.unlink()
    loads = {"at once": "inf", f"{args.rate:g} requests/s": str(args.rate)}
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds + 1):  # the first one warms up
        for load, rate in loads.items():
            for workers, proxy in proxies.items():
                run = await _load(proxy.urls[0], data / "trace.csv", rate, args.num_prompts, number)
                run |= {"round": number, "load": load, "workers": workers}
                if number:
                    runs.append(run)
                    print(
                        f"{number} {load:16} workers {workers} {run['total_token_throughput']:8.0f} tokens/s",
                        f" share of {ENGINES[0]} {run['share']:.1%}  p99 TTFT {run['p99_ttft_ms']:.0f} ms",
                        f" failed {run['failed']}",
                        flush=True,
                    )
    told = {load: _compare(runs, load, args.workers) for load in loads}
    for load, each in told.items():
        print(
            f"{load}: throughput x {each['throughput']:.3f}, p99 TTFT x {each['p99_ttft']:.3f},"
            f" p99 E2E x {each['p99_e2el']:.3f}, share {each['share_points']:+.1f} points"
        )
    return {
        "command": "python bench/workers_balance.py " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "hetlb": f"{hetlb.__version__}, {'compiled' if compiled() else 'interpreted'}",
        "compared": told,
        "runs": runs,
    }


async def _load(url: str, trace: Path, rate: str, prompts: int, seed: int) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "bench", "--url", url, "--model", MODEL, "--trace", str(trace),
        "--num-prompts", str(prompts), "--request-rate", rate, "--seed", str(seed), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"hetlb bench ended with status {process.returncode}")
    [run] = json.loads(output)["runs"]
    tokens = {each["name"]: each["total_output_tokens"] for each in run["instances"]}
    kept = ("total_token_throughput", "p99_ttft_ms", "p99_e2el_ms", "completed", "failed", "duration")
    return {name: run[name] for name in kept} | {"share": tokens[ENGINES[0]] / sum(tokens.values())}


def _compare(runs: list[dict[str, Any]], load: str, workers: int) -> dict[str, float]:
    """Medians over the rounds of N against one, each pair of the same round."""
    mine = {(run["round"], run["workers"]): run for run in runs if run["load"] == load}
    pairs = [(mine[number, workers], mine[number, 1]) for number, count in mine if count == 1]

    def ratio(figure: str) -> float:
        return float(statistics.median(many[figure] / one[figure] for many, one in pairs))

    return {
        "throughput": ratio("total_token_throughput"),
        "p99_ttft": ratio("p99_ttft_ms"),
        "p99_e2el": ratio("p99_e2el_ms"),
        "share_points": statistics.median(100.0 * (many["share"] - one["share"]) for many, one in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
