"""A stage: takes passes from coordinators and other stages, computes its layers, sends on what comes out.

Only peers with the key are listened to. What a lease holds is freed when its coordinator closes it, when
the coordinator's connection ends, and when the stage itself gives it up, which it tells the coordinator.
Waiting input and unsent output are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from hetlb.app_listener import AppListener
from hetlb.tasks import ended
from hetlb.tools.openai.requests import counter, gauge, page
from hetlb.tools.paths.stages import Curve
from hetlb.tools.stage.batching import Batcher, StageBlocks, StageLease, Work
from hetlb.tools.stage.runner import DeviceFault, Result, RowFailed, Runner, Sampled, run_apart
from hetlb.tools.stage.stage_channel import SILENCE_S, Challenges, NotProven, Peers, StageChannel
from hetlb.tools.stage.stage_messages import (
    MAX_FRAME_BYTES,
    MOST_PASSES,
    PATH,
    Cause,
    Close,
    Lost,
    Message,
    Opening,
    Pass,
    Passes,
    StageProtocolError,
    Token,
    Tokens,
    Welcome,
    decode,
    encode,
    frames,
)

log = logging.getLogger("hetlb.stage")

#: Maximum number of connections that proved nothing yet, seconds of each, and limits of a request's
#: head.
MOST_STRANGERS: Final = 64
STRANGER_S: Final = 5.0
_HEAD_LIMITS: Final[dict[str, Any]] = {"max_line_size": 1024, "max_field_size": 1024, "max_headers": 20}
#: Bytes of input that wait before nothing more is read from other stages.
MOST_WAITING_BYTES: Final = 256 << 20
#: Bytes for one next stage that may wait to leave before leases that go there pause.
MOST_PENDING_BYTES: Final = 64 << 20
#: Maximum number of closed leases remembered: what is under way for them is void.
_MAX_VOID_LEASES: Final = 1 << 16
#: Longest time of a batch before it hangs: seconds, plus this factor on the stage's own measured time.
_LEAST_DEADLINE_S: Final = 30.0
_DEADLINE_FACTOR: Final = 20.0

_SESSION_SHIFT: Final = 32


@dataclass(slots=True)
class StageCounters:
    """Work of a stage since it started. Tokens count once they passed it."""

    batches: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0

    def batch(self, works: Sequence[Work], seconds: float) -> None:
        """Note that a batch is done."""
        self.batches += 1
        self.busy_s += seconds
        for work in works:
            if work.position < work.lease.sampling.prompt_tokens:
                self.prompt_tokens += work.count
            else:
                self.generation_tokens += work.count


class StageWorker:
    """One stage's server and batch loop. `run` returns when the worker has failed."""

    def __init__(
        self,
        runner: Runner,
        pool: StageBlocks,
        welcome: Welcome,
        *,
        key: bytes = b"",
        server_tls: ssl.SSLContext | None = None,
        peer_tls: ssl.SSLContext | None = None,
        deadline_s: float = _LEAST_DEADLINE_S,
    ) -> None:
        """`deadline_s` is how long a batch may take at least before it counts as hung."""
        self._runner = runner
        self._pool = pool
        self._welcome = welcome
        self._deadline_s = deadline_s
        self._batcher = Batcher(
            pool, max_num_seqs=welcome.max_num_seqs, max_num_batched_tokens=welcome.max_num_batched_tokens
        )
        self._wake = asyncio.Event()
        self._peers = Peers(key, peer_tls, self._peer_lost, self._wake.set)
        self._challenges = Challenges(key)
        #: A connection becomes a WebSocket, which is a request, once it has proved the key.
        self._listener = AppListener(
            server_tls,
            most_idle=MOST_STRANGERS,
            idle_s=STRANGER_S,
            body_s=STRANGER_S,
            shutdown_timeout=0.1,
            **_HEAD_LIMITS,
        )
        self._coordinators: dict[int, StageChannel] = {}
        self._void: OrderedDict[int, None] = OrderedDict()
        self._room = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.counters = StageCounters()
        #: True once a batch did not end in time, or runs while it is closed: its thread cannot be stopped.
        self.hung = False
        self._computing: Future[list[Result]] | None = None
        self._prompt_s = Curve(*zip(*welcome.prompt_times, strict=True))
        self._decode_s = Curve(*zip(*welcome.decode_times, strict=True))

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `OSError`."""
        app = web.Application()
        app.router.add_get(PATH, self._connect)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        await self._listener.open(app, host, port)

    @property
    def port(self) -> int:
        """The port, once it listens."""
        return self._listener.address[1]

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._computing is not None and not self._computing.done():
            self.hung = True
        await self._peers.close()
        for channel in list(self._coordinators.values()):
            await channel.close()
        await self._listener.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- HTTP ---

    async def _health(self, request: web.Request) -> web.Response:
        return _last(web.Response())

    async def _metrics(self, request: web.Request) -> web.Response:
        text = _metrics_page(self._welcome, self._pool, self._batcher, self.counters)
        return _last(web.Response(body=text, content_type="text/plain", charset="utf-8"))

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._challenges.session(request.headers)
            if session is None:
                return _last(web.Response(status=401, headers=self._challenges.issue(request.headers)))
        except NotProven as error:
            log.warning("refused a connection from %s: %s", request.remote, error)
            return _last(web.Response(status=403, text=f"{error}\n"))
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        channel = StageChannel()
        channel.open(socket)
        channel.send(encode(self._welcome))
        try:
            if session:
                await self._serve_coordinator(session, channel)
            else:
                await self._serve_peer(channel)
        except StageProtocolError as error:
            log.error("a frame from %s cannot be read: %s", request.remote, error)
        finally:
            await channel.close()
        return socket

    # --- input ---

    async def _serve_coordinator(self, session: int, channel: StageChannel) -> None:
        previous = self._coordinators.get(session)
        if previous is not None:
            await previous.close()
        self._coordinators[session] = channel
        try:
            async for frame in channel.frames(SILENCE_S):
                self.receive(*decode(frame))
        finally:
            if self._coordinators.get(session) is channel:
                del self._coordinators[session]
                for lease in [each for each in self._batcher.leases if each >> _SESSION_SHIFT == session]:
                    self._close(lease)

    async def _serve_peer(self, channel: StageChannel) -> None:
        async for frame in channel.frames():
            self.receive(*decode(frame))
            while self._batcher.waiting_bytes > MOST_WAITING_BYTES:
                self._room.clear()
                await self._room.wait()

    def receive(self, message: Message, rows: memoryview) -> None:
        """Take in a message of a coordinator or of the stage before. Raises `StageProtocolError`."""
        if isinstance(message, Passes):
            self._take(message, rows)
        elif isinstance(message, Close):
            for lease in message.leases:
                self._close(lease)

    def _take(self, message: Passes, rows: memoryview) -> None:
        """Queue the passes of open leases. Raises `StageProtocolError`."""
        at = 0
        for each in message.passes:
            size = each.count * (4 if each.hop == 0 else self._runner.row_bytes)
            part = rows[at : at + size]
            at += size
            if len(part) != size:
                raise StageProtocolError(f"expected {size} bytes of rows, got {len(part)}")
            if each.lease in self._void or each.lease >> _SESSION_SHIFT not in self._coordinators:
                continue
            if each.opening is not None and not self._holds(each, each.opening):
                reason = f"expected layers of {self._welcome.first}:{self._welcome.end}"
                self._give_up([each.lease], Cause.PATH, reason)
                continue
            self._batcher.add(each, each.opening, part)
        self._tell_lost()
        self._wake.set()

    def _holds(self, each: Pass, opening: Opening) -> bool:
        if not 0 <= each.hop < len(opening.route):
            return False
        own = opening.route[each.hop]
        inside = self._welcome.first <= own.first < own.end <= self._welcome.end
        return inside and (own.first == 0) == (each.hop == 0)

    def _close(self, lease: int) -> None:
        """Free a lease, and drop later messages for it. Others may run in its room."""
        self._batcher.close(lease)
        self._wake.set()
        self._void[lease] = None
        if len(self._void) > _MAX_VOID_LEASES:
            self._void.popitem(last=False)

    def _give_up(self, leases: Sequence[int], cause: Cause, reason: str) -> None:
        """Close leases on our own account and tell their coordinators."""
        by_session: dict[int, list[int]] = {}
        for lease in leases:
            self._close(lease)
            by_session.setdefault(lease >> _SESSION_SHIFT, []).append(lease)
        for session, own in by_session.items():
            for at in range(0, len(own), MOST_PASSES):
                self._tell(session, Lost(own[at : at + MOST_PASSES], cause, reason[:1024]))

    def _tell_lost(self) -> None:
        """Tell coordinators of the leases that the batcher closed."""
        closed, self._batcher.lost = self._batcher.lost, []
        for lost in closed:
            self.counters.preemptions += lost.cause is Cause.KV
            self._give_up(lost.leases, lost.cause, lost.reason)

    def _tell(self, session: int, message: Message) -> None:
        if (channel := self._coordinators.get(session)) is not None:
            channel.send(encode(message))

    def _peer_lost(self, url: str, reason: str) -> None:
        gone = [lease.id for lease in self._batcher.leases.values() if lease.next_url == url]
        if gone:
            log.warning("%d requests lost their next stage: %s", len(gone), reason)
        self._give_up(gone, Cause.PATH, reason)

    # --- the loop ---

    def _accepts(self, lease: StageLease) -> bool:
        url = lease.next_url
        return url is None or self._peers.pending_bytes(url) <= MOST_PENDING_BYTES

    async def run(self) -> None:
        """Run batches until the device fails or a batch hangs."""
        while True:
            works = self._batcher.form(self._accepts)
            self._tell_lost()
            if self._batcher.waiting_bytes <= MOST_WAITING_BYTES:
                self._room.set()
            if not works:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._pass_on(works, await self._batch(works))
            except DeviceFault as error:
                log.error("the device computes nothing: %s", error)
                return
            except TimeoutError:
                log.error("a batch of %d requests hangs", len(works))
                self.hung = True
                # One of them may be the reason: none is sent to another stage.
                leases = [work.lease.id for work in works]
                self._give_up(leases, Cause.REQUEST, "its batch did not end in time")
                await self._told()
                return

    async def _batch(self, works: Sequence[Work]) -> list[Result]:
        """Compute a batch. Raises `DeviceFault`, `TimeoutError`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._computing = self._thread.submit(run_apart, self._runner, works)
        computing = asyncio.wrap_future(self._computing)
        try:
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes with the result.
            async with asyncio.timeout(self._deadline(works)):
                results = await computing
        finally:
            self._batcher.done()
        self.counters.batch(works, loop.time() - began)
        return results

    def _deadline(self, works: Sequence[Work]) -> float:
        """Return the seconds after which a batch hangs."""
        layer_s = self._prompt_s(sum(work.count for work in works)) + self._decode_s(len(works))
        layers = self._welcome.end - self._welcome.first
        return self._deadline_s + _DEADLINE_FACTOR * layers * max(0.0, layer_s)

    async def _told(self) -> None:
        """Flush messages to coordinators, for one second at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(channel.flush() for channel in self._coordinators.values()))

    def _pass_on(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Send tokens to their coordinators and activations to the next stages."""
        tokens: dict[int, list[Token]] = {}
        parts: dict[str, list[tuple[Pass, bytes]]] = {}
        for work, result in zip(works, results, strict=True):
            lease = work.lease
            if lease.closed:
                continue
            if isinstance(result, RowFailed):
                log.warning("a request cannot be computed: %s", result.reason)
                self._give_up([lease.id], Cause.REQUEST, result.reason)
            elif isinstance(result, Sampled):
                lease.output.append(result.token)
                position = work.position + work.count
                token = Token(lease.id, position, result.token, result.logprobs)
                tokens.setdefault(lease.id >> _SESSION_SHIFT, []).append(token)
            elif (url := lease.next_url) is not None:
                opening = Opening(lease.route, lease.sampling) if work.position == 0 else None
                passed = Pass(lease.id, lease.hop + 1, work.position, work.count, work.last, opening)
                parts.setdefault(url, []).append((passed, result))
        for session, own in tokens.items():
            for at in range(0, len(own), MOST_PASSES):
                self._tell(session, Tokens(own[at : at + MOST_PASSES]))
        for url, passed_on in parts.items():
            for frame in frames(passed_on):
                self._peers.send(url, frame)


