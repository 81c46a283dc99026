"""A vLLM server to look at, as cheap as it can be made: what every proxy of this bench has behind it.

`python mock_engine.py --ports 9000,9001` hosts one instance per port in one process. It answers what routers
ask (/health, /version, /v1/models, /metrics, SGLang's /get_server_info) and `POST /v1/chat/completions`. What
it shall do stands in the prompt, since every proxy hands that on untouched:

    bench=MODE:TAG:CHUNKS:PACE_US:BYTES;

TAG has 8 characters. p = one plain answer that repeats TAG; c = CHUNKS events in one write; b = the same with
every byte its own HTTP chunk; s = one event every PACE_US; d = a plain answer that names the length and
CRC-32 of the body it got. BYTES pads each event's text.

Events are framed as vLLM under uvicorn frames them: each its own HTTP chunk of about 250 bytes and,
when paced, its own write; the head goes with the first, the finishing event with `[DONE]`. Streams are spread
over the milliseconds of their pace. `/bench/report` says how late it wrote and how many it answered since it
was last asked.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import time
from collections import Counter
from typing import Any

import uvloop
from alarm import Alarm
from bodies import MODEL, bytewise, dechunked, digest

_TICK_S = 0.001
_ASKED = re.compile(rb"bench=([pcsbd]):(\w{8}):(\d+):(\d+):(\d+);")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked")
_USAGE = re.compile(rb'"include_usage" ?: ?true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PLAIN_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: %s\r\ncontent-length: %d\r\n\r\n"
)
_LIMITS = {"kv_cache_tokens": 64_000_000, "max_num_seqs": 8192, "max_model_len": 1_000_000}


def _event(delta: dict[str, str], finish: str | None = None, usage: bool = False) -> bytes:
    """One event as an HTTP chunk, about 250 bytes as vLLM's are."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": None,
    }
    body: dict[str, Any] = {
        "id": "chatcmpl-3f6c1d0a9be94c47a4c05f2fbe1f6d21",
        "object": "chat.completion.chunk",
        "created": 1795262400,
        "model": MODEL,
        "choices": [] if usage else [choice],
    }
    if usage:
        body["usage"] = {"prompt_tokens": 128, "total_tokens": 256, "completion_tokens": 128}
    return _chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(number: int, padding: int = 0) -> str:
    """The text of event `number` (from 1) of a stream: how order is checked."""
    return f" t{number:06d}{'x' * padding}"


class Events:
    """Prebuilt events of one padding, by number."""

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._built: list[bytes] = []

    def first(self, count: int) -> list[bytes]:
        """The events 1 to `count` at least."""
        while len(self._built) < count:
            self._built.append(_event({"content": token(len(self._built) + 1, self._padding)}))
        return self._built


