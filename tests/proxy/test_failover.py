"""A name without an address is an instance's failure: another one answers, and the reason is shown."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers import turns_until
from proxy.services import Engine, document, said, serving
from proxy.upstreams import SSE_HEAD, Upstream, chunk, closing

from hetlb.balancer.core.facts import Probed, ProbeResult
from hetlb.balancer.core.types import Health


async def test_a_name_without_an_address_is_answered_elsewhere(tmp_path: Path) -> None:
    async with Engine() as engine:
        fleet = document(engine)
        fleet["models"][0]["instances"].append({"name": "lost", "url": "http://lost.invalid:80"})
        fleet["scrape"]["interval_s"] = 60  # no probe finds it out before the request does
        async with serving(tmp_path, fleet) as running:
            lost = running.instance("lost").evidence
            # As before its name was taken out of the DNS.
            running.service.scheduling.change(Probed("lost", ProbeResult.OK))
            for _ in range(4):
                reply = await running.ask()
                assert (reply.status, reply.headers["x-hetlb-instance"]) == (200, "i0")
            assert lost.health.state is Health.EJECTED


async def test_why_an_instance_is_not_used_is_shown(tmp_path: Path) -> None:
    async with Engine() as engine:
        fleet = document(engine)
        fleet["models"][0]["instances"].append({"name": "lost", "url": "http://lost.invalid:80"})
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: "lost.invalid" in running.instance("lost").evidence.health.reason)
            [model] = (await running.admin("GET", "/v1/fleet")).json["models"]
            shown = {each["name"]: each["health_reason"] for each in model["instances"]}
            assert shown["lost"].startswith("the name has no address: lost.invalid: ")
            assert shown["i0"] == "probe answered"


async def test_an_address_is_registered_once(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, admin={"registration": True})) as running:
            reply = await running.admin("POST", "/v1/fleet/instances", {"url": engine.url, "name": "again"})
            assert (reply.status, reply.message) == (
                400,
                "url: expected an address used once in the fleet, got the address of i0 again",
            )


async def test_another_model_than_the_file_says_is_logged_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine:
        engine.served = "other"
        async with serving(tmp_path, document(engine)) as running:
            [line] = said(caplog.records, "i0 serves")
            assert line == "i0 serves other, not m: it gets requests for what it serves"
            assert (await running.ask()).status == 404
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            async with aiohttp.ClientSession() as session:
                async with session.post(url, json={"model": "other", "prompt": "x"}) as reply:
                    assert reply.status == 200


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b'{"model":"none","max_tokens":5,"messages":[]}', 404, "not_found_error"),
        (b"{", 400, "invalid_request_error"),
    ],
)
async def test_errors_of_messages_have_the_form_of_anthropic(
    tmp_path: Path, body: bytes, status: int, kind: str
) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{running.port}/v1/messages"
            async with session.post(url, data=body) as reply:
                document_ = await reply.json()
    assert reply.status == status
    assert document_["type"] == "error"
    assert document_["error"]["type"] == kind
    assert document_["error"]["message"]


async def test_a_stream_of_messages_that_breaks_ends_with_anthropics_event(start: Callable[..., Any]) -> None:
    event = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
    async with Upstream(closing(SSE_HEAD + chunk(event))) as engine:
        proxy = await start(engine.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        body = b'{"model":"m","max_tokens":5,"messages":[],"stream":true}'
        writer.write(
            b"POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        text = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert event in text
    assert b'event: error\ndata: {"type":"error","error":{"type":"api_error"' in text


async def test_large_bodies_of_json_are_taken(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        body = b'{"model":"m","prompt":"' + b"x" * (9 << 20) + b'"}'
        async with aiohttp.ClientSession() as session:
            async with session.post(
                f"http://127.0.0.1:{running.port}/v1/completions", data=io.BytesIO(body)
            ) as reply:
                assert reply.status == 200
        await asyncio.sleep(0)
        assert running.service.server.held_bytes == 0
