"""What gateways may send, in whatever order: a request has one lease and one end, no message a traceback."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from helpers import turns_until
from hypothesis import given
from hypothesis import strategies as st
from options.pick.door import BODY, HEADERS, Door
from options.pick.gateway import (
    PROCESS,
    Gateway,
    body_of,
    insecure,
    picker,
    request_headers,
    response_headers,
    trailers,
)
from options.pick.rig import Rig
from proxy.upstreams import PLAIN_BODY

from hetlb.options.pick import messages, stream_states
from hetlb.options.pick.calls import MAX_BESIDE_BODY_BYTES, is_body
from hetlb.options.pick.envoy_fields import FAIRNESS, MAX_NAMES, OTHERS, TenantNames
from hetlb.options.pick.messages import BUFFERED, FULL_DUPLEX, STREAMED
from hetlb.options.pick.stream_states import StreamState


def test_every_state_of_a_stream_is_reached_and_left() -> None:
    reached = {row.after for row in stream_states.TRANSITIONS} | {StreamState.OPENED}
    left = {state for row in stream_states.TRANSITIONS for state in row.before}
    assert reached == left | {StreamState.CLOSED} == set(StreamState)


async def told(call: Any) -> Any:
    """The message that names an instance, behind what only says go on."""
    while True:
        answer = await call.read()
        assert answer is not grpc.aio.EOF
        part = answer.WhichOneof("response")
        if getattr(answer, part).response.header_mutation.set_headers:
            return answer


#: The ends of a request's body, the first of which is one already.
ENDS = {
    "a buffered body with trailers": (BUFFERED, [b"whole", trailers()]),
    "a body ends twice": (STREAMED, [b"whole", body_of("request_body", b"")]),
    "a piece behind the end": (STREAMED, [b"whole", body_of("request_body", b"{}", end=False)]),
    "trailers behind the end": (FULL_DUPLEX, [b"whole", trailers()]),
    "a second request": (STREAMED, [b"whole", request_headers(STREAMED), body_of("request_body", b"{}")]),
}


@pytest.mark.parametrize("name", ENDS)
async def test_a_request_that_ends_twice_is_booked_once(tmp_path: Path, name: str) -> None:
    mode, parts = ENDS[name]
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway, scheduler = Gateway(channel), made.picker.scheduler
        for _ in range(3):
            call = await gateway.open(mode)
            for part in parts:
                await call.write(body_of("request_body", made.body()) if part == b"whole" else part)
            await told(call)
            assert scheduler.in_flight == 1
            await answered(call)
            await turns_until(lambda: not made.picker.server.connections)
            assert scheduler.in_flight == 0
        assert made.outcomes == ["ok"] * 3


async def answered(call: Any) -> None:
    """The engine's answer, to a stream that may have more to say of the request."""
    await call.write(response_headers())
    await call.write(body_of("response_body", PLAIN_BODY))
    while await call.read() is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK


async def test_trailers_of_a_buffered_body_are_answered(tmp_path: Path) -> None:
    """Envoy waits for it."""
    async with picker(tmp_path) as made, insecure(made) as channel:
        call = await Gateway(channel).open(BUFFERED)
        await call.write(body_of("request_body", made.body(), end=False))
        assert (await call.read()).HasField("request_body")
        await call.write(trailers())
        assert (await call.read()).HasField("request_trailers")
        await answered(call)


async def test_an_answer_before_an_instance_was_told_ends_the_request(tmp_path: Path) -> None:
    """Envoy gave one of its own to what waits in the queue."""
    async with picker(tmp_path, queue={"no_instance_timeout_s": 60}) as made, insecure(made) as channel:
        from options.pick.test_picking import _drain

        made.picker.roster.change(_drain("i0"))
        call = await Gateway(channel).open(BUFFERED)
        await call.write(body_of("request_body", made.body()))
        await turns_until(lambda: len(made.picker.scheduler.queue) == 1)
        await call.write(response_headers("504", end=True))
        await turns_until(lambda: not made.picker.driver.exchanges)
        assert len(made.picker.scheduler.queue) == 0
        call.cancel()
        await turns_until(lambda: made.outcomes == ["client_gone"])


