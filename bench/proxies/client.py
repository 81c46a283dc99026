"""The load of every measurement, as cheap as it can be made: raw prebuilt requests over kept connections.

`python client.py` reads one JSON object a line from standard input (the fields of `Load`), runs it, writes
one JSON object a line. Promise: every answer is checked before it counts (status, tag, every event, their
order, the finishing event, `[DONE]`, the end of the body); the CPU of the proxy is read at the first and at
the last instant of the window; times are of the reads themselves. An answer that fails a check is an
error with its reason, never a figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import uvloop
from alarm import Alarm
from bodies import PROMPTS, chat, dechunked, large, request, tag
from cpu import busy_s, cpu_ns, rss_bytes
from mock_engine import token

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_TOKENS = re.compile(rb'"content": ?"( t\d{6}x*)"')
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_EVENT = b"data: {"
#: Modes whose answers are streams of events.
STREAMED = ("coalesced", "bytewise", "paced")


@dataclass(slots=True)
class Load:
    """One measurement."""

    #: `plain`, `coalesced`, `bytewise`, `paced`, or the kind of a body of bodies.large.
    mode: str
    #: Where to: `[host, port]`, several when the engines are asked directly.
    targets: list[tuple[str, int]]
    connections: int
    #: Counted requests (plain, coalesced), after `warmup` uncounted ones.
    requests: int = 0
    warmup: int = 0
    #: Requests a second, Poisson arrivals; 0 is closed loop.
    rate: float = 0.0
    #: Of a stream: events, microseconds between them, further characters in each, seconds of the window.
    chunks: int = 1
    pace_us: int = 0
    padding: int = 0
    window_s: float = 0.0
    #: The processes of the proxy, and of the generator (the engine; this process is added).
    pids: list[int] = field(default_factory=list)
    generator_pids: list[int] = field(default_factory=list)
    engine: tuple[str, int] = ("127.0.0.1", 0)
    #: The cores that proxy and generator have.
    cores: list[int] = field(default_factory=list)
    prompt_bytes: int = 400
    #: Of a large body: see bodies.large.
    size: int = 0
    timeout_s: float = 120.0


def stream_error(answer: bytes, load: Load, tag: bytes) -> str | None:
    """Why a whole streamed answer is not what the engine sent; None if it is."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return f"status {head[9:12].decode('latin-1')}"
    if b"hunked" in head:
        text = dechunked(body)
        if text is None:
            return "bad framing"
    else:
        text = body
    if not text.rstrip().endswith(b"data: [DONE]"):
        return "no [DONE]"
    if b'"stop"' not in text:
        return "no finishing event"
    if tag not in text:
        return "another request's answer"
    if b'"prompt_tokens"' in text:
        return "usage that was not asked for"
    wanted = [token(number, load.padding).encode() for number in range(1, load.chunks + 1)]
    got = _TOKENS.findall(text)
    if got == wanted:
        return None
    return "events out of order" if sorted(got) == wanted else "events lost or added"


def _requests(load: Load) -> list[tuple[bytes, bytes]]:
    if load.size:
        return [large(load.mode, load.size)]
    return [
        (
            request(chat(load.mode, number, load.prompt_bytes, load.chunks, load.pace_us, load.padding)),
            tag(number),
        )
        for number in range(PROMPTS)
    ]


