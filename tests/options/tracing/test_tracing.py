"""A trace goes on where a client's began, its flag decides, and a request's spans say when what happened."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hetlb.balancer.config.fleet import fleet_from_urls
from hetlb.balancer.config.fleet_tables import TracingTable
from hetlb.balancer.core.types import Lease, Outcome, Request
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.fleet.reloading import require_urls
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.errors import ConfigError
from hetlb.options.tracing.tracing import Trace, Tracing, spans_url

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01".encode()
HEAD = (
    b"POST /traceparent: HTTP/1.1\r\ntraceparent: x\r\nx-a: tracestate: 1\r\ntracestate: a=1\r\n"
    b"traceparent: x\r\n"
)


@dataclass
class Traces:
    """Traces, and the spans that were made of them."""

    tracing: Tracing
    exporter: InMemorySpanExporter

    def spans(self) -> list[ReadableSpan]:
        self.tracing.close()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traces() -> Iterator[Traces]:
    exporter = InMemorySpanExporter()
    made = Traces(Tracing(TracingTable(otlp_endpoint="http://nowhere"), exporter=exporter), exporter)
    yield made
    made.tracing.close()


def request() -> Request:
    return Request(id=1, model="llama", prompt_tokens=100)


def lease() -> Lease:
    made = Lease(
        1, request(), "a800-0", 1, work_ns=0, kv_tokens=0, kv_prompt_tokens=0, promised_tokens=0,
        prompt_tokens=100, unread_tokens=0, predicted_output=30.0,
        dispatched_at=102.0,
    )  # fmt: skip
    made.output_tokens = 25
    return made


def over(trace: Trace | None, **facts: Any) -> RequestRecord:
    """A chat that was answered: arrived at 100, dispatched at 102, first byte at 103, over at 105."""
    ended = RequestRecord(request(), Kind.CHAT, b"POST", "/v1/chat/completions", "r-1", "ann", 100.0, 90)
    told = {
        "trace": trace, "lease": lease(), "outcome": Outcome.OK, "ended_in": Phase.STREAMING, "status": 200,
        "usage_prompt_tokens": 90, "dispatched_at": 102.0, "first_byte_at": 103.0, "ended_at": 105.0, **facts,
    }  # fmt: skip
    for name, value in told.items():
        setattr(ended, name, value)
    return ended


# --- ids ----------------------------------------------------------------------------------------------


def test_a_client_s_trace_is_continued(traces: Traces) -> None:
    first, second = (traces.tracing.begin(SAMPLED) for _ in range(2))
    for trace in (first, second):
        assert (f"{trace.trace_id:032x}", f"{trace.parent_id:016x}") == (TRACE_ID, PARENT_ID)
        assert trace.sampled
        assert trace.header == f"traceparent: 00-{TRACE_ID}-{trace.engine_id:016x}-01".encode()
        assert trace.onto(HEAD) == HEAD.replace(b"traceparent: x\r\n", b"") + trace.header + b"\r\n"
    assert len({first.span_id, first.engine_id, second.span_id, second.engine_id}) == 4


def test_what_is_no_traceparent_begins_a_trace(traces: Traces) -> None:
    zeros = f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01"
    wrong = ("", "x", f"ff-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID.upper()}-{PARENT_ID}-01", *zeros)
    longer = (
        f"00-{TRACE_ID}-{PARENT_ID}-01-extra",
        f"00-{TRACE_ID}-{PARENT_ID}-01\n",
        f" {SAMPLED.decode()}",
    )
    found = [traces.tracing.begin(None if not text else text.encode()) for text in (*wrong, *longer)]
    for trace in found:
        assert trace.parent_id is None
        assert trace.sampled
        assert (
            trace.onto(HEAD) == b"POST /traceparent: HTTP/1.1\r\nx-a: tracestate: 1\r\n%b\r\n" % trace.header
        )
    assert len({trace.trace_id for trace in found}) == len(found)


def test_a_later_version_may_say_more(traces: Traces) -> None:
    trace = traces.tracing.begin(f"cc-{TRACE_ID}-{PARENT_ID}-01-what-comes".encode())
    assert f"{trace.trace_id:032x}" == TRACE_ID


@given(st.binary(max_size=80))
def test_any_header_gives_a_right_one(header: bytes) -> None:
    exporter = InMemorySpanExporter()
    made = Tracing(TracingTable(otlp_endpoint="http://nowhere"), exporter=exporter)
    try:
        assert re.fullmatch(rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]", made.begin(header).header)
    finally:
        made.close()


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, 200), (0.0, 0), (0.5, None)])
def test_the_share_that_is_kept_of_traces_begun_here(ratio: float, kept: int | None) -> None:
    table = TracingTable(otlp_endpoint="http://nowhere", sample_ratio=ratio)
    made = Tracing(table, exporter=InMemorySpanExporter())
    found = sum(made.begin(None).sampled for _ in range(200))
    assert made.begin(SAMPLED).sampled  # the client decides about its own
    made.close()
    assert found == kept if kept is not None else 0 < found < 200


# --- spans --------------------------------------------------------------------------------------------


def test_a_request_is_a_span_and_its_time_at_the_engine_another(traces: Traces) -> None:
    trace = traces.tracing.begin(SAMPLED)
    before = time.time_ns()
    traces.tracing.finished(over(trace), 106.0)  # told a second after it was over
    after = time.time_ns()
    engine, server = traces.spans()
    assert (server.kind, engine.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert (server.name, engine.name) == ("POST /v1/chat/completions", "chat llama")
    assert server.context is not None
    assert engine.context is not None
    assert server.parent is not None
    assert engine.parent is not None
    assert {f"{each.trace_id:032x}" for each in (server.context, engine.context)} == {TRACE_ID}
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert server.parent.is_remote
    assert engine.parent.span_id == server.context.span_id == trace.span_id
    assert engine.context.span_id == trace.engine_id
    assert server.start_time is not None
    assert server.end_time is not None
    assert before - 1_000_000_000 <= server.end_time <= after - 1_000_000_000
    assert server.end_time - server.start_time == pytest.approx(5e9, abs=1e3)
    assert engine.start_time == pytest.approx(server.start_time + 2e9, abs=1e3)
    assert engine.end_time == server.end_time
    times = {event.name: event.timestamp - server.start_time for event in server.events}
    assert times == {
        "dispatched": pytest.approx(2e9, abs=1e3),
        "first_token": pytest.approx(3e9, abs=1e3),
    }
    assert server.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.output_tokens": 25,
        "hetlb.instance": "a800-0",
        "hetlb.outcome": "ok",
        "hetlb.phase": "answer",
        "hetlb.predicted_output_tokens": 30.0,
        "hetlb.queue_s": 2.0,
        "hetlb.request_id": "r-1",
        "hetlb.retries": 0,
        "hetlb.tenant": "ann",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
    }
    assert server.resource.attributes["service.name"] == "hetlb"
    assert server.status.status_code is StatusCode.UNSET


def test_a_client_that_wants_no_spans_gets_none(traces: Traces) -> None:
    trace = traces.tracing.begin(SAMPLED[:-1] + b"0")
    traces.tracing.finished(over(trace), 105.0)
    traces.tracing.finished(over(None), 105.0)
    assert traces.spans() == []
    assert trace.header.endswith(b"-00")


def test_a_request_that_went_nowhere_has_one_span(traces: Traces) -> None:
    ended = over(
        traces.tracing.begin(None), lease=None, dispatched_at=None, first_byte_at=None, tenant=None,
        outcome=Outcome.NO_INSTANCE, ended_in=Phase.QUEUED, status=503,
    )  # fmt: skip
    traces.tracing.finished(ended, 105.0)
    (span,) = traces.spans()
    assert span.parent is None
    assert span.attributes is not None
    assert (span.attributes["error.type"], span.attributes["hetlb.queue_s"]) == ("no_instance", 5.0)
    assert span.events == ()
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("outcome", "status", "failed"),
    [
        (Outcome.OK, 200, False),
        (Outcome.RATE_LIMITED, 429, False),
        (Outcome.CLIENT_GONE, 0, False),
        (Outcome.UPSTREAM_REFUSED, 404, False),
        (Outcome.UPSTREAM_ERROR, 500, True),
        (Outcome.BROKEN_STREAM, 200, True),
        (Outcome.NO_RESPONSE, 502, True),
    ],
)
def test_what_is_an_error(traces: Traces, outcome: Outcome, status: int, failed: bool) -> None:
    traces.tracing.finished(over(traces.tracing.begin(None), outcome=outcome, status=status), 105.0)
    for span in traces.spans():
        assert span.attributes is not None
        assert (span.status.status_code is StatusCode.ERROR) == failed
        assert ("error.type" in span.attributes) == failed


def test_names_do_not_grow_with_what_clients_send(traces: Traces) -> None:
    ended = over(traces.tracing.begin(None))
    ended.request = Request(id=1, model="x\ud800" * 500, prompt_tokens=1)
    traces.tracing.finished(ended, 105.0)
    engine, server = traces.spans()
    assert server.name.startswith("POST /v1/")
    assert len(engine.name) <= len("chat ") + 256
    engine.name.encode()


# --- off, and not there -------------------------------------------------------------------------------


def test_without_it_nothing_of_opentelemetry_is_imported() -> None:
    loaded = "any('opentelemetry' in name for name in sys.modules)"
    program = f"import sys, hetlb.balancer.fleet.service; print({loaded})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetlb.extras.find_spec", lambda _: None)
    table = TracingTable(otlp_endpoint="http://nowhere")
    fleet = fleet_from_urls(["http://127.0.0.1:9"]).with_tables(tracing=table)
    with pytest.raises(ConfigError, match=r"^tracing: expected the extra otel .*hetlb\[otel\]"):
        require_urls(fleet)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector:4318/", "https://collector:4318/v1/traces"),
        ("http://collector/otlp/v1/traces", "http://collector/otlp/v1/traces"),
    ],
)
def test_where_spans_are_posted(endpoint: str, url: str) -> None:
    assert spans_url(endpoint) == url