async def test_a_request_that_is_refused_while_nothing_comes_is_over(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        call = await Gateway(channel).open(FULL_DUPLEX)
        await call.write(body_of("request_body", b"{", end=False))
        streams = made.picker.server.state.streams
        await turns_until(lambda: [each.body_bytes for each in streams] == [1])
        next(iter(streams)).sweep(1000.0)
        assert (await call.read()).immediate_response.status.code == 408
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await turns_until(lambda: not streams)
        assert made.picker.server.state.held_bytes == 0


@pytest.mark.parametrize("status", ["100", "101", "302"])
def test_a_head_that_is_no_answer_is_refused_for_the_engine(status: str) -> None:
    door = Door()
    with contextlib.closing(door.loop):
        stream = door.call([HEADERS, BODY, response_headers(status).SerializeToString()])
        last = messages.ProcessingResponse.FromString(door.sent[-1])
        assert (stream.state, last.immediate_response.status.code) == (StreamState.REFUSED, 502)
        stream.closed()
        door.driver.settle()
        assert door.scheduler.in_flight == 0


def _raw(head: Any, value: bytes) -> bytes:
    """A message with such a `value` in a header: by hand, since the field was a string once."""
    text = b"\x0a\x01x\x12" + bytes([len(value)]) + value
    header = b"\x0a" + bytes([len(text)]) + text
    return bytes(head.SerializeToString()) + b"\x12" + bytes([len(header) + 2, 0x0A, len(header)]) + header


def _header_map(count: int, size: int) -> bytes:
    message = request_headers(STREAMED)
    for number in range(count):
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = f"x-{number}", b"v" * size
    return bytes(message.SerializeToString())


#: Messages that end a call: the first of it, the status.
WRONG = {
    "no message": (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    "nothing": (b"", grpc.StatusCode.INVALID_ARGUMENT),
    "a body first": (body_of("request_body", b"{}").SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
    "an answer first": (response_headers().SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
    "a header map of 100,000": (_header_map(100_000, 0), grpc.StatusCode.INVALID_ARGUMENT),
    "a message of 16 MiB": (
        body_of("request_body", bytes(16 << 20)).SerializeToString(), grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_a_message_that_no_gateway_sends_ends_its_call_alone(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, status = WRONG[name]
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway = Gateway(channel)
        beside = await gateway.open()
        call = channel.stream_stream(PROCESS)()
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may end while it is written
            await call.write(data)
        assert await call.code() is status
        assert (await gateway.body(beside, made.body())).HasField("request_body")
        beside.cancel()
        await turns_until(lambda: not made.picker.server.connections)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("status", ["abc", "", "-20", "9999", "٢٠٠"])
async def test_an_answer_without_a_status_ends_its_call_and_logs_nothing(
    tmp_path: Path, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        call = await Gateway(channel).open()
        await call.write(body_of("request_body", made.body()))
        await told(call)
        await call.write(response_headers(status))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await turns_until(lambda: made.outcomes == ["client_gone"])
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_headers_may_be_any_bytes_and_are_bounded(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        raw = channel.stream_stream(PROCESS, response_deserializer=messages.ProcessingResponse.FromString)
        odd = raw()
        await odd.write(_raw(request_headers(STREAMED), b"\xff\xfe"))
        await odd.write(body_of("request_body", made.body()).SerializeToString())
        await told(odd)
        odd.cancel()
        for count, size in ((201, 0), (150, 300)):
            large = raw()
            await large.write(_header_map(count, size))
            assert (await large.read()).immediate_response.status.code == 431
        await turns_until(lambda: not made.picker.server.connections)


def rounds(made: Rig) -> int:
    """Tenants that the queue knows."""
    return len(made.picker.server.state.tenants)


async def test_tenants_that_anyone_may_name_are_bounded(tmp_path: Path) -> None:
    async with picker(tmp_path) as made, insecure(made) as channel:
        gateway, seen = Gateway(channel), set()
        for number in range(MAX_NAMES + 20):
            call = await gateway.open(x_gateway_inference_fairness_id=f"t{number}")
            await call.write(body_of("request_body", made.body()))
            await told(call)
            (exchange,) = made.picker.driver.exchanges.values()
            seen.add(exchange.record.request.tenant)
            call.cancel()
            await turns_until(lambda: not made.picker.driver.exchanges)
        assert len(seen) == MAX_NAMES + 1
        assert OTHERS.decode() in seen


@given(st.lists(st.tuples(st.integers(0, 600), st.floats(0, 30)), max_size=900))
def test_a_tenant_that_is_idle_makes_room_and_one_in_use_keeps_its_name(
    steps: list[tuple[int, float]],
) -> None:
    names, now, last = TenantNames(), 0.0, dict[int, float]()
    for number, passed in steps:
        now += passed
        fields = {FAIRNESS.encode(): b"%d" % number}
        kept = number in last and fields[FAIRNESS.encode()] in names._seen
        names.confine(fields, now)
        assert len(names) <= MAX_NAMES
        if fields[FAIRNESS.encode()] == OTHERS:
            assert not kept
        else:
            last[number] = now


@given(st.integers(0, 300_000), st.integers(0, 300_000), st.booleans())
def test_a_large_message_is_read_if_it_is_a_body(body: int, beside: int, answer: bool) -> None:
    message = body_of("response_body" if answer else "request_body", bytes(body))
    message.attributes["x"].fields["y"].string_value = "z" * beside
    data = message.SerializeToString()
    if len(data) > MAX_BESIDE_BODY_BYTES:
        assert is_body(data) == (len(data) - body <= MAX_BESIDE_BODY_BYTES)


@given(st.binary(max_size=40))
def test_whatever_begins_a_large_message_is_no_error(beginning: bytes) -> None:
    data = beginning + bytes(MAX_BESIDE_BODY_BYTES + 1)
    is_body(data)
