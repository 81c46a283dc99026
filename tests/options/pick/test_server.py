"""The listener of gateways on real sockets: another gRPC client, TLS, and peers that are no gateway."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import trustme
import yaml
from helpers import HANG_S, turns_until
from options.pick.frames import (
    ACK,
    DATA,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    HELLO,
    MAX_CONCURRENT_STREAMS,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    block,
    frame,
    next_frame,
)
from options.pick.gateway import PROCESS, Gateway, insecure, picker
from options.pick.rig import GATEWAY_API, STATIC, Engine, Rig
from options.pick.test_faults import PickerProcess

from hetlb.balancer.config.fleet import load_fleet
from hetlb.errors import ConfigError
from hetlb.options.pick import messages, pick_service
from hetlb.options.pick import pick_server as server
from hetlb.options.pick.messages import FULL_DUPLEX
from hetlb.options.pick.pick_service import check_pick

#: Names that have an address, and that have none (RFC 6761, 6.4).
NAMES = ("localhost", "none.invalid")


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


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (["169.254.169.254"], None),
        (["::ffff:169.254.169.254", "10.0.0.7"], "10.0.0.7:8000"),
        (["fd00::7", "10.0.0.7"], "10.0.0.7:8000"),
        (["fd00::7", "0.0.0.0"], "[fd00::7]:8000"),
    ],
)
async def test_a_name_leads_to_no_address_where_no_engine_can_be(
    answers: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object, **__: object) -> list[Any]:
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, 8000)) for each in answers
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    assert await pick_service._look_up("http://engine.test:8000", asyncio.Semaphore(1)) == told


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


async def test_bodies_that_are_not_whole_are_bounded_over_all_streams(tmp_path: Path) -> None:
    async with picker(tmp_path, proxy={"max_held_bytes": 100_000}) as made, insecure(made) as channel:
        gateway, state = Gateway(channel), made.picker.server.state
        part = messages.ProcessingRequest()
        part.request_body.body = b" " * 60_000
        first, second = [await gateway.open(FULL_DUPLEX) for _ in range(2)]
        await first.write(part)
        await turns_until(lambda: state.held_bytes == 60_000)
        await second.write(part)
        answer = (await second.read()).immediate_response
        assert answer.status.code == 429
        assert b"too_many_bytes" in answer.body
        assert await second.read() is grpc.aio.EOF
        assert await second.code() is grpc.StatusCode.OK
        assert state.held_bytes == 60_000
        first.cancel()
        await turns_until(lambda: state.held_bytes == 0 and not state.streams)


async def test_what_is_no_message_and_no_method_has_a_status(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        raw = channel.stream_stream(PROCESS)
        call = raw()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        unknown = channel.unary_unary("/test.Echo/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        compressed = channel.stream_stream(PROCESS)(compression=grpc.Compression.Gzip)
        with contextlib.suppress(grpc.aio.AioRpcError):  # it has ended while it was written
            await compressed.write(b"x" * 1000)
        assert await compressed.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert not made.outcomes


async def test_a_method_that_is_no_text_does_not_end_the_listener(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        open_before = await gateway.open()
        for path in (b"/\xff/\xfe", PROCESS.encode()[:-1] + b"\x99"):
            head = block(path)
            reader, _ = await connect(made, HELLO, frame(HEADERS, END_HEADERS, 1, head))
            while (found := await next_frame(reader))[0] != RST_STREAM:
                assert found[0] != GOAWAY
        assert (await gateway.body(open_before, made.body())).HasField("request_body")
        await gateway.open()


#: Numbers of streams.
ODD = range(1, 200, 2)
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
        browser, _ = await connect(made, b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n")
        await browser.read()
        # One that pings without end, and one that opens requests and takes each back.
        flood, _ = await connect(made, HELLO, frame(PING, 0, 0, bytes(8)) * 200)
        while (found := await next_frame(flood))[0] != GOAWAY:
            pass
        assert int.from_bytes(found[3][4:8], "big") == ENHANCE_YOUR_CALM
        head = block(PROCESS.encode())
        hasty = [frame(HEADERS, END_HEADERS, n, head) + frame(RST_STREAM, 0, n, bytes(4)) for n in ODD]
        _, writer = await connect(made, HELLO, *hasty)
        assert (await gateway.body(call, made.body())).HasField("request_body")
        writer.close()
        await call.done_writing()


async def test_a_connection_that_stops_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = {**dict(server._OPTIONS), "grpc.server_handshake_timeout_ms": 50}
    monkeypatch.setattr(server, "_OPTIONS", tuple(soon.items()))
    async with picker(tmp_path) as made:
        silent, _ = await connect(made, PREFACE[:10])
        await silent.read()  # until it is closed


async def test_more_connections_than_allowed_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**dict(server._OPTIONS), "grpc.max_allowed_incoming_connections": 2}
    monkeypatch.setattr(server, "_OPTIONS", tuple(few.items()))
    async with picker(tmp_path) as made:
        for _ in range(2):
            reader, _ = await connect(made, HELLO)
            assert (await next_frame(reader))[0] == SETTINGS
        third, _ = await connect(made, HELLO)
        with contextlib.suppress(OSError):
            assert await third.read() == b""


async def test_connections_without_a_call_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dict(server._OPTIONS) | {
        "grpc.max_allowed_incoming_connections": 2,
        "grpc.max_connection_idle_ms": dict(server._OPTIONS)["grpc.max_connection_idle_ms"] // 100,
    }
    monkeypatch.setattr(server, "_OPTIONS", tuple(few.items()))
    async with picker(tmp_path) as made:
        for _ in range(2):
            idle, _ = await connect(made, HELLO)
            while (await next_frame(idle))[0] != GOAWAY:
                pass
        async with insecure(made) as channel:
            gateway = Gateway(channel)
            call = await gateway.open()
            assert (await gateway.body(call, made.body())).HasField("request_body")
            await call.done_writing()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_frames_of_two_bytes_hold_little_more_than_their_bytes(tmp_path: Path) -> None:
    calls, size = 16, 512 << 10
    async with picker(tmp_path) as made:
        process = PickerProcess(made)
        await process.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            OPEN.append(writer)
            head, begun = block(PROCESS.encode()), b"\0" + (8 << 20).to_bytes(4, "big")
            writer.write(HELLO)
            for number in ODD[:calls]:
                writer.write(frame(HEADERS, END_HEADERS, number, head) + frame(DATA, 0, number, begun))
            # What may be sent, by stream; 0 is the connection.
            room = dict.fromkeys(ODD[:calls], 65_535 - 5) | {0: 65_535 - 5 * calls}
            before, sent = process.memory, dict.fromkeys(ODD[:calls], 0)
            while min(sent.values()) < size:
                for number, done in sent.items():
                    part = min(room[number], room[0], size - done) // 2
                    writer.write(frame(DATA, 0, number, b"xx") * part)
                    for each in (number, 0):
                        room[each] -= 2 * part
                    sent[number] += 2 * part
                await writer.drain()
                kind, flags, number, payload = await next_frame(reader)
                assert kind not in (GOAWAY, RST_STREAM), (kind, payload)
                if kind == WINDOW_UPDATE:
                    room[number] += int.from_bytes(payload, "big")
                elif kind in (PING, SETTINGS) and not flags:
                    writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
            writer.write(frame(PING, 0, 0, bytes(8)))
            while (await next_frame(reader))[:2] != (PING, ACK):  # it has read all that came before
                pass
            assert process.memory - before < 5 * calls * size
        finally:
            await process.kill()


async def test_one_connection_has_a_bounded_number_of_calls(tmp_path: Path) -> None:
    """Calls beyond it are refused at once, and do not hold up calls of other connections."""
    most = server.MAX_CALLS_EACH
    numbers = range(1, 4 * most, 2)
    async with picker(tmp_path) as made, insecure(made) as channel:
        head = block(PROCESS.encode())
        reader, writer = await connect(made, HELLO)
        while (found := await next_frame(reader))[0] != SETTINGS:
            pass
        said = dict(struct.iter_unpack(">HI", found[3]))
        assert said[MAX_CONCURRENT_STREAMS] == most
        writer.write(frame(SETTINGS, ACK) + b"".join(frame(HEADERS, END_HEADERS, n, head) for n in numbers))
        refused: set[int] = set()
        while len(refused) < most:
            kind, _, number, payload = await next_frame(reader)
            if kind == RST_STREAM:
                assert int.from_bytes(payload, "big") == REFUSED_STREAM
                refused.add(number)
        assert refused == set(numbers[most:])
        await Gateway(channel).open()
        writer.close()


async def test_more_calls_than_allowed_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        for _ in range(3):
            await gateway.open()
        fourth = channel.stream_stream(PROCESS)()
        assert await fourth.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(made.picker.server.connections) == 3


def test_a_gateway_may_ping_as_often_as_the_shipped_ones_do() -> None:
    """grpcio ends the connection of a client that pings more often than it is told to bear."""
    for path in (STATIC, GATEWAY_API):
        (picker,) = [
            each
            for each in yaml.safe_load(path.read_text())["static_resources"]["clusters"]
            if each["name"] == "picker"
        ]
        (options,) = picker["typed_extension_protocol_options"].values()
        ping = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
        borne = dict(server._OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
        assert float(ping["interval"].rstrip("s")) * 1000 >= 2 * borne


async def test_a_picker_that_stops_says_so_and_serves_what_is_open(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        call = await gateway.open()
        await gateway.body(call, made.body())
        watcher, _ = await connect(made, HELLO)
        assert (await next_frame(watcher))[0] == SETTINGS
        stopping = asyncio.create_task(made.picker.stop(HANG_S))
        while (await next_frame(watcher))[0] != GOAWAY:
            pass
        assert not stopping.done()
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
            writer.write(HELLO)
            try:
                assert (await next_frame(reader))[0] == SETTINGS
                found = writer.get_extra_info("ssl_object")
                assert found.selected_alpn_protocol() == "h2"
                subject = dict(pair for each in found.getpeercert()["subject"] for pair in each)
                return str(subject["commonName"])
            finally:
                writer.transport.abort()

        assert await shown(mine) == "first"
        for stranger in (None, other.issue_cert("gateway")):
            with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
                await shown(stranger)
        issue("second")
        made.picker.server._sweep(0.0)
        assert await shown(mine) == "second"
        (tmp_path / "cert.pem").write_text("no certificate")
        made.picker.server._sweep(0.0)
        assert await shown(mine) == "second"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "picker.example"])
def test_a_listener_of_strangers_is_refused(tmp_path: Path, host: str) -> None:
    """Beyond loopback gateways show a certificate, or the file says that every peer is one."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own = trustme.CA().issue_cert("localhost")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    tls = {"cert": "own.pem", "key": "own.pem"}

    def check(table: dict[str, object]) -> None:
        path = tmp_path / "fleet.yaml"
        models = [{"name": "m", "instances": [{"url": "http://127.0.0.1:1"}]}]
        path.write_text(yaml.safe_dump({"version": 1, "pick": table, "models": models}))
        check_pick(load_fleet(path))

    check({"host": "127.0.0.1"})
    for table in ({}, {"tls": tls}):
        with pytest.raises(ConfigError, match=r"pick\.host: expected a loopback address"):
            check({"host": host, **table})
    check({"host": host, "any_gateway": True})
    check({"host": host, "tls": tls, "client_ca_file": "ca.pem"})


async def test_authorities_without_a_certificate_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pick\.client_ca_file: expected pick\.tls beside it, got none"):
        async with picker(tmp_path, pick={"client_ca_file": "ca.pem"}):
            pass
