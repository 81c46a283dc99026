"""Prompt and output tokens of a span equal all other readers' counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from proxy.test_counts import CACHED, NEWER, RESPONSES, SHAPES, STREAMED, Start, answered, check, streamed
from proxy.test_proxying import ask, post
from proxy.upstreams import Upstream, plain

from hetlb.balancer.config.fleet_tables import TracingTable
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.options.tracing.tracing import Tracing


def span(record: RequestRecord) -> dict[str, Any]:
    """Attributes of the span of the request to the engine."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingTable(otlp_endpoint="http://nowhere"), exporter=exporter)
    record.trace = tracing.begin(None)
    tracing.finished(record, record.arrived_at)
    tracing.close()
    first, *_ = exporter.get_finished_spans()
    return dict(first.attributes or {})


def check_span(proxy: Any, tokens: int, cached: int | None, output: int) -> None:
    """The one ended request: its span gives these numbers."""
    [record] = proxy.exchanges
    attributes = span(record)
    assert attributes["gen_ai.usage.input_tokens"] == tokens
    assert attributes.get("gen_ai.usage.cache_read.input_tokens") == cached
    assert attributes["gen_ai.usage.output_tokens"] == output


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", SHAPES)
async def test_the_engine_s_count_is_in_the_span(start: Start, name: str, stream: bool) -> None:
    shape = SHAPES[name]
    if stream and name not in STREAMED:
        pytest.skip("not streamed")
    usage = NEWER if shape.path == RESPONSES and not stream else CACHED
    async with Upstream(streamed(usage) if stream else answered(usage)) as engine:
        proxy = await start(engine.url)
        body = json.dumps({"model": "m", **shape.body, "stream": stream}).encode()
        await ask(proxy, post(body, path=shape.path))
    await check(proxy, shape, 500, 384, 40)
    check_span(proxy, 500, 384, 40)


@pytest.mark.parametrize("name", SHAPES)
async def test_without_usage_the_estimate_is_in_the_span(start: Start, name: str) -> None:
    shape = SHAPES[name]
    async with Upstream(answered(None)) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(json.dumps({"model": "m", **shape.body}).encode(), path=shape.path))
    [record] = proxy.exchanges
    check_span(proxy, record.prompt_tokens_total, None, 0)


async def test_what_is_no_operation_of_a_model_has_no_tokens(start: Start) -> None:
    async with Upstream(plain(b'{"tokens":[1]}')) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(b'{"model":"m","prompt":"hello"}', path="/tokenize"))
    [record] = proxy.exchanges
    assert not [name for name in span(record) if name.startswith("gen_ai.usage")]
