"""Floods at the doors beside the main listener: what each does to the p99 of an honest client.

Shows, for every flood: the p99 of honest requests without and with it, the failed ones, resident memory
before and at most, figures of the fleet that are not zero afterwards, and the lines that were logged.
The flood is stopped (SIGSTOP) and goes on in turns, so that other work on the machine meets both alike, and
medians of the rounds are compared. The process that is attacked, its engine, the attacker and the honest
client are processes of their own; the attacked one has a core for itself where there are two, and all others
share the rest. The attacker gives way to the honest client, whose own waiting is no cost of the door.
The main listener has a bench of its own (`bench/faults/run.py attacks`).

`.venv/bin/python bench/faults/floods.py [--rounds 5] [--seconds 4] [--only NAME] [--hetlb PYTHON]
[--save FILE]`: exit status 1 where a flood adds more than 50 ms, or leaves something behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # what it starts is safe from its folder

import grpc.aio
import msgspec
import zmq
from attacks import asking, p99
from common import busy, serving
from engine import plain
from options.kv_events.kv_publisher import removed, stored
from options.pick.frames import DATA as DATA_FRAME
from options.pick.frames import END_HEADERS, HELLO, RST_STREAM, block, frame
from options.pick.frames import HEADERS as HEADERS_FRAME
from options.pick.gateway import PROCESS, Gateway
from proxy.frames import frame as websocket_frame

from hetlb.options.tunnel.realtime import accept_of
from hetlb.tools.loadtest.load_result import platform_document

MOST_ADDED_MS = 50.0
ALIAS = "alias"
TEXT = 1
ANSWER = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
UPGRADE = (
    b"GET /v1/realtime?model=alias HTTP/1.1\r\nhost: p\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
#: Asked for by a client whose engine is to flood it.
LOUD = b"x-request-id: loud\r\n"


async def engine_process() -> None:
    """An engine that answers at once; its WebSockets read, or are flooded where the client asks for it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"\r\nupgrade: websocket" in head:
                    await talk(head, reader, writer)
                    return
                length = int(head.partition(b"content-length: ")[2].split(b"\r")[0] or b"0")
                if length:
                    await reader.readexactly(length)
                models = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                writer.write(plain(models if b"/v1/models" in head else ANSWER))
                await writer.drain()

    async def talk(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = head.partition(b"sec-websocket-key: ")[2].split(b"\r")[0]
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: %b\r\n\r\n" % accept_of(key)
        )
        while b"loud" in head:
            writer.write(websocket_frame(TEXT, b"") * 10_000)
            await writer.drain()
        while await reader.read(1 << 18):
            pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(3600)


# --- attackers ---

Attack = Callable[[str], Awaitable[None]]


async def for_ever(once: Callable[[], Awaitable[None]], count: int) -> None:
    """Do something again and again, so often at once."""

    async def again() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await once()
            await asyncio.sleep(0)

    await asyncio.gather(*(again() for _ in range(count)))


def sending(hello: bytes, data: bytes, count: int, *, reads: bool = True) -> Attack:
    """On `count` connections: say hello, then the same bytes for ever."""

    async def attack(place: str) -> None:
        async def once() -> None:
            host, _, port = place.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(hello)
                draining = asyncio.create_task(_drain(reader)) if reads else None
                while data and not (draining and draining.done()):
                    writer.write(data)
                    await writer.drain()
                await (draining or asyncio.sleep(60))
            finally:
                writer.transport.abort()

        await for_ever(once, count)

    return attack


async def _drain(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 18):
            pass


async def publish(place: str) -> None:
    """KV events as fast as they are taken, and longer than they are kept."""
    publisher = zmq.Context().socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    publisher.bind(f"tcp://{place}")
    payload = msgspec.msgpack.encode([0.5, [stored(list(range(4000)), 1), removed(*range(1, 1001))]])
    number = 0
    while True:
        for _ in range(100):
            publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
            number += 1
        await asyncio.sleep(0.001)


async def knock(place: str) -> None:
    """Connect to the socket of `--replace`, and say what is no step."""
    host, _, port = place.rpartition(":")
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end, contextlib.suppress(OSError):
            end.setblocking(False)
            end.connect(f"\0hetlb/{os.getuid()}/{host}:{port}")
            end.send(b'{"step":"x"}' * 100)
        await asyncio.sleep(0)


async def resets(place: str) -> None:
    """Open calls and take each back, on two connections."""
    head = block(PROCESS.encode())

    async def once() -> None:
        host, _, port = place.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        draining = asyncio.create_task(_drain(reader))
        writer.write(HELLO)
        for begin in range(1, 1 << 30, 128):
            numbers = range(begin, begin + 128, 2)
            writer.write(
                b"".join(
                    frame(HEADERS_FRAME, END_HEADERS, n, head) + frame(RST_STREAM, 0, n, bytes(4))
                    for n in numbers
                )
            )
            await writer.drain()
            if draining.done():
                break
        writer.transport.abort()

    await for_ever(once, 2)


