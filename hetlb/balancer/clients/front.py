"""The side of a serving process that clients meet: the listener, the request log, spans, ended requests."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from hetlb.balancer.clients.access import Access
from hetlb.balancer.clients.router import Router
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.telemetry.access_log import FORMATS
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.logs import LogWriter

if TYPE_CHECKING:
    from hetlb.balancer.option_record import Options, SpanMaker


class Listener(Protocol):
    """Interface of the listener of a process that serves: of clients, or of a gateway (`pick.server`)."""

    router: Router

    @property
    def certificates(self) -> Sequence[object | None]: ...
    @property
    def connections(self) -> Collection[object]: ...
    def configure(self, table: ProxyTable, access: Access) -> None: ...
    @property
    def descriptors(self) -> list[int]: ...
    async def start(
        self, host: str, port: int, sockets: Sequence[socket.socket] = (), number: int = 0
    ) -> tuple[str, int]: ...
    def leave(self) -> None: ...
    def stop_accepting(self) -> None: ...
    async def close(self) -> None: ...


class Front:
    """The listener over `driver`, and the records of ended requests."""

    def __init__(
        self, driver: Driver, server: Listener, fleet: Fleet, access: Access, options: Options
    ) -> None:
        self._driver = driver
        self._fleet = fleet
        self.server = server
        driver.on_ended = self._requests_ended
        self._apply(fleet, access)
        table = fleet.file.tracing
        self._tracing: SpanMaker | None = None if table is None else options.spans(table)
        self.server.router.tracing = self._tracing
        self._lines: LogWriter | None = None
        self._write_line: Callable[[RequestRecord, float], str] | None = None
        if fleet.file.proxy.request_log:
            self._write_line = FORMATS[fleet.file.proxy.request_log_format]

    def open_log(self, at_once: int | None = None) -> None:
        """Begin the request log, if the fleet wants one. `at_once`: see `LogWriter`."""
        if self._write_line is not None:
            self._lines = LogWriter(sys.stderr.fileno(), "request log", at_once)
            self._lines.on_lost = self._driver.log_lost

    @property
    def lost_lines(self) -> int:
        """Lines of the request log that a slow reader or a full disk made us drop."""
        return 0 if self._lines is None else self._lines.lost

    def configure(self, fleet: Fleet, access: Access) -> None:
        self._driver.configure(fleet.file.proxy)
        self._apply(fleet, access)

    def _apply(self, fleet: Fleet, access: Access) -> None:
        self.server.configure(fleet.file.proxy, access)
        router = self.server.router
        router.names = router.classes = None
        if any(each.aliases or each.fallback or each.canary for each in fleet.written.models):
            from hetlb.balancer.clients.model_names import ModelNames

            router.names = ModelNames.of(fleet.written)
        if any(each.classes for each in fleet.file.models):
            from hetlb.balancer.clients.service_classes import ServiceClasses

            router.classes = ServiceClasses(fleet.service_classes)
        router.resume = fleet.resumes

    def _requests_ended(self, ended: Sequence[RequestRecord]) -> None:
        now = self._driver.now()
        epoch_s = time.time() - now
        if self._tracing is not None:
            for record in ended:
                self._tracing.finished(record, now)
        if self._lines is not None and self._write_line is not None:
            self._lines.write(*[self._write_line(record, epoch_s) for record in ended])

    async def stop(self, grace_s: float) -> None:
        """Accept no more, and end open requests within `grace_s`."""
        self.server.stop_accepting()
        await self._driver.drain(grace_s)

    async def close(self) -> None:
        """Close everything now; harmless after a start that failed half-way."""
        await self.server.close()
        self._driver.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._lines is not None:
            self._lines.close()
