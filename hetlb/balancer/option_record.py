"""Options: parts that only some fleets use. The command that serves hands them over in one record.

A field is called when a key of the fleet file, a flag or a request asks for its option. The types of what
comes back stand here, or with their base classes in the balancer; `hetlb/cli/serving_options.py` fills the
record.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet
    from hetlb.balancer.config.fleet_tables import (
        DiscoveryTable,
        KvEventsTable,
        TracingTable,
    )
    from hetlb.balancer.core.block_index import KvEventBatch
    from hetlb.balancer.core.facts import InstanceChange
    from hetlb.balancer.core.fleet_state import SchedulerSetup
    from hetlb.balancer.core.placement import Splitting
    from hetlb.balancer.core.scheduler import Scheduler
    from hetlb.balancer.engines.engine_pools import EnginePools
    from hetlb.balancer.exchange.driver import Driver, Handshake, MakeSplits
    from hetlb.balancer.exchange.exchange import EngineRequest, Maker
    from hetlb.balancer.fleet.shared_fleet import SleepWatch
    from hetlb.balancer.fleet.source import Source
    from hetlb.balancer.http.endpoints import Kind
    from hetlb.balancer.http.http1 import RequestHead
    from hetlb.balancer.http.openai_body import Call
    from hetlb.balancer.telemetry.request_record import RequestRecord, RequestSpans
    from hetlb.systemd import Listeners

    #: Makes the maker of one request's attempts; the answer may go on at another instance.
    Resumption: TypeAlias = Callable[[Kind, Call, EngineRequest], Maker]


class SpanMaker(Protocol):
    """Maker and sender of spans."""

    def begin(self, traceparent: bytes | None) -> RequestSpans: ...
    def finished(self, record: RequestRecord, now_s: float) -> None: ...
    def close(self) -> None: ...


class SchedulerLog(Protocol):
    """File of the scheduler's facts and decisions."""

    lost: int
    on_lost: Callable[[str], object]

    def scheduler(self, setup: SchedulerSetup, splitting: Callable[[Scheduler], Splitting]) -> Scheduler: ...
    def close(self) -> None: ...


class CacheReports(Protocol):
    """Reader of the KV events of engines."""

    def set(self, name: str, table: KvEventsTable | None) -> None: ...
    async def close(self) -> None: ...


class Predecessor(Protocol):
    """Listeners and view of the process that this one replaces."""

    #: Socket to the process that this one replaces.
    end: socket.socket
    listeners: Listeners
    folder: Path | None

    async def accepting(self) -> None: ...
    def close(self) -> None: ...


class Successor(Protocol):
    """Wait for a process that replaces this one."""

    def open(self, address: tuple[str, int]) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """One callable for each option; it imports the option, and returns what the balancer asks for."""

    #: Decisions about requests of two legs, for a scheduler with instances that transfer their KV cache.
    splitting: Callable[[Scheduler], Splitting]
    #: Maker of the attempts of such requests.
    splits: MakeSplits
    #: Answers that go on at another instance.
    resumption: Callable[[Driver], Resumption]
    #: Request for a WebSocket, from head and body; True if clients need no key. Raises `GateError`.
    handshake: Callable[[Driver, RequestHead, bytes, bool], Handshake]
    #: Spans of requests.
    spans: Callable[[TracingTable], SpanMaker]
    #: File of the scheduler's facts and decisions.
    event_log: Callable[[Path], SchedulerLog]
    #: Sources of instances that stand in no fleet file. Raises `ConfigError`.
    sources: Callable[[Fleet, DiscoveryTable], Sequence[Source]]
    #: Sources of the priorities of requests by the name of their objective.
    objectives: Callable[[Fleet, DiscoveryTable, Callable[[Mapping[str, int]], None]], Sequence[Source]]
    #: Reader of KV events, which go to a callback with the name of their instance.
    cache_reports: Callable[[Callable[[str, KvEventBatch], None]], CacheReports]
    #: Sleep and wake of instances: told to the scheduler, over the pools of the engines.
    sleep_watch: Callable[[Scheduler, Callable[[InstanceChange], None], EnginePools], SleepWatch]
