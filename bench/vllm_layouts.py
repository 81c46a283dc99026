"""Two real vLLM servers of TP 1 against one of TP 2 on two CPU cores: does `hetlb search` name the better?

Shows: `hetlb profile --url` on each layout (the two TP 1 servers at the same time, since they share the
memory bus when they serve), `hetlb search` on these profiles, and a load test of each layout through
`hetlb serve` with the rows that the search simulated.
Nothing is tuned between the steps; the search sees only the profiles and the trace. Exit status
1 if it names the slower layout, or its simulated throughput is more than 15 % from the measured one.

With targets: a load test of each layout at five rates, from one at which TP 2 may be quicker to one that
neither can carry; limits on TTFT and TPOT are 1.5 times the geometric mean of both layouts' medians there.
`hetlb search` is asked about each rate, and must name the layout of which more requests met the limits
(within 2 %).

`.venv/bin/python bench/vllm_layouts.py [--requests N] [--budget 3m]`; about 15 minutes. With `--keep DIR` and
`--layouts 1`, then `--layouts 2` the layouts are measured one after the other, in half the time each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))  # engines.py, pair.py

import pair as real
from engines import REPO_ROOT, SERVED_MODEL_NAME, TINY_SLOW, Server, vllm_servers

from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

OUT = REPO_ROOT / "bench" / "results" / "vllm_layouts.json"
HETLB = (sys.executable, "-m", "hetlb")
PROMPT_TOKENS = (32, 320)
OUTPUT_TOKENS = (16, 96)
#: tiny-slow: 107.6M parameters in bfloat16; 2 * 12 layers * 12 KV heads * 64 * 2 bytes of KV per token.
PARAMETERS, KV_BYTES_PER_TOKEN = 107_600_000, 36_864
KV_SPACE_BYTES = 1 << 30
TOLERANCE = 0.15
#: Requests/s of the load tests with targets; seconds of each, and the fewest requests.
REQUEST_RATES = (0.8, 2.0, 3.5, 5.0, 7.0)
RATE_S, RATE_REQUESTS = 20, 40
#: Limits over the geometric mean of the medians.
LOOSE = 1.5

TP1 = [replace(TINY_SLOW, name=f"tp1-{core}", core=core) for core in (0, 1)]
TP2 = [
    replace(
        TINY_SLOW,
        name="tp2",
        extra_args=("--tensor-parallel-size", "2"),
        extra_env=(("VLLM_CPU_OMP_THREADS_BIND", "0|1"),),
    )
]


def main() -> int:
    """Measure, search, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--budget", default="3m", help="of each profile")
    parser.add_argument("--rounds", type=int, default=3, help="load tests of all requests at once")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="profiles and measurements, for later runs")
    parser.add_argument("--layouts", default="1,2", help="TP degrees to measure now, if they are not kept")
    args = parser.parse_args()
    rng = random.Random(1)
    rows = [Row(None, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(args.requests)]
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetlb-layouts-")))
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / "trace.csv"
        lines = [
            "arrival_s,input_tokens,output_tokens",
            *(f",{r.input_tokens},{r.output_tokens}" for r in rows),
        ]
        trace.write_text("\n".join(lines) + "\n")
        measured: dict[int, Any] = {}
        for degree, specs in ((1, TP1), (2, TP2)):
            kept = folder / f"tp{degree}.json"
            known = json.loads(kept.read_text()) if kept.exists() else {}
            if "at_rates" not in known and str(degree) in args.layouts.split(","):
                known |= _layout(specs, degree, folder, args, rows, known)
                kept.write_text(json.dumps(known))
            if "at_rates" in known:
                measured[degree] = known
        if len(measured) < 2:
            print(f"measured: TP {', '.join(map(str, measured))}")
            return 0
        found = _search(folder, trace)
        targets = [_ask(folder, trace, measured, rate, *_limits(measured, rate)) for rate in REQUEST_RATES]
    faster = max(measured, key=lambda degree: measured[degree]["median_tok_s"])
    named = found["best"]["box"]
    estimated = {
        each["tensor_parallel_size"]: each["throughput_tok_s"] for each in found["machines"][0]["ranking"]
    }
    errors = {n: estimated[n] / measured[n]["median_tok_s"] - 1 for n in measured}
    document = {
        "requests": args.requests,
        "measured": measured,
        "estimated_tok_s": estimated,
        "errors": errors,
        "faster": faster,
        "named": named,
        "targets": targets,
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    for degree in measured:
        print(
            f"TP {degree}: measured {measured[degree]['median_tok_s']:.0f} tokens/s, "
            f"simulated {estimated[degree]:.0f} ({errors[degree]:+.1%})"
        )
    print(f"search names TP {named}; the load test finds TP {faster} faster")
    for each in targets:
        shares = ", ".join(f"TP {degree} {share:.0%}" for degree, share in each["met"].items())
        print(
            f"{each['rate']}/s, ttft {each['ttft_s']:.3f} s, tpot {each['tpot_s']:.4f} s: met by {shares}; "
            f"named TP {each['named']}"
        )
    wrong = [each for each in targets if not each["right"]]
    return int(named != faster or abs(errors[named]) > TOLERANCE or bool(wrong))


def _limits(measured: dict[int, Any], rate: float) -> tuple[float, float]:
    """TTFT and TPOT, from the medians of both layouts at a rate."""
    ttft_s, tpot_s = (
        math.sqrt(
            math.prod(statistics.median(layout["at_rates"][str(rate)][key]) for layout in measured.values())
        )
        for key in ("ttft_s", "tpot_s")
    )
    return LOOSE * ttft_s, LOOSE * tpot_s


def _ask(
    folder: Path, trace: Path, measured: dict[int, Any], rate: float, ttft_s: float, tpot_s: float
) -> dict[str, Any]:
    """One target: what each layout met, and what the search names."""
    met = {
        degree: statistics.mean(
            ttft <= ttft_s and tpot <= tpot_s
            for ttft, tpot in zip(at_rate["ttft_s"], at_rate["tpot_s"], strict=True)
        )
        for degree, layout in measured.items()
        for at_rate in [layout["at_rates"][str(rate)]]
    }
    limits = f"ttft:{ttft_s * 1e3:.3f}", f"tpot:{tpot_s * 1e3:.3f}"
    found = _search(folder, trace, "--request-rate", str(rate), "--goodput", *limits)
    layouts = found["machines"][0]["layouts"]
    named = layouts[0]["instances"][0]["tensor_parallel_size"]
    right = met[named] >= max(met.values()) - 0.02
    return {
        "rate": rate,
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "met": met,
        "named": named,
        "right": right,
        "layouts": layouts,
    }


def _layout(
    specs: Sequence[Any],
    degree: int,
    folder: Path,
    args: argparse.Namespace,
    rows: Sequence[Row],
    known: dict[str, Any],
) -> dict[str, Any]:
    """Profile the servers of a layout, all at once, and load them through the proxy, where not known."""
    profile = folder / f"tp{degree}.yaml"
    with vllm_servers(specs, real.MODELS, folder / f"logs-{degree}", deadline_s=240) as servers:
        if not profile.exists():
            profiles = [folder / f"tp{degree}-{index}.yaml" for index in range(len(servers))]
            sweeps = [
                subprocess.Popen(
                    [*HETLB, "profile", "--url", server.url, "--out", str(out), "--budget", args.budget,
                     "--tp", str(degree), "--system", "cpu"]
                )
                for server, out in zip(servers, profiles, strict=True)
            ]  # fmt: skip
            assert [sweep.wait() for sweep in sweeps] == [0] * len(sweeps), "a profile failed"
            profiles[0].rename(profile)
        found = {"fit": yaml.safe_load(profile.read_text())["fit"]}
        with _proxy(servers, profile, folder) as url:

            def load(plan: list[PlannedRequest], seed: str) -> LoadResult:
                result = asyncio.run(real.load(url, plan, seed))
                assert not result.errors, result.examples
                return result

            if "tok_s" not in known:
                plan = make_plan(rows, None, math.inf, random.Random(1))
                found["tok_s"] = [
                    load(plan, f"layout {degree} round {number}").summary()["total_token_throughput"]
                    for number in range(args.rounds)
                ]
                found["median_tok_s"] = statistics.median(found["tok_s"])
            found["at_rates"] = {}
            for rate in REQUEST_RATES:
                number = min(len(rows), max(RATE_REQUESTS, round(RATE_S * rate)))
                plan = make_plan(rows[:number], None, rate, random.Random(2))
                records = load(plan, f"layout {degree} at {rate}").records
                done = [r for r in records if r.ttft_s is not None and r.tpot_s is not None]
                found["at_rates"][str(rate)] = {
                    "ttft_s": [r.ttft_s for r in done],
                    "tpot_s": [r.tpot_s for r in done],
                }
    return found


@contextlib.contextmanager
def _proxy(servers: Sequence[Server], profile: Path, folder: Path) -> Iterator[str]:
    fleet = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [
            {
                "name": SERVED_MODEL_NAME,
                "instances": [
                    {"name": server.name, "url": server.url, "profile": str(profile)} for server in servers
                ],
            }
        ],
    }
    config = folder / "fleet.yaml"
    config.write_text(yaml.safe_dump(fleet))
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", "--config", str(config))
        asyncio.run(process.ready())
        url, admin = process.urls
        asyncio.run(real.Proxy(url, admin, folder / "none").idle())
        yield url


def _search(folder: Path, trace: Path, *flags: str) -> dict[str, Any]:
    """`hetlb search` on the machine of two cores, each with 1 GiB of KV cache beside the weights."""
    cluster = {
        "version": 1,
        "model": {
            "name": SERVED_MODEL_NAME,
            "parameters": PARAMETERS,
            "bytes_per_parameter": 2,
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
        },
        "limits": {"max_input_tokens": PROMPT_TOKENS[1], "max_output_tokens": OUTPUT_TOKENS[1]},
        "machines": [
            {
                "name": "box",
                "gpu": "cpu-core",
                "gpus": 2,
                "memory_bytes": KV_SPACE_BYTES + 2 * PARAMETERS,
                "gpu_memory_utilization": 1.0,
                "reserved_bytes_per_gpu": 0,
                "profiles": {1: "tp1.yaml", 2: "tp2.yaml"},
            }
        ],
    }
    config = folder / "cluster.yaml"
    config.write_text(yaml.safe_dump(cluster, sort_keys=False))
    command = [*HETLB, "search", "--config", str(config), "--trace", str(trace), "--json", *flags]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


if __name__ == "__main__":
    sys.exit(main())
