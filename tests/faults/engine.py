"""An engine that fails on demand: raw bytes on real sockets, forty ways to answer, and a record of it all.

What a request meets is decided by `modes` (by request id) or `mode` (all others). Every
execution is counted by request id with its start on the loop's clock; the moment in which the peer leaves
is noticed while the answer goes on; every token bears the request's id, so that a mix-up shows. Health,
metrics and the list of models answer as told. Used by the tests, the soak and the runner of the reference
column.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import json
import socket
import termios
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from helpers import HANG_S, free_port
from proxy.upstreams import DONE, LAST, SSE_HEAD, USAGE, chunk, plain

Mode: TypeAlias = Callable[["Visit"], Awaitable[None]]

METRICS = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc %g\n"
WHOLE_ANSWER = b'{"choices":[{"text":"one two"}]}'
ERROR_EVENT = b'data: {"error":{"message":"the engine died","type":"InternalServerError","code":500}}\n\n'
#: Bytes after a chunk that no parser accepts.
BAD_CHUNK = b"zz\r\ndata: x\r\n"

MODES: dict[str, Mode] = {}


def mode(name: str) -> Callable[[Mode], Mode]:
    """Register a way to answer."""

    def register(function: Mode) -> Mode:
        assert name not in MODES, f"two modes are named {name}"
        MODES[name] = function
        return function

    return register


class Visit:
    """One request at the engine, and the means to answer it well or badly."""

    def __init__(
        self, engine: FaultEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        self.engine, self.reader, self.writer, self.head = engine, reader, writer, head
        self.body = b""
        lines = head.decode("latin-1").split("\r\n")
        self.method, self.path = lines[0].split(" ")[:2]
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:-2])}
        self.id = self.headers.get("x-request-id", "")
        self.started_at = asyncio.get_running_loop().time()
        #: Set when the peer closed while the answer was under way; when, and after how many tokens.
        self.left = asyncio.Event()
        self.left_at: float | None = None
        self.tokens = 0

    @property
    def stream(self) -> bool:
        """Whether the request asks for a stream."""
        return b'"stream":true' in self.body.replace(b" ", b"")

    def token(self) -> bytes:
        """The next event of the stream; the last one has a finish reason."""
        reason = "length" if self.tokens + 1 == self.engine.length else None
        choice = {"index": 0, "text": f"{self.id}/{self.tokens} ", "finish_reason": reason}
        event = json.dumps({"choices": [choice]})
        self.tokens += 1
        return b"data: " + event.encode() + b"\n\n"

    async def send(self, data: bytes) -> None:
        """Write bytes and let them go; a peer that has left is noticed elsewhere."""
        if self.writer.is_closing():
            return
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def begin(self, tokens: int = 2, head: bytes = SSE_HEAD) -> None:
        """The head and first tokens of a stream; whatever follows is a read of its own."""
        await self.send(head)
        for _ in range(tokens):
            await self.send(chunk(self.token()))
        await self.passed()

    async def passed(self) -> None:
        """Wait until what was written so far has reached the peer's process."""
        sock = self.writer.get_extra_info("socket")
        while not self.left.is_set() and _unacknowledged(sock):
            await asyncio.sleep(0)
        # Acknowledged is not read: give the peer, which may share this loop, its turns.
        for _ in range(8):
            await asyncio.sleep(0)

    async def until_left(self) -> None:
        """Wait for the peer to close."""
        await self.left.wait()

    def close(self) -> None:
        """Send what was written, then FIN."""
        self.writer.close()

    def reset(self) -> None:
        """RST: nothing more, and nothing of what is still here."""
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes in the send queue of a connection (SIOCOUTQ); 0 once it is closed."""
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"), "little")
    except (OSError, ValueError):
        return 0


class FaultEngine:
    """A server that answers as told. Use as a context manager, or `start` and `stop` it."""

    def __init__(self, mode: str = "ok", *, served: str = "m", host: str = "127.0.0.1") -> None:
        self.mode = mode
        #: What single requests meet, by request id.
        self.modes: dict[str, str] = {}
        self.served = served
        self.host = host
        self.port = free_port()
        #: Seconds between two tokens, and how many a stream has.
        self.pace_s = 0.0
        self.length = 4
        #: While not set, requests of mode `held` wait.
        self.released = asyncio.Event()
        #: `ok`, a status such as `503`, `stall`, `reset`, or `flap` (every second probe fails).
        self.health = "ok"
        #: The metrics page, or None for one that never comes.
        self.metrics: bytes | None = METRICS % (0, 0)
        self.visits: list[Visit] = []
        self.executions: Counter[str] = Counter()
        #: What came and was no request.
        self.nonsense: list[bytes] = []
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        #: The requests that are being answered, probes apart.
        self.working: set[Visit] = set()
        #: Connections on which an answer went out (for `idle-close`).
        self.answered: WeakSet[asyncio.StreamWriter] = WeakSet()
        self._ahead: WeakKeyDictionary[asyncio.StreamWriter, bytes] = WeakKeyDictionary()
        self.probes = 0
        self.scrapes = 0
        self.scraping = 0
        self.most_scraping = 0
        self.changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    # --- life ---

    async def __aenter__(self) -> FaultEngine:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Where it listens, or did."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen; a second time on the same port."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, backlog=1024)

    async def stop(self) -> None:
        """Die as a killed process does: the listener and every connection go at once."""
        if self._server is not None:
            self._server.close()
        for writer in list(self.open):
            writer.transport.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    # --- looking on ---

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on this engine holds."""
        async with asyncio.timeout(HANG_S), self.changed:
            await self.changed.wait_for(holds)

    async def visit(self, number: int = 1) -> Visit:
        """The n-th request that is no probe, when it has come."""
        await self.until(lambda: len(self.visits) >= number)
        return self.visits[number - 1]

    async def visit_of(self, label: str) -> Visit:
        """The latest execution of a request id, when there is one."""
        await self.until(lambda: self.executions[label] > 0)
        return [visit for visit in self.visits if visit.id == label][-1]

    async def probed(self, more: int) -> None:
        """Wait for that many further health probes."""
        wanted = self.probes + more
        await self.until(lambda: self.probes >= wanted)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # --- serving ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        self.open.add(writer)
        try:
            while not writer.is_closing():
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    head = self._ahead.pop(writer, b"") + head
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                if head.count(b" ", 0, head.index(b"\r\n")) != 2:
                    self.nonsense.append(head)
                    return
                await self._answer(Visit(self, reader, writer, head))
                await self._tell()
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.tasks.discard(task)
            self.open.discard(writer)
            writer.close()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tell()

    async def _answer(self, visit: Visit) -> None:
        if visit.path in ("/health", "/metrics", "/version", "/v1/models"):
            await self._watched(visit, self._own)
            return
        name = self.modes.get(visit.id, self.mode)
        if name != "slow-read":
            visit.body = await self._body(visit)
        self.visits.append(visit)
        self.executions[visit.id] += 1
        self.working.add(visit)
        try:
            await self._tell()
            await self._watched(visit, MODES[name])
        finally:
            self.working.discard(visit)

    async def _body(self, visit: Visit) -> bytes:
        if visit.headers.get("transfer-encoding") == "chunked":  # other proxies send them
            body = b""
            while size := int(await visit.reader.readuntil(b"\r\n"), 16):
                body += (await visit.reader.readexactly(size + 2))[:-2]
            await visit.reader.readexactly(2)
            return body
        return await visit.reader.readexactly(int(visit.headers.get("content-length", 0)))

    async def _watched(self, visit: Visit, answer: Mode) -> None:
        """Answer, and notice meanwhile that the peer leaves."""
        if visit.body or visit.method == "GET":
            watcher = asyncio.create_task(self._watch(visit))
            self.tasks.add(watcher)
        else:
            watcher = None  # the body is still to be read: the mode does it
        try:
            await answer(visit)
        finally:
            if watcher is not None:
                self.tasks.discard(watcher)
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, visit: Visit) -> None:
        with contextlib.suppress(ConnectionError):
            data = await visit.reader.read(1)
            if data:  # the next request: it comes as soon as the answer is out, and this is its first byte
                self._ahead[visit.writer] = data
                return
        visit.left_at = asyncio.get_running_loop().time()
        visit.left.set()
        await self._tell()

    async def _own(self, visit: Visit) -> None:
        if visit.path == "/health":
            self.probes += 1
            told = self.health
            if told == "flap":
                told = "503" if self.probes % 2 else "ok"
            if told == "stall":
                await visit.until_left()
            elif told == "reset":
                visit.reset()
            else:
                await visit.send(plain(b"", b"200 OK" if told == "ok" else told.encode() + b" X"))
        elif visit.path == "/metrics":
            self.scrapes += 1
            self.scraping += 1
            self.most_scraping = max(self.most_scraping, self.scraping)
            try:
                if self.metrics is None:
                    await visit.until_left()
                else:
                    await visit.send(plain(self.metrics))
            finally:
                self.scraping -= 1
        elif visit.path == "/version":
            await visit.send(plain(b'{"version":"0.32.0"}'))
        else:
            listed = {"object": "list", "data": [{"id": self.served, "object": "model"}]}
            await visit.send(plain(json.dumps(listed).encode()))


