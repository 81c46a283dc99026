"""Soak: minutes of load, clients cut at random, engines that fail and die, reloads; then what is left.

Shows: resident memory (Theil-Sen slope with its 95 % interval, after a warm-up), file descriptors, how fast
an engine is let go once its client has left, and that every figure is exactly zero in the end.
The proxy is a process of its own with its ordinary settings but for shorter timeouts; three in ten
clients leave at a random moment; each request has a tenant and a session of its own; one request in ten
meets a fault; engines are killed and started again, and drained, all the time; the fleet file is read again
about a hundred times a minute. Every answer that a client took to its end is checked: its own tokens, no
clean end where the stream broke, no request run more often than promised. Exit status 1 if any of it fails.

`make soak`, or `.venv/bin/python bench/faults/soak.py --minutes 10 [--save bench/results/soak.json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import theilslopes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from faults.checker import Checker, outcomes
from faults.checker import metrics as read_metrics
from faults.client import Client, body_of, request
from faults.engine import FaultEngine, Visit
from faults.rig import Process, as_process

ROOT = Path(__file__).resolve().parents[2]
ENGINES = 3
CUT_SHARE = 0.3
FAULT_SHARE = 0.1
FAULTS = (
    "429", "429-retry-after", "400", "500", "503", "close", "reset", "junk", "fin", "rst",
    "fin-mid-event", "no-done", "bad-chunk", "no-length-cut", "short-length-stream", "te-cl",
    "stall", "stall-mid", "error-first", "error-late", "big-head", "empty-200", "drip", "interim",
    "upgrade", "long-length", "redirect",
)  # fmt: skip
#: Modes after which no answer to a stream is whole.
BROKEN = {
    "fin",
    "rst",
    "fin-mid-event",
    "no-done",
    "bad-chunk",
    "no-length-cut",
    "short-length-stream",
    "stall-mid",
}
#: Modes whose request may be sent three times: to two other engines, or again to its first one, whose idle
#: connection may have been closed before. Others are sent twice.
THRICE = {"400", "close", "reset"}
#: The project's bound: growth in MiB over 100,000 requests at most, and in the second half of ten minutes.
BOUND_MIB = 1.0
TABLES: dict[str, Any] = {
    "policy": {"name": "hetlb"},
    "scrape": {"interval_s": 0.5},
    "proxy": {"first_byte_timeout_s": 2, "idle_timeout_s": 2, "tenant_header": "x-tenant"},
}


def _left(visit: Visit) -> bool:
    """Return whether an engine was let go, or has answered."""
    return visit.left_at is not None or visit not in visit.engine.working


@dataclass
class Tally:
    """What the clients saw."""

    warm_up: int = 0
    sent: int = 0
    left: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    #: Seconds from a client's leaving until its engine knew.
    let_go_s: list[float] = field(default_factory=list)
    reloads: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    """The load, and the faults meanwhile."""

    def __init__(self, rig: Process, engines: list[FaultEngine], seed: int, at_once: int) -> None:
        self._rig = rig
        self._engines = engines
        self._rng = random.Random(seed)
        self._at_once = at_once
        self._stop = asyncio.Event()
        self._number = 0
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        """Everything, for that long."""
        tasks = [asyncio.create_task(self._client()) for _ in range(self._at_once)]
        tasks += [
            asyncio.create_task(work()) for work in (self._kill, self._drain, self._reload, self._forget)
        ]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        self._stop.set()
        await asyncio.gather(*tasks)
        assert not done, "a task ended before its time"

    async def warm_up(self, count: int) -> None:
        """Plain requests, one behind the other on each connection, to fill what the proxy keeps of the last
        ones (decisions, answers), however long they take."""
        left = iter(range(count))

        async def client() -> None:
            async with Client(self._rig.port) as connection:
                for number in left:
                    label = f"w{number}"
                    own = f"X-Tenant: {label}", f"X-Session-Id: {label}"
                    connection.send(request(label, body_of(label, stream=False), *own))
                    assert (await connection.answer()).status == 200
                    for engine in self._engines:
                        engine.executions.pop(label, None)
                        engine.visits.clear()
                    self.tally.warm_up += 1

        await asyncio.gather(*(client() for _ in range(self._at_once)))

    async def _pause(self, seconds: float) -> bool:
        """Wait, unless it is over; whether it goes on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return not self._stop.is_set()

    async def _client(self) -> None:
        while not self._stop.is_set():
            self._number += 1
            try:
                await self._one(f"s{self._number}")
            except (OSError, asyncio.IncompleteReadError) as error:
                self.tally.wrong.append(f"s{self._number}: no answer: {error!r}")

    async def _one(self, label: str) -> None:
        rng, tally = self._rng, self.tally
        stream = rng.random() < 0.8
        mode = rng.choice(FAULTS) if rng.random() < FAULT_SHARE else "ok"
        for engine in self._engines:
            engine.modes[label] = mode
        tally.sent += 1
        try:
            async with Client(self._rig.port) as client:
                own = f"X-Tenant: {label}", f"X-Session-Id: {label}"
                client.send(request(label, body_of(label, stream=stream), *own))
                if rng.random() < CUT_SHARE:
                    await self._leave(label, client)
                else:
                    answer = await client.answer()
                    tally.statuses[str(answer.status)] += 1
                    self._judge(label, mode, stream, answer)
        finally:
            runs = sum(engine.executions.pop(label, 0) for engine in self._engines)
            for engine in self._engines:
                engine.modes.pop(label, None)
            if runs > (3 if mode in THRICE else 2):
                tally.wrong.append(f"{label}: {mode}: run {runs} times")

    async def _leave(self, label: str, client: Client) -> None:
        """Leave at a random moment, and see when the engine knows."""
        moment = self._rng.random()
        if moment > 0.2:
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                async with asyncio.timeout(moment * 0.15):
                    await client.answer()
        self.tally.left += 1
        left_at = asyncio.get_running_loop().time()
        visits = [visit for engine in self._engines for visit in engine.working if visit.id == label]
        client.leave()
        for visit in visits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await visit.engine.until(partial(_left, visit))
            if visit.left_at is not None:
                self.tally.let_go_s.append(visit.left_at - left_at)
            elif visit in visit.engine.working:
                self.tally.wrong.append(f"{label}: the engine was not let go within 5 s")

    def _judge(self, label: str, mode: str, stream: bool, answer: Any) -> None:
        wrong = self.tally.wrong
        if answer.status != 200:
            return
        if (answer.header("content-type") or "").startswith("text/event-stream"):
            try:
                answer.tokens(label)
            except AssertionError as error:
                wrong.append(f"{label}: {error}")
            if answer.end == "clean" and not answer.done:
                wrong.append(f"{label}: {mode}: a clean end without [DONE]")
            if answer.end == "clean" and stream and mode in BROKEN:
                wrong.append(f"{label}: {mode}: taken for complete")
        elif answer.end != "clean" and mode == "ok":
            wrong.append(f"{label}: an answer of a well engine was cut")

    async def _kill(self) -> None:
        while await self._pause(7.0):
            engine = self._rng.choice(self._engines[1:])
            await engine.stop()
            self.tally.kills += 1
            await self._pause(1.5)
            await engine.start()

    async def _drain(self) -> None:
        while await self._pause(3.0):
            await self._rig.set_state("i1", "drain")
            await self._pause(0.5)
            await self._rig.set_state("i1", "ready")

    async def _reload(self) -> None:
        document = self._rig.document()
        instances = document["models"][0]["instances"]
        while await self._pause(0.4):
            # Every tenth takes an instance out or puts it back.
            gone = self.tally.reloads // 10 % 2
            document["models"][0]["instances"] = instances[: ENGINES - gone]
            self._rig.write(document)
            status, text = await self._rig.reload()
            self.tally.reloads += 1
            if status != 200:
                self.tally.wrong.append(f"reload: {status} {text!r}")
        document["models"][0]["instances"] = instances
        self._rig.write(document)
        await self._rig.reload()

    async def _forget(self) -> None:
        """Engines remember every visit, which here would be the memory of this process."""
        while await self._pause(1.0):
            for engine in self._engines:
                engine.visits.clear()


