"""Relays and the scheduler process that speak at the same time: each request is answered once."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import msgspec
from helpers import examples, make_scheduler, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Outcome
from hetlb.options.lease_wire import WireBegun, WireBooked, WireEnded
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays import protocol
from hetlb.options.relays.protocol import (
    FROM_RELAY,
    FROM_SCHEDULER,
    Cancelled,
    Hello,
    LeaseChange,
    LiveRequest,
    RelayMessage,
)
from hetlb.options.relays.relay_driver import ID_BITS, arrival_of
from hetlb.options.relays.relay_host import RelayHost, RelayLink
from hetlb.tools.sim.integrity import check_scheduler

ENDS = [Outcome.OK, Outcome.CLIENT_GONE, Outcome.BROKEN_STREAM, Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE]


def ended(
    number: int, lease: protocol.DispatchMessage, outcome: Outcome, tokens: int = 9, *, retry: bool = False
) -> LeaseChange:
    return LeaseChange(number, WireEnded(lease.lease, outcome, tokens, None), retry)


class Wire(asyncio.Transport):
    """The transport of a link's channel: messages on their way to the relay, encoded."""

    def __init__(self) -> None:
        super().__init__()
        self._down: deque[Any] = deque()
        self.channel = MessageChannel(FROM_RELAY, lambda messages: None, lambda: None)
        self.channel.connection_made(self)

    @property
    def down(self) -> deque[Any]:
        """Messages of whole frames that the relay has not read."""
        self.channel.flush()
        return self._down

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._down += FROM_SCHEDULER.decode(memoryview(data)[4:])

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self._down.clear()


