"""An open-loop load generator: every request goes out when it is due, whatever became of those before.

Promise: sending never waits for an answer; every planned request ends in exactly one record, failed ones
with the kind of failure; cancelling the run closes every connection. A run says whether its client was fit
to measure: VALID, or SUSPECT with reasons (late sends, a busy event loop, a busy core, failures, answers
of other lengths than asked for), instead of reporting its own slowness as the server's latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
from yarl import URL

from hetlb.core.arrivals import PlannedRequest
from hetlb.core.records import RequestRecord, percentile, summarize
from hetlb.loadtest.answers import AnswerError, StreamReader, read_plain
from hetlb.loadtest.prompts import Bodies

#: uvicorn closes idle connections after 5 s; the pool lets go of them before.
KEEP_ALIVE_S = 2.0
#: Large events and long prompts must not stall in the client's own buffers (vLLM issue 39963).
READ_BUFFER_BYTES = 1 << 20

_LAG_INTERVAL_S = 0.02
_INSTANCE_HEADER = "x-hetlb-instance"

#: A measurement error below this is nobody's concern; above it, it must be small beside what is measured.
ERROR_ALLOWED_S = 0.005
ERROR_ALLOWED_SHARE_OF_TTFT = 0.01
#: A load that is due all at once waits in queues, whose order decides when an answer comes, not when its
#: request was sent: lateness only has to be short beside the whole.
ERROR_ALLOWED_SHARE_OF_DURATION = 0.1
RATE_ERROR_ALLOWED = 0.02
CPU_ALLOWED = 0.9
FAILED_ALLOWED = 0.01
MISMATCHED_ALLOWED = 0.01


class Progress:
    """Live counts of a run; whoever shows them reads them when it likes."""

    __slots__ = ("completed", "failed", "output_tokens", "planned", "sent")

    def __init__(self) -> None:
        self.planned = 0
        self.sent = 0
        self.completed = 0
        self.failed = 0
        self.output_tokens = 0

    @property
    def ended(self) -> int:
        """Requests that have their answer, good or bad."""
        return self.completed + self.failed


@dataclass(slots=True)
class LoadResult:
    """What a run gives: a record per planned request in plan order, and how the client fared."""

    plan: Sequence[PlannedRequest]
    records: list[RequestRecord]
    cpu_share: float
    loop_lag_s: list[float]
    errors: dict[str, int] = field(default_factory=dict)
    #: One message for each kind of error.
    examples: dict[str, str] = field(default_factory=dict)

    def summary(self, **options: Any) -> dict[str, Any]:
        """`summarize` of the records (`options` are its own), and how the client fared as `client`."""
        figures = summarize(self.records, **options)
        return {**figures, "client": self.client(figures)}

    def client(self, figures: dict[str, Any]) -> dict[str, Any]:
        """The verdict on the client, and the figures it rests on."""
        late = sorted(lateness for record in self.records if (lateness := record.lateness_s) is not None)
        late_s, lag_s = percentile(late, 99), percentile(sorted(self.loop_lag_s), 99)
        offered = _rate([planned.scheduled_s for planned in self.plan])
        achieved = _rate([record.sent_s for record in self.records if record.sent_s is not None])
        done = [
            (planned, record) for planned, record in zip(self.plan, self.records, strict=True) if record.ok
        ]
        mismatched = sum(record.output_tokens != max(1, planned.output_tokens) for planned, record in done)

        ttft_s = figures["median_ttft_ms"] / 1e3 or figures["median_e2el_ms"] / 1e3
        allowed_s = max(ERROR_ALLOWED_S, ERROR_ALLOWED_SHARE_OF_TTFT * ttft_s)
        if offered is None:
            allowed_s = max(ERROR_ALLOWED_S, ERROR_ALLOWED_SHARE_OF_DURATION * figures["duration"])
        reasons = []
        if late_s > allowed_s:
            reasons.append(
                f"late: 1 % of the requests went out {1e3 * late_s:.1f} ms or more after they were due "
                f"({1e3 * allowed_s:.1f} ms allowed)"
            )
        if lag_s > allowed_s:
            reasons.append(
                f"lag: the client's event loop was {1e3 * lag_s:.1f} ms behind (p99; "
                f"{1e3 * allowed_s:.1f} ms allowed)"
            )
        if offered is not None and (
            achieved is None or not math.isclose(offered, achieved, rel_tol=RATE_ERROR_ALLOWED)
        ):
            reasons.append(
                f"rate: sent at {achieved or 0.0:.4g} requests/s, but planned were {offered:.4g} requests/s"
            )
        if self.cpu_share > CPU_ALLOWED:
            reasons.append(f"cpu: the client used {100 * self.cpu_share:.0f} % of a core")
        if figures["failed"] > FAILED_ALLOWED * len(self.records):
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.errors.items())
            reasons.append(f"failed: {figures['failed']} of {len(self.records)} requests ({kinds})")
        if mismatched > MISMATCHED_ALLOWED * len(done):
            reasons.append(f"length: {mismatched} of {len(done)} answers were not as long as planned")
        return {
            "verdict": "SUSPECT" if reasons else "VALID",
            "reasons": reasons,
            "p99_lateness_ms": 1e3 * late_s,
            "max_lateness_ms": 1e3 * late[-1] if late else 0.0,
            "p99_loop_lag_ms": 1e3 * lag_s,
            "cpu_share": self.cpu_share,
            "offered_rate": offered,
            "achieved_rate": achieved,
            "mismatched_lengths": mismatched,
            "errors": dict(self.errors),
        }


async def run_load(
    plan: Sequence[PlannedRequest],
    bodies: Bodies,
    url: str,
    *,
    progress: Progress | None = None,
    request_timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> LoadResult:
    """Send the plan to the server at `url` and wait for every answer.

    Without `request_timeout_s` an answer may take as long as it likes: a limit that nobody asked for would
    turn the slowest answers into failures and flatter the percentiles.
    """
    return await _Run(plan, bodies, url, progress or Progress(), request_timeout_s, headers or {}).run()


class _Attempt:
    """One request on one connection."""

    __slots__ = ("record", "reused")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.reused = False


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
        bodies: Bodies,
        url: str,
        progress: Progress,
        timeout_s: float | None,
        headers: dict[str, str],
    ) -> None:
        self._plan = plan
        self._bodies = bodies
        self._target = URL(url.rstrip("/") + bodies.path)
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
        plan, progress = self._plan, self._progress
        progress.planned = len(plan)
        allow_open_files(len(plan))
        records = [RequestRecord(planned.scheduled_s, planned.prompt_tokens) for planned in plan]
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
                        progress.sent += 1
                        group.create_task(self._send(session, planned, record))
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
        self, session: aiohttp.ClientSession, planned: PlannedRequest, record: RequestRecord
    ) -> None:
        progress = self._progress
        try:
            async with await self._ask(session, self._bodies.body(planned), record) as response:
                record.instance = response.headers.get(_INSTANCE_HEADER, "")
                await self._read(response, record)
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
        self, session: aiohttp.ClientSession, body: bytes, record: RequestRecord
    ) -> aiohttp.ClientResponse:
        """The head of the answer. A kept connection that the server had closed meanwhile costs no request."""
        while True:
            attempt = _Attempt(record)
            try:
                return await session.post(self._target, data=body, trace_request_ctx=attempt)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not attempt.reused:
                    raise

    async def _read(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        if response.status != 200:
            raise AnswerError(f"http {response.status}", (await response.read()).decode(errors="replace"))
        if not self._bodies.stream:
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

    def _fail(self, record: RequestRecord, kind: str, detail: object) -> None:
        record.error = kind
        self._errors[kind] += 1
        self._examples.setdefault(kind, str(detail))
        self._progress.failed += 1

    async def _watch_lag(self) -> None:
        """How late the event loop calls what is due: the error of every other stamp."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag_s.append(max(0.0, time.monotonic() - due))


def _rate(times_s: Sequence[float]) -> float | None:
    """Requests per second, None where they are all at once."""
    span = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / span if span > 0 else None


def allow_open_files(connections: int) -> None:
    """Raise the soft limit on open files where so many connections need it (as far as the hard limit goes).

    A client that runs out of files would look like a server that refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