async def _first_of(visit: Visit, step: Coroutine[Any, Any, object]) -> None:
    """Take a step, unless the peer leaves before it is done."""
    tasks = asyncio.create_task(step), asyncio.create_task(visit.left.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- modes: whole answers ---


@mode("ok")
async def _ok(visit: Visit) -> None:
    await (_ok_stream(visit) if visit.stream else _ok_json(visit))


@mode("ok-stream")
async def _ok_stream(visit: Visit) -> None:
    engine = visit.engine
    await visit.send(SSE_HEAD)
    while visit.tokens < engine.length and not visit.left.is_set():
        await visit.send(chunk(visit.token()))
        await asyncio.sleep(engine.pace_s)
    if b"include_usage" in visit.body:
        await visit.send(chunk(USAGE))
    await visit.send(chunk(DONE) + LAST)


@mode("ok-json")
async def _ok_json(visit: Visit) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    await visit.send(plain(json.dumps({"choices": [{"text": visit.id}], "usage": usage}).encode()))


@mode("held")
async def _held(visit: Visit) -> None:
    """Answer once `released` is set, unless the peer leaves before."""
    await _first_of(visit, visit.engine.released.wait())
    if not visit.left.is_set():
        await _ok(visit)


@mode("endless")
async def _endless(visit: Visit) -> None:
    """Tokens until the peer leaves."""
    await visit.send(SSE_HEAD)
    while not visit.left.is_set():
        await visit.send(chunk(visit.token()))
        await asyncio.sleep(visit.engine.pace_s)


@mode("flood")
async def _flood(visit: Visit) -> None:
    """As much as the peer takes, until it leaves."""
    await visit.send(SSE_HEAD)
    piece = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
    while not visit.left.is_set():
        await _first_of(visit, visit.send(piece))


@mode("drip")
async def _drip(visit: Visit) -> None:
    """A whole stream, one byte a write."""
    events = b"".join(chunk(visit.token()) for _ in range(3))
    for byte in SSE_HEAD + events + chunk(DONE) + LAST:
        await visit.send(bytes([byte]))
        await asyncio.sleep(0)


@mode("interim")
async def _interim(visit: Visit) -> None:
    await visit.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    await _ok(visit)


@mode("slow-read")
async def _slow_read(visit: Visit) -> None:
    """Take the request's body in small pieces, many turns apart."""
    left = int(visit.headers["content-length"])
    while left:
        piece = await visit.reader.read(min(left, 4096))
        if not piece:
            return
        visit.body += piece
        left -= len(piece)
        await asyncio.sleep(0)
    await _ok(visit)


@mode("gzip")
async def _gzip(visit: Visit) -> None:
    await visit.send(plain(gzip.compress(b'{"choices":[]}', mtime=0), extra=b"content-encoding: gzip\r\n"))


@mode("big-chunk")
async def _big_chunk(visit: Visit) -> None:
    event = b'data: {"choices":[{"text":"' + b"x" * (1 << 20) + b'"}]}\n\n'
    await visit.send(SSE_HEAD + chunk(event) + chunk(DONE) + LAST)


@mode("tiny-chunks")
async def _tiny_chunks(visit: Visit) -> None:
    """A hundred thousand chunks of one byte."""
    event = b'data: {"choices":[{"text":"' + b"x" * 99_900 + b'"}]}\n\n'
    await visit.send(SSE_HEAD)
    await visit.send(b"".join(b"1\r\n%c\r\n" % byte for byte in event))
    await visit.send(chunk(DONE) + LAST)


@mode("long-line")
async def _long_line(visit: Visit) -> None:
    """A line of 300 KiB in reads of 16 KiB, without a line feed."""
    await visit.begin(1)
    await visit.send(chunk(b": "))
    for _ in range(20):
        await visit.send(chunk(b"x" * (16 << 10)))
    await visit.send(chunk(b"\n\n") + chunk(DONE) + LAST)


@mode("sse-for-plain")
async def _sse_for_plain(visit: Visit) -> None:
    await _ok_stream(visit)


@mode("no-length-whole")
async def _no_length_whole(visit: Visit) -> None:
    """Close-delimited, as HTTP/1.0 has it, but whole."""
    await visit.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + visit.token() + DONE)
    visit.close()


