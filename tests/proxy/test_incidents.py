"""Incidents of a running fleet: what the first line says, while each lasts and after it is mended.

`pytest -s` prints the seconds until the line is true, and until it is well again. They are measured, not
asserted: other processes share the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults.client import Client, body_of, request
from faults.engine import FaultEngine, Visit, _status, mode
from helpers import HANG_S
from proxy.services import Running, document, serving
from proxy.upstreams import DONE, LAST, SSE_HEAD, chunk, plain

pytestmark = pytest.mark.slow

_status("401", b"401 Unauthorized")


@mode("steady")
async def _steady(visit: Visit) -> None:
    """Stream tokens at the engine's pace; usage is left to be counted. Hetlb's own requests say how many."""
    engine = visit.engine
    length = json.loads(visit.body)["max_tokens"] if b"ignore_eos" in visit.body else engine.length
    await visit.send(SSE_HEAD)
    while visit.tokens < length and not visit.left.is_set():
        await visit.send(chunk(visit.token()))
        await asyncio.sleep(engine.pace_s)
    if length is not engine.length:
        await visit.send(chunk(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % length))
    await visit.send(chunk(DONE) + LAST)


@mode("500-in-three")
async def _one_in_three(visit: Visit) -> None:
    number = sum(visit.engine.executions.values())
    await (visit.send(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n") if number % 3 == 0 else _steady(visit))


@mode("no-finish")
async def _no_finish(visit: Visit) -> None:
    """End each stream with an error as its reason, as an engine whose output is broken."""
    await visit.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await visit.send(b'data: {"choices":[{"index":0,"text":"","finish_reason":"error"}]}\n\ndata: [DONE]\n\n')
    visit.close()


class Watched(FaultEngine):
    """An engine of which the page of metrics is true; `others` are requests that hetlb did not send."""

    def __init__(self) -> None:
        self.others = 0
        self.lists = True
        self.page = True
        self.began = next(_BEGAN)
        super().__init__("steady")
        self.pace_s, self.length = 0.02, 15

    @property
    def metrics(self) -> bytes | None:
        running = sum(visit.path.startswith("/v1/") for visit in self.working)
        tokens = sum(visit.tokens for visit in self.visits)
        return (
            f"vllm:num_requests_running {running + self.others}\nvllm:num_requests_waiting 0\n"
            f"vllm:kv_cache_usage_perc 0.1\nvllm:generation_tokens_total {tokens}\n"
            f"process_start_time_seconds {self.began}\n"
        ).encode()

    async def _answer(self, visit: Visit) -> None:
        known = ("/health", "/v1/models", "/version", *(("/metrics",) if self.page else ()))
        if visit.path == "/v1/models" and not self.lists:
            await visit.send(plain(b"<html>hello</html>"))
        elif visit.method == "GET" and visit.path not in known:
            await visit.send(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")
        else:
            await super()._answer(visit)

    @metrics.setter
    def metrics(self, value: bytes | None) -> None:
        pass


_BEGAN = itertools.count(1.7e9)


class Incident:
    """A running fleet of engines `i0`, `i1`, `i2` under load, and its first lines."""

    def __init__(self, running: Running, engines: list[Watched]) -> None:
        self.running, self.engines = running, engines
        self.first, self.lines = engines[0], list[str]()
        self.rate = 20.0
        self.fields: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._asks: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Ask at a rate until cancelled."""
        while True:
            task = asyncio.create_task(self._ask(f"r{next(self._numbers)}"))
            self._asks.add(task)
            task.add_done_callback(self._asks.discard)
            await asyncio.sleep(1.0 / self.rate)

    async def leave(self) -> None:
        for task in self._asks:
            task.cancel()
        await asyncio.gather(*self._asks, return_exceptions=True)

    async def _ask(self, label: str) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with Client(self.running.port) as client:
                client.send(request(label, body_of(label, **self.fields)))
                await client.answer()

    async def says(self, pattern: str, state: str = "") -> float:
        """Wait for a first line; return the seconds until then. `lines` has what was said before."""
        clock = asyncio.get_running_loop().time
        since, self.lines = clock(), []
        while True:
            found = (await self.running.admin("GET", "/v1/status")).json
            line = f"{found['state']}: {found['advice']}"
            if re.search(pattern, line):
                assert line.startswith(state)
                return clock() - since
            words = re.sub(r"\d+(\.\d+)?", "#", line)
            if words not in self.lines:
                self.lines.append(words)
            assert clock() - since < HANG_S, self.lines
            await asyncio.sleep(0.1)