FRAMES = websocket_frame(TEXT, b"", b"mask") * 10_000
CALL = HELLO + frame(HEADERS_FRAME, END_HEADERS, 1, block(PROCESS.encode()))
#: Of `hetlb serve`: the door, and what knocks.
DOORS: dict[str, tuple[str, Attack]] = {
    "short frames of a client's WebSocket": ("main", sending(UPGRADE + b"\r\n", FRAMES, 2)),
    "short frames of an engine's WebSocket": ("main", sending(UPGRADE + LOUD + b"\r\n", b"", 2)),
    "KV events": ("kv_events", publish),
    "half heads on the admin listener": ("admin", sending(b"GET / HTTP/1.1\r\n", b"", 500, reads=False)),
    "the socket of --replace": ("main", knock),
}
#: Of `hetlb pick`.
CALLS: dict[str, tuple[str, Attack]] = {
    "calls that are opened and taken back": ("grpc", resets),
    "data of one byte": ("grpc", sending(CALL, frame(DATA_FRAME, 0, 1, b"\0") * 10_000, 2)),
    "pings": ("grpc", sending(HELLO, frame(6, 0, 0, bytes(8)) * 1000, 2)),
}


# --- honest clients ---


async def asks(place: str) -> None:
    """One request over a connection of its own."""
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(asking("x", stream=False))
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise OSError(head)


class Honest:
    """Forty requests a second, and what they saw."""

    def __init__(self, once: Callable[[], Awaitable[None]]) -> None:
        self._once = once
        self.times_ms: list[float] = []
        self.failed, self.said = 0, ""

    async def run(self, seconds: float) -> None:
        due = time.perf_counter()
        ends = due + seconds
        tasks = []
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(due)))
            due += 0.025
        await asyncio.gather(*tasks)

    async def _ask(self, due: float) -> None:
        try:
            async with asyncio.timeout(30):
                await self._once()
        except (OSError, EOFError, TimeoutError, grpc.aio.AioRpcError) as error:
            self.failed += 1
            self.said = " ".join(repr(error).split())[:300]
        self.times_ms.append((time.perf_counter() - due) * 1e3)


# --- the runs ---


