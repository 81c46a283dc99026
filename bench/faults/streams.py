"""Streams through a takeover: thousands at once, some left, engines killed, `--replace` in the middle.

Shows: how every stream ended as its client saw it, the figures of the fleet that are not zero in the end, and
the most resident memory of any process of hetlb.
Engines, hetlb and the clients are processes of their own; an engine is killed and started again every 20 s.
A stream ends whole, with an error that hetlb tells in it, or because its client left; anything else fails
the run, as do figures that are not zero and more than 80 MiB. Every request is in the log of the process that
had it, once, with the outcome that its client saw (where the client left, it may have ended otherwise just
before), and the counters of the last process say what its log says.

`.venv/bin/python bench/faults/streams.py [--minutes 3] [--workers 2] [--hetlb PYTHON] [--save FILE]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import yaml
from common import busy
from engine import HEAD, chunk, plain, read_request

from hetlb.tools.loadtest.load_result import platform_document

MOST_MIB = 80.0
ENGINES = 4
KILL_S = 20.0
#: Seconds between two tokens of a stream, and its tokens.
INTERVAL_S, TOKENS = 1.0, (5, 30)
LEAVE = 0.1
TOKEN = chunk(b'data: {"id":"c","choices":[{"index":0,"text":"x"}]}\n\n')
#: Ends of a stream that are as they should be.
GOOD = ("whole", "left", "told")


async def engine_process(port: int) -> None:
    """An engine that streams as many tokens as it is asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head, body = await read_request(reader)
                if not body:
                    models = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                    writer.write(plain(models if b"/v1/models" in head else b""))
                    continue
                writer.write(HEAD)
                for _ in range(json.loads(body)["max_tokens"]):
                    writer.write(TOKEN)
                    await writer.drain()
                    await asyncio.sleep(INTERVAL_S)
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """One run: its processes, and how its streams ended."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._rng = random.Random(1)
        self.ends: Counter[str] = Counter()
        #: Ends by the ids of requests, as clients saw them.
        self.seen: dict[str, str] = {}
        self.most_mib = 0.0
        self.kills = 0
        self.port, self.admin = free_port(), free_port()
        self._ports = [free_port() for _ in range(ENGINES)]
        self._engines = [self._engine(port) for port in self._ports]
        self.processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def _engine(port: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, "--engine", str(port)], stderr=subprocess.DEVNULL)

    async def start(self, *flags: str) -> None:
        """Start hetlb, in place of the one that runs with `--replace`."""
        file = self._folder / "fleet.yaml"
        instances = [
            {"name": f"i{n}", "url": f"http://127.0.0.1:{port}"} for n, port in enumerate(self._ports)
        ]
        fleet = {
            "version": 1,
            "listen": {"port": self.port},
            "admin": {"port": self.admin},
            "proxy": {"workers": self._args.workers, "shutdown_grace_s": 60},
            "policy": {"name": "least-requests"},
            "models": [{"name": "m", "instances": instances}],
        }
        file.write_text(yaml.safe_dump(fleet))
        log = (self._folder / f"log{len(self.processes)}").open("w")
        process = subprocess.Popen(  # noqa: ASYNC220 - it runs beside
            [self._args.hetlb, "-m", "hetlb", "serve", "--config", str(file), *flags],
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self.processes.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await asyncio.to_thread(process.stdout.readline)
        if b"ready" not in line:
            raise RuntimeError(f"hetlb did not start: {line!r}")

    async def clients(self, seconds: float) -> None:
        """Keep a number of streams open at a time; return when all have ended."""
        ends = time.monotonic() + seconds

        async def one() -> None:
            await asyncio.sleep(self._rng.uniform(0.0, 10.0))
            while time.monotonic() < ends:
                try:
                    async with asyncio.timeout(120):
                        end = await self._stream()
                except TimeoutError:
                    end = "no end in 120 s"
                except OSError as error:
                    end = f"connection: {error.strerror or type(error).__name__}"
                self.ends[end] += 1

        await asyncio.gather(*(one() for _ in range(self._args.streams)))

    async def _stream(self) -> str:
        """One stream: how it ended."""
        rng, tokens = self._rng, self._rng.randint(*TOKENS)
        leaves_after = rng.randrange(tokens) if rng.random() < LEAVE else None
        body = b'{"model":"m","prompt":"x","stream":true,"max_tokens":%d}' % tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            data = b""
            while piece := await reader.read(1 << 14):
                data += piece
                if leaves_after is not None and data.count(b"data: {") > leaves_after:
                    return self._ended("left", data)
                if data.endswith(b"\r\n0\r\n\r\n") or b" 200 " not in data.partition(b"\r\n")[0]:
                    break
        finally:
            writer.transport.abort()
        status = data.partition(b"\r\n")[0]
        if b"[DONE]" in data and data.count(b'"text":"x"') == tokens:
            return self._ended("whole", data)
        if b'"error"' in data or b" 50" in status:
            return self._ended("told", data)
        return f"cut after {data[-60:]!r}"

    def _ended(self, end: str, data: bytes) -> str:
        """Keep how a request ended, by its id."""
        self.seen[data.partition(b"x-request-id: ")[2].partition(b"\r")[0].decode()] = end
        return end

    async def kill_engines(self) -> None:
        """Kill an engine and start it again, every 20 s."""
        while True:
            await asyncio.sleep(KILL_S)
            number = self.kills % ENGINES
            self.kills += 1
            self._engines[number].kill()
            await asyncio.to_thread(self._engines[number].wait)
            self._engines[number] = self._engine(self._ports[number])

    async def watch(self) -> None:
        """Keep the most memory of any process of hetlb."""
        while True:
            for pid in _family([each.pid for each in self.processes if each.poll() is None]):
                self.most_mib = max(self.most_mib, _memory_mib(pid))
            await asyncio.sleep(1.0)

    async def left(self) -> list[str]:
        """Figures of the fleet that are not zero after half a minute."""
        found = ["no answer"]
        async with aiohttp.ClientSession() as session:
            for _ in range(60):
                async with session.get(f"http://127.0.0.1:{self.admin}/v1/fleet") as reply:
                    found = busy(await reply.json())
                if not found:
                    break
                await asyncio.sleep(0.5)
        return found

    def logged(self, number: int) -> list[tuple[str, str]]:
        """Ids and outcomes of the requests in the log of a process and its workers."""
        text = (self._folder / f"log{number}").read_text()
        return re.findall(r"request=(\S+) .* path=/v1/completions .*?outcome=(\w+)", text)

    async def counted(self) -> Counter[str]:
        """Outcomes that the counters of the last process say."""
        found: Counter[str] = Counter()
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.admin}/metrics") as reply,
        ):
            for outcome, count in re.findall(
                r'^hetlb_requests_total{outcome="(\w+)".* (\d+)$', await reply.text(), re.MULTILINE
            ):
                found[outcome] += int(count)
        return found

    def close(self) -> None:
        """End all processes."""
        for each in (*self.processes, *self._engines):
            for pid in _family([each.pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            each.wait()


def _memory_mib(pid: int) -> float:
    """Resident memory of a process, 0 of one that is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return 0.0