Step = Callable[[Incident], Awaitable[None]]


@dataclass
class Case:
    """What breaks, what the first line says then, and what mends it."""

    breaks: Step
    says: str
    mends: Step
    tables: dict[str, Any] = field(default_factory=dict)
    instance: dict[str, Any] = field(default_factory=dict)
    well: str = r"^well: (?!i0 )|^busy: The slots"


def sets(**values: Any) -> Step:
    """Set fields of the first engine."""

    async def step(incident: Incident) -> None:
        for name, value in values.items():
            setattr(incident.first, name, value)

    return step


def all_set(**values: Any) -> Step:
    async def step(incident: Incident) -> None:
        for engine in incident.engines:
            for name, value in values.items():
                setattr(engine, name, value)

    return step


def asks(**values: Any) -> Step:
    async def step(incident: Incident) -> None:
        for name, value in values.items():
            setattr(incident, name, value)

    return step


async def dies(incident: Incident) -> None:
    await incident.first.stop()


async def starts(incident: Incident) -> None:
    incident.first.began = next(_BEGAN)
    await incident.first.start()


async def moves(incident: Incident) -> None:
    """Another model takes the address, between two looks."""
    incident.first.served, incident.first.mode = "other", "404"


async def moves_back(incident: Incident) -> None:
    incident.first.served, incident.first.mode = "m", "steady"


async def drains(incident: Incident) -> None:
    await incident.running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})


async def is_ready(incident: Incident) -> None:
    await incident.running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "ready"})


async def flaps(incident: Incident) -> None:
    """Die and start three times: the seconds between are the fault itself."""
    for _ in range(3):
        await dies(incident)
        await asyncio.sleep(1.5)
        await starts(incident)
        await asyncio.sleep(2.5)
    await dies(incident)


