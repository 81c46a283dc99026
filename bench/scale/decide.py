"""Time that a picker takes for a decision, at random times and without Envoy: request in, instance out.

`python bench/scale/decide.py --rates 500,1000,2500` starts `hetlb pick` over two mock engines and plays the
gateway: one HTTP/2 connection, each request's headers and body in one write, as Envoy sends them. A line a
rate: latency from the moment a request was due until the picker's answer was read, the scheduler's part of it
(`hetlb_decision_seconds`), and the picker's CPU per request, engine's answer included. `--python` for the
hetlb that is installed there, `--cores 0,1` pins picker and client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import uvloop
import yaml
from demo import HETLB, Processes, free_port

from hetlb.options.pick import messages

PROXIES = Path(__file__).resolve().parents[1] / "proxies"
sys.path.insert(0, str(PROXIES))
from alarm import Alarm  # noqa: E402
from bodies import MODEL, PROMPTS, chat  # noqa: E402
from client import quantiles  # noqa: E402
from cpu import cpu_ns, prefer  # noqa: E402

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
_LARGEST_WINDOW = (1 << 31) - 1
#: HPACK without a table: `:method: POST`, `:scheme: http` of the static one, then literals.
_METHOD, _SCHEME = b"\x83", b"\x86"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (len(payload) << 48 | kind << 40 | flags << 32 | stream).to_bytes(9, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_BLOCK = (
    _METHOD
    + _SCHEME
    + _literal(b":path", b"/" + messages.PROCESS_SERVICE.encode() + b"/Process")
    + _literal(b":authority", b"picker")
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"te", b"trailers")
)


def _message(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return len(data).to_bytes(5, "big") + data


def _headers(part: Any, **fields: str) -> None:
    for name, value in fields.items():
        header = part.headers.headers.add()
        header.key, header.raw_value = name.replace("_", "-"), value.encode()


def requests() -> list[bytes]:
    """Messages of Envoy for each prompt: the request's headers, its body, in the mode of `static.yaml`."""
    first = messages.ProcessingRequest()
    path = {":method": "POST", ":path": "/v1/chat/completions", ":authority": "bench"}
    _headers(first.request_headers, **path, content_type="application/json")
    mode = first.protocol_config
    mode.request_body_mode = mode.response_body_mode = messages.STREAMED
    mode.send_body_without_waiting_for_header_response = True
    found = []
    for number in range(PROMPTS):
        body = messages.ProcessingRequest()
        body.request_body.body = chat("plain", number, 400, 1, 0, 0)
        body.request_body.end_of_stream = True
        found.append(_message(first) + _message(body))
    return found


def answer() -> bytes:
    """Messages of Envoy for an engine's answer."""
    head, body = messages.ProcessingRequest(), messages.ProcessingRequest()
    _headers(head.response_headers, **{":status": "200"}, content_type="application/json")
    usage = {"prompt_tokens": 128, "completion_tokens": 1, "total_tokens": 129}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * 200}, "finish_reason": "stop"}
    body.response_body.body = json.dumps({"model": MODEL, "choices": [choice], "usage": usage}).encode()
    body.response_body.end_of_stream = True
    return _message(head) + _message(body)


