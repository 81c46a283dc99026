"""Servers that fail now and then, answer fast and wrong, refuse a kind, or are full of others' work.

    python bench/faults/bad_hour.py [--plain] [--profile] [--seconds S] [--servers N] [CASE ...]

Three servers on loopback behind a real `hetlb serve`; `a` is bad and three times as fast as the others,
which are idle. A line for each case: requests sent and lost, the share of `a` after 10 s, and `hetlb status`.
Without a name all cases run. Exit status 1 if a case misses its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENS, PACE_S = 20, 0.02
PAGE = """vllm:num_requests_running{engine="0"} %d
vllm:num_requests_waiting{engine="0"} %d
vllm:kv_cache_usage_perc{engine="0"} %.3f
vllm:generation_tokens_total{engine="0"} %d
vllm:prompt_tokens_total{engine="0"} %d
vllm:cache_config_info{block_size="16",num_gpu_blocks="8000",engine="0"} 1
process_start_time_seconds %.2f
process_cpu_seconds_total %.2f
"""
PROFILE = {
    "version": 1,
    "engine": {"name": "vllm", "kv_cache_tokens": 128000, "block_size": 16, "max_num_seqs": 64},
    "prefill": {"k1": 1e-6, "k2": 0.0, "k3": 0.0, "k4": 0.01},
}
Fields = dict[str, Any]


def _event(text: str | None, finish: str | None = None, *, model: str = "m", **more: Any) -> bytes:
    delta: Fields = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": {**delta, **more}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "model": model, "choices": [choice]}).encode() + b"\n\n"


def _whole(text: Any, finish: str = "stop", tokens: int = TOKENS, model: str = "m", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return json.dumps({"id": "c", "model": model, "choices": [choice], "usage": usage}).encode()


DONE = b"data: [DONE]\n\n"
#: A pause of one token, and a closed connection behind it, in the bytes of a wrong answer.
PAUSE = b"<pause>"
CLOSE = b"<close>"
ROLE = _event("", role="assistant")
_NONE = json.dumps({"id": "c", "model": "m", "choices": []}).encode()
#: Wrong answers by name: events of a stream (None: the body instead), and the body of a plain one.
WRONG: dict[str, tuple[list[bytes] | None, bytes]] = {
    "finish error": ([ROLE, _event("x"), _event("", "error"), DONE], _whole("x", "error", 1)),
    "finish abort": ([ROLE, _event("x"), _event("", "abort"), DONE], _whole("x", "abort", 1)),
    "no choices": ([b"data: " + _NONE + b"\n\n", DONE], _NONE),
    "json for a stream": (None, _whole("word " * TOKENS)),
    "empty text": ([ROLE, _event(""), _event("", "stop"), DONE], _whole("", tokens=0)),
    "one token": ([ROLE, _event("x"), _event("", "stop"), DONE], _whole("x", tokens=1)),
    "exclamations": (
        [ROLE, *[_event("!")] * TOKENS, _event("", "stop"), DONE],
        _whole("!" * TOKENS),
    ),
    "another model": (
        [_event(f"w{i} ", model="other") for i in range(TOKENS)] + [_event("", "stop", model="other"), DONE],
        _whole("word " * TOKENS, model="other"),
    ),
    "done after role": ([ROLE, DONE], _whole(None, tokens=0)),
    "no finish": ([ROLE, _event("x"), DONE], _whole("x", None, 1)),  # type: ignore[arg-type]
    "blanks": ([ROLE, *[_event(" ")] * 4, _event("", "stop"), DONE], _whole("    ", tokens=4)),
    "nul": ([ROLE, *[_event("\x00")] * TOKENS, _event("", "stop"), DONE], _whole("\x00" * TOKENS)),
    "text of an error": (
        [ROLE, _event("Internal Server Error"), _event("", "stop"), DONE],
        _whole("Internal Server Error", tokens=4),
    ),
    "only usage": ([_event(None, "stop"), DONE], json.dumps({"id": "c", "usage": {}}).encode()),
    "a page": (None, b"<html><title>Sign in</title></html>"),
    "no body": (None, b""),
    "half of it": (None, _whole("word " * TOKENS)[:60]),
    "length of none": ([ROLE, _event("", "length"), DONE], _whole("", "length", 0)),
    "no end": ([ROLE, *[_event(f"w{i} ") for i in range(TOKENS)], _event("", "stop")], b'{"choices":[{'),
    "filtered": ([ROLE, _event("", "content_filter"), DONE], _whole("", "content_filter", 0)),
    "choices of null": (
        [b'data: {"id":"c","choices":null}\n\n', DONE],
        b'{"id":"c","choices":null}',
    ),
}


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: int, body: bytes, more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


def _error(status: int) -> bytes:
    return _plain(status, b'{"error":{"message":"no","code":%d}}' % status)


@dataclass
class Server:
    """One server. `bad` returns the bytes with which it answers a body, None for a good answer."""

    pace_s: float = PACE_S
    bad: Callable[[Fields, bytes], bytes | None] | None = None
    #: Requests of others that it says run and wait, and the share of its cache.
    foreign: tuple[int, int, float] = (0, 0, 0.0)
    metrics: bool = True
    key: str = ""
    posts: int = 0
    running: int = 0
    tokens: int = 0
    port: int = 0
    began: float = field(default_factory=lambda: time.time() - 1000.0 * random.random())
    started_s: float = field(default_factory=lambda: 10.0 * random.random())
    closes: bool = False
    #: Seconds for which it stands still at its first request with `logprobs`, and whether it did.
    compiles: float = 0.0
    compiled: bool = False
    _works: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        """Listen."""
        self._works.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port or None, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    def cpu_s(self) -> float:
        """Return the CPU seconds of its process so far: no two starts take the same time."""
        return 30.0 + self.started_s + 0.1 * time.monotonic() + 1e-3 * self.tokens

    def hangs(self) -> None:
        """Answer no request from now on."""
        self._works.clear()

    async def stop(self) -> None:
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.I)
                body = await reader.readexactly(int(length[1])) if length else b""
                if not await self._answer(head, body, writer):
                    break
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = head.split(b" ", 2)[1]
        if self.key and path != b"/health" and b"Bearer " + self.key.encode() not in head:
            writer.write(_error(401))
            return True
        if not head.startswith(b"POST"):
            writer.write(self._page(path))
            return True
        self.posts += 1
        fields = json.loads(body)
        wrong = None if self.bad is None else self.bad(fields, body)
        if wrong == b"close":
            return False
        if wrong is not None:
            for part in wrong.removesuffix(CLOSE).split(PAUSE):
                writer.write(part)
                await asyncio.sleep(self.pace_s)
                if writer.is_closing():
                    return False
            return not wrong.endswith(CLOSE)
        self.running += 1
        try:
            await self._good(fields, writer)
        finally:
            self.running -= 1
        return True

    def _page(self, path: bytes) -> bytes:
        if path == b"/health":
            return _plain(200, b"")
        if path == b"/v1/models":
            return _plain(200, b'{"data":[{"id":"m","max_model_len":32768}]}')
        if path == b"/metrics" and self.metrics:
            running, waiting, kv = self.foreign
            page = PAGE % (
                self.running + running,
                waiting,
                kv,
                self.tokens,
                self.tokens,
                self.began,
                self.cpu_s(),
            )
            return _plain(200, page.encode())
        return _plain(404, b"{}")

    async def _good(self, fields: Fields, writer: asyncio.StreamWriter) -> None:
        count = fields.get("max_tokens") or TOKENS
        if "logprobs" in fields and self.compiles and not self.compiled:
            self.compiled = True
            self._works.clear()
            await asyncio.sleep(self.compiles)
            self._works.set()
        await self._works.wait()
        crowd = 1.0 + 0.15 * self.foreign[0] + 0.02 * self.running
        if not fields.get("stream"):
            await asyncio.sleep(self.pace_s * crowd * count)
            self.tokens += count
            writer.write(_plain(200, _whole("word " * count, "length", count)))
            return
        writer.write(STREAM_HEAD)
        writer.write(_chunk(ROLE))
        for i in range(count):
            await asyncio.sleep(self.pace_s * crowd)
            await self._works.wait()
            if writer.is_closing():
                return
            self.tokens += 1
            writer.write(_chunk(_event(f"w{i} ")))
        writer.write(_chunk(_event("", "length") + DONE) + b"0\r\n\r\n")
        await writer.drain()


class Proxy:
    """A running `hetlb serve` before some servers."""

    def __init__(self, servers: list[Server], profile: bool, more: str = "", each: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hetlb-bad-"))
        self.port, self.admin = _free_port(), _free_port()
        lines: list[str] = []
        for name, server in zip("abcdef", servers, strict=False):
            own, host = (
                each,
                "localhost" if any(other is server for other in servers[: len(lines)]) else "127.0.0.1",
            )
            if profile:
                decode = {"k5": 0.0, "k6": 0.0, "k7": 0.0, "k8": server.pace_s}
                (self.folder / f"{name}.yaml").write_text(
                    json.dumps({**PROFILE, "name": name, "decode": decode})
                )
                own += f", profile: {name}.yaml"
            lines.append(f'      - {{name: {name}, url: "http://{host}:{server.port}"{own}}}\n')
        (self.folder / "fleet.yaml").write_text(
            f"version: 1\nlisten: {{port: {self.port}}}\nadmin: {{port: {self.admin}}}\n{more}"
            f"models:\n  - name: m\n    instances:\n{''.join(lines)}"
        )

    async def __aenter__(self) -> Proxy:
        self._log = (self.folder / "log").open("wb")
        command = [os.environ.get("HETLB", str(Path(sys.executable).with_name("hetlb"))), "serve"]
        self.process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
            [*command, "--config", str(self.folder / "fleet.yaml")], stdout=self._log, stderr=self._log
        )
        for _ in range(600):
            await asyncio.sleep(0.05)
            with suppress(OSError):
                for port in (self.port, self.admin):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
        await asyncio.sleep(0.5)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait)

    async def status(self) -> Fields:
        """Return `GET /v1/status` of the admin listener."""
        found = await _send(self.admin, b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status: Fields = json.loads(found[1])
        return status

    async def ask(self, fields: Fields, lines: bytes = b"", timeout_s: float = 30.0) -> tuple[bool, str, int]:
        """Return whether a chat was answered well, the instance, and the status."""
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%b"
        data = head % lines + b"content-length: %d\r\n\r\n" % len(body) + body
        try:
            async with asyncio.timeout(timeout_s):
                answer, text = await _send(self.port, data)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return False, "", 0
        status = int(answer.split(b" ", 2)[1])
        found = re.search(rb"x-hetlb-instance: *(\S+)", answer, re.I)
        finish = re.search(rb'"finish_reason": ?"(\w+)"', text)
        good = status == 200 and finish is not None and finish[1] in (b"length", b"stop")
        if fields.get("stream"):
            good = good and text.endswith(DONE) and b'"error"' not in text
        return good, "" if found is None else found[1].decode(), status


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _send(port: int, data: bytes) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.I)
        if length:
            return head, await reader.readexactly(int(length[1]))
        body = b""
        while True:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            part = await reader.readexactly(size + 2)
            body += part[:-2]
            if not size:
                return head, body
    finally:
        writer.close()


@dataclass
class Seen:
    """What clients saw: time of the request, whether it was answered, where, and in how many seconds."""

    rows: list[tuple[float, bool, str, float, int]] = field(default_factory=list)

    def lost(self, since: float = 0.0) -> int:
        """Return the requests that got no good answer."""
        return sum(not row[1] for row in self.rows if row[0] >= since)

    def share(self, name: str, since: float) -> float:
        """Return the share of requests from a time on that an instance answered."""
        rows = [row for row in self.rows if row[0] >= since]
        return sum(row[2] == name for row in rows) / max(1, len(rows))

    def mean_s(self, since: float = 0.0) -> float:
        """Return the mean time of the good answers."""
        times = [row[3] for row in self.rows if row[1] and row[0] >= since]
        return sum(times) / max(1, len(times))


async def load(
    proxy: Proxy,
    rate: float,
    seconds: float,
    fields: Callable[[int], Fields],
    lines: bytes = b"",
    timeout_s: float = 30.0,
) -> Seen:
    """Send requests at a rate, evenly spaced."""
    seen, began = Seen(), time.monotonic()

    async def one(number: int) -> None:
        at = time.monotonic()
        good, name, status = await proxy.ask(fields(number), lines, timeout_s)
        seen.rows.append((at - began, good, name, time.monotonic() - at, status))

    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            delay_s = began + number / rate - time.monotonic()
            if delay_s > 0.0:
                await asyncio.sleep(delay_s)
            group.create_task(one(number))
    return seen


class Bench:
    """Options of a run, and its verdicts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.plain, self.profile, self.seconds = options.plain, options.profile, options.seconds
        self.count: int = options.servers
        self.missed = 0

    def servers(self, **bad: Any) -> list[Server]:
        """Return the servers, `a` the fast one."""
        return [Server(PACE_S / 3.0, **bad), *[Server() for _ in range(self.count - 1)]]

    def fields(self, **more: Any) -> Fields:
        """Return the fields of a request."""
        return {"max_tokens": TOKENS, **({} if self.plain else {"stream": True}), **more}

    def verdict(self, name: str, kept: bool, text: str, status: Fields | None = None) -> None:
        """Print a line."""
        self.missed += not kept
        line = "" if status is None else f" | {status['state']}: {status['advice']}"
        print(f"{'ok   ' if kept else 'MISSED'} {name}: {text}{line}", flush=True)


