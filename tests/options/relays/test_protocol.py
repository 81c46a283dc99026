"""Channels and messages between relays and the scheduler process, and what the docs say of them."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from helpers import HANG_S
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import Outcome, Request
from hetlb.options.lease_wire import RequestFacts, WireBooked, WireEnded
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays.protocol import (
    FROM_RELAY,
    FROM_SCHEDULER,
    Arrival,
    FromRelay,
    FromScheduler,
    Hello,
    LeaseChange,
    LiveRequest,
    Refused,
)
from hetlb.options.relays.relay_driver import arrival_of

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "messages.md"
REQUEST = Request(
    7 << 32, "m", 12, 5, 2, 30, False, 400, True, (("k", 64), ("s", None)), -1, "t", 2, (16, (1, 2)),
    streamed=True, generated=3, service=ServiceClass("fast", ttft_s=0.5),
)  # fmt: skip
#: Fields of what a relay has none of: legs of a split, a gateway's choice, a share of the instances.
OF_ONE_PROCESS = {"splittable", "subset", "preferred", "preferred_within"}


def test_a_request_of_these_tests_has_every_field() -> None:
    """A field that stands at its default would come as it went though it is not sent."""
    default = Request(0, "", 0)
    for each in dataclasses.fields(Request):
        same = getattr(REQUEST, each.name) == getattr(default, each.name)
        assert same == (each.name in OF_ONE_PROCESS), each.name


def test_a_request_comes_as_it_went() -> None:
    arrival = arrival_of(REQUEST, None)
    [read] = FROM_RELAY.decode(msgspec.msgpack.encode([arrival]))
    assert isinstance(read, Arrival)
    assert read.request.request() == REQUEST


def test_live_leases_come_as_they_went() -> None:
    live = WireBooked(3, "i0", RequestFacts.of(REQUEST), 10**9, 20.5, 1.5, True)
    hello = Hello(2, 7, 2, [LiveRequest(live, "o")])
    assert FROM_RELAY.decode(msgspec.msgpack.encode([hello])) == [hello]


def test_fields_may_be_appended_within_a_version() -> None:
    newer = msgspec.msgpack.encode([[5, 1, 2, True, 0.5, "new"]])
    assert FROM_RELAY.decode(newer) == [Refused(1, 2, True, 0.5)]


@pytest.mark.parametrize(
    "messages", [[[99, 1]], [[3, 1, [2, 2, "unheard of", 3, None]]], [[3, 1, [0, 1]]], [[5, 1]], {}, 1]
)
def test_what_is_no_message_is_refused(messages: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        FROM_RELAY.decode(msgspec.msgpack.encode(messages))


def test_every_message_is_described() -> None:
    text = DOCS.read_text()
    described = {
        (int(tag), name) for tag, name in re.findall(r"^\| (\d+) \| `([A-Z]\w+)` \|", text, re.MULTILINE)
    }
    kinds = (*get_args(FromRelay), *get_args(FromScheduler))
    assert described == {(kind.__struct_config__.tag, kind.__name__) for kind in kinds}


@given(
    st.lists(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), max_size=40),
)
def test_batches_arrive_whole_however_they_are_cut(batches: list[list[int]], cuts: list[int]) -> None:
    sent = [[LeaseChange(number, WireEnded(1, Outcome.OK, 2, None)) for number in batch] for batch in batches]
    data = b"".join(
        len(frame).to_bytes(4) + frame for frame in (msgspec.msgpack.encode(batch) for batch in sent)
    )
    received: list[Any] = []

    async def feed() -> None:
        channel: MessageChannel[FromRelay] = MessageChannel(FROM_RELAY, received.append, lambda: None)
        at = 0
        for cut in [*cuts, len(data)]:
            channel.data_received(data[at : at + cut])
            at += cut

    asyncio.run(feed())
    assert received == sent


async def test_what_is_sent_in_one_turn_is_one_frame_and_garbage_closes_the_channel() -> None:
    ours, theirs = socket.socketpair()
    received: list[list[Any]] = []
    news, closed = asyncio.Event(), asyncio.Event()

    def receive(messages: list[Any]) -> None:
        received.append(messages)
        news.set()

    one: MessageChannel[FromScheduler] = MessageChannel(FROM_SCHEDULER, lambda messages: None, lambda: None)
    other: MessageChannel[FromRelay] = MessageChannel(FROM_RELAY, receive, closed.set)
    await one.open(ours)
    await other.open(theirs)
    one.send(Refused(1, 1, True, 0.5))
    one.send(Refused(2, 2, True, 0.5))
    await news.wait()
    assert received == [[Refused(1, 1, True, 0.5), Refused(2, 2, True, 0.5)]]
    one.send(Hello(1, "seven", 0, []))  # type: ignore[arg-type]
    async with asyncio.timeout(HANG_S):
        await closed.wait()
    one.close()
