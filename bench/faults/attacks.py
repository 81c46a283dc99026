"""Attacks beside honest clients: what each does to the p99 of others, to streams, instances and memory.

Shows: for every attack the p99 of plain requests before and during it, the gaps in streams, streams that were
cut, ejections, the worst health that `/v1/fleet` showed, and resident memory before and at most.
Proxy, engines, attackers and honest clients are processes of their own. Before each attack the
honest load runs alone, against the same proxy: 50 streams at 20 tokens a second, 20 plain requests a second.
An attack is judged by the difference, and runs for the whole time: a client thrown out comes back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from common import MODEL, Promise, Serving, report, serving
from engine import HEAD, chunk, plain, read_request

STREAMS, RATE = 50, 20.0
#: Engines that are well: together they have places for 500 streams that are not read and the honest ones.
WELL = 3
INTERVAL_S = 0.05
MOST_ADDED_MS = 50.0
MOST_MIB = 64.0
POST = b"POST %b HTTP/1.1\r\nHost: p\r\nContent-Type: %b\r\n"
JSON = b"application/json"
#: The model of the engine that is hostile itself, and its name in the fleet.
EVIL = "evil"
FORM = b"multipart/form-data; boundary=b"
MODEL_PART = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


def post(body: bytes, path: bytes = b"/v1/completions", kind: bytes = JSON) -> bytes:
    """A request with its length."""
    return POST % (path, kind) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def asking(prompt: str, *, stream: bool = True, max_tokens: int = 200, model: str = MODEL) -> bytes:
    """A completion."""
    body = {"model": model, "prompt": prompt, "stream": stream, "max_tokens": max_tokens}
    return post(json.dumps(body).encode())


# --- engines ---


async def engine_process(served: str) -> None:
    """An engine that does what a prompt says: `chunks`, `interim`, `large`, or an answer as asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head, body = await read_request(reader)
                await answer(head.split()[1], body, writer)
                await writer.drain()

    async def answer(path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path != b"/v1/completions":
            models = json.dumps({"object": "list", "data": [{"id": served, "object": "model"}]}).encode()
            writer.write(plain(models if path == b"/v1/models" else b""))
            return
        asked = json.loads(body)
        prompt = str(asked.get("prompt"))
        if prompt == "interim":
            while True:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 4000)
                await writer.drain()
        if prompt == "chunks":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(chunk(b"x") * 20_000)
                await writer.drain()
        if not asked.get("stream"):
            writer.write(
                plain(b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
            )
            return
        writer.write(HEAD)
        text = "y" * 8000 if prompt == "large" else "x"
        event = chunk(b'data: {"id":"c","choices":[{"index":0,"text":"%b"}]}\n\n' % text.encode())
        for _ in range(int(asked.get("max_tokens") or 10)):
            writer.write(event)
            await writer.drain()
            await asyncio.sleep(INTERVAL_S)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(3600)


# --- attackers ---

Attack = Callable[[int], Awaitable[None]]


async def connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)


def again(once: Attack, count: int = 1) -> Attack:
    """Repeat an attack for ever, on `count` connections."""

    async def for_ever(port: int) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await once(port)
            await asyncio.sleep(0)

    async def attack(port: int) -> None:
        await asyncio.gather(*(for_ever(port) for _ in range(count)))

    return attack


def sending(data: bytes, *, per_s: float = 0.0, hold_s: float = 0.0) -> Attack:
    """Send this and wait for an end; with `per_s` at this rate in bytes a second."""

    async def once(port: int) -> None:
        reader, writer = await connection(port)
        try:
            step = len(data) if not per_s else max(1, int(per_s / 20))
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
                await writer.drain()
                if per_s:
                    await asyncio.sleep(0.05)
            if hold_s:
                await asyncio.sleep(hold_s)
            else:
                await reader.read(1)
        finally:
            writer.transport.abort()

    return once


