"""A running `hetlb serve --workers N`: its processes, ways to ask both of its listeners."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from helpers import HANG_S
from proxy.services import Reply

PROMPT = {"model": "m", "prompt": [1] * 100, "max_tokens": 50}
Serve = Callable[..., Any]
#: Pause between two looks at what several processes must do before it is so.
_POLL_S = 0.02


class Serving:
    """A running `hetlb serve --workers N`."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self.path = path
        self.url = self.admin_url = ""
        self.errors: list[str] = []
        self._news = asyncio.Condition()
        # A connection for every request: the kernel chooses a worker for each.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=HANG_S),
        )
        self._reader: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        assert self.process.stdout is not None
        self._reader = asyncio.create_task(self._read_errors())
        line = (await asyncio.wait_for(self.process.stdout.readline(), HANG_S)).decode()
        assert " ready on " in line, self.errors
        self.url, self.admin_url = (word.strip("()\n") for word in line.split() if "http://" in word)

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._news:
                self.errors.append(line.decode().rstrip("\n"))
                self._news.notify_all()

    async def said(self, part: str) -> str:
        """A line of the log that holds `part`, when it has come."""
        try:
            async with asyncio.timeout(HANG_S), self._news:
                await self._news.wait_for(lambda: any(part in line for line in self.errors))
        except TimeoutError:
            raise AssertionError(f"expected {part!r}, got {self.errors}") from None
        return next(line for line in self.errors if part in line)

    async def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Stop it; every process of it is gone then."""
        workers: list[int] = []
        if self.process.returncode is None:
            workers = self.workers
            self.process.send_signal(number)
        status = await asyncio.wait_for(self.process.wait(), HANG_S)
        assert not alive(workers), "a process was left behind"
        if self._reader is not None:
            await self._reader
        await self.session.close()
        assert not [line for line in self.errors if "Traceback" in line], "\n".join(self.errors)
        return status

    async def kill(self) -> None:
        """End what a failed test left, and read its pipes to their end: the loop closes with none open."""
        if self.process.returncode is None:
            workers = self.workers
            self.process.kill()
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), HANG_S)
        if self._reader is not None:
            await asyncio.wait_for(self._reader, HANG_S)
        assert self.process.stdout is not None
        await asyncio.wait_for(self.process.stdout.read(), HANG_S)
        await self.session.close()

    @property
    def workers(self) -> list[int]:
        """The workers' process ids."""
        return children(self.process.pid)

    async def ask(
        self,
        path: str = "/v1/completions",
        method: str = "POST",
        tenant: str = "-",
        key: str = "-",
        **body: Any,
    ) -> Reply:
        """A request on a connection of its own."""
        data = msgspec.json.encode(body or PROMPT) if method == "POST" else None
        headers = {"X-Tenant": tenant, "Authorization": f"Bearer {key}"}
        async with self.session.request(method, self.url + path, data=data, headers=headers) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def admin(self, path: str, method: str = "GET", **body: Any) -> Reply:
        """Ask the admin listener."""
        data = msgspec.json.encode(body) if body else None
        async with self.session.request(method, self.admin_url + path, data=data) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def metric(self, line: str) -> float:
        """The sum of the series that have these labels, as the processes have told within a second."""
        text = (await self.admin("/metrics")).body.decode()
        name, _, labels = line.rstrip("}").partition("{")
        wanted = set(labels.split(",")) - {""}
        series = re.findall(rf"^{name}(?:{{(.*)}})? (.+)$", text, re.MULTILINE)
        return sum(float(value) for has, value in series if wanted <= set(has.split(",")))

    async def fleet_until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The fleet once something is true of it."""
        fleet: dict[str, Any] = {}
        try:
            async with asyncio.timeout(HANG_S):
                while True:
                    fleet = (await self.admin("/v1/fleet")).json
                    if holds(fleet):
                        return fleet
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"the fleet stays {fleet}") from None

    async def everywhere(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until something is true of the fleet as each worker sees it.

        Each look is a connection of its own, so the kernel chooses the worker: fifty that all pass one of
        three by do not occur.
        """
        looks = 0
        async with asyncio.timeout(HANG_S):
            while looks < 50:
                looks = looks + 1 if holds((await self.admin("/v1/fleet")).json) else 0

    async def metric_until(self, line: str, value: float) -> None:
        """Wait until a series has a value."""
        async with asyncio.timeout(HANG_S):
            while await self.metric(line) != value:
                await asyncio.sleep(_POLL_S)

    async def both_serve(self, count: int = 2) -> list[Reply]:
        """Ask until `count` workers have answered; return all replies."""
        replies: list[Reply] = []
        async with asyncio.timeout(HANG_S):
            while len({worker_of(reply) for reply in replies}) < count:
                replies.append(await self.ask())
        return replies


def worker_of(reply: Reply) -> str:
    """What names the worker in a request's id."""
    label: str = reply.headers["x-request-id"]
    return label.rpartition("-")[0]


def children(pid: int) -> list[int]:
    """Return the living processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    """What a process calls itself, "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def alive(pids: list[int]) -> list[int]:
    """Return the processes that are alive."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def in_flight(fleet: dict[str, Any]) -> int:
    return sum(each["in_flight"] for model in fleet["models"] for each in model["instances"])


def at_rest(fleet: dict[str, Any]) -> bool:
    figures = ("in_flight", "queued", "workload", "kv_reserved_tokens")
    instances = [each for model in fleet["models"] for each in model["instances"]]
    return fleet["queue"] == {"requests": 0, "bytes": 0} and not any(
        each[name] for each in instances for name in figures
    )
