"""Does `hetlb bench` measure what a server does? Against one of known latency, and one that stalls.

Shows: TTFT and ITL as reported at 500 requests/s of 8 tokens, open loop, beside the server's setting
and its own clock; and the p99 of a run in which it stalls for 2 s.
Server and client are processes of their own on one clock; `hetlb bench` runs as a user runs it.
Exit status 1 if mean or median is off by more than 2 ms from what the server did, or the stall is not in
the p99. The bounds are for an otherwise idle machine; on a busy one the client must say that it is SUSPECT.

`.venv/bin/python bench/loadtest_accuracy.py [--request-rate R] [--seconds S]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

TTFT_S = 0.040
ITL_S = 0.010
TOKENS = 8
PROMPT_TOKENS = 32
STALL_S = 2.0
#: What a report may be off by.
ALLOWED_MS = 2.0
#: The server is late after a stall, and has to catch up.
STALL_ALLOWED = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description="hetlb bench against a server of known latency.")
    parser.add_argument("--request-rate", type=float, default=500.0, help="requests/s (default 500)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each run (default 20)")
    parser.add_argument("--serve", type=float, metavar="STALL_AT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve(args.serve))
        return 0
    count = round(args.request_rate * args.seconds)
    steady, server = measured(args.request_rate, count, 0.0)
    stalled, _ = measured(args.request_rate, count, args.seconds / 2)
    return show(steady, server, stalled, count)


def measured(rate: float, count: int, stall_at_s: float) -> tuple[Any, Any]:
    """One run of `hetlb bench`, and what the server says that it did. `stall_at_s` 0: it does not stall."""
    with tempfile.TemporaryDirectory() as folder, mock_server(stall_at_s) as (url, stop):
        trace = Path(folder) / "trace.csv"
        trace.write_text(f"arrival_s,input_tokens,output_tokens\n,{PROMPT_TOKENS},{TOKENS}\n")
        command = [sys.executable, "-m", "hetlb", "bench", "--url", url, "--model", "mock", "--json"]
        command += ["--trace", str(trace), "--num-prompts", str(count), "--request-rate", str(rate)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)["runs"][0], stop()


def show(steady: Any, server: Any, stalled: Any, count: int) -> int:
    """The tables; the exit status."""
    table = Table(title=f"{count:,} requests, ms", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("", "told", "server's own", "reported", "off by"):
        table.add_column(heading, justify="right" if heading else "left")
    off = []
    for name, told_s in (("ttft", TTFT_S), ("itl", ITL_S)):
        for figure in ("mean", "median", "p99"):
            reported, own = steady[f"{figure}_{name}_ms"], server[f"{figure}_{name}_ms"]
            if figure != "p99":
                off.append(abs(reported - own))
            table.add_row(
                f"{figure} {name.upper()}",
                f"{1e3 * told_s:.1f}",
                f"{own:.2f}",
                f"{reported:.2f}",
                f"{reported - own:+.2f}",
            )
    console = Console()
    console.print(table)
    # Of the requests that were due in the stall, the first waited for all of it, the last for nothing.
    seconds = stalled["duration"]
    expected_s = STALL_S - 0.01 * seconds + TTFT_S
    console.print(
        f"a stall of {STALL_S:g} s in {seconds:.0f} s: p99 TTFT {stalled['p99_ttft_ms'] / 1e3:.2f} s, "
        f"{expected_s:.2f} s expected; median {stalled['median_ttft_ms']:.1f} ms"
    )
    for run in (steady, stalled):
        console.print(f"{run['client']['verdict']} {'; '.join(run['client']['reasons'])}")
        console.print(
            f"  sent late p99 {run['client']['p99_lateness_ms']:.2f} ms, loop lag p99 "
            f"{run['client']['p99_loop_lag_ms']:.2f} ms, {100 * run['client']['cpu_share']:.0f} % of a core, "
            f"{run['failed']} failed"
        )
    shows = abs(stalled["p99_ttft_ms"] / 1e3 - expected_s) <= STALL_ALLOWED * STALL_S
    good = max(off) <= ALLOWED_MS and shows and not steady["failed"] and not stalled["failed"]
    verdict = "good" if good else "BAD"
    if not good and steady["client"]["verdict"] == "SUSPECT":
        verdict = "BAD, but the client says itself that it is not fit to measure here: try an idle machine"
    console.print(f"off by {max(off):.2f} ms at most (mean, median), {ALLOWED_MS:g} allowed: {verdict}")
    return 0 if good else 1


# --- the server -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mock_server(stall_at_s: float) -> Iterator[tuple[str, Any]]:
    """A server in a process of its own: its address, and a call that ends it and gives its figures."""
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(stall_at_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        yield url, lambda: json.loads(server.communicate("stop\n")[0])
    finally:
        server.kill()
        server.communicate()


async def serve(stall_at_s: float) -> None:
    """Answer until a line comes on stdin; the first request starts the clock of the stall."""
    loop = asyncio.get_running_loop()
    log = Log()

    def stall_later() -> None:
        if stall_at_s:
            loop.call_later(stall_at_s, time.sleep, STALL_S)

    log.first_request = stall_later
    server = await loop.create_server(lambda: Answers(loop, log), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    figures = {}
    for name, values in (("ttft", log.ttft_s), ("itl", log.itl_s)):
        figures[f"mean_{name}_ms"] = 1e3 * statistics.fmean(values)
        figures[f"median_{name}_ms"] = 1e3 * statistics.median(values)
        figures[f"p99_{name}_ms"] = 1e3 * statistics.quantiles(values, n=100, method="inclusive")[98]
    print(json.dumps(figures), flush=True)
    os._exit(0)  # connections that are kept open would keep it


class Log:
    """What the server did, by its own clock."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.first_request: Callable[[], object] = _nothing


class Answers(asyncio.Protocol):
    """One connection: each request is answered with tokens that come when they are due."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log) -> None:
        self._loop = loop
        self._log = log
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        self._came_s = time.monotonic()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        asked = json.loads(self._body)
        self._body = b""
        self._usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        self._left = asked["max_tokens"]
        if not self._log.ttft_s:
            self._log.first_request()
            self._log.first_request = _nothing
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._due_s = self._came_s + TTFT_S
        self._last_s = 0.0
        self._wait()

    def _wait(self) -> None:
        self._loop.call_later(max(0.0, self._due_s - time.monotonic()), self._token)

    def _token(self) -> None:
        now = time.monotonic()
        if self._last_s:
            self._log.itl_s.append(now - self._last_s)
        else:
            self._log.ttft_s.append(now - self._came_s)
        self._last_s = now
        self._left -= 1
        answer = event({"choices": [{"index": 0, "text": " token"}]})
        if self._left:
            self._transport.write(answer)
            self._due_s += ITL_S
            self._wait()
        else:
            answer += event({"choices": [], "usage": self._usage}) + chunk(b"data: [DONE]\n\n")
            self._transport.write(answer + b"0\r\n\r\n")


def event(document: dict[str, Any]) -> bytes:
    return chunk(b"data: %b\n\n" % json.dumps(document).encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _nothing() -> None:
    """Do nothing at further requests."""


if __name__ == "__main__":
    sys.exit(main())