class Runner:
    """Runs one load."""

    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        self.load = load
        self.loop = loop
        self.requests = _requests(load)
        self.errors: Counter[str] = Counter()
        self.sent = 0
        self.done = 0
        #: Paced: streams that have had their first event, events and reads inside the window.
        self.begun = 0
        self.events = 0
        self.reads = 0
        #: Streams or answers inside the window, seconds each.
        self.latencies = array("d")
        self.gaps = array("d")
        self.in_window = False
        #: The result stands: what ends from here on is our own doing.
        self.over = False
        self.idle: list[Connection] = []
        self.late: deque[float] = deque()
        self.finished = loop.create_future()
        self.mark: dict[str, float] = {}
        self.figures: dict[str, Any] = {}

    @property
    def last(self) -> int:
        """How many requests there are in all."""
        return self.load.warmup + self.load.requests

    def next_request(self) -> tuple[bytes, bytes]:
        """The next prebuilt request."""
        self.sent += 1
        return self.requests[self.sent % len(self.requests)]

    def open_window(self) -> None:
        """From here on things count."""
        self.in_window = True
        self.mark = self._snapshot()

    def close_window(self) -> None:
        """Nothing counts any more."""
        if not self.in_window:
            return
        self.in_window = False
        now = self._snapshot()
        self.figures = {name: now[name] - was for name, was in self.mark.items()}
        self.figures["rss"] = rss_bytes(self.load.pids)

    def _snapshot(self) -> dict[str, float]:
        return {
            "generator_ns": cpu_ns([*self.load.generator_pids, os.getpid()]),
            "wall_s": time.monotonic(),
            "busy_s": busy_s(self.load.cores),
            "cpu_ns": cpu_ns(self.load.pids),
        }

    def answered(self, connection: Connection, error: str | None, seconds: float) -> None:
        """A request is over."""
        if self.over:
            return
        self.done += 1
        if error is not None:
            self.errors[error] += 1
        elif self.in_window:
            self.latencies.append(seconds)
        if self.load.mode == "paced":
            self.close_window()  # the first stream that ends closes it, if time has not
        elif self.done == self.load.warmup:
            self.open_window()
        elif self.done == self.last:
            self.close_window()
        if self.done >= self.last:
            if not self.finished.done():
                self.finished.set_result(None)
        elif self.load.rate:
            if self.late:
                connection.send(self.late.popleft())
            else:
                self.idle.append(connection)
        elif self.sent < self.last:
            connection.send(time.monotonic())


class Connection(asyncio.Protocol):
    """One connection: one request at a time, a new connection when the other side closed it."""

    def __init__(self, runner: Runner, target: tuple[str, int]) -> None:
        self._runner = runner
        self._target = target
        self._transport: Any = None
        self._plain = runner.load.mode not in STREAMED
        self._paced = runner.load.mode == "paced"
        self._pieces: list[bytes] = []
        self._have = 0
        self._tail = b""
        self._busy = False
        self._tag = b""
        self._sent_at = 0.0
        self._read_at = 0.0

    async def connect(self) -> None:
        """Open it."""
        await self._runner.loop.create_connection(lambda: self, *self._target)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, due: float) -> None:
        """Send the next request, which was due at `due` (its latency counts from then)."""
        runner = self._runner
        if self._transport is None:
            task = runner.loop.create_task(self._send_on_new(due))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return
        data, self._tag = runner.next_request()
        self._busy = True
        self._sent_at = due
        self._transport.write(data)

    async def _send_on_new(self, due: float) -> None:
        try:
            await self.connect()
        except OSError as error:
            self._runner.answered(self, f"connect: {error.strerror}", 0.0)
            return
        self.send(due)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._plain:
            self._read_plain(data, now)
        else:
            self._read_stream(data, now)

    def _read_plain(self, data: bytes, now: float) -> None:
        if self._pieces:
            self._pieces.append(data)
            data = b"".join(self._pieces)
            self._pieces = []
        end = data.find(b"\r\n\r\n")
        length = _LENGTH.search(data, 0, end) if end >= 0 else None
        if end < 0 or (len(data) - end - 4 < int(length[1]) if length else not data.endswith(_LAST_CHUNK)):
            self._pieces.append(data)
            return
        if not data.startswith(b"HTTP/1.1 200"):
            error: str | None = f"status {data[9:12].decode('latin-1')}"
        else:
            error = None if self._tag in data else "another request's answer"
        self._busy = False
        self._runner.answered(self, error, now - self._sent_at)

    def _read_stream(self, data: bytes, now: float) -> None:
        runner = self._runner
        if runner.in_window:
            runner.reads += 1
            runner.events += data.count(_EVENT)
            if self._paced:
                runner.gaps.append(now - self._read_at)
        self._read_at = now
        pieces = self._pieces
        pieces.append(data)
        if len(pieces) == 1 and self._paced:
            runner.begun += 1
            if runner.begun == runner.load.connections:
                runner.open_window()
                runner.loop.call_later(runner.load.window_s, runner.close_window)
        self._tail = data[-7:] if len(data) >= 7 else (self._tail + data)[-7:]
        if self._tail == _LAST_CHUNK or (len(pieces) == 1 and not data.startswith(b"HTTP/1.1 200")):
            self._end_stream(now)

    def _end_stream(self, now: float) -> None:
        answer = b"".join(self._pieces)
        self._pieces, self._tail, self._busy = [], b"", False
        self._runner.answered(self, stream_error(answer, self._runner.load, self._tag), now - self._sent_at)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._busy:
            return
        if not self._plain and self._pieces:
            self._end_stream(time.monotonic())
            return
        self._pieces, self._busy = [], False
        self._runner.answered(self, "connection lost", 0.0)