def _status(name: str, line: bytes, extra: bytes = b"") -> None:
    body = json.dumps({"error": {"message": name, "type": "Engine", "code": int(line[:3])}}).encode()

    @mode(name)
    async def answer(visit: Visit) -> None:
        await visit.send(plain(body, line, extra))


_status("400", b"400 Bad Request")
_status("404", b"404 Not Found")
_status("413", b"413 Content Too Large")
_status("422", b"422 Unprocessable")
_status("429", b"429 Too Many Requests")
_status("429-retry-after", b"429 Too Many Requests", b"retry-after: 60\r\n")
_status("500", b"500 Internal Server Error")
_status("503", b"503 Service Unavailable")
_status("503-retry-after", b"503 Service Unavailable", b"retry-after: 60\r\n")
_status("redirect", b"307 Temporary Redirect", b"location: http://169.254.169.254/latest/\r\n")


# --- modes: no answer, or none that is HTTP ---


@mode("close")
async def _close(visit: Visit) -> None:
    visit.close()


@mode("reset")
async def _reset(visit: Visit) -> None:
    visit.reset()


@mode("die")
async def _die(visit: Visit) -> None:
    """Close the listener and each connection."""
    engine = visit.engine
    if engine._server is not None:
        engine._server.close()
    for writer in list(engine.open):
        writer.transport.abort()


