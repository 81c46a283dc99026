"""Requests through real Envoy, with both shipped configurations."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from helpers import turns_until
from options.pick.rig import GATEWAY_API, STATIC, Envoy, Rig, rig, stream
from proxy.upstreams import DONE, PLAIN_BODY, TOKEN

from hetlb.balancer.core.facts import AdminStateSet, CapacityLearned
from hetlb.balancer.core.types import AdminState, Capacity, Request
from hetlb.options.event_log.eventlog import Replay
from hetlb.options.pick.calls import ProcessCall
from hetlb.options.pick.stream import HttpStream
from hetlb.options.split.hand_overs import HandOvers

pytestmark = pytest.mark.envoy


def buffered(envoy: Envoy) -> None:
    """The mode of the older Envoys: the request's body comes whole, after the answer to its headers."""
    del envoy.ext_proc["send_body_without_waiting_for_header_response"]
    envoy.ext_proc["processing_mode"]["request_body_mode"] = "BUFFERED"


@pytest_asyncio.fixture(params=["static", "gateway-api", "buffered"])
async def both(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    base = GATEWAY_API if request.param == "gateway-api" else STATIC
    change = buffered if request.param == "buffered" else lambda envoy: None
    async with rig(tmp_path, base, change=change) as made:
        yield made


async def test_a_plain_request_and_a_stream_reach_the_instance_that_was_chosen(both: Rig) -> None:
    for n, streamed in enumerate((False, False, True, True)):
        reply = await both.ask(stream=streamed)
        assert reply.status == 200
        # The usage that hetlb asked for is not the client's.
        assert reply.body == (TOKEN + TOKEN + DONE if streamed else PLAIN_BODY)
        assert reply.headers["x-hetlb-instance"] == f"i{n % 2}"
        assert reply.headers["x-request-id"]
    assert [len(engine.bodies) for engine in both.engines] == [2, 2]
    await both.settled()
    shares = both.picker.totals.recent.last(60.0, both.picker.now()).shares
    assert {(each.output_tokens, each.prompt_tokens) for each in shares.values()} == {(4, 6)}
    assert both.outcomes == ["ok"] * 4


async def test_the_decision_is_told_as_the_gateway_api_has_it(both: Rig) -> None:
    await both.ask()
    addresses = [engine.address for engine in both.engines]
    assert both.engines[0].heads[0]["x-gateway-destination-endpoint"].split(",") == addresses


async def test_a_long_body_comes_whole(both: Rig) -> None:
    raw = both.body(prompt="word " * 100_000)
    reply = await both.ask(raw=raw)
    assert reply.status == 200
    assert both.engines[0].bodies == [raw]


async def test_a_streamed_request_comes_whole_with_the_usage_that_is_asked_for(both: Rig) -> None:
    prompt = "word " * 10_000
    reply = await both.ask(prompt=prompt, stream=True)
    assert (reply.status, reply.body) == (200, TOKEN + TOKEN + DONE)
    sent = json.loads(both.engines[0].bodies[0])
    assert sent["prompt"] == prompt
    assert sent["stream_options"] == {"include_usage": True}


async def test_a_body_that_is_too_large_is_refused_and_one_that_fits_is_not(tmp_path: Path) -> None:
    def small(envoy: Envoy) -> None:
        envoy.document["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 100_000

    async with rig(tmp_path, change=small, pick={"buffer_bytes": 100_000}) as made:
        empty = len(made.body(prompt=""))
        largest = made.body(prompt="x" * (100_000 - empty))
        assert (await made.ask(raw=largest)).status == 200
        assert made.engines[0].bodies == [largest]
        assert (await made.ask(raw=largest + b" ")).status == 413


async def test_a_body_that_comes_slowly_is_waited_for_and_one_that_stops_is_not(tmp_path: Path) -> None:
    def short(envoy: Envoy) -> None:
        envoy.ext_proc["message_timeout"] = "3s"

    async with rig(tmp_path, change=short) as made:  # Envoy waits for the picker longer if it asks for that
        streams, body = made.picker.server.state.streams, made.body()

        async def begun() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            """A request of which the picker has the first part of the body."""
            reader, writer = await asyncio.open_connection("127.0.0.1", made.envoy.port)
            head = "POST /v1/completions HTTP/1.1\r\nhost: m\r\nconnection: close\r\n"
            head += "content-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
            await turns_until(lambda: [each.body_bytes for each in streams] == [5])
            return reader, writer

        reader, writer = await begun()
        next(iter(streams)).sweep(1.0)
        seen = made.picker.now()
        await turns_until(lambda: made.picker.now() > seen + 4.0)
        writer.write(body[5:])
        assert b" 200 " in await reader.read()
        assert made.engines[0].bodies == [body]
        writer.transport.abort()
        reader, writer = await begun()
        next(iter(streams)).sweep(1000.0)
        assert b" 408 " in await reader.readline()
        writer.transport.abort()
    assert made.outcomes == ["ok"]


async def test_a_mode_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    def waits(envoy: Envoy) -> None:
        del envoy.ext_proc["send_body_without_waiting_for_header_response"]

    async with rig(tmp_path, change=waits) as made:
        reply = await made.ask()
        assert (reply.status, "request_body_mode" in reply.json["error"]["message"]) == (500, True)


async def test_answers_of_our_own_have_the_bodies_of_the_proxy(both: Rig) -> None:
    unknown = await both.ask(model="other")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    broken = await both.ask(raw=b"{")
    assert (broken.status, broken.json["error"]["message"]) == (400, "The body is not valid JSON.")
    assert broken.headers["content-type"] == "application/json"
    url = f"http://127.0.0.1:{both.envoy.port}/v1/models"
    async with both.session.get(url) as models:
        assert [each["id"] for each in (await models.json())["data"]] == ["m"]
    assert not any(engine.bodies for engine in both.engines)


async def test_an_engines_own_error_passes(both: Rig) -> None:
    async def refuse(request: Any, engine: Any) -> Any:
        return aiohttp.web.json_response({"error": {"message": "no"}}, status=400)

    both.engines[0].script = refuse
    reply = await both.ask()
    assert (reply.status, reply.json) == (400, {"error": {"message": "no"}})
    await both.settled()
    assert both.outcomes == ["upstream_refused"]


async def fill(made: Rig) -> list[asyncio.Task[Any]]:
    """Send requests to an engine that holds them until one waits in the queue."""
    made.picker.roster.change(CapacityLearned("i0", Capacity(max_num_seqs=1)))
    made.engines[0].released.clear()
    queue, driver = made.picker.scheduler.queue, made.picker.driver
    sent: list[asyncio.Task[Any]] = []
    while not len(queue):
        sent.append(asyncio.create_task(made.ask()))
        await turns_until(lambda: len(queue) + made.engines[0].running == len(sent))
        assert len(driver.exchanges) == len(sent) < 10
    return sent


@pytest.mark.parametrize("base", [STATIC, GATEWAY_API], ids=lambda path: path.stem)
async def test_what_waits_in_the_queue_waits_in_the_stream(tmp_path: Path, base: Path) -> None:
    def short(envoy: Envoy) -> None:
        envoy.ext_proc["message_timeout"] = "3s"

    async with rig(tmp_path, base, engines=1, change=short, policy={"name": "hetlb"}) as made:
        sent = await fill(made)
        began = made.picker.now()
        await turns_until(lambda: made.picker.now() > began + 4.0)
        assert len(made.picker.scheduler.queue) == 1
        made.engines[0].released.set()
        assert {(await each).status for each in sent} == {200}
        assert made.engines[0].bodies[-1] == made.body()


async def test_a_full_queue_and_a_fleet_that_is_down_are_answered(tmp_path: Path) -> None:
    tables = {"policy": {"name": "hetlb"}, "queue": {"max_requests": 1, "no_instance_timeout_s": 0}}
    tables["pick"] = {"objectives": {"batch": -1}}
    async with rig(tmp_path, engines=1, **tables) as made:
        sent = await fill(made)
        full = await made.ask()
        assert (full.status, full.json["error"]["code"]) == (429, "queue_full")
        assert full.headers["x-should-retry"] == "true"
        assert int(full.headers["retry-after"]) >= 1
        made.engines[0].released.set()
        assert {(await each).status for each in sent} == {200}
        made.picker.roster.change(_drain("i0"))
        none = await made.ask()
        assert (none.status, none.json["error"]["code"]) == (503, "no_instance")
        assert len(made.engines[0].bodies) == len(sent)


async def test_a_sheddable_request_does_not_wait(tmp_path: Path) -> None:
    tables = {"policy": {"name": "hetlb"}, "pick": {"objectives": {"batch": -1}}}
    async with rig(tmp_path, engines=1, **tables) as made:
        sent = await fill(made)
        shed = await made.ask(headers={"x-gateway-inference-objective": "batch"})
        assert (shed.status, shed.json["error"]["code"]) == (429, "queue_full")
        made.engines[0].released.set()
        assert {(await each).status for each in sent} == {200}


def _drain(name: str) -> AdminStateSet:
    return AdminStateSet(name, AdminState.DRAIN)


async def test_fairness_objective_and_subset_reach_the_scheduler(tmp_path: Path) -> None:
    def hints(envoy: Envoy) -> None:
        envoy.ext_proc["metadata_options"]["forwarding_namespaces"]["untyped"].append("envoy.lb.subset_hint")
        setter = {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [
                    {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "value": {"x-gateway-destination-endpoint-subset": [made_addresses[1]]},
                    }
                ],
            },
        }
        envoy.manager["http_filters"].insert(0, setter)

    made_addresses: list[str] = []

    def learn(envoy: Envoy) -> None:
        points = envoy.cluster("engines")["load_assignment"]["endpoints"][0]["lb_endpoints"]
        made_addresses.extend(
            f"127.0.0.1:{each['endpoint']['address']['socket_address']['port_value']}" for each in points
        )
        hints(envoy)

    log = tmp_path / "events"
    tables = {"pick": {"objectives": {"critical": 7}}}
    async with rig(tmp_path, change=learn, event_log=log, **tables) as made:
        headers = {"x-gateway-inference-objective": "critical", "x-gateway-inference-fairness-id": "team"}
        for _ in range(3):
            assert (await made.ask(headers=headers)).headers["x-hetlb-instance"] == "i1"
        made.picker.roster.change(_drain("i1"))
        reply = await made.ask()
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_instance")
        assert not made.engines[0].bodies
    with log.open() as lines:
        facts = list(Replay(lines, HandOvers))
    assert all(fact.same for fact in facts)
    with log.open() as lines:
        seen = [json.loads(line)["request"] for line in lines if '"kind":"arrival"' in line]
    taken = [(each["band"], each["tenant"], each["places"]["subset"]) for each in seen]
    assert taken == [(-7, "team", ["i1"])] * 3


async def test_keys_of_clients_are_checked_and_engines_get_their_own(tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "keys.yaml").write_text(f'- {{name: team, sha256: "{digest}"}}\n')
    (tmp_path / "engine.key").write_text("engine-key")
    tables = {"proxy": {"api_keys_file": "keys.yaml"}}
    async with rig(tmp_path, engines=1, **tables) as made:
        denied = await made.ask()
        assert (denied.status, denied.json["error"]["code"]) == (401, "invalid_api_key")
        allowed = await made.ask(headers={"authorization": "Bearer secret"})
        assert allowed.status == 200
        assert "authorization" not in made.engines[0].heads[0]


async def test_the_event_log_replays_to_the_same_decisions(tmp_path: Path) -> None:
    log = tmp_path / "events"
    async with rig(tmp_path, event_log=log, policy={"name": "hetlb"}) as made:
        await asyncio.gather(*(made.ask(stream=n % 2 == 0) for n in range(60)))
    with log.open() as lines:
        facts = list(Replay(lines, HandOvers))
    assert sum(len([c for c in fact.recorded if c[0] == "dispatch"]) for fact in facts) == 60
    assert all(fact.same for fact in facts)


async def test_http2_clients_and_tls_on_both_sides(tmp_path: Path) -> None:
    import httpx
    import trustme

    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    server.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    pem = {"filename": str(tmp_path / "ca.pem")}

    def secured(envoy: Envoy) -> None:
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3."
        envoy.cluster("picker")["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": kind + "UpstreamTlsContext",
                "common_tls_context": {
                    "alpn_protocols": ["h2"],
                    "validation_context": {"trusted_ca": pem},
                },
            },
        }
        chain = envoy.document["static_resources"]["listeners"][0]["filter_chains"][0]
        pair = {
            "certificate_chain": {"filename": str(tmp_path / "cert.pem")},
            "private_key": {"filename": str(tmp_path / "key.pem")},
        }
        chain["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": kind + "DownstreamTlsContext",
                "common_tls_context": {"tls_certificates": [pair], "alpn_protocols": ["h2", "http/1.1"]},
            },
        }

    tables = {"pick": {"tls": {"cert": "cert.pem", "key": "key.pem"}}}
    async with rig(tmp_path, GATEWAY_API, change=secured, **tables) as made:
        async with httpx.AsyncClient(http2=True, verify=_trusting(tmp_path / "ca.pem")) as client:
            url = f"https://127.0.0.1:{made.envoy.port}/v1/completions"
            for streamed in (False, True):
                reply = await client.post(url, content=made.body(stream=streamed))
                assert (reply.status_code, reply.http_version) == (200, "HTTP/2")
                assert reply.headers["x-hetlb-instance"] in ("i0", "i1")
        assert made.picker.ready_line.startswith("hetlb pick ready on https://")


