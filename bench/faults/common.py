"""What the behaviour benches share: a proxy in a process of its own, clients on raw sockets, a record.

`hetlb serve` runs as a user starts it, on free ports, and never outlives its block; a
client's answer says whether it was whole, and when each part came; a record says what was promised, what was
measured and whether it was kept, on which machine under which load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from hetlb.tools.loadtest.load_result import platform_document

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[0] / "results"
MODEL = "m"
BASE: dict[str, Any] = {"version": 1, "watch": False, "listen": {"port": 0}, "admin": {"port": 0}}

# --- the proxy ---


class Serving:
    """A running `hetlb serve`."""

    def __init__(self, process: subprocess.Popen[str], port: int, admin: str, file: Path, log: Path) -> None:
        self.process, self.port, self.admin_url, self.file, self.log = process, port, admin, file, log
        self.session = aiohttp.ClientSession()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def fleet(self) -> Any:
        """`GET /v1/fleet`."""
        async with self.session.get(f"{self.admin_url}/v1/fleet") as reply:
            return await reply.json()

    async def instances(self) -> dict[str, Any]:
        """The instances of `/v1/fleet` by name."""
        return {each["name"]: each for model in (await self.fleet())["models"] for each in model["instances"]}

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples whose name and labels begin so."""
        async with self.session.get(f"{self.admin_url}/metrics") as reply:
            page = await reply.text()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

    async def reload(self) -> int:
        """`POST /v1/reload`: its status."""
        async with self.session.post(f"{self.admin_url}/v1/reload") as reply:
            await reply.read()
            return reply.status

    def write(self, document: Mapping[str, Any]) -> None:
        """Put another fleet in the file, whole."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(yaml.safe_dump({**BASE, **document}))
        partial.replace(self.file)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    def rss_kib(self) -> int:
        """Resident memory, KiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def log_lines(self, *levels: str) -> list[str]:
        """What it logged at these levels; the lines of requests are not among them."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(levels)]

    async def ended(self, limit_s: float) -> int | None:
        """Return the exit status, None if it has not ended within `limit_s`."""
        try:
            return await asyncio.to_thread(self.process.wait, limit_s)
        except subprocess.TimeoutExpired:
            return None

    async def quiet(self, limit_s: float = 10.0) -> list[str]:
        """Return the figures of the fleet that are still not zero after `limit_s`."""

        async def is_quiet() -> bool:
            return not busy(await self.fleet())

        with contextlib.suppress(RuntimeError):  # then the figures say it
            await until(is_quiet, "quiet fleet", limit_s)
        return busy(await self.fleet())


def busy(fleet: Any) -> list[str]:
    """The figures of `/v1/fleet` that are not zero."""
    keys = ("in_flight", "queued", "workload", "kv_reserved_tokens")
    instances = [each for model in fleet["models"] for each in model["instances"]]
    found = [f"{each['name']}.{key}={each[key]}" for each in instances for key in keys if each[key] != 0]
    return found + [f"queue.{key}={value}" for key, value in fleet["queue"].items() if value != 0]


@contextlib.asynccontextmanager
async def serving(
    fleet: Mapping[str, Any],
    *,
    launcher: Sequence[str] = ("-m", "hetlb"),
    profiles: Mapping[str, Any] = {},
    python: str = sys.executable,
) -> AsyncIterator[Serving]:
    """`hetlb serve` over a fleet file on free ports; `profiles` are files beside it, by name.

    `python` is the interpreter whose hetlb it is.
    """
    with tempfile.TemporaryDirectory(prefix="hetlb-behaviour-") as folder:
        for name, document in profiles.items():
            (Path(folder) / name).write_text(yaml.safe_dump(document))
        file, log = Path(folder) / "fleet.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump({**BASE, **fleet}))
        with log.open("w") as stderr:
            process = subprocess.Popen(  # noqa: ASYNC220 - it is to outlive this call, and starts at once
                [python, *launcher, "serve", "--config", str(file)],
                stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0,
            )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                line = await asyncio.to_thread(process.stdout.readline)
            urls = re.findall(r"http://[^\s)]+", line)
            if len(urls) != 2:
                raise RuntimeError(f"hetlb serve did not start: {log.read_text()[-2000:]}")
            running = Serving(process, int(urls[0].rsplit(":", 1)[1]), urls[1], file, log)
            async with running.session:
                yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


# --- clients ---


@dataclass(slots=True)
class Answer:
    """What a client saw, seconds on the loop's clock."""

    id: str
    started: float
    status: int = 0
    first_at: float | None = None
    ended_at: float = 0.0
    #: The events that bear a token.
    tokens: int = 0
    #: `[DONE]` came, the framing ended well, an error event came.
    done: bool = False
    framed: bool = False
    error: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """To the first byte of the body."""
        assert self.first_at is not None, "expected an answer that began"
        return self.first_at - self.started

    @property
    def whole(self) -> bool:
        """A stream that came to its end."""
        return self.status == 200 and self.done and self.framed and not self.error


