"""The side of a serving process that clients meet: the listener, the request log, spans, the ended requests.

Every process that serves has one, beside its driver; `Service` and a relay build it alike. A fleet and its
keys configure it whole, at start and at every reload.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from hetlb.config.fleet import Fleet
from hetlb.proxy.access import Access
from hetlb.proxy.driver import ExchangeDriver
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.model_names import ModelNames
from hetlb.proxy.router import FleetView
from hetlb.proxy.server import ProxyServer
from hetlb.proxy.telemetry.access_log import FORMATS
from hetlb.proxy.telemetry.history import History
from hetlb.proxy.telemetry.log_writer import LogWriter
from hetlb.proxy.telemetry.tracing import Tracing


class Front:
    """The listener over `driver`, and all that is kept of a request that ended."""

    def __init__(self, driver: ExchangeDriver, view: FleetView, fleet: Fleet, access: Access) -> None:
        self._driver = driver
        self._fleet = fleet
        self.server = ProxyServer(driver, view)
        self.server.tls, self.server.router.tenants = access.tls, access.tenants
        self.server.router.names = ModelNames.of(fleet.written) or None
        self._tracing = None if fleet.tracing is None else Tracing(fleet.tracing, fleet.where)
        self.server.router.tracing = self._tracing
        self._write_line = FORMATS[fleet.proxy.request_log_format]
        self._lines: LogWriter | None = None
        #: The requests that ended lately, for the dashboard.
        self.history = History()

    def open_log(self, at_once: int | None = None) -> None:
        """Begin the request log, where the fleet wants one. `at_once`: see `LogWriter`."""
        if self._fleet.proxy.request_log:
            self._lines = LogWriter(sys.stderr.fileno(), "request log", at_once)

    @property
    def lost_lines(self) -> int:
        """Lines of the request log that a slow reader made us drop."""
        return 0 if self._lines is None else self._lines.lost

    def configure(self, fleet: Fleet, access: Access) -> None:
        """New limits, keys and certificates, for what begins from now on."""
        self._driver.configure(fleet.proxy)
        self.server.configure(fleet.proxy)
        self.server.router.tenants = access.tenants
        self.server.router.names = ModelNames.of(fleet.written) or None
        if access.tls is not None:
            self.server.tls = access.tls

    def requests_ended(self, ended: Sequence[Exchange]) -> None:
        """Keep and log requests that have their outcome."""
        now = self._driver.now()
        epoch_s = time.time() - now
        if self._tracing is not None:
            for exchange in ended:
                self._tracing.finished(exchange, now)
        add, line = self.history.add, self._write_line
        for exchange in ended:
            add(exchange)
        if self._lines is not None:
            self._lines.write(*[line(exchange, epoch_s) for exchange in ended])

    async def stop(self, grace_s: float) -> None:
        """Accept no more, and let what is open end within `grace_s`."""
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