class Relay:
    """A relay as docs/workers.md has it: requests that wait (None) or have a lease, and both directions."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.open: dict[int, protocol.DispatchMessage | None] = {}
        self.begun: set[int] = set()
        self.asked: set[int] = set()
        self.answered: set[int] = set()
        self.next = (life << ID_BITS) + 1
        self.up: deque[RelayMessage] = deque()
        self.wire = Wire()
        self.link = RelayLink(life, life)

    def connect(self, host: RelayHost) -> None:
        """Begin a channel: what was on the way is lost."""
        self.up.clear()
        self.wire = Wire()
        self.link = RelayLink(self.life, self.life)
        self.link.channel = self.wire.channel
        self.asked.clear()
        host.connected(self.link)
        live = [
            LiveRequest(
                WireBooked(
                    lease.lease, lease.instance, self.arrival(number).request, lease.work_ns,
                    lease.predicted_output, 0.5, number in self.begun,
                ),
                None,
            )
            for number, lease in self.open.items()
            if lease is not None
        ]  # fmt: skip
        self.up.append(Hello(protocol.VERSION, self.life, 0, live))
        self.up += [self.arrival(number) for number, lease in self.open.items() if lease is None]

    def arrival(self, number: int) -> protocol.Arrival:
        return arrival_of(request(number, prompt=900), None)

    def arrive(self) -> None:
        number, self.next = self.next, self.next + 1
        self.open[number] = None
        self.up.append(self.arrival(number))

    def finish(self, number: int) -> None:
        assert number not in self.answered, "answered twice"
        self.answered.add(number)
        self.asked.discard(number)
        del self.open[number]

    def act(self, rng: random.Random) -> None:
        """Something happens to a request."""
        if not self.open:
            return
        number = rng.choice(sorted(self.open))
        lease = self.open[number]
        kind = rng.randrange(5)
        if lease is None:
            if kind == 0:
                self.finish(number)
                self.up.append(Cancelled(number))
        elif kind == 0 and number not in self.asked:
            self.begun.add(number)
            self.up.append(LeaseChange(number, WireBegun(lease.lease)))
        elif kind == 1 and number not in self.asked and number not in self.begun:
            self.asked.add(number)
            self.up.append(protocol.Refused(number, lease.lease, rng.random() < 0.5, rng.choice((5.0, None))))
        elif kind == 2 and number not in self.asked and number not in self.begun:
            self.open[number] = None
            self.up.append(ended(number, lease, rng.choice(ENDS[3:]), 0, retry=True))
        elif kind > 2:
            self.finish(number)
            self.up.append(ended(number, lease, rng.choice(ENDS[:3])))

    def receive(self, message: Any) -> None:
        if isinstance(message, protocol.DispatchMessage):
            if message.request not in self.open:
                return
            assert self.open[message.request] is None or message.request in self.asked
            self.asked.discard(message.request)
            self.open[message.request] = message
        elif isinstance(message, protocol.Rejected):
            if message.request in self.open:
                assert self.open[message.request] is None
                self.finish(message.request)
        elif isinstance(message, protocol.PassOnMessage):
            self.asked.discard(message.request)


class World:
    """Relays, a host, and messages that are on their way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.clock = 0.0
        self.lives = 0
        self.relays: list[Relay] = []
        self.host = self.begin()
        for _ in range(2):
            self.join()

    def begin(self) -> RelayHost:
        scheduler = make_scheduler(
            [spec("a", kv=4000), spec("b", kv=2000)],
            "hetlb",
            limits=QueueLimits(max_requests=4),
            now=self.clock,
        )
        host = RelayHost(scheduler, self.loop, lambda at_once: None)
        host.now = lambda: self.clock
        return host

    def join(self) -> None:
        self.lives += 1
        self.relays.append(Relay(self.lives))
        self.relays[-1].connect(self.host)

    def step(self) -> None:
        self.clock += self.rng.random() / 5
        kind, relay = self.rng.randrange(40), self.rng.choice(self.relays)
        if kind == 0:  # a relay dies, and another comes
            self.relays.remove(relay)
            self.host.disconnected(relay.link)
            self.join()
        elif kind == 1:  # the scheduler process dies, and another comes
            self.host.close()
            self.host = self.begin()
            self.host.expect(relay.life for relay in self.relays)
            for each in self.relays:
                each.connect(self.host)
        elif kind < 12:
            relay.arrive()
        elif kind < 22:
            relay.act(self.rng)
        elif kind < 31:
            self.deliver_up(relay)
        else:
            self.deliver_down(relay)
        check_scheduler(self.host.scheduler)

    def deliver_up(self, relay: Relay) -> None:
        count = self.rng.randrange(1, 4)
        messages = [relay.up.popleft() for _ in range(min(count, len(relay.up)))]
        if messages:
            self.host.receive(relay.link, FROM_RELAY.decode(msgspec.msgpack.encode(messages)))

    def deliver_down(self, relay: Relay) -> None:
        if relay.wire.down:
            relay.receive(relay.wire.down.popleft())

    def settle(self) -> None:
        """Everything arrives, and whatever has a lease ends well."""
        while any(relay.up or relay.wire.down or relay.open for relay in self.relays):
            self.clock += 1.0
            for relay in self.relays:
                self.deliver_up(relay)
                self.deliver_down(relay)
                for number, lease in list(relay.open.items()):
                    if lease is not None and number not in relay.asked and not relay.wire.down:
                        relay.finish(number)
                        relay.up.append(ended(number, lease, Outcome.OK))
            self.host.scheduling.carry_out(self.host.scheduler.on_tick(self.clock))


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_and_nothing_is_left(seed: int) -> None:
    asyncio.run(play(seed))


async def play(seed: int) -> None:
    """Drive relays and a host by hand; the loop has no turn of its own meanwhile."""
    world = World(random.Random(seed))
    for _ in range(300):
        world.step()
    world.settle()
    scheduler = world.host.scheduler
    check_scheduler(scheduler)
    assert scheduler.in_flight == len(scheduler.queue) == 0
    assert not world.host._open
    for instance in scheduler.instances:
        assert (instance.work_ns, instance.kv_tokens, instance.in_flight) == (0, 0, 0)
    for relay in world.relays:
        assert len(relay.answered) == (relay.next & ((1 << ID_BITS) - 1)) - 1
    world.host.close()
