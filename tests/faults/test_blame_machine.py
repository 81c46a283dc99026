"""No client behaviour alone changes the health of an instance: a state machine over a whole proxy in memory.

The engines are well. They answer every request, at their own pace, and give up a connection that is not read
for `GIVES_UP_S`, as servers and balancers do. Clients do whatever they like: send pieces, stop reading,
leave, close one side, ask for streams and read nothing, send nonsense. Minutes pass at once.
"""

from __future__ import annotations

import os

from helpers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from proxy.memory import End, Proxy

from hetlb.balancer.core.types import Health
from hetlb.tools.sim.integrity import check_scheduler

#: Examples of the property; `BLAME_EXAMPLES=10000` runs it at length.
EXAMPLES = int(os.environ.get("BLAME_EXAMPLES", examples(40)))
GIVES_UP_S = 45.0
TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":"%b"}]}\n\n'
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class WellEngine(End):
    """An engine that answers whole requests one after the other."""

    slow_s = 0.0
    token = b"x"

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        while (end := self.got.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.got[:end]).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r")[0] or b"0")
            if len(self.got) < end + 4 + length:
                return
            body = bytes(self.got[end + 4 : end + 4 + length])
            del self.got[: end + 4 + length]
            assert self.transport is not None
            self.transport._loop.call_later(self.slow_s, self.answer, body)

    def answer(self, body: bytes) -> None:
        """Answer one request."""
        if b'"bad"' in body:
            text = b'{"error":{"message":"no","code":400}}'
            self.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        elif b'"bad-in-stream"' in body:
            self.send(SSE_HEAD)
            self.chunks([b'data: {"error":{"message":"no","code":400}}\n\n', b"data: [DONE]\n\n"])
        elif b'"stream":true' in body:
            self.send(SSE_HEAD)
            self.chunks([TOKEN % self.token] * 20 + [b"data: [DONE]\n\n"])
        else:
            text = b'{"choices":[{"text":"' + self.token + b'"}]}'
            self.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))

    def chunks(self, left: list[bytes], since: float | None = None) -> None:
        """Send what is left of a stream, a chunk each second while it is read."""
        transport = self.transport
        if transport is None or self.closed:
            return
        loop = transport._loop
        if transport._paused:
            since = loop.time() if since is None else since
            if loop.time() - since > GIVES_UP_S:
                self.leave()
                return
        else:
            since = None
            if not left:
                self.send(b"0\r\n\r\n")
                return
            self.send(b"%x\r\n%b\r\n" % (len(left[0]), left[0]))
            left = left[1:]
        loop.call_later(1.0, self.chunks, left, since)


class SlowEngine(WellEngine):
    """One that takes a minute to begin, and sends much at a time."""

    slow_s = 60.0
    token = b"y" * 30_000


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/audio/transcriptions", "/nothing")
BODIES = (
    b'{"model":"m","prompt":"x","stream":true}',
    b'{"model":"m","prompt":"x"}',
    b'{"model":"m","prompt":"bad"}',
    b'{"model":"m","prompt":"bad-in-stream","stream":true}',
    b'{"model":"m","prompt":"%b","stream":true}' % (b"p" * 200_000),
    b'{"model":"other"}',
    b"{",
)


def message(path: str, body: bytes, chunked: bool) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: p\r\n"
    if chunked:
        return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (
            len(body),
            body,
        )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class BlameMachine(RuleBasedStateMachine):
    """Clients of two engines that are well."""

    @initialize(
        idle_s=st.sampled_from((5.0, 70.0, 1000.0)),
        heartbeat_s=st.sampled_from((0.0, 3.0)),
    )
    def start(self, idle_s: float, heartbeat_s: float) -> None:
        self.proxy = Proxy(
            WellEngine, SlowEngine, idle_timeout_s=idle_s, heartbeat_s=heartbeat_s,
            write_timeout_s=120.0, body_timeout_s=60.0,
        )  # fmt: skip
        self.clients: list[End] = []

    def pick(self, data: st.DataObject) -> End:
        return data.draw(st.sampled_from(self.clients))

    @rule(reading=st.booleans())
    def connect(self, reading: bool) -> None:
        if len(self.clients) < 12:
            self.clients.append(self.proxy.client())
            self.clients[-1].reading = reading

    @precondition(lambda self: self.clients)
    @rule(
        data=st.data(), path=st.sampled_from(PATHS), body=st.sampled_from(BODIES), chunked=st.booleans(),
        times=st.integers(1, 6),
    )  # fmt: skip
    def ask(self, data: st.DataObject, path: str, body: bytes, chunked: bool, times: int) -> None:
        self.pick(data).send(message(path, body, chunked) * times)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), path=st.sampled_from(PATHS), body=st.sampled_from(BODIES), part=st.floats(0, 1))
    def ask_in_part(self, data: st.DataObject, path: str, body: bytes, part: float) -> None:
        whole = message(path, body, False)
        self.pick(data).send(whole[: int(part * len(whole))])

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), junk=st.one_of(st.binary(max_size=40), st.just(b"\r\n" * 50)))
    def send_junk(self, data: st.DataObject, junk: bytes) -> None:
        self.pick(data).send(junk)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), reading=st.booleans())
    def read(self, data: st.DataObject, reading: bool) -> None:
        self.pick(data).set_reading(reading)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.pick(data)
        self.clients.remove(client)
        client.leave()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def close_the_sending_side(self, data: st.DataObject) -> None:
        client = self.pick(data)
        assert client.transport is not None
        if not client.transport._gone:
            client.transport._protocol.eof_received()

    @rule(seconds=st.sampled_from((0.0, 0.3, 2.0, 10.0, 60.0, 130.0)))
    def time_passes(self, seconds: float) -> None:
        self.proxy.loop.turn(seconds)

    @invariant()
    def every_instance_is_as_well_as_it_was(self) -> None:
        if not hasattr(self, "proxy"):
            return
        self.proxy.loop.settle(2)
        now = self.proxy.loop.time()
        for instance in self.proxy.scheduler.instances:
            known = instance.evidence
            assert known.health.state is Health.UP, f"{instance.name}: {known.health.reason}"
            assert not known.answers.doubted, f"{instance.name}: {known.why(now)}"
            assert known.health.clean, f"{instance.name} is held to have failed"
        self.clients = [each for each in self.clients if not each.closed]

    def teardown(self) -> None:
        if not hasattr(self, "proxy"):
            return
        for client in self.clients:
            client.leave()
        self.proxy.loop.turn(3.0)
        check_scheduler(self.proxy.scheduler)
        assert self.proxy.scheduler.in_flight == 0
        assert not self.proxy.driver.exchanges
        assert not self.proxy.server.connections
        assert self.proxy.server.held_bytes == 0
        self.proxy.close()
        del self.proxy, self.clients


def test_no_client_behaviour_alone_changes_the_health_of_an_instance() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        BlameMachine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=30,
        ),
    )  # fmt: skip