async def run(load: Load) -> dict[str, Any]:
    """Run one load and say what was measured."""
    loop = asyncio.get_running_loop()
    runner = Runner(load, loop)
    if load.mode == "paced":
        load.requests = load.connections
    connections = [
        Connection(runner, load.targets[number % len(load.targets)]) for number in range(load.connections)
    ]
    for start in range(0, len(connections), 64):
        await asyncio.gather(*(connection.connect() for connection in connections[start : start + 64]))
    await _engine_report(load)
    if load.warmup == 0 and load.mode != "paced":
        runner.open_window()
    began = time.monotonic()
    alarm = _open_loop(runner, connections) if load.rate else None
    if alarm is None:
        for number, connection in enumerate(connections[: runner.last]):
            connection.send(time.monotonic())
            if number % 16 == 15:
                await asyncio.sleep(0.001)
    try:
        await asyncio.wait_for(runner.finished, load.timeout_s)
    except TimeoutError:
        runner.errors["unanswered"] += runner.last - runner.done
        runner.close_window()
    runner.over = True
    if alarm is not None:
        alarm.close()
    report = await _engine_report(load)
    for connection in connections:
        if connection._transport is not None:
            connection._transport.abort()
    return {
        **runner.figures,
        "took_s": time.monotonic() - began,
        "answers": len(runner.latencies) if load.mode != "paced" else runner.done,
        "events": runner.events,
        "reads": runner.reads,
        "errors": dict(runner.errors),
        "latency_ms": quantiles(runner.latencies),
        "gap_ms": quantiles(runner.gaps),
        "engine": report,
    }


def _open_loop(runner: Runner, connections: list[Connection]) -> Alarm:
    """Requests at random times, whatever became of earlier ones; one waits if all connections are busy."""
    draw = random.Random(1)
    runner.idle = list(connections)
    due = time.monotonic() + 0.01
    planned = 0

    def ring() -> None:
        nonlocal due, planned
        now = time.monotonic()
        while due <= now and planned < runner.last:
            planned += 1
            if runner.idle:
                runner.idle.pop().send(due)
            else:
                runner.late.append(due)
            due += draw.expovariate(runner.load.rate)
        if planned < runner.last:
            alarm.set(due)

    alarm = Alarm(runner.loop, ring)
    alarm.set(due)
    return alarm


def quantiles(values: array[float]) -> dict[str, float]:
    """p50, p90, p99, p99.9 and the maximum in milliseconds; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1e3 for name, q in at.items()}


async def _engine_report(load: Load) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(*load.engine)
    writer.write(b"GET /bench/report HTTP/1.1\r\nHost: bench\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None
    found: dict[str, Any] = json.loads(await reader.readexactly(int(length[1])))
    writer.close()
    return found


def main() -> None:
    """One load a line, until standard input ends."""
    for line in sys.stdin:
        result = uvloop.run(run(Load(**json.loads(line))))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
