"""`hetlb batch` in the gaps of interactive traffic: what the traffic loses, and how much of the gaps is used.

Two emulated engines, an A800 and a V100, behind hetlb, whose model has a background class. Interactive
requests come at 28 requests/s for 90 s, then at 1 request/s for 90 s; a batch of 3,000 jobs runs beside them.
Promised: p99 TTFT of the interactive requests is at most 1.1 times what it is without the batch, and the
batch gets at least 0.9 of what is left over. That is its rate alone, times the share of each phase that the
interactive requests do not need (1 - their rate / the rate at which the fleet serves them alone).

`.venv/bin/python bench/batch_gaps.py` takes eight minutes and writes bench/results/batch_gaps.json; `--smoke`
takes seconds and writes nothing. Exit status 1 if a promise was not kept.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetlb.loadtest.processes import helper_processes
from hetlb.loadtest.results import platform_document

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
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="seconds, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.seconds, args.rates, args.jobs = 2.0, "4,1", 20
    rates = [float(rate) for rate in args.rates.split(",")]
    with tempfile.TemporaryDirectory(prefix="hetlb-gaps-") as name, fleet(Path(name)) as url:
        found = measure(Path(name), url, rates, args.seconds, args.jobs)
    print(json.dumps(found, indent=1))
    kept = found["ttft_ratio"] <= MOST_TTFT_RATIO and found["used"] >= LEAST_USED
    if not args.smoke:
        args.out.write_text(json.dumps(found | {"platform": platform_document()}, indent=1) + "\n")
    return 0 if kept or args.smoke else 1


def measure(folder: Path, url: str, rates: list[float], seconds: float, jobs: int) -> dict[str, Any]:
    """Measure both kinds alone, then together."""
    rng = random.Random(0)
    trace = folder / "trace.csv"
    write_trace(trace, rates, seconds, rng)
    count = max(8, min(800, int(20 * max(rates))))
    most_rps = bench(url, trace, "inf", "--num-prompts", str(count))["request_throughput"]
    alone = bench(url, trace, "trace")
    part = max(8, jobs // 4)
    write_batch(folder / "part.jsonl", part, rng)
    jobs_per_s = rate_of(run_batch(folder / "part.jsonl", folder / "part.out.jsonl", url), folder, part)
    write_batch(folder / "in.jsonl", jobs, rng)
    batch = run_batch(folder / "in.jsonl", folder / "out.jsonl", url)
    together = bench(url, trace, "trace")
    with contextlib.suppress(OSError):
        batch.terminate()  # what has not ended by now is not of the gaps
    batch.communicate()
    ended = (folder / "out.jsonl").read_text().count("\n")
    free = [max(0.0, 1.0 - rate / most_rps) for rate in rates]
    left_over = sum(share * seconds * jobs_per_s for share in free)
    return {
        "rates": rates,
        "seconds": seconds,
        "interactive_most_rps": most_rps,
        "jobs_per_s_alone": jobs_per_s,
        "p99_ttft_ms_alone": alone["p99_ttft_ms"],
        "p99_ttft_ms": together["p99_ttft_ms"],
        "mean_ttft_ms_alone": alone["mean_ttft_ms"],
        "mean_ttft_ms": together["mean_ttft_ms"],
        "ttft_ratio": together["p99_ttft_ms"] / alone["p99_ttft_ms"],
        "jobs": jobs,
        "jobs_ended": ended,
        "jobs_left_over": min(left_over, jobs),
        "used": ended / min(left_over, jobs),
        "failed": alone["failed"] + together["failed"],
        "client": together["client"]["reasons"],
    }


def rate_of(batch: subprocess.Popen[str], folder: Path, count: int) -> float:
    """Return the jobs per second of a batch between its first and its last fifth: it fills and drains."""
    marks: dict[int, float] = {}
    while batch.poll() is None:
        with contextlib.suppress(OSError):
            ended = (folder / "part.out.jsonl").read_text().count("\n")
            for mark in (count // 5, count - count // 5):
                if ended >= mark:
                    marks.setdefault(mark, time.monotonic())
        time.sleep(0.1)
    batch.communicate()
    (first, first_s), (last, last_s) = sorted(marks.items())
    return (last - first) / max(0.1, last_s - first_s)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[str]:
    """Serve two emulated engines; gives the address."""
    classes = {"interactive": {"ttft_ms": 1000, "tpot_ms": 100}, "later": {"background": True}}
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