#: Stands for the tag in the prebuilt bytes: as long as every tag is, so that framing and lengths fit.
_TAG = "TAG00000"
_START_BEFORE, _START_AFTER = (_STREAM_HEAD + _event({"role": "assistant", "content": _TAG})).split(
    _TAG.encode()
)
_END = _event({"content": ""}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_END_USAGE = (
    _event({"content": ""}, "stop") + _event({}, usage=True) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
)
_ANSWER: dict[str, Any] = {
    "id": "chatcmpl-3f6c1d0a9be94c47a4c05f2fbe1f6d21",
    "object": "chat.completion",
    "created": 1795262400,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": _TAG, "refusal": None, "tool_calls": []},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 128, "total_tokens": 129, "completion_tokens": 1},
}


class Engine:
    """What all instances of this process share: the clock of the paced streams, and its lag."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = Alarm(loop, self._tick)
        self._events: dict[int, Events] = {}
        #: Paced streams by (pace in ticks, phase).
        self._slots: dict[int, list[dict[Stream, None]]] = {}
        self._open = 0
        self._started = 0
        self._next = 0
        self._lags: list[float] = []
        #: Completions asked for, by port.
        self.served: Counter[int] = Counter()

    def events(self, padding: int) -> Events:
        """The prebuilt events with this padding."""
        return self._events.setdefault(padding, Events(padding))

    def add(self, stream: Stream) -> None:
        """Let a stream have its event every `stream.ticks`."""
        slots = self._slots.setdefault(stream.ticks, [{} for _ in range(stream.ticks)])
        # Spread in an order that leaves no burst while there are fewer streams than slots.
        stream.phase = self._started * max(1, round(stream.ticks * 0.618)) % stream.ticks
        self._started += 1
        slots[stream.phase][stream] = None
        self._open += 1
        if self._open == 1:
            self._next = int(time.monotonic() / _TICK_S) + 1
            self._alarm.set(self._next * _TICK_S)

    def remove(self, stream: Stream) -> None:
        """No more events for this one."""
        if self._slots[stream.ticks][stream.phase].pop(stream, stream) is None:
            self._open -= 1

    def report(self) -> dict[str, Any]:
        """How late ticks were since the last call, milliseconds, and the completions of each instance."""
        lags, self._lags = sorted(self._lags) or [0.0], []
        served, self.served = self.served, Counter()
        at = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
        return {
            **{name: lags[min(len(lags) - 1, int(len(lags) * q))] * 1e3 for name, q in at.items()},
            "served": [count for _, count in sorted(served.items())],
        }

    def _tick(self) -> None:
        now = time.monotonic()
        self._lags.append(now - self._next * _TICK_S)
        while self._next * _TICK_S <= now:
            for ticks, slots in self._slots.items():
                for stream in list(slots[self._next % ticks]):
                    stream.step()
            self._next += 1
        if self._open:
            self._alarm.set(self._next * _TICK_S)


class Stream:
    """One paced answer."""

    __slots__ = ("_end", "_engine", "_events", "_total", "_transport", "_written", "phase", "ticks")

    def __init__(
        self,
        engine: Engine,
        transport: asyncio.WriteTransport,
        events: list[bytes],
        total: int,
        ticks: int,
        end: bytes,
    ) -> None:
        self._engine, self._transport, self._events = engine, transport, events
        self._total, self.ticks, self._end = total, ticks, end
        self._written = 0
        self.phase = 0

    def step(self) -> None:
        """Write the next event, or the end."""
        if self._written < self._total:
            self._transport.write(self._events[self._written])
            self._written += 1
        else:
            self._transport.write(self._end)
            self.stop()

    def stop(self) -> None:
        """The stream is over, or its connection is."""
        self._engine.remove(self)


class Instance(asyncio.Protocol):
    """One connection to one instance."""

    def __init__(self, engine: Engine, port: int) -> None:
        self._engine = engine
        self._port = port
        self._transport: Any = None
        self._pieces: list[bytes] = []
        self._have = 0
        #: Bytes that head and body have together; -1 while unknown, -2 when the body is chunked.
        self._needed = -1
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.stop()

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._have += len(data)
        if self._needed == -1:
            whole = data if len(self._pieces) == 1 else b"".join(self._pieces)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                return
            if (length := _LENGTH.search(whole, 0, end)) is not None:
                self._needed = end + 4 + int(length[1])
            else:
                self._needed = -2 if _CHUNKED.search(whole, 0, end) else end + 4
        if self._needed == -2:
            if not (self._pieces[-2] + data if len(self._pieces) > 1 else data).endswith(b"\r\n0\r\n\r\n"):
                return
        elif self._have < self._needed:
            return
        request = data if len(self._pieces) == 1 else b"".join(self._pieces)
        if self._needed == -2:
            head, _, body = request.partition(b"\r\n\r\n")
            request = head + b"\r\n\r\n" + (dechunked(body) or b"")
        self._pieces, self._have, self._needed = [], 0, -1
        self._answer(request)

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST "):
            path = request[4:].split(b" ", 1)[0].split(b"?")[0]
            self._transport.write(_page(path, self._engine))
            return
        asked = _ASKED.search(request)
        if asked is None:
            self._transport.write(_PLAIN_HEAD % (b"application/json", 2) + b"{}")
            return
        self._engine.served[self._port] += 1
        mode, tag = asked[1], asked[2]
        if mode == b"p":
            self._transport.write(_plain(tag))
        elif mode == b"d":
            self._transport.write(_plain(digest(request.partition(b"\r\n\r\n")[2])))
        else:
            self._begin_stream(request, asked)

    def _begin_stream(self, request: bytes, asked: re.Match[bytes]) -> None:
        chunks = int(asked[3])
        events = self._engine.events(int(asked[5])).first(chunks)
        end = _END_USAGE if _USAGE.search(request) else _END
        head = b"".join((_START_BEFORE, asked[2], _START_AFTER))
        if asked[1] == b"c":
            self._transport.write(b"".join([head, *events[:chunks], end]))
            return
        if asked[1] == b"b":
            head, _, start = head.partition(b"\r\n\r\n")
            content = dechunked(b"".join([start, *events[:chunks], end]))
            self._transport.write(head + b"\r\n\r\n" + bytewise(content or b""))
            return
        self._transport.write(head)
        ticks = max(1, round(int(asked[4]) * 1e-6 / _TICK_S))
        self._stream = Stream(self._engine, self._transport, events, chunks, ticks, end)
        self._engine.add(self._stream)


_PLAIN = json.dumps(_ANSWER, separators=(",", ":")).encode()
_PLAIN_BEFORE, _PLAIN_AFTER = _PLAIN.split(_TAG.encode(), 1)


def _plain(text: bytes) -> bytes:
    length = len(_PLAIN_BEFORE) + len(text) + len(_PLAIN_AFTER)
    return b"".join((_PLAIN_HEAD % (b"application/json", length), _PLAIN_BEFORE, text, _PLAIN_AFTER))


_METRICS = f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.01
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{_LIMITS["kv_cache_tokens"]}",\
num_gpu_blocks="{_LIMITS["kv_cache_tokens"] // 16}"}} 1.0
"""
_PAGES: dict[bytes, object] = {
    b"/health": "",
    b"/version": {"version": "0.32.0"},
    b"/metrics": _METRICS,
    b"/v1/models": {
        "object": "list",
        "data": [
            {
                "id": MODEL,
                "object": "model",
                "created": 1795262400,
                "owned_by": "vllm",
                "root": MODEL,
                "parent": None,
                "max_model_len": _LIMITS["max_model_len"],
            }
        ],
    },
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1},
    b"/get_model_info": {"model_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "is_generation": True},
}


def _page(path: bytes, engine: Engine) -> bytes:
    found = engine.report() if path == b"/bench/report" else _PAGES.get(path)
    if found is None:
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    if isinstance(found, str):
        kind, body = b"text/plain; version=0.0.4; charset=utf-8", found.encode()
    else:
        kind, body = b"application/json", json.dumps(found).encode()
    return _PLAIN_HEAD % (kind, len(body)) + body


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(loop)
    for port in ports:
        await loop.create_server(functools.partial(Instance, engine, port), "127.0.0.1", port, backlog=8192)
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="Mock vLLM instances for bench/proxies.")
    parser.add_argument("--ports", required=True, help="one instance per port: 9000,9001")
    ports = [int(port) for port in parser.parse_args().ports.split(",")]
    uvloop.run(_serve(ports))


if __name__ == "__main__":
    main()
