"""Raw mutants on sockets: requests that were damaged at random, against a proxy as a process of its own.

The mutants are drawn from a seed, so every find can be made again (`mutants.py --seed S --only N`).
Of a run: the process lives and wrote no traceback; nothing was answered with a 5xx, for the engine is well;
every connection was answered or ended; every good request beside them was answered with 200; and what
reached the engine is read alike by three parsers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.client import Client, body_of, get, request
from faults.engine import FaultEngine
from faults.rig import Process, as_process
from fuzz.desync import requests
from fuzz.readers import REQUEST_READERS
from fuzz.run_target import mutate
from helpers import HANG_S

#: The proxy's own limits for heads and bodies here.
LIMIT_S = 0.3
CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
AT_ONCE = 100


@dataclass
class Report:
    """What came of a run."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    #: Of the good requests beside the mutants.
    good: int = 0
    slowest_good_s: float = 0.0
    finds: list[str] = field(default_factory=list)


def bases() -> list[bytes]:
    """Return the inputs of mutation: good requests of several kinds, and requests that are bad on purpose."""
    good = [
        request("mutant", body_of("x")),
        request("mutant", body_of("x", stream=False), "Connection: close", version="1.0"),
        request("mutant", CHAT, path="/v1/chat/completions"),
        b"GET /v1/models HTTP/1.1\r\nHost: p\r\n\r\n" * 2,
        b"GET /health HTTP/1.1\r\nHost: p\r\nConnection: keep-alive\r\n\r\n",
        request("mutant", body_of("x")) + b"GET /version HTTP/1.1\r\nHost: p\r\n\r\n",
    ]
    return good * 60 + [case.data.replace(b"{id}", b"mutant") for case in requests()]


def draw(seed: int, number: int, kept: list[bytes]) -> bytes:
    """The n-th mutant of a seed."""
    rng = random.Random(f"{seed}-{number}")
    return mutate(rng, rng.choice(kept), kept)


class Run:
    """One run against one proxy."""

    def __init__(self, rig: Process, seed: int) -> None:
        self._rig = rig
        self._seed = seed
        self._kept = bases()
        self._room = asyncio.Semaphore(AT_ONCE)
        self.report = Report()

    async def one(self, number: int) -> None:
        """Send one mutant and see what becomes of it."""
        async with self._room:
            data = draw(self._seed, number, self._kept)
            self.report.sent += 1
            loop = asyncio.get_running_loop()
            started = loop.time()
            try:
                async with asyncio.timeout(HANG_S):
                    async with Client(self._rig.port) as client:
                        with contextlib.suppress(ConnectionError):
                            client.send(data)
                            await self._look(number, client)
            except TimeoutError:
                self.report.finds.append(f"mutant {number}: neither answered nor closed: {data[:200]!r}")
            self.report.slowest_s = max(self.report.slowest_s, loop.time() - started)

    async def _look(self, number: int, client: Client) -> None:
        """Read the first answer; what else comes on the connection is of no interest."""
        try:
            answer = await client.answer()
        except asyncio.IncompleteReadError as end:
            self.report.answers["closed" if not end.partial else "no answer"] += 1
            if end.partial:
                self.report.finds.append(f"mutant {number}: no HTTP came back: {end.partial[:80]!r}")
            return
        except (ValueError, AssertionError) as error:
            self.report.finds.append(f"mutant {number}: an answer that is none: {error}")
            return
        self.report.answers[str(answer.status)] += 1
        if answer.status >= 500:
            self.report.finds.append(f"mutant {number}: {answer.status} {answer.body[:100]!r}")

    async def good_ones(self) -> None:
        """Good requests beside the mutants, one after the other."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            async with Client(self._rig.port) as client:
                client.send(request("good", body_of("good", model="bg", stream=False)))
                try:
                    answer = await client.answer()
                except (asyncio.IncompleteReadError, ConnectionError):
                    if loop.time() - started < LIMIT_S:
                        raise
                    continue  # a busy machine: the connection stood idle for too long before its request
            took_s = loop.time() - started
            self.report.good += 1
            self.report.slowest_good_s = max(self.report.slowest_good_s, took_s)
            if answer.status != 200:
                self.report.finds.append(f"a good request got {answer.status} {answer.body[:100]!r}")
            await asyncio.sleep(0.01)


class Wiretap:
    """A listener in front of the engine that keeps what the proxy sends, by connection."""

    def __init__(self, engine: FaultEngine) -> None:
        self._engine = engine
        self.kept: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on in both directions."""
        kept = bytearray()
        self.kept.append(kept)
        answers, there = await asyncio.open_connection("127.0.0.1", self._engine.port)

        async def forth() -> None:
            while data := await reader.read(1 << 16):
                kept.extend(data)
                there.write(data)

        async def back() -> None:
            while data := await answers.read(1 << 16):
                writer.write(data)

        with contextlib.suppress(ConnectionError):
            tasks = asyncio.create_task(forth()), asyncio.create_task(back())
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        there.close()
        writer.close()


async def run(count: int, seed: int, folder: Path, *, only: int | None = None) -> Report:
    """Send that many mutants (or one of them) and judge what came of it."""
    tables = {
        "proxy": {
            "head_timeout_s": LIMIT_S, "body_timeout_s": LIMIT_S, "keepalive_timeout_s": LIMIT_S,
            "write_timeout_s": LIMIT_S, "connect_timeout_s": HANG_S,
        },
        "scrape": {"timeout_s": HANG_S},  # the engine is well: however slow this machine is
    }  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FaultEngine())
        neighbour = await stack.enter_async_context(FaultEngine(served="bg"))
        tap = Wiretap(engine)
        server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
        stack.callback(server.close)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with as_process(folder, [engine], neighbour, tables, urls=[url]) as rig:
            going = Run(rig, seed)
            beside = asyncio.create_task(going.good_ones())
            numbers = range(count) if only is None else [only]
            await asyncio.gather(*(going.one(number) for number in numbers))
            beside.cancel()
            outcome = (await asyncio.gather(beside, return_exceptions=True))[0]
            report = going.report
            if not isinstance(outcome, asyncio.CancelledError):
                report.finds.append(f"a good request failed: {outcome!r}")
            if rig.process.returncode is not None:
                report.finds.append(f"the process ended with {rig.process.returncode}")
            elif (await get(rig.admin_port, "/healthz"))[0] != 200:
                report.finds.append("the admin listener does not answer")
    log = (folder / "log").read_text(errors="replace")
    if "Traceback" in log:
        report.finds.append(log[log.index("Traceback") :][:2000])
    for kept in tap.kept:
        readings = {name: read(bytes(kept)) for name, read in REQUEST_READERS.items()}
        first = readings["h11"]
        if first is None or any(reading != first for reading in readings.values()):
            report.finds.append(f"read in several ways: {bytes(kept)[:400]!r}")
    return report


def main() -> int:
    """Run as the arguments say. Exit status 1 where something was found."""
    parser = argparse.ArgumentParser(description="Raw mutants on sockets.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="send this one alone and show it")
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(repr(draw(arguments.seed, arguments.only, bases())))
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(arguments.count, arguments.seed, Path(folder), only=arguments.only))
    print(
        f"mutants: {report.sent} sent, answers {dict(report.answers.most_common())}, "
        f"slowest {report.slowest_s:.2f} s; {report.good} good requests beside them, "
        f"slowest {report.slowest_good_s:.3f} s; {len(report.finds)} finds"
    )
    for find in report.finds[:20]:
        print(f"  {find}")
    return 1 if report.finds else 0


if __name__ == "__main__":
    sys.exit(main())
