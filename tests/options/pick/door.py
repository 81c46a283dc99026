"""The picker's door without gRPC and sockets: messages as grpcio hands them on."""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from helpers import make_scheduler, spec
from options.pick.frames import message
from options.pick.gateway import body_of, request_headers, response_headers
from proxy.memory import Loop
from proxy.upstreams import PLAIN_BODY

from hetlb.balancer.clients.router import Router
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import PickTable, ProxyTable
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.types import Health
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.pick.calls import receive
from hetlb.options.pick.envoy_fields import MAX_NAMES, MalformedMessage
from hetlb.options.pick.messages import STREAMED
from hetlb.options.pick.pick_driver import PickDriver
from hetlb.options.pick.stream import HttpStream, PickerState
from hetlb.tools.sim.integrity import check_scheduler

#: The messages of a request and its answer, as Envoy sends them.
HEADERS = request_headers(STREAMED).SerializeToString()
BODY = body_of("request_body", b'{"model":"m","prompt":"x"}').SerializeToString()
ANSWER = response_headers().SerializeToString()
ANSWER_BODY = body_of("response_body", PLAIN_BODY).SerializeToString()


class _View:
    """A fleet that serves one model."""

    def routable(self) -> bool:
        return True

    def models(self) -> list[str]:
        return ["m"]


class Door:
    """A picker over one instance."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler([spec("i0")], "hetlb")
        self.loop = Loop()
        self.driver = PickDriver(
            self.scheduler, ProxyTable(), TokenEstimator(), self.loop, {}, OPTIONS.splits
        )
        self.state = PickerState(self.driver, Router(self.driver, _View(), OPTIONS), PickTable(), {})  # type: ignore[arg-type]
        self.state.set_addresses({"i0": "127.0.0.1:1"})
        self.sent: list[bytes] = []

    def call(self, messages: list[bytes]) -> HttpStream:
        """A stream that got these messages, until it is over or one is refused."""
        self.sent = []
        stream = HttpStream(self.state, self.sent.append)
        for data in messages:
            if stream.over:
                break
            try:
                receive(stream, data)
            except (DecodeError, MalformedMessage):
                break
            assert len(self.driver.exchanges) <= 1, "a stream has two requests"
            assert self.scheduler.in_flight <= 1, "a stream has two leases"
        return stream

    def check(self, messages: list[bytes]) -> None:
        """Whatever the messages are, nothing of them is left."""
        stream = self.call(messages)
        stream.closed()
        self.driver.settle()
        assert not self.driver.exchanges
        assert not self.driver.streams
        assert self.scheduler.in_flight == 0
        assert len(self.scheduler.queue) == 0
        assert self.state.held_bytes == 0
        assert len(self.state.tenants) <= MAX_NAMES
        check_scheduler(self.scheduler)
        # Nothing of one input is to be held against the next.
        instance = self.scheduler.instances[0]
        instance.evidence = Evidence(random.Random(0), 0.0, Health.UP)


def messages_of(data: bytes) -> list[bytes]:
    """Messages as gRPC sends them, each after five bytes; what is left over is the last."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at + 1 : at + 5], "big")
        found.append(data[at + 5 : at + 5 + size])
        at += 5 + size
    return found


def written(messages: list[bytes]) -> bytes:
    """The other way."""
    return b"".join(map(message, messages))
