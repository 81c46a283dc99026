"""An open-loop load generator: every request goes out when it is due, whatever became of those before.

Sending never waits for an answer; every planned request ends in exactly one record, failed ones
with the kind of failure; cancelling the run closes every connection. A run says whether its client was fit
to measure: VALID, or SUSPECT with reasons (late sends, a busy event loop, a busy core, failures, answers
of other lengths than asked for), instead of reporting its own slowness as the server's latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from hetlb.loadtest.bodies import RequestBodies
from hetlb.loadtest.response_parser import AnswerError, StreamReader, read_plain
from hetlb.loadtest.verdict import LoadResult
from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.records import RequestResult

#: uvicorn closes idle connections after 5 s; the pool lets go of them before.
KEEP_ALIVE_S = 2.0
#: Large events and long prompts must not stall in the client's own buffers (vLLM issue 39963).
READ_BUFFER_BYTES = 1 << 20

_LAG_INTERVAL_S = 0.02
_INSTANCE_HEADER = "x-hetlb-instance"


@dataclass(slots=True)
class LoadProgress:
    """Live counts of a run; a display reads them when it likes."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0

    @property
    def in_flight(self) -> int:
        """Requests that are sent and have no answer yet."""
        return self.sent - self.ended

    @property
    def ended(self) -> int:
        """Requests that have their answer, good or bad."""
        return self.completed + self.failed


async def run_load(
    plan: Sequence[PlannedRequest],
    bodies: RequestBodies,
    url: str,
    *,
    progress: LoadProgress | None = None,
    request_timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
    max_concurrency: int | None = None,
) -> LoadResult:
    """Send the plan to the server at `url` and wait for every answer.

    `max_concurrency` caps the requests in flight. A request that is due waits for its turn and is late by
    that much; of a plan that is due all at once, the loop is closed: a request is due when its turn comes.
    Without `request_timeout_s` an answer may take as long as it likes: a limit that was not asked for would
    turn the slowest answers into failures and flatter the percentiles.
    """
    run = _Run(
        plan, bodies, url, progress or LoadProgress(), request_timeout_s, headers or {}, max_concurrency
    )
    # What is there stays: a collection that walks over a large plan would stop the clock of every answer.
    gc.collect()
    gc.freeze()
    try:
        return await run.run()
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class _Attempt:
    """One request on one connection."""

    record: RequestResult
    reused: bool = False


async def _on_reused(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.reused = True


class _Run:
    """One run."""

    def __init__(
        self,
        plan: Sequence[PlannedRequest],
        bodies: RequestBodies,
        url: str,
        progress: LoadProgress,
        timeout_s: float | None,
        headers: dict[str, str],
        max_concurrency: int | None,
    ) -> None:
        self._turns = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._plan = plan
        self._bodies = bodies
        self._url = url.rstrip("/")
        self._progress = progress
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_s, connect=None, sock_connect=None, sock_read=None
        )
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            **headers,
        }
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._lag_s: array[float] = array("d")
        self._start = 0.0

    async def run(self) -> LoadResult:
        plan, progress, turns = self._plan, self._progress, self._turns
        closed_loop = turns is not None and all(planned.scheduled_s == 0 for planned in plan)
        allow_open_files(len(plan))
        records = [
            RequestResult(each.scheduled_s, each.input_tokens, sequences=each.sequences, service=each.service)
            for each in plan
        ]
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_on_reused)
        tracing.on_request_headers_sent.append(self._on_sent)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=self._timeout,
            headers=self._headers,
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,
            trace_configs=[tracing],
        ) as session:
            self._start, cpu_s = time.monotonic(), time.process_time()
            watch = asyncio.create_task(self._watch_lag())
            try:
                async with asyncio.TaskGroup() as group:
                    for planned, record in zip(plan, records, strict=True):
                        # Also where it is late already: the answers have a claim to the loop as well.
                        await asyncio.sleep(max(0.0, planned.scheduled_s - self._now()))
                        if turns is not None:
                            await turns.acquire()
                            if closed_loop:
                                record.scheduled_s = self._now()
                        progress.sent += 1
                        task = group.create_task(self._send(session, planned, record))
                        if turns is not None:
                            task.add_done_callback(lambda _, turns=turns: turns.release())  # type: ignore[misc]
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
            elapsed = self._now()
            cpu_share = (time.process_time() - cpu_s) / elapsed if elapsed > 0 else 0.0
        return LoadResult(
            plan, records, cpu_share, list(self._lag_s), dict(self._errors.most_common()), self._examples
        )

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _on_sent(
        self,
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _params: aiohttp.TraceRequestHeadersSentParams,
    ) -> None:
        # Connecting is the client's own affair: a request that waits for a connection is late.
        context.trace_request_ctx.record.sent_s = self._now()

    async def _send(
        self, session: aiohttp.ClientSession, planned: PlannedRequest, record: RequestResult
    ) -> None:
        progress = self._progress
        try:
            async with await self._ask(session, planned, record) as response:
                record.instance = response.headers.get(_INSTANCE_HEADER, "")
                await self._read(response, record, streams=self._bodies.streams(planned))
        except AnswerError as error:
            self._fail(record, error.kind, error.detail)
        except TimeoutError:
            self._fail(record, "timeout", f"no complete answer within {self._timeout.total} s")
        except aiohttp.ClientConnectorError as error:
            self._fail(record, f"connect: {error.os_error.strerror or error.os_error}", error)
        except aiohttp.ClientError as error:
            self._fail(record, "broken connection", error)
        else:
            record.ok = True
            progress.completed += 1
        record.end_s = self._now()

    async def _ask(
        self, session: aiohttp.ClientSession, planned: PlannedRequest, record: RequestResult
    ) -> aiohttp.ClientResponse:
        """Send the request and return the response head; retry once on a stale kept-alive connection."""
        body, headers = self._bodies.body(planned), self._bodies.headers(planned)
        target = URL(self._url + self._bodies.path(planned))
        while True:
            attempt = _Attempt(record)
            try:
                return await session.post(target, data=body, headers=headers, trace_request_ctx=attempt)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not attempt.reused:
                    raise

    async def _read(self, response: aiohttp.ClientResponse, record: RequestResult, *, streams: bool) -> None:
        if response.status != 200:
            raise AnswerError(f"http {response.status}", (await response.read()).decode(errors="replace"))
        if not streams:
            body = await response.read()
            read_plain(body, record, self._now())
            self._progress.output_tokens += record.output_tokens
            return
        progress, monotonic, start = self._progress, time.monotonic, self._start
        reader = StreamReader(record)
        read = response.content.readany
        while data := await read():
            progress.output_tokens += reader.feed(data, monotonic() - start)
        reader.close(self._now())

    def _fail(self, record: RequestResult, kind: str, detail: object) -> None:
        record.error = kind
        self._errors[kind] += 1
        self._examples.setdefault(kind, str(detail))
        self._progress.failed += 1

    async def _watch_lag(self) -> None:
        """Sample event-loop lag, the error of every other timestamp."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag_s.append(max(0.0, time.monotonic() - due))


def allow_open_files(connections: int) -> None:
    """Raise the soft limit on open files where so many connections need it (as far as the hard limit goes).

    A client that runs out of files would look like a server that refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
