"""The checker of the invariants: what stands on the outside of a proxy before and after a fault.

I1 from `/metrics` (the outcomes' sum is the requests sent), I2 and I3 from `/v1/fleet` (every figure
is zero, and an integer), I4 from the same after instances came and went, I5 from descriptors, tasks and the
engines' connections, I6 from the engines' own counts, I7 and I8 in the client (`client.py`), I9 from the
streams in the background, I10 from the log. All but tasks is seen from outside, so that the same checker
works on a process, in a test and in the soak.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from faults.client import get
from faults.engine import FaultEngine
from helpers import HANG_S

_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)
#: Seconds that figures may take to come to rest, and the least number of looks at them.
QUIESCE_S, LOOKS = HANG_S, 10
ZERO_KEYS = ("in_flight", "queued", "workload", "kv_reserved_tokens")


async def fleet(admin_port: int) -> dict[str, Any]:
    """`GET /v1/fleet`."""
    status, body = await get(admin_port, "/v1/fleet")
    assert status == 200, body
    document: dict[str, Any] = json.loads(body)
    return document


async def metrics(admin_port: int) -> dict[tuple[str, str], float]:
    """`GET /metrics`: value by name and labels as written."""
    status, body = await get(admin_port, "/metrics")
    assert status == 200, body
    return {(name, labels): float(value) for name, labels, value in _SERIES.findall(body.decode())}


def outcomes(page: dict[tuple[str, str], float]) -> Counter[str]:
    """How many requests ended in which outcome."""
    found: Counter[str] = Counter()
    for (name, labels), value in page.items():
        if name == "hetlb_requests_total":
            outcome = re.search(r'outcome="(\w+)"', labels)
            assert outcome is not None, labels
            found[outcome[1]] += int(value)
    return +found


def figures(document: dict[str, Any]) -> dict[str, float]:
    """Every figure of `/v1/fleet` that must be zero at rest."""
    found = {f"queue.{key}": value for key, value in document["queue"].items()}
    for model in document["models"]:
        for instance in model["instances"]:
            found |= {f"{instance['name']}.{key}": instance[key] for key in ZERO_KEYS}
    return found


def descriptors(pid: int | str = "self") -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until(holds: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
    """Ask until a condition holds, some times at least; the limit only ends what has failed."""
    loop = asyncio.get_running_loop()
    ends, looks = loop.time() + QUIESCE_S, 0  # looked up at every call: a test shortens it
    while not await holds():
        looks += 1
        assert loop.time() < ends or looks < LOOKS, what()
        await asyncio.sleep(0.01)


@dataclass
class Snapshot:
    """What was there at one moment."""

    outcomes: Counter[str]
    descriptors: int
    tasks: int
    executions: Counter[str]


class Checker:
    """Before and after. `own_process`: the proxy runs in this one, so that its tasks can be counted."""

    def __init__(
        self, admin_port: int, engines: Iterable[FaultEngine], *, pid: int | str = "self", own_process: bool
    ) -> None:
        self._admin_port = admin_port
        self._engines = list(engines)
        self._pid = pid
        self._own_process = own_process
        self.figures: dict[str, float] = {}

    def _foreign_descriptors(self) -> int:
        """Return the open descriptors that are no connection to an engine (which the proxy may keep idle)."""
        ends = 2 if self._own_process else 1
        return descriptors(self._pid) - ends * sum(len(engine.open) for engine in self._engines)

    def _foreign_tasks(self) -> int:
        return len(asyncio.all_tasks() - {task for engine in self._engines for task in engine.tasks})

    async def snapshot(self) -> Snapshot:
        """The state now, of a proxy at rest."""
        await self.at_rest()
        executions: Counter[str] = Counter()
        for engine in self._engines:
            executions += engine.executions
        # An engine may take a connection for open whose other end is closed, until it has had its turn.
        descriptors = self._foreign_descriptors()
        ended = outcomes(await metrics(self._admin_port))
        return Snapshot(
            ended,
            max(descriptors, self._foreign_descriptors()),
            self._foreign_tasks() if self._own_process else 0,
            executions,
        )

    async def at_rest(self) -> None:
        """I2 and I3: every figure of the ledger and the queue is exactly zero, and no engine is at work."""

        async def still() -> bool:
            self.figures = figures(await fleet(self._admin_port))
            assert all(value >= 0 for value in self.figures.values()), f"below zero: {self.figures}"
            working = any(engine.working for engine in self._engines)
            return not any(self.figures.values()) and not working

        await until(still, lambda: f"not at rest: {self._nonzero()}")

    def _nonzero(self) -> dict[str, float]:
        found = {key: value for key, value in self.figures.items() if value}
        return found | {
            f"at work on port {each.port}": len(each.working) for each in self._engines if each.working
        }

    async def back_to(self, before: Snapshot) -> Snapshot:
        """Wait for rest, then check I5 against an earlier snapshot. Returns the state now."""
        now = await self.snapshot()

        async def no_more() -> bool:
            nonlocal now
            now = await self.snapshot()
            return now.descriptors <= before.descriptors and now.tasks <= before.tasks

        await until(
            no_more,
            lambda: (
                f"left behind: descriptors {before.descriptors} -> {now.descriptors}, "
                f"tasks {before.tasks} -> {now.tasks}"
            ),
        )
        return now
