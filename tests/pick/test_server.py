"""The listener of gateways on real sockets: another gRPC client, TLS, and peers that are no gateway."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import trustme
from helpers import HANG_S, turns_until
from pick.frames import END_HEADERS, HEADERS, block, data, frame, frames, message, opened
from pick.rig import Engine, Rig
from proxy.discovery.conftest import Cluster, serving
from proxy.discovery.test_inference_pool import pool
from proxy.discovery.test_kubernetes import pod

from hetlb.errors import ConfigError
from hetlb.pick import messages
from hetlb.pick.http2 import DATA, GOAWAY, MAX_FRAME, PING, PREFACE, RST_STREAM, SETTINGS
from hetlb.pick.messages import BUFFERED, FULL_DUPLEX

#: Names that have an address, and that have none (RFC 6761, 6.4).
NAMES = ("localhost", "none.invalid")
PROCESS = f"/{messages.PROCESS_SERVICE}/Process"


class Gateway:
    """Streams of external processing over grpcio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            PROCESS,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=messages.ProcessingResponse.FromString,
        )

    async def open(self, mode: int = BUFFERED) -> Any:
        """A stream whose request's headers were sent."""
        call = self._process()
        await call.write(request_headers(mode))
        if mode == BUFFERED:
            assert (await call.read()).HasField("request_headers")
        return call

    async def body(self, call: Any, body: bytes) -> Any:
        """Send the request's body; the picker's first word."""
        part = messages.ProcessingRequest()
        part.request_body.body = body
        part.request_body.end_of_stream = True
        await call.write(part)
        return await call.read()


@contextlib.asynccontextmanager
async def picker(folder: Path, **tables: Any) -> AsyncIterator[Rig]:
    """A picker over one engine, without Envoy."""
    async with contextlib.AsyncExitStack() as stack:
        made = Rig(folder, [await Engine().start()])
        stack.push_async_callback(made.engines[0].stop)
        await made.start_picker(**tables)
        stack.push_async_callback(made.picker.stop, 0.0)
        yield made
        await made.settled()


def insecure(made: Rig) -> grpc.aio.Channel:
    limit = ("grpc.max_receive_message_length", 64 << 20)
    return grpc.aio.insecure_channel(f"127.0.0.1:{made.grpc_port}", options=[limit])