def _metrics_page(welcome: Welcome, pool: StageBlocks, batcher: Batcher, counters: StageCounters) -> bytes:
    """Metrics with vLLM's names if they mean the same, else `hetlb_stage_*`."""
    gauges: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "Requests that hold KV or wait here.", len(batcher.leases)),
        ("vllm:num_requests_waiting", "Passes that wait for a batch.", batcher.waiting),
        ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", pool.used / pool.blocks),
    ]
    counts = [
        ("vllm:prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens),
        ("vllm:generation_tokens", "Answer tokens computed.", counters.generation_tokens),
        ("vllm:num_preemptions", "Requests that lost their KV blocks.", counters.preemptions),
    ]
    own: list[tuple[str, str, float]] = [
        ("hetlb_stage_first_layer", "First layer held.", welcome.first),
        ("hetlb_stage_end_layer", "Layer behind the last one held.", welcome.end),
        ("hetlb_stage_waiting_bytes", "Bytes of rows that wait.", batcher.waiting_bytes),
    ]
    model = {"model_name": welcome.model}
    sizes = {"num_gpu_blocks": str(pool.blocks), "block_size": str(pool.block_size)}
    return page(
        [
            *(gauge(name, text, [(model, value)]) for name, text, value in gauges),
            gauge("vllm:cache_config_info", "KV blocks of one layer each.", [(sizes, 1)]),
            *(counter(name, text, [(model, value)]) for name, text, value in counts),
            counter("hetlb_stage_batches", "Batches run.", [({}, counters.batches)]),
            counter("hetlb_stage_busy_seconds", "Seconds in batches.", [({}, counters.busy_s)]),
            *(gauge(name, text, [({}, value)]) for name, text, value in own),
        ]
    )


def _last(response: web.Response) -> web.Response:
    """Return an answer after which the connection is closed."""
    response.force_close()
    return response


async def serve(
    worker: StageWorker, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None]
) -> bool:
    """Run a worker until `stop`; False if it gave up by itself. `ready` is given the port.

    Raises `OSError` if it cannot listen.
    """
    await worker.start(host, port)
    ready(worker.port)
    running = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        return not running.done()
    finally:
        await ended(stopping, running)
        await worker.close()
