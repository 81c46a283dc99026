"""Engines for the behaviour benches: raw asyncio, as cheap as can be, with a clock on what their peer does.

An answer is `max_tokens` events, one every `interval_s`; a prompt that begins with `wait` is read
and never answered. When the peer of a request under way closes, the moment is noted by request id
(`departure`, `time.perf_counter`); `run` counts executions. Health, metrics and models answer as vLLM's do.
`Hole` is an address whose backlog is full: the kernel drops every SYN, as a firewall would.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from typing import Any, cast

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
METRICS = (
    b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%d"} 1\n'
)


def plain(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        kind,
        len(body),
        body,
    )


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine:
    """One emulated server on a free port; every answer is counted and timed by request id."""

    def __init__(self, model: str, interval_s: float = 0.05, kv_blocks: int = 8192) -> None:
        self.model = model
        self.interval_s = interval_s
        #: Of 16 tokens each: what it says its cache holds.
        self.kv_blocks = kv_blocks
        self.run: Counter[str] = Counter()
        #: When the peer of a request that was under way went.
        self.left: dict[str, asyncio.Future[float]] = {}
        self.arrived: dict[str, asyncio.Event] = {}
        self.under_way = 0
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None, "expected a started engine"
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Engine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    def arrival(self, request_id: str) -> asyncio.Event:
        """Set when the request with this id is here."""
        return self.arrived.setdefault(request_id, asyncio.Event())

    def departure(self, request_id: str) -> asyncio.Future[float]:
        """When the peer of this request went, before its answer was over."""
        if request_id not in self.left:
            self.left[request_id] = asyncio.get_running_loop().create_future()
        return self.left[request_id]


class _Connection(asyncio.Protocol):
    """One connection of the proxy: one request at a time."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data = b""
        self._id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._engine.connections.add(self)

    def eof_received(self) -> bool:
        self._gone()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
        self._engine.connections.discard(self)

    def _gone(self) -> None:
        if self._id is not None:
            left = self._engine.departure(self._id)
            if not left.done():
                left.set_result(time.perf_counter())
            self._finished()

    def _finished(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._id = self._timer = None
        self._engine.under_way -= 1

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._data = rest[length:]
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/v1/") and path != b"/v1/models":
            self._answer(fields.get(b"x-request-id", b"").decode(), json.loads(rest[:length]))
        else:
            self.transport.write(self._aside(path))

    def _aside(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            models = {"object": "list", "data": [{"id": self._engine.model, "object": "model"}]}
            return plain(json.dumps(models).encode())
        if path == b"/metrics":
            return plain(METRICS % (self._engine.under_way, self._engine.kv_blocks), kind=b"text/plain")
        return plain(b'{"version":"0.32.0"}' if path == b"/version" else b"")

    def _answer(self, request_id: str, body: dict[str, Any]) -> None:
        engine = self._engine
        self._id = request_id
        engine.under_way += 1
        engine.run[request_id] += 1
        engine.arrival(request_id).set()
        if str(body["prompt"]).startswith("wait"):
            return
        tokens = int(body["max_tokens"])
        if body.get("stream"):
            self.transport.write(HEAD)
        else:  # a plain answer comes in as many pieces, so that a client can leave in its middle
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % (tokens + 2)
            )
        self._began = self._loop.time()
        self._token(request_id, 0, tokens, bool(body.get("stream")))

    def _token(self, request_id: str, number: int, tokens: int, stream: bool) -> None:
        if number < tokens:
            if stream:
                text = json.dumps({"id": request_id, "choices": [{"index": 0, "text": " t"}]})
                self.transport.write(chunk(f"data: {text}\n\n".encode()))
            else:
                self.transport.write(b"t" if number else b'"')
            number += 1
            # By the clock and not one after the other: a busy machine makes no answer longer.
            at = self._began + number * self._engine.interval_s
            self._timer = self._loop.call_at(at, self._token, request_id, number, tokens, stream)
            return
        if stream:
            usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
            text = json.dumps({"id": request_id, "choices": [], "usage": usage})
            last = f"data: {text}\n\ndata: [DONE]\n\n".encode()
            self.transport.write(chunk(last) + b"0\r\n\r\n")
        else:
            self.transport.write(b't"')
        self._finished()


class Hole:
    """An address that answers no SYN."""

    def __enter__(self) -> Hole:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._fillers: list[socket.socket] = []
        for _ in range(4):  # a backlog of 0 takes one or two
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._fillers, self._listener):
            each.close()

    @property
    def url(self) -> str:
        """Address without an answer."""
        return f"http://127.0.0.1:{self.port}"


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the head of the next request in lower case, and its body. Raises `IncompleteReadError`."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r")[0] or b"0")
    return head, await reader.readexactly(length) if length else b""