def _trusting(path: Path) -> Any:
    import ssl

    return ssl.create_default_context(cafile=str(path))


async def test_health_checks_say_who_should_get_requests(tmp_path: Path) -> None:
    import grpc.aio

    from hetlb.options.pick.messages import (
        HEALTH_SERVICE,
        NOT_SERVING,
        PROCESS_SERVICE,
        SERVING,
        HealthCheckRequest,
        HealthCheckResponse,
    )

    async with rig(tmp_path, engines=1) as made:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{made.grpc_port}") as channel:
            check = channel.unary_unary(
                f"/{HEALTH_SERVICE}/Check",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=HealthCheckResponse.FromString,
            )

            async def status(service: str) -> int:
                return int((await check(HealthCheckRequest(service=service))).status)

            services = ("liveness", "readiness", PROCESS_SERVICE)
            assert [await status(each) for each in services] == [SERVING] * 3
            made.picker.roster.change(_drain("i0"))
            assert [await status(each) for each in services] == [SERVING, NOT_SERVING, NOT_SERVING]
            with pytest.raises(grpc.aio.AioRpcError):
                await status("other")


async def test_a_request_leaves_nothing_to_the_garbage_collector(both: Rig) -> None:
    gc.collect()
    gc.disable()
    before = {id(each) for each in gc.get_objects() if isinstance(each, HttpStream | ProcessCall)}
    try:
        for n in range(8):
            assert (await both.ask(stream=n % 2 == 0)).status == 200
        assert (await both.ask(model="other")).status == 404
        await both.settled()
        await turns_until(lambda: not both.picker.server.connections)
        both.picker.driver.settle()  # requests that ended are counted together
        kept = [each for each in gc.get_objects() if isinstance(each, HttpStream | ProcessCall)]
        left = [each for each in kept if id(each) not in before]
        assert not left
    finally:
        gc.enable()