class Samples:
    """Memory and descriptors of a process, once a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.at_s: list[float] = []
        self.rss_mib: list[float] = []
        self.descriptors: list[int] = []
        self.requests: list[int] = []

    async def take(self, tally: Tally) -> None:
        """Until cancelled."""
        started = time.monotonic()
        page_mib = os.sysconf("SC_PAGE_SIZE") / 2**20
        while True:
            self.at_s.append(time.monotonic() - started)
            self.rss_mib.append(self._pages() * page_mib)
            self.descriptors.append(len(os.listdir(f"/proc/{self._pid}/fd")))
            self.requests.append(tally.warm_up + tally.sent)
            await asyncio.sleep(1.0)

    def _pages(self) -> int:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])

    def second_half(self, warm_up_s: float) -> dict[str, float]:
        """Memory in the middle and at the end of the load: medians of a tenth of its time, in MiB."""
        rss_mib = self.rss_mib[np.searchsorted(self.at_s, warm_up_s) :]
        half, tenth = len(rss_mib) // 2, max(1, len(rss_mib) // 10)
        middle, end = rss_mib[half : half + tenth], rss_mib[-tenth:]
        return {"middle_mib": statistics.median(middle), "end_mib": statistics.median(end)}

    def by_minute(self, warm_up_s: float) -> list[float]:
        """Medians of the memory in each minute of the load, in MiB."""
        at_s, rss_mib = np.array(self.at_s) - warm_up_s, np.array(self.rss_mib)
        minutes = (at_s[at_s >= 0.0] // 60.0).astype(int)
        return [
            round(float(np.median(rss_mib[at_s >= 0.0][minutes == each])), 2) for each in np.unique(minutes)
        ]

    def slope(self, from_s: float) -> dict[str, float]:
        """Growth of the load, MiB for 100,000 requests, with its 95 % interval; and over what was sent.

        A slow machine sends fewer: what they add is judged, not what 100,000 of them might.
        """
        at = np.searchsorted(self.at_s, from_s)
        x, y = np.array(self.requests[at:]) / 1e5, np.array(self.rss_mib[at:])
        slope, _, low, high = theilslopes(y, x, 0.95)
        return {"mib_per_100k_requests": float(slope), "low": float(low), "high": float(high),
                "first_mib": float(y[0]), "last_mib": float(y[-1]),
                "grown_mib": float(slope * min(1.0, x[-1] - x[0]))}  # fmt: skip


async def soak(minutes: float, warm_up: int, seed: int, at_once: int, folder: Path) -> dict[str, Any]:
    """Run it; the document of what came of it, with nothing `wrong` where all is well."""
    async with contextlib.AsyncExitStack() as stack:
        neighbour = await stack.enter_async_context(FaultEngine(served="bg"))
        engines = [await stack.enter_async_context(FaultEngine()) for _ in range(ENGINES)]
        for number, engine in enumerate(engines):
            engine.pace_s, engine.length = 0.004 * (number + 1), 12
        rig = await stack.enter_async_context(as_process(folder, engines, neighbour, TABLES))
        assert isinstance(rig.pid, int)
        checker = Checker(rig.admin_port, (*engines, neighbour), pid=rig.pid, own_process=False)
        before = await checker.snapshot()
        load = Soak(rig, engines, seed, at_once)
        samples = Samples(rig.pid)
        sampling = asyncio.create_task(samples.take(load.tally))
        started = time.monotonic()
        try:
            await load.warm_up(warm_up)
            warm_up_s = time.monotonic() - started
            await load.run(minutes * 60)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        took_s = time.monotonic() - started
        wrong = load.tally.wrong
        try:
            after = await checker.back_to(before)
            ended = after.outcomes - before.outcomes
        except AssertionError as error:
            wrong.append(f"afterwards: {error}")
            ended = outcomes(await read_metrics(rig.admin_port))
        log = (folder / "log").read_text(errors="replace")
        if "Traceback" in log:
            wrong.append(log[log.index("Traceback") :][:1000])
        if "secret-" in log:
            wrong.append("a prompt stands in the log")
    tally = load.tally
    # A client that left before its request was read counts nowhere; every other request has one outcome.
    ended["ok"] -= warm_up
    if not tally.sent - tally.left <= ended.total() <= tally.sent:
        wrong.append(f"{tally.sent} requests of which {tally.left} left, but {ended.total()} outcomes")
    growth = samples.slope(warm_up_s + 0.2 * (took_s - warm_up_s))
    if minutes >= 10 and growth["low"] > 0 and growth["grown_mib"] > BOUND_MIB:
        wrong.append(f"memory grows by {growth['grown_mib']:.2f} MiB in {tally.sent:,} requests")
    half = samples.second_half(warm_up_s)
    if minutes >= 10 and half["end_mib"] - half["middle_mib"] > BOUND_MIB:
        wrong.append(f"memory grows by {half['end_mib'] - half['middle_mib']:.2f} MiB in the second half")
    let_go = sorted(tally.let_go_s)
    return {
        "recorded": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "command": f"bench/faults/soak.py --minutes {minutes:g} --seed {seed} --at-once {at_once}",
        "seconds": round(took_s, 1),
        "warm_up_requests": warm_up,
        "warm_up_seconds": round(warm_up_s, 1),
        "requests": tally.sent,
        "clients_that_left": tally.left,
        "statuses": dict(tally.statuses.most_common()),
        "outcomes": dict(ended.most_common()),
        "reloads": tally.reloads,
        "engines_killed": tally.kills,
        "memory": {**growth, **half, "mib_by_minute": samples.by_minute(warm_up_s)},
        "descriptors": {"before": samples.descriptors[0], "most": max(samples.descriptors)},
        "engine_let_go_ms": {
            "count": len(let_go),
            "median": 1e3 * statistics.median(let_go) if let_go else None,
            "p99": 1e3 * let_go[int(0.99 * len(let_go))] if let_go else None,
        },
        "wrong": {"count": len(wrong), "examples": wrong[:20]},
    }


def _commit() -> str:
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or "unknown"


def main() -> int:
    """Soak as the arguments say. Exit status 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="Load, faults, and what is left of them.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=int, default=100_000, help="plain requests sent before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=40, help="clients")
    parser.add_argument("--save", type=Path, help="write the document here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(
            soak(arguments.minutes, arguments.warm_up, arguments.seed, arguments.at_once, Path(folder))
        )
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.save is not None:
        arguments.save.write_text(text + "\n")
    return 1 if result["wrong"]["count"] else 0


if __name__ == "__main__":
    sys.exit(main())
