"""An open-loop load generator: every request goes out when it is due, whatever became of earlier ones.

Every planned request ends in exactly one record, failed ones with the kind of failure.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from hetlb.balancer.http.answer_form import SAMPLE_BYTES, WRONG, form_of_body, form_of_stream
from hetlb.errors import InputError, reason_of
from hetlb.tasks import ended
from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.openai.answers import AnswerError, AnswerUsage, EventReader, read_answer
from hetlb.tools.tables import LoadProgress
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import RequestResult


class StreamReader:
    """A stream of one request, read into its record."""

    __slots__ = ("_events", "_finish", "_last", "_last_s", "_record", "_sample", "_usage", "tokens")

    def __init__(self, record: RequestResult) -> None:
        self._record = record
        self._events = EventReader()
        self._usage: AnswerUsage | None = None
        #: First bytes of the stream and its last read, and the finish reason that came last.
        self._sample = self._last = b""
        self._finish = ""
        #: Events with text so far.
        self.tokens = 0
        #: Time of the last text of each choice, seconds.
        self._last_s: dict[int, float] = {}
        record.itl_s = array("d")

    def feed(self, data: bytes, now_s: float) -> int:
        """Take bytes read at `now_s`; return the number of events with text they completed.

        Raises `AnswerError` on an error event or on what is not JSON.
        """
        before = self.tokens
        if len(self._sample) < SAMPLE_BYTES:
            self._sample += data
        self._last = data
        for event in self._events.feed(data):
            for choice in event.choices or ():
                if choice.says_something:
                    self._token(choice.index, now_s)
                if choice.finish_reason:
                    self._finish = choice.finish_reason
            if event.usage is not None:
                self._usage = event.usage
        return self.tokens - before

    def _token(self, index: int, now_s: float) -> None:
        record, before_s = self._record, self._last_s.get(index)
        if before_s is not None:
            record.itl_s.append(now_s - before_s)  # type: ignore[union-attr]
        elif record.first_token_s is None:
            record.first_token_s = now_s
        self._last_s[index] = record.last_token_s = now_s
        self.tokens += 1

    def close(self, now_s: float) -> None:
        """End the body at `now_s`. Raises `AnswerError` if the stream has not ended, or is no answer."""
        record = self._record
        _count(record, self._usage, self.tokens)
        if not self._events.begun:
            raise AnswerError("no stream", "the body has no events")
        if not self._events.done:
            raise AnswerError("broken stream", "the body ended without [DONE]")
        finish = self._finish.encode()
        if form_of_stream(self._sample, self._last[-SAMPLE_BYTES:], self.tokens, None, finish, True) == WRONG:
            raise AnswerError("no answer", f"finish reason {self._finish or 'missing'}, {self.tokens} tokens")
        if record.last_token_s is None:
            record.last_token_s = now_s  # the model ended at once: an answer without text


def read_plain(body: bytes, record: RequestResult, now_s: float) -> None:
    """Read an answer that came whole at `now_s`. Raises `AnswerError`."""
    answer = read_answer(body)
    if not answer.choices and not answer.data:
        raise AnswerError("malformed answer", "neither choices nor data")
    if answer.choices and form_of_body(body, None, True) == WRONG:
        raise AnswerError("no answer", f"finish reason {answer.choices[0].finish_reason}")
    _count(record, answer.usage, 0)
    record.last_token_s = now_s


def _count(record: RequestResult, usage: AnswerUsage | None, tokens: int) -> None:
    record.output_tokens = tokens
    if usage is not None:
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens


#: Seconds that the pool keeps idle connections: uvicorn closes them after 5 s.
KEEP_ALIVE_S = 2.0
#: Bytes of the client's buffers: large events and long prompts must not stall there (vLLM issue 39963).
READ_BUFFER_BYTES = 1 << 20

#: As in `vllm bench serve`.
LONGEST_ANSWER_S = 6 * 3600.0

_LAG_INTERVAL_S = 0.02
_INSTANCE_HEADER = "x-hetlb-instance"


def client_session(headers: Mapping[str, str], *tracing: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    """Return a session for any number of requests at once, without a limit of its own on their time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        headers={"content-type": "application/json", "accept-encoding": "identity", **headers},
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
        trace_configs=list(tracing),
    )


