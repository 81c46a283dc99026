"""Answers that are kept for `resume: ids`: memory under hostile streams, and how long the event loop stands.

Shows: resident memory of `hetlb serve` before and at most while one engine sends 4 streams as fast as it can
for 8 s, in each of some forms; and, where an engine dies in 200 streams of 2,000 events, the answers that are
whole and the most CPU time that the event loop took between two of its timers, 5 ms apart.
Exit status 1 if a form takes more than 64 MiB, a turn more than 50 ms, or an answer is not whole.

`.venv/bin/python bench/faults/resumed_floods.py [--seconds 8] [--streams 200] [--events 2000]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from common import Serving, serving, until
from engine import HEAD, METRICS, chunk, plain

MOST_MIB, MOST_STAND_MS = 64.0, 50.0
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":100000}]}'


def event(text: str, ids: list[int], finish: str | None = None, **more: Any) -> bytes:
    """Return an event of a completion as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": ids, **more}
    data = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


FIRST = event("tok", [5], prompt_token_ids=[1, 2])
#: Events that a hostile engine sends again and again, by name.
FORMS = {
    "small events": chunk(event("tok", [5])) * 200,
    "large texts": chunk(event("x" * 15_000, [5])) * 4,
    "many ids": chunk(event("", list(range(3000)))) * 4,
    "no end of an event": chunk(b"x" * 15_000),
    "no ids": chunk(event("x" * 500, []).replace(b"[]", b"null")) * 50,
    "CRLF": chunk(event("tok", [5]).replace(b"\n", b"\r\n")) * 200,
    "an object each": chunk(b'data: {"choices":[{"text":"' + b"\\u0041" * 2000 + b'"}]}\n\n') * 4,
    "comments": chunk(b": " + b"x" * 14_000 + b"\n") * 4,
}