def _family(pids: list[int]) -> list[int]:
    """Return these processes and the ones that they started."""
    found = list(pids)
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def unaccounted(seen: dict[str, str], logged: list[tuple[str, str]]) -> list[str]:
    """Requests that are not in the logs once, with the outcome that the client saw."""
    outcomes, times = dict(logged), Counter(label for label, _ in logged)
    found = [f"{label}: {count} times" for label, count in times.items() if count > 1 or label not in seen]
    for label, end in seen.items():
        outcome = outcomes.get(label, "not logged")
        kind = {"ok": "whole", "client_gone": "left", "not logged": "lost"}.get(outcome, "told")
        if kind == "lost" or end not in (kind, "left"):
            found.append(f"{label}: {end} to the client, {outcome}")
    return found


async def run(args: argparse.Namespace, folder: Path) -> int:
    """One run; the exit status."""
    made = Run(args, folder)
    try:
        await made.start()
        others = [asyncio.create_task(each) for each in (made.kill_engines(), made.watch())]
        clients = asyncio.create_task(made.clients(args.minutes * 60))
        await asyncio.sleep(args.minutes * 30)
        await made.start("--replace")
        await clients
        for each in others:
            each.cancel()
        left = await made.left()
        counted = await made.counted()
        made.processes[1].terminate()  # what ended last is logged then
        old = await asyncio.to_thread(made.processes[0].wait, 90)
        await asyncio.to_thread(made.processes[1].wait, 90)
    finally:
        made.close()
    last = made.logged(1)
    logged = made.logged(0) + last
    odd_requests = unaccounted(made.seen, logged)
    if (of_last := Counter(outcome for _, outcome in last)) != counted:
        odd_requests.append(f"the last process logs {dict(of_last)}")
    odd = {name: count for name, count in made.ends.items() if name not in GOOD}
    document = {
        "bench": "streams", "platform": platform_document(), "load_average": list(os.getloadavg()),
        "streams": args.streams, "minutes": args.minutes, "workers": args.workers, "ends": dict(made.ends),
        "engines_killed": made.kills, "left": left, "most_mib": made.most_mib, "replaced_exit": old,
        "logged": dict(Counter(outcome for _, outcome in logged)), "counted_by_the_last": dict(counted),
        "unaccounted": odd_requests,
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    if args.save:
        args.save.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if odd or left or made.most_mib > MOST_MIB or old or odd_requests else 0


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=2000, help="at once")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--hetlb", default=sys.executable, help="the Python whose hetlb it is")
    parser.add_argument("--save", type=Path, help="write the figures here")
    args = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        asyncio.run(engine_process(int(sys.argv[2])))
    else:
        sys.exit(main())
