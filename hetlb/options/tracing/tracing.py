"""Traces for OpenTelemetry: a span per request, made at the request's end, and the id that engines get.

A client's `traceparent` is continued and its sampling obeyed. Spans hold times, counts and names, no prompt
and no answer. A slow or missing collector costs spans, never a request.
"""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import hetlb
from hetlb.balancer.config.fleet_tables import TracingTable
from hetlb.balancer.core.types import CAUSES
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.telemetry.request_record import RequestRecord

#: Path of a collector that takes spans over HTTP, if its address has none.
OTLP_PATH = "/v1/traces"
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RANDOM = 0x02
#: Seconds that the last spans may take when the proxy stops.
_CLOSE_S = 3.0
_MAX_TEXT_CHARACTERS = 256
#: `gen_ai.operation.name` by endpoint.
_OPERATIONS = {
    Kind.CHAT: "chat",
    Kind.RESPONSES: "chat",
    Kind.MESSAGES: "chat",
    Kind.COMPLETION: "text_completion",
}
_EMBEDDINGS = "/v1/embeddings"
_NO_CONTEXT = Context()
#: Causes of ends that are no failure on our side unless the status says so.
_NO_ERROR = frozenset({"none", "client", "limit"})


#: The flag of a trace with kept spans.
SAMPLED: Final = 1
_CONTINUED = re.compile(rb"(?<=\n)traceparent:[^\n]*\n")
#: State that another vendor's trace left behind means nothing in this one.
_BEGUN = re.compile(rb"(?<=\n)(?:traceparent|tracestate):[^\n]*\n")


class Trace:
    """Ids of one request: its parent's, its own, and the one used as parent by the engine's spans."""

    __slots__ = ("engine_id", "flags", "parent_id", "span_id", "trace_id")

    def __init__(
        self, trace_id: int, parent_id: int | None, span_id: int, engine_id: int, flags: int
    ) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = span_id
        self.engine_id = engine_id
        self.flags = flags

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def header(self) -> bytes:
        """The header for the engine, without a line end."""
        return b"traceparent: 00-%032x-%016x-%02x" % (self.trace_id, self.engine_id, self.flags)

    def onto(self, lines: bytes) -> bytes:
        """Return a head's lines (names in lower case) with `header` instead of the client's."""
        taken = _CONTINUED if self.parent_id is not None else _BEGUN
        return b"%b%b\r\n" % (taken.sub(b"", lines), self.header)