class Gateway(asyncio.Protocol):
    """A gateway with one connection: each request is answered by its engine as soon as it has one."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._rest = b""
        self._requests, self._answer = requests(), answer()
        self._due: dict[int, float] = {}
        self._parts: dict[int, bytes] = {}
        self._next = 1
        self.latencies = array("d")
        self.done = asyncio.get_running_loop().create_future()
        self.wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        window = (4).to_bytes(2, "big") + _LARGEST_WINDOW.to_bytes(4, "big")
        more = (_LARGEST_WINDOW - 65_535).to_bytes(4, "big")
        self._transport.write(PREFACE + _frame(SETTINGS, 0, 0, window) + _frame(WINDOW_UPDATE, 0, 0, more))

    def ask(self, due: float) -> None:
        """Send a request that was due then."""
        number, self._next = self._next, self._next + 2
        self._due[number] = due
        data = self._requests[number // 2 % PROMPTS]
        self._transport.write(_frame(HEADERS, END_HEADERS, number, _BLOCK) + _frame(DATA, 0, number, data))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        at = 0
        while len(data) - at >= 9:
            length, number = (
                int.from_bytes(data[at : at + 3], "big"),
                int.from_bytes(data[at + 5 : at + 9], "big"),
            )
            if len(data) - at < 9 + length:
                break
            if data[at + 3] == DATA and number in self._due:
                self._chosen(number, data[at + 9 : at + 9 + length], now)
            elif data[at + 3] in (SETTINGS, PING) and not data[at + 4]:
                payload = data[at + 9 : at + 9 + length] if data[at + 3] == PING else b""
                self._transport.write(_frame(data[at + 3], ACK, 0, payload))
            at += 9 + length
        self._rest = data[at:]

    def _chosen(self, number: int, data: bytes, now: float) -> None:
        data = self._parts.pop(number, b"") + data
        size = int.from_bytes(data[1:5], "big")
        if len(data) < 5 + size:
            self._parts[number] = data
            return
        told = messages.ProcessingResponse.FromString(data[5 : 5 + size])
        if told.HasField("override_message_timeout"):  # the body came late
            self._chosen(number, data[5 + size :], now)
            return
        if not told.request_headers.response.header_mutation.set_headers:
            raise RuntimeError(f"expected an instance, got {told}")
        self.latencies.append(now - self._due.pop(number))
        self._transport.write(_frame(DATA, END_STREAM, number, self._answer))
        if len(self.latencies) == self.wanted:
            self.done.set_result(None)


async def run(port: int, rate: float, count: int) -> array[float]:
    """Return latencies of `count` requests at this rate, in seconds, of the later nine tenths."""
    loop = asyncio.get_running_loop()
    transport, gateway = await loop.create_connection(Gateway, "127.0.0.1", port)
    gateway.wanted = count
    draw = random.Random(1)
    due, planned = time.monotonic() + 0.05, 0

    def ring() -> None:
        nonlocal due, planned
        now = time.monotonic()
        while due <= now and planned < count:
            planned += 1
            gateway.ask(due)
            due += draw.expovariate(rate)
        if planned < count:
            alarm.set(due)

    alarm = Alarm(loop, ring)
    alarm.set(due)
    await asyncio.wait_for(gateway.done, 60.0 + count / rate)
    alarm.close()
    transport.abort()
    return gateway.latencies[count // 10 :]


def decisions(admin: str) -> tuple[float, float]:
    """Seconds that the scheduler has taken for requests that came, and their number."""
    page = urllib.request.urlopen(f"{admin}/metrics").read().decode()
    found = [
        re.search(
            rf'^hetlb_decision_seconds_{part}{{[^}}]*event="arrival"[^}}]*}} (\S+)$', page, re.MULTILINE
        )
        for part in ("sum", "count")
    ]
    assert all(found), "expected hetlb_decision_seconds"
    total, count = (float(each[1]) for each in found if each is not None)
    return total, count


def main() -> None:
    """Measure each rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="500,1000,2500", help="requests/s")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--python", help="the Python whose hetlb it is; this folder's without it")
    args = parser.parse_args()
    hetlb = HETLB
    if args.python is not None:
        hetlb = [args.python, "-P", "-m", "hetlb"]
        os.environ["PYTHONPATH"] = ""
    picker_core, own_core = map(int, args.cores.split(","))
    with Processes() as processes, tempfile.TemporaryDirectory() as scratch:
        ports = [free_port(), free_port()]
        os.sched_setaffinity(0, [own_core])
        engine = subprocess.Popen(
            [sys.executable, str(PROXIES / "mock_engine.py"), "--ports", ",".join(map(str, ports))]
        )
        processes.callback(engine.kill)
        fleet = {
            "version": 1,
            "admin": {"port": 0},
            "pick": {"port": 0},
            "models": [{"name": MODEL, "instances": [{"url": f"http://127.0.0.1:{port}"} for port in ports]}],
        }
        path = Path(scratch) / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        picker, line = processes.start(*hetlb, "pick", "--config", str(path), ready="pick ready on")
        os.sched_setaffinity(picker.pid, [picker_core])
        for pid in (picker.pid, os.getpid()):
            prefer(pid)
        port, admin = int(line.split()[4].rpartition(":")[2]), line.split()[-1].rstrip(")")
        for rate in map(float, args.rates.split(",")):
            count = int(rate * args.seconds)
            cpu_before, (took, number) = cpu_ns([picker.pid]), decisions(admin)
            latencies = uvloop.run(run(port, rate, count))
            cpu_us = (cpu_ns([picker.pid]) - cpu_before) / count / 1e3
            took_s, number_now = decisions(admin)
            scheduler_us = 1e6 * (took_s - took) / (number_now - number)
            row = {"rate": rate, "requests": count, "latency_ms": quantiles(latencies)}
            print(json.dumps({**row, "scheduler_us": round(scheduler_us, 1), "cpu_us": round(cpu_us, 1)}))


if __name__ == "__main__":
    main()
