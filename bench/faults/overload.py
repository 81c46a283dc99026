"""Ten times what the fleet can do, for minutes: goodput, waiting times, rejects, the queue, the way back.

Shows: the capacity, measured first at saturation, then an open-loop load of a multiple of it, then half of
it; what was served and turned down, how fast, and how the queue stood.
Emulated engines (`hetlb engine`) are processes of their own; the queue holds what the fleet serves
in about `--queue-s`; load is Poisson from the intended times; the queue's figures are read from
`/v1/fleet` ten times a second. The bound on the time to first token is the queue's limit over the measured
capacity, plus what a request that did not wait in the queue took with the engines as full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from common import MODEL, Answer, Promise, Serving, ask, quantile, report, serving, stream_body
from reference import round_trips

from hetlb.tools.loadtest.processes import helper_processes

GOODPUT = 0.9
REJECT_S = 0.05
RECOVERY_S = 5.0
PROMPT_BYTES = 800
#: Least and most tokens of an answer: were all of a length, a batch would begin and end as one.
TOKENS = (16, 48)
#: Requests that the default policy keeps at an engine, over its slots: sequences that end in one step are
#: replaced.
OVERFULL = 1 + 2 / sum(TOKENS)
PROFILE: dict[str, Any] = {
    "version": 1,
    "name": "emulated",
    "model": {"name": MODEL, "kv_bytes_per_token": 131072},
    "engine": {
        "name": "emulated", "tensor_parallel_size": 1, "kv_cache_tokens": 4000, "block_size": 16,
        "max_num_seqs": 12, "max_num_batched_tokens": 1024,
    },
    "prefill": {"k1": 5.5e-5, "k2": 4.0e-4, "k3": 0.0, "k4": 1.2e-2},
    "decode": {"k5": 6.5e-8, "k6": 2.5e-5, "k7": 0.0, "k8": 1.15e-2},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload (default 120)")
    parser.add_argument("--times", type=float, default=10.0, help="the capacity (default 10)")
    parser.add_argument("--engines", type=int, default=2, help="(default 2)")
    parser.add_argument("--time-scale", type=float, default=4.0, help="of the engines (default 4)")
    parser.add_argument("--queue-s", type=float, default=2.0, help="of work in a full queue (default 2)")
    parser.add_argument("--calibrate-s", type=float, default=15.0, help="of each calibration (default 15)")
    parser.add_argument("--seed", type=int, default=0, help="draws arrivals (default 0)")


async def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    with tempfile.TemporaryDirectory(prefix="hetlb-behaviour-") as folder, helper_processes() as helpers:
        profile = Path(folder) / "engine.yaml"
        profile.write_text(yaml.safe_dump(PROFILE))
        engines = [
            helpers.start(
                "hetlb engine", "engine", "--profile", str(profile), "--port", "0",
                "--served-model-name", MODEL, "--time-scale", str(args.time_scale),
            )
            for _ in range(args.engines)
        ]  # fmt: skip
        for engine in engines:
            await engine.ready()
        scaled = {
            **PROFILE,
            **{
                part: {key: value * args.time_scale for key, value in PROFILE[part].items()}
                for part in ("prefill", "decode")
            },
        }
        instances = [
            {"name": f"e{n}", "url": engine.urls[0], "profile": "small.yaml"}
            for n, engine in enumerate(engines)
        ]
        base = {"proxy": {"request_log": False}, "models": [{"name": MODEL, "instances": instances}]}
        profiles = {"small.yaml": scaled}
        places = args.engines * PROFILE["engine"]["max_num_seqs"]
        async with serving(base, profiles=profiles) as proxy:
            own = await closed_loop(proxy, round(OVERFULL * places), args.calibrate_s)
            full = await closed_loop(proxy, 3 * places, args.calibrate_s)
        capacity = full["rate"]
        limit = max(4, round(args.queue_s * capacity))
        body_bytes = (PROMPT_BYTES + 200) * (limit + 1)
        print(f"capacity {capacity:.1f} requests/s; queue of {limit}", flush=True)
        queue = {"max_requests": limit, "max_bytes": body_bytes}
        async with serving({**base, "queue": queue}, profiles=profiles) as proxy:
            async with round_trips() as reference:
                measured = await _overloaded(proxy, args, capacity)
            left = await proxy.quiet()
            troubles = proxy.log_lines("Traceback", "ERROR")
    return _judge(args, measured, capacity, own, limit, body_bytes, left, troubles, reference)


async def closed_loop(proxy: Serving, clients: int, seconds: float) -> dict[str, float]:
    """Return requests per second and TTFT of `clients` that ask again and again, after a third of warm-up."""
    loop = asyncio.get_running_loop()
    start = loop.time() + seconds / 3
    draw = random.Random(clients)
    answers: list[Answer] = []

    async def client(number: int) -> None:
        count = 0
        while loop.time() < start + seconds:
            count += 1
            answers.append(await ask(proxy.port, f"loop-{number}-{count}", request_body(draw)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    counted = [each for each in answers if start <= each.ended_at <= start + seconds]
    if any(not each.whole for each in answers):
        raise RuntimeError("expected every answer of the calibration to be whole")
    ttft = [each.ttft_s for each in counted]
    return {
        "rate": len(counted) / seconds,
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p99_s": quantile(ttft, 0.99),
    }


def request_body(draw: random.Random) -> dict[str, Any]:
    """A prompt of one size, an answer of any length."""
    return stream_body(MODEL, draw.randint(*TOKENS), "x" * PROMPT_BYTES)


async def _overloaded(proxy: Serving, args: argparse.Namespace, capacity: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    draw = random.Random(args.seed)
    tasks: list[asyncio.Task[Answer]] = []
    most = {"requests": 0, "bytes": 0}
    empty_at: list[float] = []

    async def watch() -> None:
        while True:
            figures = (await proxy.fleet())["queue"]
            for key, value in figures.items():
                most[key] = max(most[key], value)
            if not figures["requests"]:
                empty_at.append(loop.time())
            await asyncio.sleep(0.1)

    async def offer(rate: float, seconds: float) -> tuple[float, float]:
        began = at = loop.time()
        while (at := at + draw.expovariate(rate)) < began + seconds:
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            tasks.append(asyncio.create_task(ask(proxy.port, f"offered-{len(tasks)}", request_body(draw))))
        return began, began + seconds

    watching = asyncio.create_task(watch())
    began, ended = await offer(args.times * capacity, args.seconds)
    offered = len(tasks)
    print(f"{offered} requests offered", flush=True)
    await offer(0.5 * capacity, 10.0)
    answers = await asyncio.gather(*tasks)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return {
        "answers": answers, "offered": offered, "began": began, "ended": ended, "most": most,
        "empty_s": min((at for at in empty_at if at > ended), default=float("inf")) - ended,
    }  # fmt: skip


def _judge(
    args: argparse.Namespace, measured: dict[str, Any], capacity: float, own: dict[str, float],
    limit: int, limit_bytes: int, left: Sequence[str], troubles: Sequence[str],
    reference: Sequence[float],
) -> int:  # fmt: skip
    answers: list[Answer] = measured["answers"]
    began, ended = measured["began"], measured["ended"]
    during = answers[: measured["offered"]]
    # The first seconds fill the queue.
    served = [each for each in answers if each.whole and began + 5 <= each.ended_at <= ended]
    goodput = len(served) / (ended - began - 5)
    admitted = [each for each in during if each.status == 200]
    rejected = [each for each in during if each.status == 429]
    other = [
        each for each in answers if each.status not in (200, 429) or (each.status == 200 and not each.whole)
    ]
    ttft = quantile([each.ttft_s for each in admitted], 0.99)
    bound = limit / capacity + own["ttft_p99_s"]
    reject_s = quantile([each.ended_at - each.started for each in rejected], 0.99)
    advised = sum("retry-after" in each.headers for each in rejected)
    afterwards = answers[measured["offered"] :]
    late = [each.started - ended for each in afterwards if each.status != 200]
    recovery = max([measured["empty_s"], *late])
    most = measured["most"]
    bare_ms = 1000 * quantile(reference, 0.99)
    promises = [
        Promise(
            "goodput", f">= {100 * GOODPUT:.0f} % of {capacity:.1f}/s",
            f"{goodput:.1f}/s, {100 * goodput / capacity:.1f} %", goodput >= GOODPUT * capacity,
        ),
        Promise(
            "TTFT of the admitted, p99", f"{bound:.2f} s (queue / capacity + its own)",
            f"{ttft:.2f} s", ttft <= bound,
        ),
        Promise(
            f"reject, p99 of {len(rejected)}", f"{1000 * REJECT_S:.0f} ms",
            f"{1000 * reject_s:.1f} ms (bare round trip: {bare_ms:.1f} ms)",
            reject_s <= REJECT_S,
        ),
        Promise("rejects without Retry-After", "0", str(len(rejected) - advised), advised == len(rejected)),
        Promise("other ends", "0", str(len(other)), not other),
        Promise("queue, requests at most", str(limit), str(most["requests"]), most["requests"] <= limit),
        Promise("queue, bytes at most", str(limit_bytes), str(most["bytes"]), most["bytes"] <= limit_bytes),
        Promise(
            "after it, at half the capacity: queue empty and no request rejected", f"{RECOVERY_S:.0f} s",
            f"{recovery:.1f} s", recovery <= RECOVERY_S,
        ),
        Promise("figures not zero afterwards", "none", ", ".join(left) or "none", not left),
        Promise("errors in the log", "0", str(len(troubles)), not troubles),
    ]  # fmt: skip
    figures: dict[str, Any] = {
        "capacity_rps": capacity, "offered": len(during), "offered_rps": len(during) / (ended - began),
        "admitted": len(admitted), "rejected": len(rejected), "own_ttft": own,
        "admitted_ttft_s": _quantiles([each.ttft_s for each in admitted]),
        "longest_ttft_s_by_5_s": _longest(admitted, began),
        "bare_round_trip_s": _quantiles(reference),
        "reject_s": _quantiles([each.ended_at - each.started for each in rejected]),
        "queue_most": most, "arguments": {k: v for k, v in vars(args).items() if k != "name"},
    }  # fmt: skip
    return report("overload", promises, figures, args.recorded)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {str(share): round(quantile(values, share), 4) for share in (0.5, 0.9, 0.99, 1.0)}


def _longest(admitted: Sequence[Answer], began: float) -> list[float]:
    """Return the longest time to first token among the arrivals of each five seconds."""
    longest: dict[int, float] = {}
    for each in admitted:
        window = int((each.started - began) // 5)
        longest[window] = round(max(longest.get(window, 0.0), each.ttft_s), 3)
    return [longest.get(window, 0.0) for window in range(max(longest) + 1)]
