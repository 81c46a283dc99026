"""A thousand reloads under load: errors, memory, descriptors and tasks.

Shows: what clients saw, and what the process held, while the fleet file was read again and again, by SIGHUP
and by `POST /v1/reload` in turn, each time with an instance added, moved to another address, given another
weight, or taken out.
Every reload is waited for (the proxy's own counter) and counted; memory and descriptors are read
from /proc while the load goes on, tasks when it has ended (the handlers of the bench's own connections to
the admin listener are left out); the slope is Theil-Sen's, after a warm-up that fills what the dashboard
remembers of requests, and a fifth of the reloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, MODEL, Answer, Promise, Serving, background, quantile, report, serving, until
from engine import Engine
from scipy.stats import theilslopes

#: The project's bound, MiB per 1,000 reloads, on the lower end of the slope's 95 % interval.
SLOPE_MIB = 1.0
WARM_UP = 5_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reloads", type=int, default=1000, help="(default 1000)")
    parser.add_argument("--streams", type=int, default=30, help="at a time (default 30)")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP, help="requests before, to fill what is remembered"
    )
    parser.add_argument("--pause-s", type=float, default=0.05, help="between reloads (default 0.05)")


async def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    answers: list[Answer] = []
    memory: list[tuple[int, int]] = []
    descriptors: list[int] = []
    with tempfile.TemporaryDirectory(prefix="hetlb-behaviour-") as folder:
        watch = Path(folder) / "watch"
        os.environ["HETLB_WATCH"] = str(watch)
        async with contextlib.AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(Engine(MODEL, 0.01)) for _ in range(4)]
            proxy = await stack.enter_async_context(
                serving(fleet(engines, 0), launcher=(str(HERE / "watched.py"),))
            )
            idle = await watched(proxy, watch)
            idle_descriptors = proxy.descriptors()
            filled: list[Answer] = []
            crowd = asyncio.create_task(background(proxy.port, args.streams, 2, filled))

            async def full() -> bool:
                return len(filled) >= int(args.warm_up)

            await until(full, "warm-up", 200)
            await _stopped(crowd)
            print(f"{len(filled)} answers before the first reload", flush=True)
            crowd = asyncio.create_task(background(proxy.port, args.streams, 10, answers))
            refused = 0
            started = time.monotonic()
            for number in range(1, args.reloads + 1):
                proxy.write(fleet(engines, number))
                if number % 2:
                    proxy.signal(signal.SIGHUP)
                else:
                    refused += await proxy.reload() >= 300

                async def done(expected: int = number) -> bool:
                    return await proxy.metric("hetlb_config_reloads_total{") >= expected

                await until(done, f"reload {number}")
                if number % 10 == 0:
                    memory.append((number, proxy.rss_kib()))
                    descriptors.append(proxy.descriptors())
                if number % 200 == 0:
                    print(
                        f"{number} reloads, {len(answers)} answers, {memory[-1][1] / 1024:.1f} MiB",
                        flush=True,
                    )
                await asyncio.sleep(args.pause_s)
            took_s = time.monotonic() - started
            names = {each["name"] for each in (await proxy.instances()).values()}
            proxy.write(fleet(engines, 0))
            await proxy.reload()
            await _stopped(crowd)
            left = await proxy.quiet()
            refused += int(await proxy.metric('hetlb_config_reloads_total{result="refused"}'))

            async def settled() -> bool:
                return proxy.descriptors() <= idle_descriptors + 1

            with contextlib.suppress(RuntimeError):  # then the table says how many are left
                await until(settled, "descriptors as before", 15)
            after = await watched(proxy, watch)
            for _ in range(50):  # a probe, or a page of the admin listener, may be under way
                if len(after["tasks"]) <= len(idle["tasks"]):
                    break
                await asyncio.sleep(0.1)
                after = await watched(proxy, watch)
            after_descriptors = proxy.descriptors()
            troubles = proxy.log_lines("Traceback", "ERROR")
            per_instance = {engine.url: sum(engine.run.values()) for engine in engines}
    warm = [(number, rss) for number, rss in memory if number > args.reloads // 5] or memory
    slope, _, low, high = theilslopes([rss / 1024 for _, rss in warm], [number / 1000 for number, _ in warm])
    bad = [answer for answer in (*filled, *answers) if not answer.whole]
    promises = [
        Promise(f"errors, of {len(filled) + len(answers)} answers", "0", str(len(bad)), not bad),
        Promise(f"reloads refused, of {args.reloads}", "0", str(refused), refused == 0),
        Promise(
            "memory after the warm-up, MiB per 1,000 reloads",
            f"interval reaches down to {SLOPE_MIB:g}",
            f"{slope:+.2f} (95 %: {low:+.2f} to {high:+.2f})",
            bool(low <= SLOPE_MIB),
        ),
        Promise(
            "descriptors, idle before and after", "the same (+1)",
            f"{idle_descriptors}, {after_descriptors}; {max(descriptors)} at most",
            after_descriptors <= idle_descriptors + 1,
        ),
        Promise(
            "asyncio tasks, idle before and after", "the same",
            f"{len(idle['tasks'])}, {len(after['tasks'])}", len(after["tasks"]) <= len(idle["tasks"]),
        ),
        Promise("figures not zero afterwards", "none", ", ".join(left) or "none", not left),
        Promise("errors in the log", "0", str(len(troubles)), not troubles),
    ]  # fmt: skip
    for line in troubles[:3]:
        print(line)
    first, last = warm[0][1] / 1024, warm[-1][1] / 1024
    figures: dict[str, Any] = {
        "reloads_per_s": round(args.reloads / took_s, 2),
        "answers_per_s": round(len(answers) / took_s, 1),
        "ttft_p99_ms": round(1000 * quantile([each.ttft_s for each in answers if each.first_at], 0.99), 1),
        "instances_at_the_end": sorted(names),
        "answers_by_engine": per_instance,
        "rss_mib_after_warm_up": round(first, 2),
        "rss_mib_at_the_end": round(last, 2),
        "tasks": [idle["tasks"], after["tasks"]],
        "tracked_objects": [idle["objects"], after["objects"]],
        "answers_before": len(filled),
        "rss_kib": memory,
    }
    print(f"{figures['reloads_per_s']} reloads/s, {figures['answers_per_s']} answers/s")
    return report("reload", promises, figures, args.recorded)


async def _stopped(crowd: asyncio.Task[None]) -> None:
    crowd.cancel()
    with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
        await crowd


def fleet(engines: list[Engine], number: int) -> dict[str, Any]:
    """Return the fleet after `number` edits: two instances that stay, and one that comes, moves and goes."""
    steady: list[dict[str, Any]] = [{"name": f"steady-{n}", "url": engines[n].url} for n in range(2)]
    step = number % 5
    extra: list[dict[str, Any]] = []
    if step in (1, 2, 3):  # added; moved to another address; given another weight
        extra = [{"name": f"extra-{number // 5 % 3}", "url": engines[2 if step == 1 else 3].url}]
        if step == 3:
            extra[0]["weight"] = 2
    elif step == 4:  # one that stays is altered while the other one goes
        steady[1]["weight"] = 3
    return {
        "scrape": {"interval_s": 0.2},
        "health": {"slow_start_s": 0},
        "proxy": {"request_log": False},
        "models": [{"name": MODEL, "instances": steady + extra}],
    }


async def watched(proxy: Serving, file: Path) -> dict[str, Any]:
    """What the process says of itself."""
    file.unlink(missing_ok=True)  # noqa: ASYNC240 - files of a few bytes, before and after the load
    proxy.signal(signal.SIGUSR2)

    async def said() -> bool:
        await proxy.fleet()  # a signal's handler runs when Python does
        return file.exists()  # noqa: ASYNC240

    await until(said, "word from the process")
    found: dict[str, Any] = json.loads(file.read_text())  # noqa: ASYNC240
    found["tasks"] = [name for name in found["tasks"] if name != "RequestHandler.start"]
    return found