class Engine:
    """Raw engine: `form` is sent without an end, None for an answer of `events` that stops in the middle."""

    def __init__(self, events: int) -> None:
        self.form: bytes | None = None
        self._answer = chunk(FIRST) + chunk(event("tok", [5])) * events
        self.served = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.die()

    def die(self) -> None:
        """Refuse connections, and reset open ones."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [each for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                await self._respond(writer, head, body)
                if body and b'"prompt":[1,2,' not in body:
                    await reader.read()  # until hetlb leaves
        self._writers.discard(writer)
        writer.close()

    async def _respond(self, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        if not body:
            page = METRICS % (0, 8192) if b"/metrics" in head else MODELS if b"/models" in head else b"{}"
            writer.write(plain(page, kind=b"text/plain" if b"/metrics" in head else b"application/json"))
        elif b'"prompt":[1,2,' in body:
            end = chunk(event("end", [6], "stop")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            writer.write(HEAD + end)
        else:
            writer.write(HEAD + (self._answer if self.form is None else chunk(FIRST)))
            self.served += 1
            while self.form is not None:
                writer.write(self.form)
                await writer.drain()


#: Time at which a client last read something.
read_at = 0.0


async def ask(port: int, got: list[bytes], most: float) -> None:
    """Ask for a stream, and read it for as many seconds; its last bytes are in `got`."""
    global read_at
    body = b'{"model":"m","prompt":"x","stream":true,"max_tokens":90000,"temperature":0}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    last, ends_at = b"", time.monotonic() + most
    with contextlib.suppress(TimeoutError, ConnectionError):
        while not last.endswith(b"\r\n0\r\n\r\n") and time.monotonic() < ends_at:
            async with asyncio.timeout(most):
                piece = await reader.read(1 << 18)
            if not piece:
                break
            last, read_at = (last + piece)[-400:], time.monotonic()
    got.append(last)
    writer.transport.abort()


def keep(stands: Path, seconds: float) -> None:
    """Write the file whole: another process reads it."""
    partial = stands.with_suffix(".partial")
    partial.write_text(str(seconds))
    partial.replace(stands)


def reset(stands: Path) -> None:
    keep(stands, 0.0)


def stood(stands: Path) -> float:
    """Return the most milliseconds of one turn."""
    return float(stands.read_text()) * 1e3


@contextlib.asynccontextmanager
async def proxy(engines: list[Engine], stands: Path) -> AsyncIterator[Serving]:
    fleet = {
        "proxy": {"resume": "ids", "request_log": False},
        "models": [
            {"name": "m", "instances": [{"name": f"i{n}", "url": e.url} for n, e in enumerate(engines)]}
        ],
        "policy": {"name": "rr"},
    }
    async with serving(fleet, launcher=(__file__, "--loop", str(stands))) as running:

        async def scraped() -> bool:
            return all(each["kv_reported"] is not None for each in (await running.instances()).values())

        await until(scraped, "page of each engine's metrics")
        yield running


async def memory(form: bytes, seconds: float, stands: Path) -> float:
    """Return the MiB that 4 hostile streams add."""
    async with Engine(0) as engine, proxy([engine], stands) as running:
        before = most = running.rss_kib()
        engine.form = form
        got: list[bytes] = []
        tasks = [asyncio.create_task(ask(running.port, got, seconds)) for _ in range(4)]
        while not all(each.done() for each in tasks):
            await asyncio.sleep(0.05)
            most = max(most, running.rss_kib())
        await asyncio.gather(*tasks)
    return (most - before) / 1024


async def death(streams: int, events: int, stands: Path) -> tuple[int, float]:
    """Return the whole answers of clients whose engine dies, and the most milliseconds of one turn."""
    async with Engine(events) as one, Engine(events) as two, proxy([one, two], stands) as running:
        got: list[bytes] = []
        tasks = [asyncio.create_task(ask(running.port, got, 120.0)) for _ in range(streams)]

        async def all_came() -> bool:
            return one.served + two.served == streams and time.monotonic() - read_at > 1.0

        async def all_ended() -> bool:
            return len(got) == one.served

        await until(all_came, "beginning of all answers", 120.0)
        reset(stands)  # what came before is the stand of a flood of reads
        one.die()
        await until(all_ended, "end of all answers whose engine died", 120.0)
        stood_ms = stood(stands)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return sum(b"[DONE]" in each for each in got) - len(got) + one.served, stood_ms


async def run(args: argparse.Namespace) -> int:
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        stands = Path(folder) / "stands"
        reset(stands)
        for name, form in FORMS.items() if args.seconds else ():
            reset(stands)
            mib = await memory(form, args.seconds, stands)
            stood_ms = stood(stands)
            print(f"4 streams of {name}: {mib:.1f} MiB more, {stood_ms:.1f} ms in one turn", flush=True)
            failed = failed or mib > MOST_MIB or stood_ms > MOST_STAND_MS
        whole, stood_ms = await death(args.streams, args.events, stands)
        print(
            f"an engine dies in {args.streams} streams of two: {whole} whole, {stood_ms:.1f} ms in one turn"
        )
    return int(failed or stood_ms > MOST_STAND_MS)


def serve_with_clock(stands: Path, arguments: list[str]) -> int:
    """Run hetlb, and write the most seconds of CPU between two timers of its loop to a file."""
    from hetlb.balancer.clients import server
    from hetlb.cli.main import main as hetlb

    start = server.ProxyServer.start

    async def started(self: Any, *where: Any, **more: Any) -> Any:
        loop = asyncio.get_running_loop()
        before = math.inf

        def tick() -> None:
            nonlocal before
            now = time.thread_time()
            if now - before > float(stands.read_text()):
                keep(stands, now - before)
            before = time.thread_time()
            loop.call_later(0.005, tick)

        loop.call_later(1.0, tick)
        return await start(self, *where, **more)

    server.ProxyServer.start = started  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    return int(hetlb() or 0)


def main() -> int:
    if sys.argv[1:2] == ["--loop"]:
        return serve_with_clock(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--events", type=int, default=2000)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