def check_key(url: str, status: int) -> None:
    """Raise `InputError` if a status means that a server does not accept the key of the command."""
    if status in (401, 403):
        raise InputError(f"{url}: expected an API key that it accepts in OPENAI_API_KEY, got {status}")


class LoadInterruptedError(asyncio.CancelledError):
    """The run was cancelled. `result` has the requests that had ended."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__()
        self.result = result


async def run_load(
    plan: Sequence[PlannedRequest],
    bodies: RequestBodies,
    url: str,
    *,
    progress: LoadProgress | None = None,
    headers: dict[str, str] | None = None,
    max_concurrency: int | None = None,
    timeout_s: float = LONGEST_ANSWER_S,
    in_turn: bool = False,
) -> LoadResult:
    """Send the plan to the server at `url` and wait for every answer.

    `max_concurrency` caps the requests in flight. A due request waits for its turn and is late by
    that much; with a plan due all at once, the loop is closed: a request is due when its turn comes.
    With `in_turn` a turn of a session is due no sooner than the answer to the turn before it has ended.
    A request that takes longer than `timeout_s` has failed. Cancelled, it raises `LoadInterruptedError`.
    """
    turns = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    records = [
        RequestResult(each.scheduled_s, each.input_tokens, sequences=each.sequences, service=each.row.service)
        for each in plan
    ]
    result = LoadResult(plan, records, 0.0, [])
    run = _Run(
        result, bodies, url.rstrip("/"), progress or LoadProgress(), headers or {}, turns, timeout_s, in_turn
    )
    # Existing objects stay: a collection that walks over a large plan would stop the clock of every answer.
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        await run.run()
    except asyncio.CancelledError:
        result.keep_ended()
        raise LoadInterruptedError(result) from None
    finally:
        if not frozen_before:  # else by a process that keeps it so
            gc.unfreeze()
    return result


@dataclass(slots=True)
class _Attempt:
    """One request on one connection."""

    record: RequestResult
    reused: bool = False


async def _on_reused(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.reused = True


@dataclass(slots=True)
class _Run:
    """One run, which fills `result`. With a plan due all at once, `turns` close the loop."""

    result: LoadResult
    bodies: RequestBodies
    url: str
    progress: LoadProgress
    headers: dict[str, str]
    turns: asyncio.Semaphore | None
    timeout_s: float
    in_turn: bool = False
    closed_loop: bool = False
    start: float = 0.0

    async def run(self) -> None:
        plan, turns = self.result.plan, self.turns
        self.closed_loop = turns is not None and all(planned.scheduled_s == 0 for planned in plan)
        allow_open_files(len(plan))
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_on_reused)
        tracing.on_request_headers_sent.append(self._on_sent)
        async with client_session(self.headers, tracing) as session:
            self.start, cpu_s = time.monotonic(), time.process_time()
            watch = asyncio.create_task(self._watch_lag())
            #: The newest turn of each session.
            newest: dict[str, asyncio.Task[None]] = {}
            try:
                async with asyncio.TaskGroup() as group:
                    for planned, record in zip(plan, self.result.records, strict=True):
                        # Also if it is late already: the answers have a claim to the loop as well.
                        await asyncio.sleep(max(0.0, planned.scheduled_s - self._now()))
                        before = newest.get(planned.row.session) if self.in_turn else None
                        if before is None or before.done():
                            before = None
                            await self._admit(record)
                        # Else it holds no place while it waits for the turn before it.
                        task = group.create_task(self._send(session, planned, record, before))
                        if planned.row.session:
                            newest[planned.row.session] = task
                        if turns is not None:
                            task.add_done_callback(lambda _, turns=turns: turns.release())  # type: ignore[misc]
            finally:
                await ended(watch)
                elapsed = self._now()
                self.result.cpu_share = (time.process_time() - cpu_s) / elapsed if elapsed > 0 else 0.0

    def _now(self) -> float:
        return time.monotonic() - self.start

    async def _admit(self, record: RequestResult) -> None:
        """Return when fewer requests than `max_concurrency` are in flight."""
        if self.turns is not None:
            await self.turns.acquire()
            if self.closed_loop:
                record.scheduled_s = self._now()
        self.progress.sent += 1

    async def _on_sent(
        self,
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _params: aiohttp.TraceRequestHeadersSentParams,
    ) -> None:
        # Connecting is the client's own affair: a request that waits for a connection is late.
        context.trace_request_ctx.record.sent_s = self._now()

    async def _send(
        self,
        session: aiohttp.ClientSession,
        planned: PlannedRequest,
        record: RequestResult,
        before: asyncio.Task[None] | None,
    ) -> None:
        progress = self.progress
        if before is not None:
            await asyncio.wait([before])
            record.scheduled_s = self._now()
            await self._admit(record)
        try:
            async with asyncio.timeout(self.timeout_s), await self._ask(session, planned, record) as response:
                record.instance = response.headers.get(_INSTANCE_HEADER, "")
                await self._read(response, record, streams=self.bodies.streams(planned))
        except AnswerError as error:
            self._fail(record, error.kind, error.detail)
        except TimeoutError:
            self._fail(record, "timed out", f"no end of the answer within {self.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            self._fail(record, f"connect: {error.os_error.strerror or error.os_error}", error)
        except aiohttp.ClientError as error:
            self._fail(record, "broken connection", reason_of(error))
        else:
            record.ok = True
            progress.completed += 1
        record.end_s = self._now()

    async def _ask(
        self, session: aiohttp.ClientSession, planned: PlannedRequest, record: RequestResult
    ) -> aiohttp.ClientResponse:
        """Send the request and return the response head; retry once on a stale kept-alive connection."""
        body, headers = self.bodies.body(planned), self.bodies.headers(planned)
        target = URL(self.url + self.bodies.path(planned))
        while True:
            attempt = _Attempt(record)
            try:
                return await session.post(
                    target, data=body, headers=headers, allow_redirects=False, trace_request_ctx=attempt
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not attempt.reused:
                    raise

    async def _read(self, response: aiohttp.ClientResponse, record: RequestResult, *, streams: bool) -> None:
        if response.status != 200:
            moved = response.headers.get("location")
            said = f"it redirects to {moved}" if moved else (await response.read()).decode(errors="replace")
            raise AnswerError(f"http {response.status}", said)
        if not streams:
            body = await response.read()
            read_plain(body, record, self._now())
            self.progress.output_tokens += record.output_tokens
            return
        progress, monotonic, start = self.progress, time.monotonic, self.start
        reader = StreamReader(record)
        read, first = response.content.readany, b""
        while data := await read():
            first = first or data
            progress.output_tokens += reader.feed(data, monotonic() - start)
        try:
            reader.close(self._now())
        except AnswerError as error:
            kind = response.headers.get("content-type", "of no type")
            raise AnswerError(
                error.kind, f"{error.detail}; it is {kind} and begins {first[:100]!r}"
            ) from None

    def _fail(self, record: RequestResult, kind: str, detail: object) -> None:
        record.error = kind
        self.result.examples.setdefault(kind, str(detail))
        self.progress.failed += 1

    async def _watch_lag(self) -> None:
        """Sample event-loop lag, the error of every other timestamp."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.result.loop_lag_s.append(max(0.0, time.monotonic() - due))


def allow_open_files(connections: int) -> None:
    """Raise the soft limit on open files to what `connections` need, up to the hard limit.

    A client that runs out of files would look like a server that refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