#: A step of 40 ms: the engines take half of that on an idle machine.
PROFILE = """
version: 1
name: steady
engine: {name: emulated, kv_cache_tokens: 1000000, block_size: 16, max_num_seqs: 64}
prefill: {k1: 0, k2: 0, k3: 0, k4: 1.0e-3}
decode: {k5: 0, k6: 0, k7: 0, k8: 4.0e-2}
"""
OK = sets(mode="steady")
SLOTS = {"max_num_seqs": 4}
CASES = {
    "dead": Case(dies, r"degraded: i0 is down \((connection refused|it accepts no connection)\)", starts),
    "hung": Case(sets(mode="stall"), r"degraded: i0 has stalled", OK),
    "500 for a third": Case(
        sets(mode="500-in-three"), r"degraded: i0 failed .* requests; the other.*\. Look at its log\.", OK
    ),
    "500 for all": Case(
        sets(mode="500"), r"degraded: i0 failed .* requests; the other.*\. Look at its log\.", OK
    ),
    "wrong answers": Case(sets(mode="no-finish"), r"degraded: i0 answered .* requests wrong", OK),
    "404 at one": Case(sets(mode="404"), r"degraded: i0 answers 404 to .*; the other servers .*model", OK),
    "404 at all": Case(
        all_set(mode="404"), r"degraded: The servers answer 404 to .*model", all_set(mode="steady")
    ),
    "400 at one": Case(sets(mode="400"), r"degraded: i0 answers 400 to .*; the other servers", OK),
    "key refused": Case(sets(mode="401"), r"degraded: i0 refuses hetlb's key \(401\)", OK),
    "slower than its profile": Case(
        sets(pace_s=0.4),
        r"degraded: i0 takes .* times as long as its profile says",
        sets(pace_s=0.02),
        instance={"max_num_seqs": 64, "profile": "steady.yaml"},
    ),
    "slow": Case(sets(pace_s=0.2), r"degraded: i0 is .* times as slow as usual", sets(pace_s=0.02)),
    "flaps": Case(flaps, r"degraded: i0 flaps", starts),
    "others' load": Case(sets(others=30), r"busy: Others use i0", sets(others=0)),
    "overload": Case(
        asks(rate=60.0),
        r"requests wait, the oldest for .* Add|requests wait.* add",
        asks(rate=5.0),
        instance=SLOTS,
    ),
    "full": Case(
        asks(rate=80.0),
        r"degraded: .* % of requests are refused: the queue is full",
        asks(rate=5.0),
        {"queue": {"max_requests": 5}},
        SLOTS,
    ),
    "red health": Case(sets(health="500"), r"i0 fails its probes \(/health answers 500\)", sets(health="ok")),
    "a web server": Case(
        sets(lists=False), r"busy: i0 fails its probes \(its /v1/models is no list", sets(lists=True)
    ),
    "another model": Case(moves, r"degraded: i0 serves other, not m", moves_back),
    "no metrics": Case(sets(page=False), r"i0 has no /metrics", sets(page=True)),
    "loading": Case(
        sets(health="503", mode="503"), r"i0 is down .*503.*Wait|i0 failed", sets(health="ok", mode="steady")
    ),
    "drained": Case(drains, r"well: i0 is drained", is_ready),
}


@contextlib.asynccontextmanager
async def fleet(folder: Path, case: Case) -> AsyncIterator[Incident]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Watched()) for _ in range(3)]
        table = document(
            *engines,
            policy={"name": "hetlb"},
            scrape={"interval_s": 1.0, "timeout_s": 2.0},
            proxy={"request_log": False},
            **case.tables,
        )
        for each in table["models"][0]["instances"]:
            each.update(case.instance or {"max_num_seqs": 64})
        (folder / "steady.yaml").write_text(PROFILE)
        async with serving(folder, table) as running:
            incident = Incident(running, engines)
            load = asyncio.create_task(incident.load())
            try:
                yield incident
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                for engine in engines:
                    engine.mode, engine.pace_s = "steady", 0.0
                await incident.leave()


@pytest.mark.parametrize("name", CASES)
async def test_the_first_line_says_what_is_wrong_and_then_that_it_is_well(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    async with fleet(tmp_path, case) as incident:
        await incident.says(case.well)
        for engine in incident.engines:  # enough answers for a usual speed
            await engine.until(lambda engine=engine: len(engine.visits) >= 50)  # type: ignore[misc]
        await case.breaks(incident)
        true_s = await incident.says(case.says)
        before = incident.lines
        await case.mends(incident)
        clear_s = await incident.says(case.well)
        print(f"\n{name}: true after {true_s:.1f} s, well after {clear_s:.1f} s; said", *before, sep="\n    ")


async def test_a_verdict_about_speed_holds_while_no_answer_contradicts_it(tmp_path: Path) -> None:
    """Work moves away within a second; no answer of the slow server comes to compare with others'."""
    async with fleet(tmp_path, CASES["slow"]) as incident:
        await incident.says("^well")
        for engine in incident.engines:
            await engine.until(lambda engine=engine: len(engine.visits) >= 50)  # type: ignore[misc]
        incident.first.pace_s = 0.2
        await incident.says("i0 is .* times as slow as usual")
        asked = len(incident.engines[1].visits)
        while len(incident.engines[1].visits) < asked + 100:
            found = (await incident.running.admin("GET", "/v1/status")).json
            assert "i0 is" in found["advice"], found["advice"]
            await asyncio.sleep(0.1)
