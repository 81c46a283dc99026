"""Interfaces of the options' results for the balancer; types alone, imported by nothing that runs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.option_interfaces import PromptBlocks
from hetlb.balancer.core.prefix_index import PrefixKey
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.setup import SchedulerSetup
from hetlb.balancer.core.types import Capacity, Command, EngineSample, Request
from hetlb.balancer.exchange.scheduler_side import SchedulerSide
from hetlb.balancer.http.http1 import RequestHead
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.systemd import Listeners


class KeyTicket(Protocol):
    """Reservation of a request against the limits of its key (`api_keys.limits`)."""

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None: ...
    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None: ...
    def headers(self, now: float) -> bytes: ...


class BrowserPages(Protocol):
    """Pages of other origins that may read answers (`browsers`)."""

    def lines(self, head: RequestHead) -> bytes: ...
    def permission(self, head: RequestHead) -> bytes: ...


class ClientAddresses(Protocol):
    """Addresses of clients behind trusted proxies (`client_addresses`)."""

    def of(self, head: RequestHead, peer: str) -> str: ...


class RequestSpans(Protocol):
    """Ids of the spans of one request (`tracing`), which writes them to the head for the engine."""

    def onto(self, lines: bytes) -> bytes: ...


class SpanMaker(Protocol):
    """Maker and sender of spans (`tracing`)."""

    def begin(self, traceparent: bytes | None) -> RequestSpans: ...
    def finished(self, record: RequestRecord, now_s: float) -> None: ...
    def close(self) -> None: ...


class SharedBookings(Protocol):
    """Bookings of this scheduler and of its peers (`shared_view`)."""

    def on_arrival(self, request: Request, now: float) -> list[Command]: ...


class OtherNames(Protocol):
    """Names that clients may use besides the engines' own (`model_names`)."""

    @property
    def aliases(self) -> Mapping[str, str]: ...
    def served(self, asked: str, available: Callable[[str], bool]) -> str: ...
    def entries(self, models: list[dict[str, Any]]) -> list[dict[str, Any]]: ...
    def rename(self, call: Call, model: str) -> bytes: ...


#: Keys and blocks of a request's prompts, by its head, call, model, owner, header of sessions and scheduler
#: (`prefix_keys`).
PromptKeys: TypeAlias = Callable[
    [RequestHead, Call, str, str | None, bytes, SchedulerSide],
    tuple[tuple[PrefixKey, ...], PromptBlocks | None],
]


class RequestClasses(Protocol):
    """Service classes of requests, by model (`classes`)."""

    def background(self, model: str, allowed: Sequence[str] | None) -> str | None: ...
    def of(self, model: str, head: RequestHead, allowed: Sequence[str] | None) -> ServiceClass: ...


class EngineProfile(Protocol):
    """Facts of a latency profile (`profiles`)."""

    @property
    def latency(self) -> LatencyModel: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def host_assumed(self) -> bool: ...
    @property
    def kv_bytes_per_token(self) -> int | None: ...
    def differences(self, entries: Sequence[Mapping[str, Any]], version: str | None) -> Iterator[str]: ...


class HostMeasurements(Protocol):
    """Measurement of the host time of idle instances (`profiles.host_times`)."""

    def wanted(self, instance: Instance) -> bool: ...
    async def measure(self, instance: Instance) -> None: ...


class SchedulerLog(Protocol):
    """File of facts and decisions (`event_log`)."""

    lost: int

    def scheduler(self, setup: SchedulerSetup) -> Scheduler: ...
    def close(self) -> None: ...


class EndedLately(Protocol):
    """Requests that ended lately, for pages (`recent`)."""

    def finished(self, record: RequestRecord) -> None: ...


class MetricsReader(Protocol):
    """Reader of one metrics page of an engine, at one of `paths` (`engine_pages`)."""

    @property
    def paths(self) -> tuple[str, ...]: ...
    def feed(self, data: bytes) -> None: ...
    def sample(self) -> EngineSample: ...


class FoundInstances(Protocol):
    """Sources of instances that stand in no file, while they run (`source`)."""

    async def start(self, most_s: float) -> None: ...
    async def close(self) -> None: ...


class FleetMembers(Protocol):
    """Instances of the roster that stand in no file, by their sources (`members`)."""

    def found(self, source: str, servers: Sequence[Any]) -> None: ...
    async def register(self, table: Mapping[str, Any]) -> bool: ...
    async def settled(self) -> None: ...
    def refresh(self) -> None: ...
    def gone(self, name: str) -> None: ...
    def close(self) -> None: ...


class Predecessor(Protocol):
    """Listeners and leases of the process that this one replaces (`takeover`)."""

    #: Socket to the process that this one replaces.
    end: socket.socket
    listeners: Listeners

    async def begin(self, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> None: ...
    async def accepting(self) -> None: ...
    def close(self) -> None: ...


class Successor(Protocol):
    """Wait for a process that replaces this one (`takeover`)."""

    def open(self, address: tuple[str, int]) -> None: ...
    async def close(self) -> None: ...


class CacheReports(Protocol):
    """Reader of the KV events of engines (`kv_events`)."""

    def set(self, name: str, stated: Any) -> None: ...
    async def close(self) -> None: ...