async def test_another_client_is_told_where_a_request_goes_and_may_leave(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway, scheduler = Gateway(channel), made.picker.scheduler
        calls = [await gateway.open() for _ in range(4)]
        for call in calls:
            told = (await gateway.body(call, made.body())).request_body.response.header_mutation
            assert told.set_headers[0].header.raw_value.decode() == made.engines[0].address
        assert scheduler.in_flight == 4
        calls[0].cancel()
        await turns_until(lambda: scheduler.in_flight == 3)
        await calls[1].done_writing()
        assert await calls[1].read() is grpc.aio.EOF
        assert await calls[1].code() is grpc.StatusCode.OK
        assert scheduler.in_flight == 2
        await channel.close()
        await turns_until(lambda: scheduler.in_flight == 0)
        await made.settled()
        assert len(made.outcomes) == 4


async def test_an_instance_with_a_name_is_told_by_its_address(tmp_path: Path) -> None:
    engine = await Engine().start()
    made = Rig(tmp_path, [engine])
    instances = [{"name": f"i{n}", "url": f"http://{name}:{engine.port}"} for n, name in enumerate(NAMES)]
    await made.start_picker(models=[{"name": "m", "instances": instances}])
    try:
        assert made.picker.server.state.addresses == {"i0": engine.address}
    finally:
        await made.picker.stop(0.0)
        await engine.stop()


async def test_a_long_body_goes_there_and_back(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        call, body = await gateway.open(FULL_DUPLEX), made.body(prompt="word " * 600_000)
        assert (await gateway.body(call, body)).HasField("request_headers")
        back = b""
        while len(back) < len(body):
            back += (await call.read()).request_body.response.body_mutation.streamed_response.body
        assert back == body
        await call.done_writing()


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
async def test_bodies_that_are_not_whole_are_bounded_over_all_streams(tmp_path: Path, mode: int) -> None:
    async with picker(tmp_path, proxy={"max_held_bytes": 100_000}) as made:
        state = made.picker.server.state
        part = messages.ProcessingRequest()
        part.request_body.body = b" " * 60_000
        body = message(part.SerializeToString())
        # Full duplex: a whole message, the first of several; buffered: the one message, not all of it.
        begun = (
            message(request_headers(mode).SerializeToString()) + body[: None if mode == FULL_DUPLEX else -1]
        )
        head = block(path=PROCESS.encode())
        reader, writer = await connect(made, PREFACE + frame(SETTINGS))
        writer.write(frame(HEADERS, END_HEADERS, 1, head) + in_frames(1, begun))
        await turns_until(lambda: state.held_bytes >= 60_000)
        writer.write(frame(HEADERS, END_HEADERS, 3, head) + in_frames(3, begun))
        answer = await immediate_answer(reader, 3)
        assert answer.status.code == 429
        assert b"too_many_bytes" in answer.body
        await turns_until(lambda: state.held_bytes < 70_000)
        writer.write(frame(RST_STREAM, 0, 1, bytes(4)))
        await turns_until(lambda: state.held_bytes == 0 and not state.streams)


def request_headers(mode: int) -> Any:
    """The first message of a request, its body in one message or in pieces."""
    first = messages.ProcessingRequest()
    fields = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    for name, value in fields.items():
        header = first.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    first.protocol_config.request_body_mode = mode
    first.protocol_config.response_body_mode = messages.STREAMED
    return first


def in_frames(number: int, payload: bytes) -> bytes:
    pieces = (payload[at : at + MAX_FRAME] for at in range(0, len(payload), MAX_FRAME))
    return b"".join(data(number, piece) for piece in pieces)


async def immediate_answer(reader: asyncio.StreamReader, number: int) -> Any:
    """The answer that the picker has Envoy give to the request of a stream."""
    received = b""
    while True:
        ((kind, _, stream, payload),) = frames(await _one_frame(reader))
        if kind == DATA and stream == number:
            received += payload
        elif kind == HEADERS and stream == number and received:
            break
    while received:
        size = int.from_bytes(received[1:5], "big")
        response = messages.ProcessingResponse.FromString(received[5 : 5 + size])
        received = received[5 + size :]
    return response.immediate_response


async def test_what_is_no_message_and_no_method_has_a_status(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        raw = channel.stream_stream(PROCESS)
        call = raw()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        unknown = channel.unary_unary("/test.Echo/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        compressed = channel.stream_stream(PROCESS)(compression=grpc.Compression.Gzip)
        await compressed.write(b"x" * 1000)
        assert await compressed.code() is grpc.StatusCode.UNIMPLEMENTED


OPEN: list[asyncio.StreamWriter] = []


@pytest_asyncio.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    """Connections of a test end with it."""
    yield
    while OPEN:
        writer = OPEN.pop()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def connect(made: Rig, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.grpc_port)
    OPEN.append(writer)
    writer.write(b"".join(sent))
    return reader, writer


async def test_peers_that_are_no_gateway_disturb_no_other(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        call = await gateway.open()
        server = made.picker.server
        hello = PREFACE + frame(SETTINGS)
        browser, _ = await connect(made, b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n")
        assert frames(await browser.read())[-1][0] == GOAWAY
        # One that asks for answers and reads none is not read from any more.
        _, deaf = await connect(made, hello, frame(PING, 0, 0, bytes(8)) * 5000)
        await turns_until(lambda: len(server.gateways) == 2)
        pings = frame(PING, 0, 0, bytes(8)) * 100
        began = made.picker.now()
        while len(server.gateways) == 2 and made.picker.now() < began + 1.0:
            deaf.write(pings)
            await asyncio.sleep(0)
        deaf.close()
        # One that opens requests and goes.
        _, hasty = await connect(made, hello, *(opened(number) for number in range(1, 100, 2)))
        hasty.close()
        await turns_until(lambda: len(server.gateways) == 1)
        assert (await gateway.body(call, made.body())).HasField("request_body")
        await call.done_writing()


async def test_a_connection_that_stops_is_dropped_and_a_silent_gateway_asked(tmp_path: Path) -> None:
    async with picker(tmp_path) as made:
        server = made.picker.server
        await connect(made, PREFACE[:10])
        await turns_until(lambda: len(server.gateways) == 1)
        (first,) = server.gateways
        loop = asyncio.get_running_loop()
        now = loop.time()
        first.sweep(now + 9.0)
        assert server.gateways
        first.sweep(now + 11.0)
        await turns_until(lambda: not server.gateways)
        idle, writer = await connect(made, PREFACE + frame(SETTINGS))
        await turns_until(lambda: len(server.gateways) == 1)
        (second,) = server.gateways
        await turns_until(lambda: not second.http2.incomplete)
        second.sweep(loop.time() + 1000.0)
        assert server.gateways  # nothing is open there: it may be silent for ever
        path = f"/{messages.HEALTH_SERVICE}/Check".encode()
        writer.write(_headers(path))
        await turns_until(lambda: bool(second.http2.streams))
        second.sweep(loop.time() + 40.0)
        while (kind := frames(await _one_frame(idle))[0][0]) != PING:
            assert kind != GOAWAY
        second.sweep(loop.time() + 100.0)
        await turns_until(lambda: not server.gateways)


def _headers(path: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, 1, block(path=path))


async def _one_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(9)
    return head + await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_a_picker_that_stops_says_so_and_serves_what_is_open(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        call = await gateway.open()
        await gateway.body(call, made.body())
        watcher, _ = await connect(made, PREFACE + frame(SETTINGS))
        await turns_until(lambda: len(made.picker.server.gateways) == 2)
        stopping = asyncio.create_task(made.picker.stop(HANG_S))
        while frames(await _one_frame(watcher))[0][0] != GOAWAY:
            pass
        assert not stopping.done()
        with pytest.raises(OSError):
            await connect(made)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await stopping


async def test_certificates_of_gateways_are_asked_for_and_ours_may_be_replaced(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    mine = authority.issue_cert("gateway")

    def issue(name: str) -> None:
        made = authority.issue_cert("localhost", common_name=name)
        made.private_key_pem.write_to_path(str(tmp_path / "key.new"))
        made.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.new"))
        shutil.move(tmp_path / "key.new", tmp_path / "key.pem")
        shutil.move(tmp_path / "cert.new", tmp_path / "cert.pem")

    issue("first")
    table = {"tls": {"cert": "cert.pem", "key": "key.pem"}, "client_ca_file": "ca.pem"}
    async with picker(tmp_path, pick=table) as made:

        async def shown(cert: trustme.LeafCert | None) -> str:
            """Name in the certificate of the picker that answers over TLS."""
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            context.set_alpn_protocols(["h2"])
            if cert is not None:
                cert.configure_cert(context)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", made.grpc_port, ssl=context, server_hostname="localhost"
            )
            writer.write(PREFACE + frame(SETTINGS))
            try:
                assert frames(await _one_frame(reader))[0][0] == SETTINGS
                found = writer.get_extra_info("ssl_object")
                assert found.selected_alpn_protocol() == "h2"
                subject = dict(pair for each in found.getpeercert()["subject"] for pair in each)
                return str(subject["commonName"])
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

        assert await shown(mine) == "first"
        for stranger in (None, other.issue_cert("gateway")):
            with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
                await shown(stranger)
        issue("second")
        made.picker.server._sweep()
        assert await shown(mine) == "second"
        (tmp_path / "cert.pem").write_text("no certificate")
        made.picker.server._sweep()
        assert await shown(mine) == "second"


async def test_authorities_without_a_certificate_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pick\.client_ca_file: expected pick\.tls beside it, got none"):
        async with picker(tmp_path, pick={"client_ca_file": "ca.pem"}):
            pass


async def test_the_fleet_and_its_objectives_may_be_an_inference_pool(tmp_path: Path) -> None:
    cluster = Cluster("inferencepools", "pods", "inferenceobjectives")
    pods, objectives = cluster.kinds["pods"], cluster.kinds["inferenceobjectives"]
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(cluster.handle))
        engines = [await Engine().start() for _ in range(2)]
        for n, engine in enumerate(engines):
            stack.push_async_callback(engine.stop)
            address = {"podIP": "127.0.0.1"}
            await pods.put(pod(f"p{n}", metadata={"labels": {"app": f"v{engine.port}"}}, status=address))
        pools = cluster.kinds["inferencepools"]
        await pools.put(pool("qwen", {"app": f"v{engines[0].port}"}, engines[0].port))
        objective = {"metadata": {"name": "critical"}, "spec": {"poolRef": {"name": "qwen"}, "priority": 9}}
        await objectives.put(objective)
        source = {"resource": "inferencepools", "pool": "qwen", "api_server": url, "namespace": "n"}
        source["model"] = "m"
        tables = {"discovery": {"kubernetes": source}, "models": []}
        async with picker(tmp_path, pick={"objectives": {"batch": -1}}, **tables) as made:
            stack.push_async_callback(pods.cut)
            stack.push_async_callback(pools.cut)
            stack.push_async_callback(objectives.cut)
            state = made.picker.server.state
            assert state.addresses == {"p0": engines[0].address}
            await turns_until(lambda: state.objectives == {"critical": 9, "batch": -1})
            await pools.put(pool("qwen", {"app": f"v{engines[1].port}"}, engines[1].port))
            await turns_until(lambda: [each.name for each in made.picker.scheduler.instances] == ["p1"])
            await turns_until(made.picker.routable)
            channel = await stack.enter_async_context(insecure(made))
            gateway = Gateway(channel)
            call = await gateway.open()
            told = (await gateway.body(call, made.body())).request_body.response.header_mutation
            assert told.set_headers[0].header.raw_value.decode() == engines[1].address
            await call.done_writing()
            await call.read()
            await channel.close()