@mode("idle-close")
async def _idle_close(visit: Visit) -> None:
    """Answer the first request of a connection, and close it under the next: the race of keep-alive."""
    if visit.writer in visit.engine.answered:
        visit.reset()
    else:
        visit.engine.answered.add(visit.writer)
        await _ok(visit)


@mode("stall")
async def _stall(visit: Visit) -> None:
    await visit.until_left()


@mode("late")
async def _late(visit: Visit) -> None:
    """Answer after `pace_s`, whatever the peer does."""
    await asyncio.sleep(visit.engine.pace_s)
    await _ok(visit)


@mode("upgrade")
async def _upgrade(visit: Visit) -> None:
    await visit.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    await visit.until_left()


def _raw(name: str, data: bytes, *, then: str = "close") -> None:
    """These bytes, then: close, reset, or stay."""

    @mode(name)
    async def answer(visit: Visit) -> None:
        await visit.send(data)
        if then == "stay":
            await visit.until_left()
        else:
            await visit.passed()
            visit.reset() if then == "reset" else visit.close()


_raw("junk", b"\x00\x01\x02 this is not HTTP\r\n\r\n" * 4)
_raw("http09", b"<html>hello</html>\r\n")
_raw("half-head", b"HTTP/1.1 200 OK\r\ncontent-ty")
_raw("big-head", b"HTTP/1.1 200 OK\r\n" + b"x-filler: " + b"y" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n")
_raw(
    "many-headers",
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(300)) + b"content-length: 0\r\n\r\n",
)
_raw("huge-head", b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000, then="stay")
_raw("empty-200", b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
_raw("te-cl", SSE_HEAD[:-2] + b"content-length: 3\r\n\r\n" + chunk(b"data: x\n\n") + chunk(DONE) + LAST)
_raw("dup-cl", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabcde")
_raw("list-cl", b"HTTP/1.1 200 OK\r\ncontent-length: 3, 3\r\n\r\nabc")
_raw("chunk-ext", SSE_HEAD + b"5;" + b"e" * 70_000 + b"\r\nhello\r\n", then="stay")


@mode("drip-head")
async def _drip_head(visit: Visit) -> None:
    """A head that never ends, byte by byte."""
    while not visit.left.is_set():
        await visit.send(b"H" if not visit.tokens else b"x")
        visit.tokens += 1
        await asyncio.sleep(0.02)


# --- modes: streams that go wrong after they began ---


def _breaking(name: str, tail: bytes = b"", *, then: str = "close", head: bytes = SSE_HEAD) -> None:
    """Two tokens, then these bytes in a read of their own, then: close, reset or stay."""

    @mode(name)
    async def answer(visit: Visit) -> None:
        if head is SSE_HEAD:
            await visit.begin()
        else:
            await visit.send(head + visit.token() + visit.token())
            await visit.passed()
        if tail:
            await visit.send(tail)
            await visit.passed()
        if then == "stay":
            await visit.until_left()
        else:
            visit.reset() if then == "reset" else visit.close()


_UNICODE = '{"choices":[{"text":"é'.encode()
_breaking("fin")
_breaking("rst", then="reset")
_breaking("fin-mid-event", b'ff\r\ndata: {"choices')
_breaking("fin-mid-utf8", b"ff\r\ndata: " + _UNICODE[:-1])
_breaking("no-done", LAST)
_breaking("bad-chunk", BAD_CHUNK, then="stay")
_breaking("chunk-ext-late", b"5;a=b\r\nhello\r\n", then="stay")
_breaking("trailers", b"0\r\nx-evil: y\r\n\r\n", then="stay")
_breaking("stall-mid", then="stay")
_breaking("no-length-cut", head=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
_breaking(
    "short-length-stream",
    head=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n",
)
_raw(
    "short-length",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n" + b"{" * 9,
)
_raw("long-length", plain(WHOLE_ANSWER) + b"surplus", then="stay")
_raw("second-response", plain(WHOLE_ANSWER) + plain(b"smuggled"), then="stay")


@mode("error-first")
async def _error_first(visit: Visit) -> None:
    await visit.send(SSE_HEAD + chunk(ERROR_EVENT) + chunk(DONE) + LAST)


@mode("error-late")
async def _error_late(visit: Visit) -> None:
    await visit.begin()
    await visit.send(chunk(ERROR_EVENT) + chunk(DONE) + LAST)
