"""Cost of the watch over many servers: CPU of an idle `hetlb serve`, and plain requests beside that.

`python bench/scale/watching.py [HETLB...]` starts servers that answer /health, /v1/models and vLLM's page of
metrics (`tests/vllm/data/metrics-idle.http`), one process for all, each at an address of its own
(127.0.0.0/8). Each HETLB is a command that is measured, this tree's by default. For 16, 256 and 1,000 servers
it prints the share of a core over `--seconds` once the fleet is known, and requests to servers per second.
Then four clients send plain requests without a pause: times, requests/s, and CPU time of the proxy for each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "proxies"))
from cpu import cpu_ns  # noqa: E402

FLEETS = (16, 256, 1000)
CLIENTS = 4
#: Seconds from the start until a fleet counts as known: looks at it have grown rare by then.
SETTLING_S = 45.0
PAGE = (ROOT / "tests" / "vllm" / "data" / "metrics-idle.http").read_bytes()
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}'
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8}}'
)
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":1}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


def plain(body: bytes) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(body) + body


ANSWERS = {
    b"/health": plain(b""),
    b"/metrics": PAGE,
    b"/v1/models": plain(MODELS),
    b"/version": plain(b'{"version":"0.32.0"}'),
}
CHAT = plain(ANSWER)


class Server(asyncio.Protocol):
    """One connection to any of the servers."""

    def __init__(self, asked: Counter[bytes]) -> None:
        self._asked = asked
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        _, end, body = data.partition(b"\r\n\r\n")
        if not end or (data[:4] == b"POST" and len(body) < len(BODY)):
            self._buffer = data
            return
        self._buffer = b""
        path = data.split(b" ", 2)[1]
        if path == b"/bench/asked":
            text = ",".join(f"{name.decode()}={count}" for name, count in self._asked.items())
            self._transport.write(plain(text.encode()))
            return
        self._asked[path] += 1
        self._transport.write(ANSWERS.get(path, CHAT))


async def serve(port: int) -> None:
    asked: Counter[bytes] = Counter()
    server = await asyncio.get_running_loop().create_server(
        lambda: Server(asked), "0.0.0.0", port, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def addresses(count: int) -> list[str]:
    return [f"127.0.{1 + n // 250}.{1 + n % 250}" for n in range(count)]


def asked(port: int) -> Counter[str]:
    """Return how often each path was asked for so far."""
    from urllib.request import urlopen

    text = urlopen(f"http://127.0.0.1:{port}/bench/asked").read().decode()
    return Counter(
        {name: int(count) for name, _, count in (each.partition("=") for each in text.split(",") if each)}
    )


async def client(port: int, until: float, took_s: list[float], failed: list[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (began := time.monotonic()) < until:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        await reader.readexactly(length)
        took_s.append(time.monotonic() - began)
        if b" 200 " not in head[:16]:
            failed.append(head[:16].decode())
    writer.close()


async def load(port: int, seconds: float) -> tuple[list[float], list[str]]:
    took_s: list[float] = []
    failed: list[str] = []
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(port, until, took_s, failed) for _ in range(CLIENTS)))
    return sorted(took_s), failed


def measure(command: list[str], count: int, engines: int, args: argparse.Namespace) -> str:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        lines = [
            f"      - {{name: i{n}, url: 'http://{host}:{engines}'}}"
            for n, host in enumerate(addresses(count))
        ]
        text = "version: 1\nlisten: {host: 127.0.0.1, port: 18765}\nadmin: {host: 127.0.0.1, port: 18766}\n"
        path = Path(folder, "fleet.yaml")
        path.write_text(f"{text}models:\n  - name: m\n    instances:\n" + "\n".join(lines) + "\n")
        proxy = subprocess.Popen([*command, "serve", "--config", str(path)], stdout=log, stderr=log)
        try:
            time.sleep(args.settling)
            if proxy.poll() is not None:
                sys.exit(Path(folder, "log").read_text()[-2000:])
            before, cpu, began = asked(engines), cpu_ns([proxy.pid]), time.monotonic()
            time.sleep(args.seconds)
            spent = (cpu_ns([proxy.pid]) - cpu) / 1e9 / (time.monotonic() - began)
            looks = (asked(engines) - before).total() / (time.monotonic() - began)
            cpu = cpu_ns([proxy.pid])
            took_s, failed = uvloop.run(load(18765, args.load_s))
            cpu = cpu_ns([proxy.pid]) - cpu
        finally:
            proxy.terminate()
            proxy.wait()
    p50, p99 = (1e3 * took_s[int(share * len(took_s))] for share in (0.5, 0.99))
    return (
        f"{count:5} servers: idle {100 * spent:6.2f} % of a core, {looks:7.1f} requests/s to servers; "
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(took_s) / args.load_s:.0f} requests/s, "
        f"{cpu / 1e3 / len(took_s):.0f} us of CPU each, {len(failed)} failed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hetlb", nargs="*", default=[f"{ROOT}/.venv/bin/hetlb"])
    parser.add_argument("--servers", default=",".join(map(str, FLEETS)))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settling", type=float, default=SETTLING_S)
    parser.add_argument("--load-s", type=float, default=8.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(0))
        return
    engines = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--serve"], stdout=subprocess.PIPE, text=True
    )
    assert engines.stdout is not None
    port = int(engines.stdout.readline())
    try:
        for count in map(int, args.servers.split(",")):
            for each in args.hetlb:
                print(
                    f"{Path(shlex.split(each)[0])}: {measure(shlex.split(each), count, port, args)}",
                    flush=True,
                )
    finally:
        engines.terminate()
        engines.wait()


if __name__ == "__main__":
    main()