async def _with(servers: list[Server], bench: Bench, more: str = "", each: str = "") -> Proxy:
    for server in servers:
        if not server.port:
            await server.start()
    return Proxy(servers, bench.profile, more, each)


async def _stopped(servers: list[Server]) -> None:
    for server in servers:
        await server.stop()


async def fails(bench: Bench, share: float, how: str) -> None:
    """Row 1: the fast server fails a share of its answers."""
    rng = random.Random(1)
    answers = {
        "500": _error(500),
        "close": b"close",
        "empty": _plain(200, b""),
        "redirect": _plain(307, b"", b"location: http://127.0.0.1:1/\r\n"),
        "408": _error(408),
        "event": STREAM_HEAD
        + _chunk(b'data: {"error":{"message":"no","code":500}}\n\n' + DONE)
        + b"0\r\n\r\n",
        "mid": STREAM_HEAD
        + _chunk(ROLE + _event("w"))
        + _chunk(b'data: {"error":{"message":"no","code":500}}\n\n' + DONE)
        + b"0\r\n\r\n",
    }
    head = answers["mid"].partition(b"\r\n\r\n")[0]
    error = _chunk(b'data: {"error":{"message":"no","code":500}}\n\n' + DONE)
    answers["late"] = PAUSE.join(
        [head + b"\r\n\r\n" + _chunk(ROLE), *[_chunk(_event("w"))] * 3, error + b"0\r\n\r\n"]
    )
    servers = bench.servers(bad=lambda fields, body: answers[how] if rng.random() < share else None)
    async with await _with(servers, bench) as proxy:
        seen = await load(proxy, 10.0, bench.seconds, lambda number: bench.fields())
        status = await proxy.status()
    await _stopped(servers)
    lost, sent = seen.lost(), len(seen.rows)
    text = f"{lost} of {sent} lost, {100 * seen.share('a', 10.0):.0f} % at a"
    bench.verdict(f"fails {100 * share:.0f} % {how}", lost <= max(1, 0.03 * sent), text, status)


