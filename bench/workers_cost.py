"""Cost of a scheduler in a process of its own: CPU and latency of a request between a relay and it.

`python bench/workers_cost.py [--instances 2] [--policy hetlb] [--rounds 5]` gives a scheduler 10,000
requests, each with its arrival, its first token and its end, without HTTP: by calls in one process, and
through the protocol between two processes, 1, 8 and 32 requests outstanding at a time. Prints microseconds of
CPU per request on each side, and from an arrival to its dispatch at p50; medians over the rounds. The
interpreter it is run with decides which build is measured; both processes run on the core `--core`, or where
the kernel puts them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

import uvloop

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.setup import SchedulerSetup
from hetlb.balancer.core.types import Capacity, Dispatch, Health, InstanceSpec, Lease, Outcome, Request
from hetlb.build import compiled
from hetlb.options.lease_wire import WireBegun, WireEnded
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays import protocol
from hetlb.options.relays.protocol import (
    FROM_RELAY,
    FROM_SCHEDULER,
    FromRelay,
    FromScheduler,
    Hello,
    LeaseChange,
)
from hetlb.options.relays.relay_driver import ID_BITS, arrival_of
from hetlb.options.relays.relay_host import RelayHost, RelayLink

REQUESTS = 10_000
OUTSTANDING = (1, 8, 32)
_LIFE = 1
_ENGINE = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="hetlb")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    capacity = Capacity(kv_cache_tokens=160_000, kv_tokens_per_request=32_768, max_num_seqs=256)
    names = [f"i{number}" for number in range(args.instances)]
    setup = SchedulerSetup(
        tuple(InstanceSpec(name, "m", latency=_ENGINE, capacity=capacity) for name in names),
        args.policy,
        initial_health=Health.UP,
    )
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for _ in range(args.rounds):
        for outstanding in OUTSTANDING:
            found.setdefault(("calls", outstanding), []).append(_calls(setup, outstanding))
            found.setdefault(("protocol", outstanding), []).append(_two_processes(setup, outstanding))
    print(f"{'compiled' if compiled() else 'interpreted'}, {args.policy}, {args.instances} instances")
    for (name, outstanding), rounds in sorted(found.items(), key=lambda item: item[0][1]):
        middle = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{name:9s} {outstanding:2d} outstanding: {_line(name, middle)}")
    return 0


def _line(name: str, figures: list[float]) -> str:
    if name == "calls":
        return f"{figures[0]:6.2f} us CPU, decision p50 {figures[1]:6.1f} us"
    relay, scheduler, wall, latency = figures
    return (
        f"{relay + scheduler:6.2f} us CPU (relay {relay:.2f}, scheduler process {scheduler:.2f}), "
        f"{wall:.1f} us of wall, dispatch p50 {latency:6.1f} us"
    )


def _request(number: int) -> Request:
    return Request(id=number, model="m", prompt_tokens=70, max_tokens=64)


def _calls(setup: SchedulerSetup, outstanding: int) -> tuple[float, ...]:
    """CPU per request of a scheduler in this process, and the time of a decision (us)."""
    scheduler, leases, now = Scheduler(setup), deque[Lease](), 1.0
    took: list[float] = []
    started = time.process_time()
    for number in range(REQUESTS):
        if len(leases) >= outstanding:
            lease = leases.popleft()
            lease.output_tokens = 60
            scheduler.on_first_token(lease, now)
            scheduler.on_lease_ended(lease, Outcome.OK, now)
        now += 3e-5
        began = time.perf_counter()
        (command,) = scheduler.on_arrival(_request(number), now)
        took.append(time.perf_counter() - began)
        assert isinstance(command, Dispatch), f"expected a dispatch, got {command}"
        leases.append(command.lease)
    return (time.process_time() - started) / REQUESTS * 1e6, statistics.median(took) * 1e6


def _two_processes(setup: SchedulerSetup, outstanding: int) -> tuple[float, ...]:
    """CPU per request of the relay and of the scheduler process, wall, p50 from arrival to dispatch (us)."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        ours.close()
        os.write(writer, repr(uvloop.run(_schedule(setup, theirs))).encode())
        os._exit(0)
    theirs.close()
    os.close(writer)
    relay = uvloop.run(_Relay(outstanding).run(ours))
    os.waitpid(pid, 0)
    scheduler = float(os.read(reader, 100))
    os.close(reader)
    return relay[0], scheduler / REQUESTS * 1e6, *relay[1:]


async def _schedule(setup: SchedulerSetup, end: socket.socket) -> float:
    """Be the scheduler process until the relay is gone; the CPU it took (s)."""
    loop = asyncio.get_running_loop()
    host = RelayHost(Scheduler(setup), loop, lambda at_once: None)
    link, gone = RelayLink(_LIFE, 0), asyncio.Event()
    receive: Callable[[list[FromRelay]], None] = lambda messages: host.receive(link, messages)  # noqa: E731
    link.channel = MessageChannel(FROM_RELAY, receive, gone.set)
    await link.channel.open(end)
    host.connected(link)
    started = time.process_time()
    await gone.wait()
    took = time.process_time() - started
    host.close()
    return took


class _Relay:
    """The other end: requests without clients or engines."""

    def __init__(self, outstanding: int) -> None:
        self._outstanding = outstanding
        self._sent: dict[int, float] = {}
        self._latencies: list[float] = []
        self._next = (_LIFE << ID_BITS) + 1
        self._left = REQUESTS
        self._done = asyncio.Event()

    async def run(self, end: socket.socket) -> tuple[float, ...]:
        """CPU per request, wall per request, p50 from arrival to dispatch (us)."""
        self._channel: MessageChannel[FromScheduler] = MessageChannel(
            FROM_SCHEDULER, self._receive, lambda: None
        )
        await self._channel.open(end)
        self._channel.send(Hello(protocol.VERSION, _LIFE, 0, []))
        started, wall = time.process_time(), time.perf_counter()
        for _ in range(self._outstanding):
            self._arrive()
        await self._done.wait()
        cpu, wall = time.process_time() - started, time.perf_counter() - wall
        self._channel.close()
        return cpu / REQUESTS * 1e6, wall / REQUESTS * 1e6, statistics.median(self._latencies) * 1e6

    def _arrive(self) -> None:
        number, self._next = self._next, self._next + 1
        self._sent[number] = time.perf_counter()
        self._channel.send(arrival_of(_request(number), None))

    def _receive(self, messages: list[FromScheduler]) -> None:
        now = time.perf_counter()
        for message in messages:
            if not isinstance(message, protocol.DispatchMessage):
                continue
            self._latencies.append(now - self._sent.pop(message.request))
            self._channel.post(LeaseChange(message.request, WireBegun(message.lease)))
            ended = WireEnded(message.lease, Outcome.OK, 60, None)
            self._channel.post(LeaseChange(message.request, ended))
            self._left -= 1
            if not self._left:
                self._done.set()
            elif self._next < (_LIFE << ID_BITS) + 1 + REQUESTS:
                self._arrive()


if __name__ == "__main__":
    sys.exit(main())