def not_reading(data: bytes) -> Attack:
    """Send this and read nothing."""

    async def once(port: int) -> None:
        reader, writer = await connection(port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(data)
        await asyncio.sleep(3600)
        del reader

    return once


def both(*attacks: Attack) -> Attack:
    """Several at once."""

    async def attack(port: int) -> None:
        await asyncio.gather(*(each(port) for each in attacks))

    return attack


def chunked(unit: bytes, count: int) -> bytes:
    return POST % (b"/v1/completions", JSON) + b"Transfer-Encoding: chunked\r\n\r\n" + unit * count


def prompts(unit: bytes, size: int) -> bytes:
    return post(b'{"model":"m","prompt":[' + unit * (size // len(unit)) + unit[:-1] + b"]}")


HEADS = MODEL_PART[:-3] + b"a: b\r\n" * 600
PART = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n'
AUDIO = b"/v1/audio/transcriptions"
HALF = POST % (AUDIO, FORM) + b"Content-Length: 1300000\r\n\r\n" + MODEL_PART + b"x" * 650_000

ATTACKS: dict[str, Attack] = {
    "empty lines, one connection at full speed": again(sending(b"\r\n" * 500_000)),
    "empty lines, two at 150 kB/s": again(sending(b"\r\n" * 500_000, per_s=150e3), 2),
    "45 streams that are not read": again(not_reading(asking("large", max_tokens=2000)), 45),
    "bodies in chunks of one byte": again(sending(chunked(b"1\r\nx\r\n", 1 << 20)), 2),
    "an engine that sends 1xx without end": again(sending(asking("interim", stream=False, model=EVIL)), 2),
    "an engine that answers in chunks of one byte": again(
        sending(asking("chunks", stream=False, model=EVIL), hold_s=2.0), 2
    ),
    "8 MiB of empty lists": again(sending(prompts(b"[],", 8_000_000)), 2),
    "8 MiB of empty strings": again(sending(prompts(b'"",', 8_000_000)), 2),
    "forms of 100,000 parts": again(
        sending(post(MODEL_PART + PART * 100_000 + b"--b--\r\n", AUDIO, FORM)), 2
    ),
    "forms with heads of 600 lines": again(
        sending(post((HEADS + b"\r\ny\r\n") * 1900 + b"--b--\r\n", AUDIO, FORM)), 2
    ),
    "300 half-sent forms": again(sending(HALF, hold_s=60.0), 300),
    "pipelined requests without end": again(sending(b"GET /ping HTTP/1.1\r\nHost: p\r\n\r\n" * 20_000), 2),
}  # fmt: skip


#: Floods and slow clients: tools of others, and many connections; judged by cut connections and memory alone.
#: Idle connections: as many as the proxy takes where fewer descriptors are allowed.
IDLE = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 500)
SLOW = "slowhttptest -c 1000 -r 200 -l {s} "
FLOODS: dict[str, Attack | list[str]] = {
    "slowhttptest, 1,000 slow heads": (SLOW + "-H -i 5 -u {url}/v1/completions").split(),
    "slowhttptest, 1,000 slow bodies": (SLOW + "-B -i 5 -s 8192 -u {url}/v1/completions").split(),
    "slowhttptest, 1,000 slow reads": (SLOW + "-X -w 1 -y 2 -n 5 -z 1 -k 3 -u {url}/v1/models").split(),
    "h2load, 100 connections": ["h2load", "--h1", "-c", "100", "-D", "{s}", "{url}/v1/models"],
    "wrk, 200 connections": ["wrk", "-c", "200", "-t", "1", "-d", "{s}s", "{url}/ping"],
    "500 streams that are not read": again(not_reading(asking("large", max_tokens=2000)), 500),
    f"{IDLE:,} idle connections": again(sending(b"", hold_s=3600.0), IDLE),
}  # fmt: skip


async def attacker_process(name: str, port: int) -> None:
    """Attack until killed."""
    attack = {**ATTACKS, **FLOODS}[name]
    assert not isinstance(attack, list), "expected an attack of our own"
    await attack(port)


def command(name: str, port: int, seconds: float) -> list[str]:
    """What attacks."""
    tool = FLOODS.get(name)
    if not isinstance(tool, list):
        return [sys.executable, __file__, "--attacker", name, str(port)]
    return [part.format(s=int(seconds), url=f"http://127.0.0.1:{port}") for part in tool]


# --- honest clients ---


class Honest:
    """50 streams and 20 requests a second, and what they saw."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.times_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.cut = self.failed = self.streams = 0
        self._ending = False

    async def run(self, seconds: float) -> None:
        """Begin, and return after `seconds`."""
        streams = [asyncio.create_task(self._stream(number)) for number in range(STREAMS)]
        ends = time.perf_counter() + seconds
        asked: list[asyncio.Task[None]] = []
        due = time.perf_counter()
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked.append(asyncio.create_task(self._ask(due)))
            due += 1.0 / RATE
        self._ending = True
        await asyncio.wait(asked, timeout=30)
        self.failed += sum(not task.done() for task in asked)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _ask(self, due: float) -> None:
        try:
            reader, writer = await connection(self._port)
            writer.write(asking("x", stream=False))
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                self.failed += 1
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            self.failed += 1
        self.times_ms.append((time.perf_counter() - due) * 1e3)

    async def _stream(self, number: int) -> None:
        await asyncio.sleep(number / STREAMS)
        while not self._ending:
            try:
                reader, writer = await connection(self._port)
                writer.write(asking("honest"))
                last, data = 0.0, b""
                while piece := await reader.read(1 << 16):
                    now = time.perf_counter()
                    if last:
                        self.gaps_ms.append((now - last) * 1e3)
                    last = now
                    data = (data + piece)[-64:]
                    if data.endswith(b"0\r\n\r\n"):
                        break
                self.streams += 1
                self.cut += b"[DONE]" not in data
                writer.close()
            except (OSError, asyncio.IncompleteReadError):
                self.cut += 1
                await asyncio.sleep(0.1)


def p99(values: list[float]) -> float:
    """The 99th percentile, 0 of nothing."""
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else 0.0


async def watched(proxy: Serving, seen: dict[str, Any]) -> None:
    """Keep the worst health and the most memory."""
    while True:
        seen["rss"] = max(seen["rss"], proxy.rss_kib())
        seen["connections"] = max(seen["connections"], proxy.descriptors())
        with contextlib.suppress(Exception):  # it is under attack
            for name, each in (await proxy.instances()).items():
                if each["health"] != "up" and name != EVIL:
                    seen["health"].add(f"{name}: {each['health']}")
        await asyncio.sleep(0.25)


async def ejected(proxy: Serving) -> float:
    """Ejections of the engines that are well."""
    return sum([await proxy.metric(f'hetlb_instance_ejections_total{{server="i{n}"') for n in range(WELL)])


async def one(proxy: Serving, name: str, seconds: float) -> dict[str, Any]:
    """One attack: the honest load alone, then beside it."""
    alone = Honest(proxy.port)
    await alone.run(seconds / 2)
    before = proxy.rss_kib()
    ejections = await ejected(proxy)
    seen: dict[str, Any] = {"rss": before, "health": set(), "connections": 0}
    watcher = asyncio.create_task(watched(proxy, seen))
    attacker = subprocess.Popen(  # noqa: ASYNC220 - it runs beside
        command(name, proxy.port, seconds),
        process_group=0,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    during = Honest(proxy.port)
    await during.run(seconds)
    watcher.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(attacker.pid, signal.SIGKILL)
    attacker.wait()
    after = await ejected(proxy)
    row = {
        "attack": name,
        "p99_alone_ms": p99(alone.times_ms), "p99_ms": p99(during.times_ms),
        "median_alone_ms": statistics.median(alone.times_ms), "median_ms": statistics.median(during.times_ms),
        "gap_p99_alone_ms": p99(alone.gaps_ms), "gap_p99_ms": p99(during.gaps_ms),
        "longest_gap_alone_ms": max(alone.gaps_ms, default=0.0),
        "longest_gap_ms": max(during.gaps_ms, default=0.0),
        "streams": during.streams, "cut": during.cut, "failed": during.failed,
        "ejections": after - ejections, "health": sorted(seen["health"]),
        "connections": seen["connections"],
        "rss_before_mib": before / 1024, "rss_most_mib": seen["rss"] / 1024,
    }  # fmt: skip
    await asyncio.sleep(2.0)
    return row


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['attack']:46} p99 {row['p99_alone_ms']:6.1f} -> {row['p99_ms']:7.1f} ms  "
        f"gap p99 {row['gap_p99_alone_ms']:5.0f} -> {row['gap_p99_ms']:5.0f}  "
        f"cut {row['cut']}/{row['streams']}  failed {row['failed']}  "
        f"ejected {row['ejections']:.0f} {','.join(row['health'])}  "
        f"rss {row['rss_before_mib']:.0f} -> {row['rss_most_mib']:.0f} MiB"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be set."""
    parser.add_argument("--seconds", type=float, default=30.0, help="of each attack")
    parser.add_argument("--floods", action="store_true", help="slow clients, floods and many connections")
    parser.add_argument("--only", help="attacks whose name holds this")
    parser.add_argument("--hetlb", default=sys.executable, help="the Python whose hetlb is attacked")


async def run(args: argparse.Namespace) -> int:
    """Attack, and record."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    engines = [
        subprocess.Popen(  # noqa: ASYNC220 - they run beside
            [sys.executable, __file__, "--engine", served], stdout=subprocess.PIPE, text=True, process_group=0
        )
        for served in (*[MODEL] * WELL, EVIL)
    ]
    rows: list[dict[str, Any]] = []
    try:
        urls = [f"http://127.0.0.1:{each.stdout.readline().strip()}" for each in engines if each.stdout]
        fleet = {
            "models": [
                {"name": MODEL, "instances": [{"name": f"i{n}", "url": urls[n]} for n in range(WELL)]},
                {"name": EVIL, "instances": [{"name": EVIL, "url": urls[WELL]}]},
            ],
            "proxy": {"request_log": False},
        }
        for name in FLOODS if args.floods else ATTACKS:
            if args.only and args.only not in name:
                continue
            # A proxy of its own for each: what one attack leaves must not be taken for another's.
            async with serving(fleet, python=args.hetlb) as proxy:
                rows.append(await one(proxy, name, args.seconds))
            print(shown(rows[-1]), flush=True)
    finally:
        for each in engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    name = "floods" if args.floods else "attacks"
    return report(name, [judged(row) for row in rows], {"rows": rows}, args.recorded)


def judged(row: dict[str, Any]) -> Promise:
    """Whether an attack did to others no more than is promised."""
    harmed = row["cut"] or row["failed"] or row["ejections"] or row["health"]
    added_ms = row["p99_ms"] - row["p99_alone_ms"]
    mib = row["rss_most_mib"] - row["rss_before_mib"]
    return Promise(
        row["attack"],
        f"{MOST_ADDED_MS:.0f} ms, none cut, none out, {MOST_MIB:.0f} MiB",
        f"{added_ms:.1f} ms, {row['cut']} cut, {row['failed']} failed, {row['ejections']:.0f} out, "
        f"{mib:.0f} MiB",
        not harmed and added_ms <= MOST_ADDED_MS and mib <= MOST_MIB,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        asyncio.run(engine_process(sys.argv[2]))
    elif sys.argv[1:2] == ["--attacker"]:
        asyncio.run(attacker_process(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit("bench/faults/run.py attacks")