async def wrong(bench: Bench, name: str) -> None:
    """Row 2: the fast server answers wrong."""
    events, body = WRONG[name]

    def bad(fields: Fields, _: bytes) -> bytes:
        if events is None or not fields.get("stream"):
            return _plain(200, body)
        return STREAM_HEAD + b"".join(_chunk(each) for each in events) + b"0\r\n\r\n"

    servers = bench.servers(bad=bad)
    async with await _with(servers, bench) as proxy:
        named, running = (
            asyncio.Event(),
            asyncio.create_task(load(proxy, 10.0, max(16.0, bench.seconds), lambda number: bench.fields())),
        )
        at, began = 0.0, time.monotonic()
        while not running.done():
            status = await proxy.status()
            if not named.is_set() and any(each["instance"] == "a" for each in status["causes"]):
                named.set()
                at = time.monotonic() - began
            await asyncio.sleep(0.5)
        seen = await running
        status = await proxy.status()
    await _stopped(servers)
    share = seen.share("a", 10.0)
    told = f"named after {at:.1f} s" if named.is_set() else "not named"
    text = f"{100 * share:.0f} % at a after 10 s, {told}, {len(seen.rows)} sent"
    bench.verdict(f"wrong: {name}", share <= 0.05 and named.is_set() and at <= 10.0, text, status)


