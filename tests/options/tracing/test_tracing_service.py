"""A collector gets the spans of a running proxy, and an engine the id to hang its own below."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from proxy.services import Engine, document, serving

from hetlb.balancer.config.fleet import load_fleet
from hetlb.errors import ConfigError

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with TestServer(app) as server:
        collector.url = f"http://{server.host}:{server.port}"
        yield collector


def header(head: bytes, name: str) -> list[str]:
    lines = head.decode().split("\r\n")
    return [line.partition(": ")[2] for line in lines if line.lower().startswith(f"{name}:")]


async def test_a_trace_goes_through_the_proxy(tmp_path: Path) -> None:
    async with collecting() as collector, Engine() as engine:
        tracing = {"otlp_endpoint": collector.url, "service_name": "edge"}
        async with serving(tmp_path, document(engine, tracing=tracing)) as running:
            parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
            await running.ask(traceparent=parent, tracestate="vendor=1", x_request_id="mine")
            await running.ask(traceparent=parent[:-1] + "0")
            await running.ask(tracestate="stale=1")
        heads = [visit.head for visit in engine.asked]
    continued, unsampled, begun = (header(head, "traceparent") for head in heads)
    assert [header(head, "tracestate") for head in heads] == [["vendor=1"], [], []]
    by_kind = {(span.trace_id.hex(), span.kind): span for span in collector.spans}
    assert len(collector.spans) == len(by_kind) == 4
    server = by_kind[TRACE_ID, Span.SPAN_KIND_SERVER]
    client = by_kind[TRACE_ID, Span.SPAN_KIND_CLIENT]
    assert server.parent_span_id.hex() == PARENT_ID
    assert client.parent_span_id == server.span_id
    assert continued == [f"00-{TRACE_ID}-{client.span_id.hex()}-01"]
    assert {event.name for event in server.events} == {"dispatched", "first_token"}
    attributes = {each.key: each.value for each in server.attributes}
    assert attributes["hetlb.request_id"].string_value == "mine"
    assert attributes["hetlb.instance"].string_value == "i0"
    assert attributes["gen_ai.request.model"].string_value == "m"
    assert attributes["http.response.status_code"].int_value == 200
    (sent,) = unsampled
    assert sent.startswith(f"00-{TRACE_ID}-")
    assert sent.endswith("-00")
    (sent,) = begun
    _, trace_id, span_id, flags = sent.split("-")
    assert trace_id != TRACE_ID
    assert by_kind[trace_id, Span.SPAN_KIND_CLIENT].span_id.hex() == span_id
    assert int(flags, 16) & 1
    assert collector.services == {"edge"}


async def test_a_request_without_an_instance_is_traced_too(tmp_path: Path) -> None:
    async with collecting() as collector, Engine() as engine:
        fleet = document(engine, tracing={"otlp_endpoint": collector.url})
        async with serving(tmp_path, fleet) as running:
            body = b'{"model":"nobody","prompt":"x","max_tokens":5}'
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            async with running._session.post(url, data=body) as reply:
                assert reply.status == 404
    (span,) = collector.spans
    assert (span.kind, span.parent_span_id, list(span.events)) == (Span.SPAN_KIND_SERVER, b"", [])


async def test_without_it_a_client_s_headers_go_through_as_they_are(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.ask(traceparent="anything", tracestate="a=1")
        (visit,) = engine.asked
        assert header(visit.head, "traceparent") == ["anything"]
        assert header(visit.head, "tracestate") == ["a=1"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{otlp_endpoint: 'collector:4318'}", r"tracing.otlp_endpoint: expected a URL like"),
        ("{otlp_endpoint: 'http://user:pw@collector:4318'}", r"got 'http://\*\*\*@collector:4318'"),
        ("{service_name: x}", r"tracing.otlp_endpoint: expected a value"),
        ("{otlp_endpoint: 'http://c:1', sample_ratio: 2}", r"tracing.sample_ratio: .*<= 1"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    models = "models: [{name: m, instances: [{url: http://127.0.0.1:1}]}]"
    path.write_text(f"version: 1\n{models}\ntracing: {table}\n")
    with pytest.raises(ConfigError, match=message):
        load_fleet(path)