def request_bytes(request_id: str, body: Mapping[str, Any], path: str = "/v1/completions") -> bytes:
    """A POST with a JSON body."""
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nx-request-id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def ask(port: int, request_id: str, body: Mapping[str, Any]) -> Answer:
    """Ask and read to the end, on a connection of its own; a connection that breaks is an answer too."""
    loop = asyncio.get_running_loop()
    answer = Answer(request_id, loop.time())
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(request_id, body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answer.status = int(head[0].split(" ")[1])
        answer.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
        }
        length = answer.headers.get("content-length")
        if length is not None:
            await reader.readexactly(int(length))
            answer.first_at, answer.framed = loop.time(), True
        else:
            await _read_stream(reader, answer, loop)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        answer.ended_at = loop.time()
        if writer is not None:
            writer.close()
    return answer


async def _read_stream(reader: asyncio.StreamReader, answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
    tail = b""
    while not answer.framed and (piece := await reader.read(65536)):
        if answer.first_at is None:
            answer.first_at = loop.time()
        answer.tokens += piece.count(b'"text"')
        tail = (tail + piece)[-4096:]
        answer.framed = tail.endswith(b"0\r\n\r\n")
    answer.done = b"data: [DONE]" in tail
    answer.error = b'data: {"error"' in tail


def stream_body(model: str, tokens: int, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    """Return a streamed completion of exactly `tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        **more,
    }


async def background(port: int, streams: int, tokens: int, answers: list[Answer]) -> None:
    """Keep `streams` streams going until cancelled; ended ones are in `answers`."""

    async def one(number: int) -> None:
        count = 0
        while True:
            count += 1
            answers.append(await ask(port, f"background-{number}-{count}", stream_body(MODEL, tokens)))

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number))


async def until(holds: Callable[[], Awaitable[bool]], what: str, limit_s: float = 20.0) -> None:
    """Poll until it holds. Raises `RuntimeError` with what was waited for."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not await holds():
        if asyncio.get_running_loop().time() > deadline:
            raise RuntimeError(f"no {what} within {limit_s:.0f} s")
        await asyncio.sleep(0.01)


# --- the record ---


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share is not above."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


@dataclass(frozen=True)
class Promise:
    """One line of the verdict."""

    what: str
    limit: str
    measured: str
    kept: bool


def report(name: str, promises: Sequence[Promise], figures: Mapping[str, Any], recorded: str | None) -> int:
    """Print the table, write the result. The exit status: 1 where a promise was not kept."""
    table = Table(box=box.SIMPLE_HEAD, title=name, title_justify="left")
    for heading in ("promise", "limit", "measured", "kept"):
        table.add_column(heading, overflow="fold")
    for each in promises:
        table.add_row(each.what, each.limit, each.measured, "yes" if each.kept else "NO")
    Console(width=110).print(table)
    document = {
        "bench": name,
        "recorded": recorded or datetime.now(UTC).date().isoformat(),
        "command": f"python bench/faults/run.py {' '.join(sys.argv[1:])}",
        "platform": platform_document(),
        "load_average": list(os.getloadavg()),
        "promises": [each.__dict__ for each in promises],
        **figures,
    }
    path = RESULTS / f"behaviour-{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(each.kept for each in promises) else 1