class _GivenIds(IdGenerator):
    """Ids that were chosen when the request was sent on."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id

    def is_trace_id_random(self) -> bool:
        return True


class Tracing:
    """Begins traces and makes their spans. On the event loop only."""

    def __init__(self, table: TracingTable, exporter: SpanExporter | None = None) -> None:
        """Begin to send spans; `exporter` takes the place of the one to `table.otlp_endpoint`."""
        if exporter is None:
            exporter = OTLPSpanExporter(endpoint=spans_url(table.otlp_endpoint))
        resource = Resource.create({"service.name": table.service_name, "service.version": hetlb.__version__})
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hetlb", hetlb.__version__)
        self._draw = random.Random()
        self._kept = table.sample_ratio

    def begin(self, traceparent: bytes | None) -> Trace:
        """Return the ids of a request that came with this header, None without one."""
        draw = self._draw.getrandbits
        span_id, engine_id = draw(64) or 1, draw(64) or 1
        parent = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if parent is not None and (parent[1] != b"00" or parent[5] is None):
            trace_id, parent_id = int(parent[2], 16), int(parent[3], 16)
            if trace_id and parent_id:
                return Trace(
                    trace_id, parent_id, span_id, engine_id, int(parent[4], 16) & (SAMPLED | _RANDOM)
                )
        kept = self._kept >= 1.0 or self._draw.random() < self._kept
        return Trace(draw(128) or 1, None, span_id, engine_id, _RANDOM | (SAMPLED if kept else 0))

    def finished(self, record: RequestRecord, now_s: float) -> None:
        """Make the spans of an ended request. `now_s` is the time on its clock."""
        ids = record.trace
        if not isinstance(ids, Trace) or not ids.sampled or record.ended_at is None or record.outcome is None:
            return
        now_ns, end = time.time_ns(), record.ended_at

        def at(when: float) -> int:
            return now_ns - int((now_s - when) * 1e9)

        lease, outcome = record.lease, record.outcome
        failed = CAUSES[outcome.value] not in _NO_ERROR or record.status >= 500
        operation = _operation(record)
        shared = _shared_attributes(record, operation, outcome.value, failed)
        method = record.method.decode("ascii", "replace")
        # An id in a path would give every request a name of its own.
        route = record.path

        # The generator of ids is asked for a trace id only without a parent.
        self._ids.trace_id, self._ids.span_id = ids.trace_id, ids.span_id
        span = self._tracer.start_span(
            f"{method} {route}",
            self._child_of(ids, ids.parent_id, remote=True),
            kind=trace.SpanKind.SERVER,
            attributes={**shared, **_own_attributes(record, method, route)},
            start_time=at(record.arrived_at),
        )
        if record.dispatched_at is not None:
            span.add_event("dispatched", timestamp=at(record.dispatched_at))
        if record.first_byte_at is not None:
            span.add_event("first_token", timestamp=at(record.first_byte_at))
        status = trace.Status(trace.StatusCode.ERROR) if failed else None
        if status is not None:
            span.set_status(status)
        if lease is not None and record.dispatched_at is not None:
            self._ids.span_id = ids.engine_id
            child = self._tracer.start_span(
                f"{operation or method} {_text(record.request.model)}".rstrip(),
                self._child_of(ids, ids.span_id, remote=False),
                kind=trace.SpanKind.CLIENT,
                attributes=shared,
                start_time=at(record.dispatched_at),
            )
            if status is not None:
                child.set_status(status)
            child.end(at(end))
        span.end(at(end))

    def _child_of(self, ids: Trace, parent_id: int | None, *, remote: bool) -> Context:
        if parent_id is None:
            return _NO_CONTEXT
        parent = trace.SpanContext(
            ids.trace_id, parent_id, is_remote=remote, trace_flags=trace.TraceFlags(ids.flags)
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), _NO_CONTEXT)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Send the rest, for at most `timeout_s`."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(timeout_s)


def _operation(record: RequestRecord) -> str | None:
    found = _OPERATIONS.get(record.kind)
    return "embeddings" if found is None and record.path == _EMBEDDINGS else found


def _shared_attributes(
    record: RequestRecord, operation: str | None, outcome: str, failed: bool
) -> dict[str, str | int]:
    found: dict[str, str | int] = {"hetlb.outcome": outcome}
    if operation is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"}
        found["gen_ai.request.model"] = _text(record.request.model)
    if record.lease is not None:
        found["hetlb.instance"] = record.lease.instance
        if operation is not None:
            found["gen_ai.usage.input_tokens"] = record.prompt_tokens_total
            found["gen_ai.usage.output_tokens"] = record.output_tokens
            if record.cached_tokens is not None:
                found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if failed:
        found["error.type"] = outcome
    return found


def _own_attributes(record: RequestRecord, method: str, route: str) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "http.request.method": method,
        "http.route": route,
        "url.path": record.path,
        "hetlb.request_id": _text(record.label),
        "hetlb.phase": str(record.ended_in),
        "hetlb.retries": record.retries,
        "hetlb.queue_s": record.queue_s,
    }
    if record.status:  # else the client left before there was one
        found["http.response.status_code"] = record.status
    if record.tenant is not None:
        found["hetlb.tenant"] = _text(record.tenant)
    if record.lease is not None:
        found["hetlb.predicted_output_tokens"] = record.lease.predicted_output
    return found


def spans_url(endpoint: str) -> str:
    """Return the address for spans: a collector's, with the usual path unless it has one."""
    return endpoint.rstrip("/") + OTLP_PATH if urlsplit(endpoint).path in ("", "/") else endpoint


def _text(value: str) -> str:
    """Return text cut to valid UTF-8: one bad span would cost its batch."""
    return value[:_MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()