def memory_mib(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def pin(pid: int) -> None:
    """Give a process the first core, where there are others for the rest."""
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(pid, {cores[0]})


async def one(
    name: str, place: str, pid: int, once: Callable[[], Awaitable[None]], rounds: int, seconds: float
) -> dict[str, Any]:
    """One flood: the honest client without it and beside it, by turns."""
    before = most = memory_mib(pid)
    attacker = subprocess.Popen(  # noqa: ASYNC220 - it runs beside
        [sys.executable, __file__, "--attacker", name, place], stderr=subprocess.DEVNULL
    )
    found: dict[int, list[Honest]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
    try:
        for turn in range(2 * rounds):
            step = (signal.SIGCONT, signal.SIGSTOP)[turn % 2]
            attacker.send_signal(step)
            await asyncio.sleep(1.0)
            honest = Honest(once)
            running = asyncio.create_task(honest.run(seconds))
            while not running.done():
                most = max(most, memory_mib(pid))
                await asyncio.sleep(0.1)
            found[step].append(honest)
    finally:
        attacker.kill()
        attacker.wait()
    alone, during = found[signal.SIGSTOP], found[signal.SIGCONT]
    return {
        "flood": name, "rounds": rounds,
        "p99_alone_ms": statistics.median(p99(each.times_ms) for each in alone),
        "p99_ms": statistics.median(p99(each.times_ms) for each in during),
        "p99_rounds_ms": [[p99(a.times_ms), p99(b.times_ms)] for a, b in zip(alone, during, strict=True)],
        "median_alone_ms": statistics.median(ms for each in alone for ms in each.times_ms),
        "median_ms": statistics.median(ms for each in during for ms in each.times_ms),
        "requests": sum(len(each.times_ms) for each in (*alone, *during)),
        "failed": sum(each.failed for each in (*alone, *during)),
        "failures": sorted({each.said for each in (*alone, *during) if each.said}),
        "rss_before_mib": before, "rss_most_mib": most,
    }  # fmt: skip


async def at_serve(name: str, python: str, url: str, rounds: int, seconds: float) -> dict[str, Any]:
    """A flood at a door of `hetlb serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        publisher = f"127.0.0.1:{probe.getsockname()[1]}"
    instance = {"name": "i0", "url": url, "kv_events": f"tcp://{publisher}"}
    fleet = {
        "models": [{"name": "m", "aliases": [ALIAS], "instances": [instance]}],
        "proxy": {"request_log": False, "shutdown_grace_s": 1},
    }
    async with serving(fleet, python=python) as proxy:
        pin(proxy.pid)
        main = f"127.0.0.1:{proxy.port}"
        places = {"main": main, "kv_events": publisher, "admin": proxy.admin_url.removeprefix("http://")}
        row = await one(name, places[DOORS[name][0]], proxy.pid, lambda: asks(main), rounds, seconds)
        left = await proxy.quiet(60.0)  # what a killed attacker sent is still read
        return row | {"left": left, "log_lines": len(proxy.log.read_text().splitlines())}


async def at_pick(name: str, python: str, url: str, rounds: int, seconds: float) -> dict[str, Any]:
    """A flood at the gRPC port of `hetlb pick`."""
    with tempfile.TemporaryFile("w+") as log, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        process = await asyncio.create_subprocess_exec(
            python, "-m", "hetlb", "pick", "--grpc-port", place.rpartition(":")[2], "--admin-port", "0",
            "--instance", url, stdout=asyncio.subprocess.PIPE, stderr=log,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode()
            admin = ready.partition("(admin ")[2].rstrip(")\n")
            pin(process.pid)
            async with grpc.aio.insecure_channel(place) as channel:
                gateway, body = Gateway(channel), b'{"model":"m","prompt":"hello"}'

                async def once() -> None:
                    call = await gateway.open()
                    try:
                        said = await gateway.body(call, body)
                        while said.HasField("override_message_timeout"):  # it waits in the queue
                            said = await call.read()
                        if not said.HasField("request_body"):
                            raise OSError(said)
                    finally:
                        call.cancel()

                row = await one(name, place, process.pid, once, rounds, seconds)
            left = await _left(admin)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        log.seek(0)
        lines = [line for line in log if " outcome=" not in line]  # lines of honest requests are their own
        return row | {"left": left, "log_lines": len(lines), "log_end": lines[-1:]}


async def _left(admin: str) -> list[str]:
    """Figures of a picker's fleet that are not zero after a minute."""
    host, _, port = admin.removeprefix("http://").rpartition(":")
    left = ["no answer"]
    for _ in range(300):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/fleet HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        left = busy(json.loads(answer.partition(b"\r\n\r\n")[2]))
        if not left:
            break
        await asyncio.sleep(0.2)
    return left


def kept(row: dict[str, Any]) -> bool:
    """Whether a flood did to others no more than is promised, and left nothing."""
    added_ms = row["p99_ms"] - row["p99_alone_ms"]
    return added_ms <= MOST_ADDED_MS and not row["failed"] and not row["left"] and row["log_lines"] < 100


async def run(args: argparse.Namespace) -> int:
    """All floods, one after the other."""
    engine = subprocess.Popen(  # noqa: ASYNC220 - it runs beside
        [sys.executable, __file__, "--engine"], stdout=subprocess.PIPE, text=True
    )
    rows: list[dict[str, Any]] = []
    try:
        assert engine.stdout is not None
        url = f"http://127.0.0.1:{engine.stdout.readline().strip()}"
        if len(cores := sorted(os.sched_getaffinity(0))) > 1:
            os.sched_setaffinity(engine.pid, cores[1:])
        for name in (*DOORS, *CALLS):
            if args.only and args.only not in name:
                continue
            at = at_serve if name in DOORS else at_pick
            row = await at(name, args.hetlb, url, args.rounds, args.seconds)
            rows.append(row)
            print(
                f"{name:40} p99 {row['p99_alone_ms']:6.1f} -> {row['p99_ms']:7.1f} ms  failed {row['failed']}"
                f"/{row['requests']}  rss {row['rss_before_mib']:.0f} -> {row['rss_most_mib']:.0f} MiB  "
                f"log {row['log_lines']} lines  {' '.join(row['left'])}{'' if kept(row) else '  NOT KEPT'}",
                flush=True,
            )
    finally:
        engine.kill()
        engine.wait()
    if args.save:
        load = list(os.getloadavg())
        document = {"bench": "floods", "platform": platform_document(), "load_average": load, "rows": rows}
        args.save.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(map(kept, rows)) else 1


async def attacker(name: str, address: str) -> None:
    """Be one of the attackers."""
    await {**DOORS, **CALLS}[name][1](address)


def main() -> int:
    """Flood as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="without and with each flood")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each half of a round")
    parser.add_argument("--only", help="floods whose name holds this")
    parser.add_argument("--hetlb", default=sys.executable, help="the Python whose hetlb is attacked")
    parser.add_argument("--save", type=Path, help="write the figures here")
    args = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"  # another Python is to have its own hetlb, not this folder's
    return asyncio.run(run(args))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        asyncio.run(engine_process())
    elif sys.argv[1:2] == ["--attacker"]:
        os.nice(10)
        asyncio.run(attacker(sys.argv[2], sys.argv[3]))
    else:
        sys.exit(main())