async def refuses_kind(bench: Bench, name: str) -> None:
    """Row 3: the fast server refuses a kind of request among others that it takes."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    kinds: dict[str, tuple[Callable[[Fields, bytes], bytes | None], Fields, int]] = {
        "tools": (lambda fields, _: _error(400) if "tools" in fields else None, {"tools": tools}, 2),
        "size": (
            lambda _, body: _error(413) if len(body) > 20_000 else None,
            {"messages": [{"role": "user", "content": "x" * 40_000}]},
            3,
        ),
        "long": (
            lambda _, body: _error(500) if len(body) > 20_000 else None,
            {"messages": [{"role": "user", "content": "x" * 40_000}]},
            3,
        ),
        "whole": (
            lambda fields, _: _error(500) if not fields.get("stream") else None,
            {"stream": False},
            2,
        ),
        "whole-400": (
            lambda fields, _: _error(400) if not fields.get("stream") else None,
            {"stream": False},
            2,
        ),
        "stream": (
            lambda fields, _: _error(500) if fields.get("stream") else None,
            {"stream": True},
            2,
        ),
        "stream-400": (
            lambda fields, _: _error(400) if fields.get("stream") else None,
            {"stream": True},
            2,
        ),
        "schema": (
            lambda fields, _: _error(400) if "response_format" in fields else None,
            {"response_format": {"type": "json_object"}},
            2,
        ),
        "image": (
            lambda _, body: _error(400) if b"image_url" in body else None,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "hi"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ]
            },
            2,
        ),
    }
    bad, own, bound = kinds[name]
    servers = bench.servers(bad=bad)
    async with await _with(servers, bench) as proxy:
        usual = {"stream": False} if name.startswith("stream") else {}
        seen = await load(
            proxy, 8.0, 15.0, lambda number: bench.fields(**(own if number % 3 == 2 else usual))
        )
        status = await proxy.status()
    await _stopped(servers)
    text = f"{seen.lost()} of 40 lost, {100 * seen.share('a', 5.0):.0f} % of all at a"
    kept = seen.lost() <= bound and seen.share("a", 5.0) > 0.4
    bench.verdict(f"refuses {name}", kept, text, status)


async def closes(bench: Bench, rate: float) -> None:
    """Row 9: the fast server answers probes and closes each POST."""
    servers = bench.servers(bad=lambda fields, body: b"close")
    async with await _with(servers, bench) as proxy:
        seen = await load(proxy, rate, 8.0, lambda number: bench.fields())
        status = await proxy.status()
    await _stopped(servers)
    bench.verdict(
        f"closes at {rate:g}/s", seen.lost() <= 1, f"{seen.lost()} of {len(seen.rows)} lost", status
    )


async def begins(bench: Bench) -> None:
    """Row 10: each server compiles for its first request with `logprobs`, and stands still meanwhile."""
    compile_s, servers = 12.0, bench.servers()
    for each in servers:
        each.compiles = compile_s
    async with await _with(servers, bench) as proxy:
        await load(proxy, 5.0, 4.0, lambda number: bench.fields())
        rare = asyncio.create_task(proxy.ask(bench.fields(logprobs=True)))
        beside = await load(proxy, 5.0, compile_s + 2.0, lambda number: bench.fields())
        good = (await rare)[0]
        status = await proxy.status()
        log = (proxy.folder / "log").read_text()
    await _stopped(servers)
    compiled = sum(each.compiled for each in servers)
    late = sum(row[3] > 4.0 for row in beside.rows)
    text = f"{compiled} of {len(servers)} compiled, {beside.lost()} lost, {late} later than 4 s"
    kept = good and compiled == 1 and not beside.lost() and late <= 2 and "stalled" not in log
    bench.verdict("begins a kind", kept, text, status)


async def poisoned(bench: Bench, how: str) -> None:
    """One client's requests fail on every server: the others' rate."""
    kinds = {"close": b"close", "500": _error(500), "event": b""}
    kinds["event"] = (
        STREAM_HEAD + _chunk(ROLE + b'data: {"error":{"message":"no","code":500}}\n\n' + DONE) + b"0\r\n\r\n"
    )
    rates = []
    for with_poison in (False, True):
        bad = lambda fields, _: kinds[how] if fields.get("user") == "poison" else None  # noqa: E731
        servers = bench.servers(bad=bad)
        for each in servers[1:]:
            each.bad = bad
        async with await _with(servers, bench, each=", max_num_seqs: 8") as proxy:
            ended, stop = [0], time.monotonic() + bench.seconds

            async def client(proxy: Proxy = proxy, ended: list[int] = ended, stop: float = stop) -> None:
                while time.monotonic() < stop:
                    good, _, _ = await proxy.ask(bench.fields())
                    ended[0] += good

            async with asyncio.TaskGroup() as group:
                for _ in range(24):
                    group.create_task(client())
                if with_poison:
                    poison = lambda number: bench.fields(user="poison")  # noqa: E731
                    group.create_task(load(proxy, 20.0, bench.seconds, poison, b"x-session-id: p\r\n"))
            status = await proxy.status()
        await _stopped(servers)
        rates.append(ended[0] / bench.seconds)
    ratio = rates[1] / rates[0]
    text = f"{rates[0]:.1f} -> {rates[1]:.1f}/s, {ratio:.2f} x"
    bench.verdict(f"poisoned by {how}", ratio >= 0.95, text, status)


async def _watched(
    bench: Bench, proxy: Proxy, name: str, cause: str, ill: Callable[[], Any], heal: Callable[[], Any],
    *, rate: float, ill_s: float, fields: Callable[[int], Fields] | None = None,
) -> tuple[Seen, float, float]:  # fmt: skip
    """Load a fleet that is well, ill, and well again: seconds until the status says it, and clears.

    Return the answers, and the times at which it became ill and well.
    """
    warm_s, after_s = 8.0, 16.0
    running = asyncio.create_task(
        load(proxy, rate, warm_s + ill_s + after_s, fields or (lambda number: bench.fields()))
    )
    began = time.monotonic()
    before, during, after = "", math.inf, math.inf
    line = ""
    false_state = 0
    changed = ill_at = healed_at = 0.0
    while not running.done():
        now = time.monotonic() - began
        if not ill_at and now >= warm_s:
            await ill()
            ill_at = time.monotonic() - began
        if ill_at and not healed_at and now >= warm_s + ill_s:
            await heal()
            healed_at = now
        status = await proxy.status()
        found = any(each["cause"] == cause for each in status["causes"])
        if not ill_at and found:
            before = f", before: {status['advice']}"
        if ill_at and not healed_at:
            if found and during == math.inf:
                during, line = now - ill_at, f"{status['state']}: {status['advice']}"
            false_state += during < math.inf and not found
        if healed_at:
            changed = now if found else changed
            after = max(0.0, changed - healed_at)
        await asyncio.sleep(0.2)
    seen = await running
    lost = seen.lost() / max(1, len(seen.rows))
    text = f"{cause} after {during:.1f} s, clear after {after:.1f} s, absent {false_state} times between"
    told = re.search("event=(cause|instance_metrics|instance_access) ", (proxy.folder / "log").read_text())
    text += "" if told else ", no event"
    kept = during <= 5.0 and after <= 10.0 and not before and not false_state
    bench.verdict(name, kept, f"{text}, {100 * lost:.0f} % lost{before} | {line}")
    return seen, ill_at, healed_at


async def _nothing() -> None:
    pass


async def fills(bench: Bench) -> None:
    """Row 4: more requests than the queue takes."""
    servers = [Server(0.05) for _ in range(bench.count)]
    rate = 4.0

    async with await _with(servers, bench, "queue: {max_requests: 30}\n", ", max_num_seqs: 4") as proxy:
        extra: list[asyncio.Task[Seen]] = []

        async def ill() -> None:
            extra.append(asyncio.create_task(load(proxy, 40.0, 12.0, lambda number: bench.fields())))

        await _watched(bench, proxy, "queue full", "refused", ill, _nothing, rate=rate, ill_s=12.0)
        rows = (await extra[0]).rows
        print(f"       {sum(row[4] == 429 for row in rows)} of {len(rows)} got 429")
    await _stopped(servers)


async def crowded(bench: Bench) -> None:
    """Row 5: clients past hetlb fill the fast server."""
    servers = bench.servers()

    async def ill() -> None:
        servers[0].foreign = (26, 19, 0.97)

    async def heal() -> None:
        servers[0].foreign = (0, 0, 0.0)

    async with await _with(servers, bench) as proxy:
        seen, since, until = await _watched(
            bench, proxy, "others fill it", "foreign_load", ill, heal, rate=10.0, ill_s=12.0
        )
    rows = [row for row in seen.rows if since + 2.0 <= row[0] < until and row[1]]
    async with await _with(servers[1:], bench) as proxy:  # as if it were known that a has no time
        known = await load(proxy, 10.0, 14.0, lambda number: bench.fields())
    await _stopped(servers)
    mean_s, known_s = sum(row[3] for row in rows) / len(rows), known.mean_s(4.0)
    text = f"mean E2E {mean_s:.3f} s, {known_s:.3f} s without a: {mean_s / known_s:.2f} x"
    bench.verdict("beside others", mean_s <= 1.2 * known_s, text)


async def flaps(bench: Bench) -> None:
    """Row 6: the fast server is down for 2.5 s, up for 2.5 s, three times; named after the second."""
    servers = bench.servers()
    for each in servers:
        await each.start()
    flapping: list[asyncio.Task[None]] = []

    async def flap() -> None:
        for _ in range(3):
            await servers[0].stop()
            await asyncio.sleep(2.5)
            await servers[0].start()
            await asyncio.sleep(2.5)

    async def ill() -> None:
        flapping.append(asyncio.create_task(flap()))
        await asyncio.sleep(5.1)

    async with await _with(servers, bench) as proxy:
        await _watched(bench, proxy, "flaps", "flaps", ill, _nothing, rate=10.0, ill_s=15.0)
        await flapping[0]
    await _stopped(servers)


async def changes(
    bench: Bench, name: str, cause: str, change: Callable[[Server, bool], None], ill_s: float = 20.0
) -> None:
    """Rows 7 and 8: the fast server becomes ill, and well again; `change` is told which (True: ill)."""
    servers = bench.servers()

    async def to(ill: bool) -> None:
        change(servers[0], ill)

    async with await _with(servers, bench) as proxy:
        await _watched(
            bench, proxy, name, cause, lambda: to(True), lambda: to(False), rate=10.0, ill_s=ill_s
        )  # fmt: skip
    await _stopped(servers)


def _slow(server: Server, ill: bool) -> None:
    server.pace_s *= 3.0 if ill else 1.0 / 3.0


def _pageless(server: Server, ill: bool) -> None:
    server.metrics = not ill


def _locked(server: Server, ill: bool) -> None:
    server.key = "other" if ill else ""


async def locked(bench: Bench) -> None:
    """Row 8: the fast server refuses the key from its start."""
    servers = bench.servers()
    servers[0].key = "other"
    async with await _with(servers, bench) as proxy:
        seen = await load(proxy, 10.0, 6.0, lambda number: bench.fields())
        status = await proxy.status()
    await _stopped(servers)
    named = any(each["cause"] == "key_refused" for each in status["causes"])
    bench.verdict("key at the start", named and not seen.lost(), f"{seen.lost()} lost", status)


async def twins(bench: Bench) -> None:
    """Row 8: two names are one process."""
    servers = bench.servers()
    await servers[0].start()
    began, named = time.monotonic(), 0.0
    async with await _with([servers[0], *servers], bench) as proxy:
        running = asyncio.create_task(load(proxy, 10.0, 60.0, lambda number: bench.fields()))
        while not running.done():
            status = await proxy.status()
            if not named and any(each["cause"] == "one_process" for each in status["causes"]):
                named = time.monotonic() - began
            await asyncio.sleep(0.2)
    await _stopped(servers)
    bench.verdict("two names", 0.0 < named <= 45.0, f"named after {named:.1f} s from the start", status)


async def _sampled(proxy: Proxy, running: asyncio.Task[Any], each: Callable[[float, Fields], None]) -> None:
    """Hand the seconds from now on and the status to `each`, ten times a second, while a load runs."""
    began = time.monotonic()
    while not running.done():
        status = await proxy.status()
        each(time.monotonic() - began, status)
        await asyncio.sleep(0.1)


async def recovers(bench: Bench) -> None:
    """Row 11: every answer of the fast server fails for 10 s, then none does."""
    servers, well_s, ill_s = bench.servers(), 8.0, 10.0
    percents: list[int] = []
    last_at, said = 0.0, ""

    def look(now: float, status: Fields) -> None:
        nonlocal last_at, said
        servers[0].bad = (lambda fields, body: _error(500)) if well_s <= now < well_s + ill_s else None
        for cause in status["causes"]:
            if cause["instance"] == "a":
                last_at, said = now, cause["sentence"]
                found = re.search(r"(\d+) %", cause["sentence"])
                if found and well_s + 2.0 <= now < well_s + ill_s:
                    percents.append(int(found[1]))

    async with await _with(servers, bench) as proxy:
        running = asyncio.create_task(load(proxy, 10.0, well_s + ill_s + 25.0, lambda n: bench.fields()))
        await _sampled(proxy, running, look)
        rows = (await running).rows
        log = (proxy.folder / "log").read_text()
    await _stopped(servers)
    healed = well_s + ill_s
    good = sorted(row[0] + row[3] - healed for row in rows if row[1] and row[2] == "a" and row[0] > healed)
    third_s, clear_s = good[2] if len(good) > 2 else math.inf, last_at - healed
    over = log.count("event=cause_over ")
    text = f"third good answer after {third_s:.1f} s, clear after {clear_s:.1f} s, {over} ends told: {said}"
    text += f"; said {min(percents)} to {max(percents)} %" if percents else ""
    kept = clear_s <= min(10.0, third_s + 2.0) and over > 0 and min(percents, default=100) >= 50
    bench.verdict("recovers", kept, text)


async def figures(bench: Bench, share: float) -> None:
    """Row 11: state, load and capacity while servers of four slots have a share of what they can do."""
    servers = [Server(0.05) for _ in range(bench.count)]
    full = 4.0 * bench.count / (TOKENS * 0.05 * 1.08)
    begins_s, states, seen = 20.0, set[str](), list[tuple[float, float, float]]()

    def look(now: float, status: Fields) -> None:
        model = status["models"][0]
        if now >= begins_s and model["capacity_req_s"]:
            states.add(status["state"])
            seen.append((now, model["load"], model["capacity_req_s"]))

    async with await _with(servers, bench, each=", max_num_seqs: 4") as proxy:
        seconds = max(40.0, bench.seconds)
        running = asyncio.create_task(load(proxy, share * full, seconds, lambda number: bench.fields()))
        await _sampled(proxy, running, look)
        status = await proxy.status()
    await _stopped(servers)
    loads = [each[1] for each in seen]
    steps = [b[2] / a[2] for a, b in itertools.pairwise(seen)]
    jump = max([max(step, 1.0 / step) for step in steps], default=math.inf)
    text = f"load {100 * min(loads):.0f} to {100 * max(loads):.0f} %, capacity {min(e[2] for e in seen):.1f} "
    text += f"to {max(e[2] for e in seen):.1f}/s, largest step {jump:.2f} x, states {sorted(states)}"
    kept = jump < 1.33 and (share >= 0.8 or states == {"well"}) and (share > 1.0 or max(loads) <= 1.0)
    bench.verdict(f"figures at {100 * share:.0f} %", kept, text, status)


async def lone_failures(bench: Bench) -> None:
    """The second server fails three answers at little traffic: how long is the fleet degraded?"""
    servers = [Server() for _ in range(bench.count)]
    left = 3

    def bad(fields: Fields, body: bytes) -> bytes | None:
        nonlocal left
        left -= 1
        return _error(500) if left >= 0 and began is not None else None

    began: float | None = None
    last_at, said = 0.0, ""

    def look(now: float, status: Fields) -> None:
        nonlocal began, last_at, said
        if now >= 20.0 and began is None:
            began = now
            servers[1].bad = bad
        if began is not None and status["causes"]:
            last_at, said = now, status["causes"][0]["sentence"]

    async with await _with(servers, bench) as proxy:
        running = asyncio.create_task(load(proxy, 1.0, 120.0, lambda number: bench.fields()))
        await _sampled(proxy, running, look)
    await _stopped(servers)
    told_s = max(0.0, last_at - (began or 0.0))
    bench.verdict("lone failures", told_s <= 30.0, f"named for {told_s:.0f} s, at last: {said}")


async def cold(bench: Bench, how: str) -> None:
    """All servers but the last hang, or fail, from the first request on; clients wait for 10 s."""
    answers = {"500": _error(500), "400": _error(400), "close": b"close", "hang": None}
    servers = bench.servers(bad=lambda fields, body: answers[how])
    for each in servers[1:-1]:
        each.bad = servers[0].bad
    async with await _with(servers, bench) as proxy:
        if how == "hang":
            for each in servers[:-1]:
                each.hangs()
        seen = await load(proxy, 15.0, bench.seconds, lambda number: bench.fields(), timeout_s=10.0)
        status = await proxy.status()
    await _stopped(servers)
    visits = [each.posts for each in servers[:-1]]
    text = f"{seen.lost()} of {len(seen.rows)} lost, visits {visits}"
    bench.verdict(f"cold, all but one {how}", seen.lost() <= 0.03 * len(seen.rows), text, status)


def _whole_stream(texts: list[str], pause: bytes = PAUSE, finish: str = "length") -> bytes:
    """Return a stream of a text each pause, without the end of its last chunk."""
    events = [_chunk(_event(each)) for each in texts]
    return pause.join([STREAM_HEAD + _chunk(ROLE), *events, _chunk(_event("", finish) + DONE) + b"0\r\n\r\n"])


def _others(bench: Bench) -> dict[str, Callable[[random.Random, Server, int], bytes | None]]:
    """Return what the fast server answers, by name of a situation; None for a good answer."""
    words = [f"w{i} " for i in range(TOKENS)]
    plain = bench.plain

    def freezes(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Three of ten answers stop after some of their text, and the connection stays."""
        if rng.random() >= 0.3:
            return None
        text = STREAM_HEAD + _chunk(ROLE) + b"".join(_chunk(_event(each)) for each in words[:6])
        return (_plain(200, _whole("word " * TOKENS))[:150] if plain else text) + PAUSE * 3000

    def reused(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It closes each connection right after an answer, and does not say so."""
        whole = _plain(200, _whole("word " * TOKENS, "length")) if plain else _whole_stream(words)
        return whole + CLOSE

    def usage(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It counts a billion tokens for each answer."""
        if plain:
            return PAUSE * TOKENS + _plain(200, _whole("word " * TOKENS, "length", 10**9))
        counted = b'data: {"id":"c","model":"m","choices":[],"usage":{"prompt_tokens":9,'
        counted += b'"completion_tokens":1000000000,"total_tokens":1000000009}}\n\n'
        whole = _whole_stream(words)
        return whole.replace(
            _chunk(_event("", "length") + DONE), _chunk(_event("", "length") + counted + DONE)
        )

    def late(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Three of ten answers are a 500 after 2 s."""
        return PAUSE * int(2.0 / server.pace_s) + _error(500) if rng.random() < 0.3 else None

    def blips(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It fails everything for 1 s of each 8 s."""
        return _error(500) if time.monotonic() % 8.0 < 1.0 else None

    def loops(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It says one word again and again."""
        return (
            _plain(200, _whole("the " * TOKENS)) if plain else _whole_stream(["the "] * TOKENS, b"", "stop")
        )

    def begins_anew(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Its page names another start of its process each time, and it fails half of all."""
        server.began += 1.0
        return _error(500) if rng.random() < 0.5 else None

    def short(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It stops after a fifth of the text that others give."""
        few = words[: TOKENS // 5]
        whole = _whole("".join(few), tokens=len(few))
        return PAUSE * len(few) + _plain(200, whole) if plain else _whole_stream(few, PAUSE, "stop")

    def conflicts(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It answers 409, 418, 425 or 508, statuses without a meaning here, four of ten times."""
        return _error(rng.choice((409, 418, 425, 508))) if rng.random() < 0.4 else None

    def closed_for_hours(rng: random.Random, server: Server, number: int) -> bytes | None:
        """It is to be asked again after ten hours."""
        return _plain(503, b'{"error":{"message":"no"}}', b"retry-after: 36000\r\n")

    def rate_limit(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Four of ten get 429 with the headers of a rate limit that is used up."""
        more = b"x-ratelimit-remaining-requests: 0\r\nx-ratelimit-reset-requests: 30s\r\n"
        return _plain(429, b'{"error":{"message":"slow down"}}', more) if rng.random() < 0.4 else None

    def wrong_length(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Its Content-Length is too small by half: more bytes follow a whole answer."""
        body = _whole("word " * TOKENS) if plain else ROLE + b"".join(map(_event, words)) + DONE
        kind = b"application/json" if plain else b"text/event-stream"
        head = b"HTTP/1.1 200 X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        return head % (kind, len(body) // 2) + body

    def trickles(rng: random.Random, server: Server, number: int) -> bytes | None:
        """One byte of its answer comes each second."""
        each_s = PAUSE * int(1.0 / server.pace_s)
        whole = _plain(200, _whole("word " * TOKENS)) if plain else _whole_stream(words, b"")
        head, _, body = whole.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n" + each_s.join([body[i : i + 1] for i in range(60)])

    def error_in_200(rng: random.Random, server: Server, number: int) -> bytes | None:
        """Four of ten answers are a 200 whose JSON is an error."""
        return _plain(200, b'{"error":{"message":"CUDA error","code":500}}') if rng.random() < 0.4 else None

    return {
        "freezes": freezes, "closes-reused": reused, "counts-a-billion": usage, "fails-late": late,
        "blips": blips, "loops": loops, "begins-anew": begins_anew, "stops-early": short,
        "odd-statuses": conflicts, "closed-for-hours": closed_for_hours, "rate-limit": rate_limit,
        "wrong-length": wrong_length, "trickles": trickles, "error-in-200": error_in_200,
    }  # fmt: skip


async def another(bench: Bench, name: str) -> None:
    """A situation that no table names: what is lost, and how long answers take after 10 s."""
    rng, numbers, servers = random.Random(1), itertools.count(), bench.servers()
    does = _others(bench)[name]
    servers[0].bad = lambda fields, body: does(rng, servers[0], next(numbers))
    named: list[tuple[float, str]] = []

    def look(now: float, status: Fields) -> None:
        named.extend((now, each["sentence"]) for each in status["causes"] if each["instance"] == "a")

    async with await _with(servers, bench) as proxy:
        running = asyncio.create_task(
            load(proxy, 10.0, bench.seconds, lambda number: bench.fields(), timeout_s=25.0)
        )
        await _sampled(proxy, running, look)
        seen, status = await running, await proxy.status()
    await _stopped(servers)
    lost, mean_s, usual_s = seen.lost(), seen.mean_s(10.0), TOKENS * PACE_S * 1.04
    text = f"{lost} of {len(seen.rows)} lost, {100 * seen.share('a', 10.0):.0f} % at a, "
    text += f"mean E2E {mean_s:.2f} s, {mean_s / usual_s:.2f} x of a good one's, "
    text += f"named after {named[0][0]:.1f} s: {named[0][1]}" if named else "not named"
    kept = lost <= 0.03 * len(seen.rows) and mean_s <= 1.3 * usual_s
    bench.verdict(name, kept, text, status)


async def alike(bench: Bench) -> None:
    """Row 8: two servers of one script began at the same tick, and have equal load: they are two."""
    servers = [Server() for _ in range(2)]
    servers[1].began = servers[0].began
    async with await _with(servers, bench) as proxy, await _with(servers, bench) as second:
        running = asyncio.gather(
            *[
                load(each, 8.0, max(60.0, bench.seconds), lambda number: bench.fields())
                for each in (proxy, second)
            ]
        )
        named = 0
        while not running.done():
            for each in (proxy, second):
                named += any(cause["cause"] == "one_process" for cause in (await each.status())["causes"])
            await asyncio.sleep(0.5)
        shares = [seen.share("a", 0.0) for seen in await running]
    await _stopped(servers)
    bench.verdict(
        "two alike", not named, f"named {named} times, shares of a {shares[0]:.2f}, {shares[1]:.2f}"
    )


def cases(bench: Bench) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """Return the cases by name."""
    found: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "fails": lambda: fails(bench, 0.2, "500"),
        "fails-half": lambda: fails(bench, 0.5, "500"),
        "fails-event": lambda: fails(bench, 0.2, "event"),
        "fails-empty": lambda: fails(bench, 0.3, "empty"),
        "fails-redirect": lambda: fails(bench, 0.3, "redirect"),
        "fails-408": lambda: fails(bench, 0.3, "408"),
        "fails-close": lambda: fails(bench, 0.2, "close"),
        "fails-mid": lambda: fails(bench, 0.2, "mid"),
        "fails-late": lambda: fails(bench, 0.2, "late"),
        "begins": lambda: begins(bench),
        "fills": lambda: fills(bench),
        "crowded": lambda: crowded(bench),
        "flaps": lambda: flaps(bench),
        "slows": lambda: changes(bench, "slows 3 x", "slow" if bench.profile else "slowed", _slow),
        "pageless": lambda: changes(bench, "no metrics", "no_metrics", _pageless),
        "locks": lambda: changes(bench, "another key", "key_refused", _locked, 15.0),
        "locked": lambda: locked(bench),
        "twins": lambda: twins(bench),
        "cold-500": lambda: cold(bench, "500"),
        "cold-400": lambda: cold(bench, "400"),
        "cold-close": lambda: cold(bench, "close"),
        "cold-hang": lambda: cold(bench, "hang"),
        "alike": lambda: alike(bench),
        "recovers": lambda: recovers(bench),
        "figures-50": lambda: figures(bench, 0.5),
        "figures-90": lambda: figures(bench, 0.9),
        "figures-120": lambda: figures(bench, 1.2),
        "lone-failures": lambda: lone_failures(bench),
        "closes": lambda: closes(bench, 1.25),
        "closes-20": lambda: closes(bench, 20.0),
    }
    for name in ("tools", "size", "schema", "image", "long", "whole", "stream", "stream-400", "whole-400"):
        found[f"kind-{name}"] = lambda name=name: refuses_kind(bench, name)  # type: ignore[misc]
    for name in WRONG:
        found[f"wrong-{name.replace(' ', '-')}"] = lambda name=name: wrong(bench, name)  # type: ignore[misc]
    for name in _others(bench):
        found[f"other-{name}"] = lambda name=name: another(bench, name)  # type: ignore[misc]
    for name in ("close", "500", "event"):
        found[f"poison-{name}"] = lambda name=name: poisoned(bench, name)  # type: ignore[misc]
    return found


def main() -> int:
    """Run the cases named, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*")
    parser.add_argument("--plain", action="store_true", help="no streams")
    parser.add_argument("--profile", action="store_true", help="with profiles")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--servers", type=int, default=3)
    bench = Bench(parser.parse_args())
    all_cases = cases(bench)
    names = parser.parse_args().case or list(all_cases)
    for name in names:
        matching = [each for each in all_cases if each == name or each.startswith(name.rstrip("*"))]
        for each in matching if name.endswith("*") else [name]:
            asyncio.run(all_cases[each]())
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
