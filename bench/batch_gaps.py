"""`hetlb batch` in the gaps of interactive traffic: what the traffic loses, and how much of the gaps is used.

Two emulated engines, an A800 and a V100, behind hetlb, whose model has a background class. Interactive
requests come at 28 requests/s for 90 s, then at 1 request/s for 90 s; a batch of 3,000 jobs runs beside them.
Promised: p99 TTFT of the interactive requests is at most 1.1 times what it is without the batch, and the
batch gets at least 0.9 of what is left over. That is its rate alone, times the share of each phase that the
interactive requests do not need (1 - their rate / the rate at which the fleet serves them alone); both rates
are simulated.

`.venv/bin/python bench/batch_gaps.py` takes seven minutes on two quiet cores; `--smoke` seconds. `--simulate`
runs the same in virtual time, for several targets of the interactive class, in a minute. Each adds its
figures to bench/results/batch_gaps.json (`--smoke` does not). Exit status 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hetlb.balancer.config.fleet import load_fleet
from hetlb.tools.loadtest.load_result import platform_document
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.study import make_study
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.records import RequestResult, percentile
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "batch_gaps.json"
PROFILES = {name: ROOT / "configs" / "profiles" / f"{name}-llama3-8b-tp1.yaml" for name in ("a800", "v100")}
MODEL = "m"
#: Tokens of the prompts and answers of both kinds, each spread evenly by half.
INTERACTIVE, JOB = (256, 64), (512, 192)
MOST_TTFT_RATIO, LEAST_USED = 1.1, 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description="hetlb batch in the gaps of interactive traffic")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each phase (default 90)")
    parser.add_argument("--rates", default="28,1", help="interactive requests/s of the phases (default 28,1)")
    parser.add_argument("--jobs", type=int, default=3000, help="of the batch (default 3000)")
    parser.add_argument("--ttft-ms", default="150", help="target of the interactive class (default 150)")
    parser.add_argument("--simulate", action="store_true", help="in virtual time, for several targets")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="seconds, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.seconds, args.rates, args.jobs = 2.0, "4,1", 20
    rates = [float(rate) for rate in args.rates.split(",")]
    kind = "simulated" if args.simulate else "emulated"
    ttft_ms = float(args.ttft_ms)
    with tempfile.TemporaryDirectory(prefix="hetlb-gaps-") as name:
        if args.simulate:
            targets = [float(each) for each in ["110", "120", "150", "200", "300", "1000"]]
            found = [simulated(Path(name), rates, args.seconds, args.jobs, each) for each in targets]
        else:
            left_over = simulated(Path(name), rates, args.seconds, args.jobs, ttft_ms)["jobs_left_over"]
            with fleet(Path(name), ttft_ms) as url:
                run = measure(Path(name), url, rates, args.seconds, args.jobs, left_over)
            found = [{"ttft_target_ms": ttft_ms} | run]
    print(json.dumps(found, indent=1))
    if not args.smoke:
        before = json.loads(args.out.read_text()) if args.out.exists() else {}
        document = before | {kind: found, "platform": platform_document()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    kept = any(each["ttft_ratio"] <= MOST_TTFT_RATIO and each["used"] >= LEAST_USED for each in found)
    return 0 if kept or args.smoke else 1


def simulated(folder: Path, rates: list[float], seconds: float, jobs: int, ttft_ms: float) -> dict[str, Any]:
    """Simulate both kinds alone, then together; jobs arrive as the lanes of `hetlb batch` begin."""
    rng = random.Random(0)
    instances = [{"name": name, "profile": str(path)} for name, path in PROFILES.items()]
    classes = {"interactive": {"ttft_ms": ttft_ms}, "later": {"background": True}}
    models = [{"name": MODEL, "classes": classes, "instances": instances}]
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    loaded = load_fleet(folder / "fleet.yaml")
    write_trace(folder / "trace.csv", rates, seconds, rng)
    interactive = read_trace(folder / "trace.csv")
    prompt, answer = JOB
    later = [
        Row(number / 16.0, length(prompt, rng), length(answer, rng), service="later", streamed=False)
        for number in range(jobs)
    ]

    def run(rows: list[Row]) -> list[RequestResult]:
        rows = sorted(rows, key=lambda row: row.arrival_s or 0.0)
        study = make_study(loaded, Load(rows))
        plan = study.load.plan("trace", 0)
        result = FleetSimulation(study.setup, study.engines, plan, model=MODEL, classes=study.classes).run()
        return [record for record in result.records if record.ok]

    def p99_ms(records: list[RequestResult]) -> float:
        times = sorted(each.ttft_s or 0.0 for each in records if each.service == "interactive")
        return 1e3 * percentile(times, 99)

    def per_s(rows: list[Row]) -> float:
        """Return the rate at which requests end that are there all at once, without fill and drain."""
        ends = sorted(each.last_token_s or 0.0 for each in run([replace(row, arrival_s=0.0) for row in rows]))
        count = len(ends)
        return 0.6 * count / (ends[int(0.8 * count)] - ends[int(0.2 * count)])

    alone, together = run(interactive), run([*interactive, *later])
    most, jobs_per_s = per_s(interactive), per_s(later)
    ended = sum(
        each.service == "later" and (each.last_token_s or 0.0) <= seconds * len(rates) for each in together
    )
    left_over = min(jobs, sum(max(0.0, 1.0 - rate / most) * seconds * jobs_per_s for rate in rates))
    return {
        "ttft_target_ms": ttft_ms,
        "interactive_most_rps": most,
        "jobs_per_s_alone": jobs_per_s,
        "p99_ttft_ms_alone": p99_ms(alone),
        "p99_ttft_ms": p99_ms(together),
        "ttft_ratio": p99_ms(together) / p99_ms(alone),
        "jobs_ended": ended,
        "jobs_left_over": left_over,
        "used": ended / left_over,
    }


def measure(
    folder: Path, url: str, rates: list[float], seconds: float, jobs: int, left_over: float
) -> dict[str, Any]:
    """Measure the interactive requests alone, then with the batch."""
    rng = random.Random(0)
    trace = folder / "trace.csv"
    write_trace(trace, rates, seconds, rng)
    alone = bench(url, trace, "trace")
    write_batch(folder / "in.jsonl", jobs, rng)
    batch = run_batch(folder / "in.jsonl", folder / "out.jsonl", url)
    together = bench(url, trace, "trace")
    with contextlib.suppress(OSError):
        batch.terminate()  # what has not ended by now is not of the gaps
    batch.communicate()
    ended = (folder / "out.jsonl").read_text().count("\n")
    return {
        "rates": rates,
        "seconds": seconds,
        "p99_ttft_ms_alone": alone["p99_ttft_ms"],
        "p99_ttft_ms": together["p99_ttft_ms"],
        "mean_ttft_ms_alone": alone["mean_ttft_ms"],
        "mean_ttft_ms": together["mean_ttft_ms"],
        "ttft_ratio": together["p99_ttft_ms"] / alone["p99_ttft_ms"],
        "jobs": jobs,
        "jobs_ended": ended,
        "jobs_left_over": left_over,
        "used": ended / left_over,
        "failed": alone["failed"] + together["failed"],
        "client": together["client"]["reasons"],
    }


@contextlib.contextmanager
def fleet(folder: Path, ttft_ms: float) -> Iterator[str]:
    """Serve two emulated engines; gives the address."""
    classes = {"interactive": {"ttft_ms": ttft_ms}, "later": {"background": True}}
    with helper_processes() as helpers:
        engines = asyncio.run(helpers.engines(PROFILES, MODEL))
        instances = [
            {"name": name, "url": url, "profile": str(PROFILES[name])} for name, url in engines.items()
        ]
        model = {"name": MODEL, "classes": classes, "instances": instances}
        url, _ = asyncio.run(helpers.proxy(model))
        yield url


def length(mean: int, rng: random.Random) -> int:
    return rng.randint(mean // 2, mean + mean // 2)


def write_trace(path: Path, rates: list[float], seconds: float, rng: random.Random) -> None:
    """Write interactive requests with Poisson arrivals, one phase after the other."""
    lines = ["arrival_s,input_tokens,output_tokens,class"]
    for phase, rate in enumerate(rates):
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            prompt, answer = (length(mean, rng) for mean in INTERACTIVE)
            lines.append(f"{phase * seconds + at_s:.4f},{prompt},{answer},interactive")
            at_s += rng.expovariate(rate)
    path.write_text("\n".join(lines) + "\n")


def write_batch(path: Path, count: int, rng: random.Random) -> None:
    """Write jobs in OpenAI's form, each prompt its own."""
    with path.open("w") as file:
        for number in range(count):
            prompt, answer = (length(mean, rng) for mean in JOB)
            ids = [rng.randint(1000, 1999) for _ in range(prompt)]
            body = {"model": MODEL, "prompt": ids, "max_tokens": answer, "ignore_eos": True}
            job = {"custom_id": f"j{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(job) + "\n")


def bench(url: str, trace: Path, rate: str, *flags: str) -> dict[str, Any]:
    """Run `hetlb bench` and return its one run."""
    command = ["bench", "--url", url, "--trace", str(trace), "--request-rate", rate, "--json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "hetlb", *command], capture_output=True, text=True, check=True
    )
    run: dict[str, Any] = json.loads(done.stdout)["runs"][0]
    return run


def run_batch(source: Path, out: Path, url: str) -> subprocess.Popen[str]:
    """Start `hetlb batch`."""
    command = [sys.executable, "-m", "hetlb", "batch", str(source), str(out), "--url", url, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