async def test_a_gateway_that_does_not_have_an_instance_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks_the_first(envoy: Envoy) -> None:
        del envoy.cluster("engines")["load_assignment"]["endpoints"][0]["lb_endpoints"][0]

    async with rig(tmp_path, change=lacks_the_first, pick={"fallbacks": 0}) as made:
        for _ in range(4):  # rr: every second is for i0
            assert (await made.ask()).headers["x-hetlb-instance"] == "i1"
        said = [each for each in caplog.records if getattr(each, "event", "") == "gateway_elsewhere"]
        assert len(said) == 1
        first, second = made.engines
        assert said[0].getMessage() == (
            f"requests for i0 reach {second.address}: the gateway has no healthy endpoint {first.address}"
        )


async def test_a_stream_of_many_tokens_is_counted(both: Rig) -> None:
    async def many(request: Any, engine: Any) -> Any:
        return await stream(request, engine, tokens=300)

    for engine in both.engines:
        engine.script = many
    replies = await asyncio.gather(*(both.ask(stream=True) for _ in range(20)))
    assert {reply.body for reply in replies} == {TOKEN * 300 + DONE}


async def test_without_a_look_at_answers_leases_end_with_the_stream(tmp_path: Path) -> None:
    def unseen(envoy: Envoy) -> None:
        envoy.ext_proc["processing_mode"]["response_body_mode"] = "NONE"

    async with rig(tmp_path, engines=1, change=unseen) as made:
        made.engines[0].released.clear()
        sent = [asyncio.create_task(made.ask(stream=streamed)) for streamed in (False, True)]
        await turns_until(lambda: made.engines[0].running == 2)
        assert len(made.picker.driver.exchanges) == 2
        made.engines[0].released.set()
        assert {(await each).status for each in sent} == {200}
        await made.settled()
        assert made.outcomes == ["ok", "ok"]
        # No usage was asked for that none would take out again; nothing was learnt from what was not seen.
        assert not any(b"include_usage" in body for body in made.engines[0].bodies)
        learnt = made.picker.scheduler.predictor
        assert learnt.predict(made_request()) == type(learnt)().predict(made_request())


def made_request() -> Request:
    return Request(1, "m", 5)
