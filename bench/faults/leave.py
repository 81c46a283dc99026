"""Clients that leave: how long until the engine's connection is closed, in every phase, plain and streamed.

Shows: the time from the client's close to the engine's end of the connection (`wait`, `stream`), to the end
of the proxy's sockets (`connect`, where no engine answers the SYN), to the queue's figure without the
request (`queue`, polled over the admin listener, so the poll is in it).
A quarter of the clients in each phase, half of each plain; while they leave, background streams run
(but for `connect`, which has a proxy of its own) and none of them is touched; nothing that left the queue is
ever run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import Any

from common import (
    MODEL,
    Answer,
    Promise,
    Serving,
    background,
    quantile,
    report,
    request_bytes,
    serving,
    until,
)
from engine import Engine, Hole
from reference import round_trips

LIMIT_S = 0.1
#: About 300 tokens: two of these prompts do not fit an engine of 448.
FILLING = " word" * 240
PHASES = ("queue", "connect", "wait", "stream")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=1000, help="that leave, all phases (default 1000)")
    parser.add_argument("--background", type=int, default=50, help="streams meanwhile (default 50)")


async def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    per_phase = args.clients // len(PHASES)
    answers: list[Answer] = []
    took: dict[str, dict[str, list[float]]] = {}
    async with Engine(MODEL, 0.05) as engine, Engine("full", 0.05, kv_blocks=28) as full:
        with Hole() as hole:
            fleet = {
                "models": [
                    {"name": MODEL, "instances": [{"name": "engine", "url": engine.url}]},
                    {
                        "name": "full",
                        "instances": [{"name": "full", "url": full.url}],
                    },
                ],
            }
            unreachable = {
                "scrape": {"interval_s": 3600.0, "timeout_s": 0.5},  # a probe knocks too
                "proxy": {"connect_timeout_s": 30.0},
                "models": [{"name": "hole", "instances": [{"name": "hole", "url": hole.url}]}],
            }
            async with serving(fleet) as proxy, serving(unreachable) as knocker, round_trips() as reference:
                crowd = asyncio.create_task(background(proxy.port, args.background, 10, answers))
                leaver = _Leaver(proxy, knocker, engine, full)
                for phase in PHASES:
                    took[phase] = {
                        kind: await leaver.leave(phase, kind == "streamed", per_phase // 2)
                        for kind in ("plain", "streamed")
                    }
                    print(
                        f"{phase}: {len(took[phase]['plain']) + len(took[phase]['streamed'])} left",
                        flush=True,
                    )
                ran = sum(full.run.values()) - full.run["holder"]
                crowd.cancel()
                with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                    await crowd
                left = await proxy.quiet() + await knocker.quiet()
                tracebacks = [
                    *proxy.log_lines("Traceback", "ERROR"),
                    *knocker.log_lines("Traceback", "ERROR"),
                ]
    all_times = [seconds for kinds in took.values() for values in kinds.values() for seconds in values]
    broken = sum(not answer.whole for answer in answers)
    promises = [
        Promise(
            f"closed, p99 of {len(all_times)}",
            f"{1000 * LIMIT_S:.0f} ms",
            f"{1000 * quantile(all_times, 0.99):.1f} ms",
            quantile(all_times, 0.99) <= LIMIT_S,
        )
    ]
    for phase, kinds in took.items():
        for kind, values in kinds.items():
            p50, p99, most = (
                1000 * each for each in (quantile(values, 0.5), quantile(values, 0.99), max(values))
            )
            shown = f"p50 {p50:.1f}, p99 {p99:.1f}, max {most:.1f} ms"
            promises.append(
                Promise(
                    f"{phase}, {kind}, {len(values)}",
                    f"{1000 * LIMIT_S:.0f} ms, p99",
                    shown,
                    quantile(values, 0.99) <= LIMIT_S,
                )
            )
    promises += [
        Promise(
            "a bare round trip meanwhile, p99",
            "to compare",
            f"{1000 * quantile(reference, 0.99):.1f} ms",
            True,
        ),
        Promise("run although they had left the queue", "0", str(ran), ran == 0),
        Promise(f"background streams not whole, of {len(answers)}", "0", str(broken), broken == 0),
        Promise("figures not zero afterwards", "none", ", ".join(left) or "none", not left),
        Promise("errors in the log", "0", str(len(tracebacks)), not tracebacks),
    ]
    figures: dict[str, Any] = {
        "background_streams": args.background,
        "milliseconds": {
            phase: {kind: [round(1000 * each, 3) for each in values] for kind, values in kinds.items()}
            for phase, kinds in took.items()
        },
    }
    return report("leave", promises, figures, args.recorded)


class _Leaver:
    """Clients that come as far as a phase and leave."""

    def __init__(self, proxy: Serving, knocker: Serving, engine: Engine, full: Engine) -> None:
        self._proxy, self._knocker, self._engine, self._full = proxy, knocker, engine, full
        self._count = 0

    async def leave(self, phase: str, stream: bool, count: int) -> list[float]:
        """Return the times of `count` requests, in seconds."""
        if phase == "queue":
            return await self._queued(stream, count)
        if phase == "connect":
            return [await self._connecting(stream) for _ in range(count)]
        took: list[float] = []
        while len(took) < count:  # some at once, as clients do
            several = min(8, count - len(took))
            took += await asyncio.gather(*(self._at_engine(phase, stream) for _ in range(several)))
        return took

    async def _begin(
        self,
        model: str,
        prompt: str,
        stream: bool,
        request_id: str | None = None,
        proxy: Serving | None = None,
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        self._count += 1
        request_id = request_id or f"leaver-{self._count}"
        reader, writer = await asyncio.open_connection("127.0.0.1", (proxy or self._proxy).port)
        body = {"model": model, "prompt": prompt, "max_tokens": 100, "stream": stream}
        writer.write(request_bytes(request_id, body))
        return request_id, reader, writer

    async def _at_engine(self, phase: str, stream: bool) -> float:
        prompt = "wait" if phase == "wait" else "hello"
        request_id, reader, writer = await self._begin(MODEL, prompt, stream)
        async with asyncio.timeout(20):
            await self._engine.arrival(request_id).wait()
            if phase == "stream":
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(1)
            left = time.perf_counter()
            writer.close()
            return await self._engine.departure(request_id) - left

    async def _connecting(self, stream: bool) -> float:
        """Watched by the descriptors of a proxy that does nothing else: the client's, and the engine's."""
        proxy = self._knocker
        idle = proxy.descriptors()
        _, _, writer = await self._begin("hole", "hello", stream, proxy=proxy)
        async with asyncio.timeout(20):
            while proxy.descriptors() < idle + 2:  # noqa: ASYNC110 - nothing but the kernel tells
                await asyncio.sleep(0.0005)
            left = time.perf_counter()
            writer.close()
            while proxy.descriptors() > idle:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
        return time.perf_counter() - left

    async def _queued(self, stream: bool, count: int) -> list[float]:
        _, _, holder = await self._begin("full", "wait" + FILLING, True, "holder")
        await self._full.arrival("holder").wait()
        took = []

        async def waiting() -> int:
            return int((await self._proxy.fleet())["queue"]["requests"])

        async def one_more() -> bool:
            return await waiting() == 1

        for _ in range(count):
            _, _, writer = await self._begin("full", "hello" + FILLING, stream)
            await until(one_more, "request in the queue")
            left = time.perf_counter()
            writer.close()
            while await waiting():
                pass
            took.append(time.perf_counter() - left)
        holder.close()
        async with asyncio.timeout(20):
            await self._full.departure("holder")
        self._full.arrived.clear()
        self._full.left.clear()
        return took
