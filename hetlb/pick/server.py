"""The picker's gRPC listener: Envoy's external processing, and the health checks of gateways."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from hetlb.config.fleet import Fleet, ProxyTable
from hetlb.errors import ConfigError
from hetlb.pick import messages
from hetlb.pick.calls import CheckCall, ProcessCall
from hetlb.pick.driver import PickDriver
from hetlb.pick.grpc_call import GrpcCall, Methods
from hetlb.pick.http2 import Http2Connection
from hetlb.pick.stream import FAIRNESS, PickerState
from hetlb.proxy.access import Access, server_context, show_newest
from hetlb.proxy.router import FleetView, Router
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.pick")

#: A message may be so much larger than the largest body that it holds.
_ENVELOPE: Final = 1 << 20
_SWEEP_S: Final = 1.0
#: A connection whose preface or header block is not whole by then is dropped.
_INCOMPLETE_S: Final = 10.0
#: A gateway with open streams that has said nothing for so long is asked for a sign of life, and has as long.
_SILENT_S: Final = 30.0


class _GatewayConnection(asyncio.Protocol):
    """A connection of a gateway: reads go to `Http2Connection`, and what it has to say is written."""

    def __init__(self, server: PickServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.http2 = Http2Connection(server.methods.accept, self._wake, server.most_pending)
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        self._heard_at = self._loop.time()
        self._incomplete_at: float | None = self._heard_at

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.gateways.add(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        now = self._heard_at = self._loop.time()
        http2 = self.http2
        http2.receive(data, now)
        if not http2.incomplete:
            self._incomplete_at = None
        elif self._incomplete_at is None:
            self._incomplete_at = now
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.gateways.discard(self)
        self.http2.lost()

    def pause_writing(self) -> None:
        # A peer that does not read is not read from: what is to be written stays bounded.
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _wake(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if data := self.http2.take():
            transport.write(data)
        if self.http2.closing:
            transport.close()

    def sweep(self, now: float) -> None:
        """Drop a connection that has stopped."""
        since = self._incomplete_at
        silent = now - self._heard_at
        stopped = since is not None and now - since > _INCOMPLETE_S
        if not stopped and self.http2.streams and silent > _SILENT_S:
            stopped = silent > 2.0 * _SILENT_S
            self.http2.ping()
            self._flush()
        if stopped:
            self.abort()

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()


class PickServer:
    """The listener of gateways, in the place of the proxy's `ProxyServer`."""

    def __init__(self, driver: PickDriver, view: FleetView, fleet: Fleet, ready: Callable[[], bool]) -> None:
        """`ready`: whether gateways should send requests to this picker. Raises `ConfigError`."""
        self._driver = driver
        self._ready = ready
        self.router = Router(driver, view)
        self.state = PickerState(driver, self.router, fleet.pick, driver.access)
        self.configure(driver.table)
        self._fleet = fleet
        #: The certificate shown to gateways that connect from now on, None without TLS.
        self.tls: ssl.SSLContext | None = gateway_context(fleet)
        self._files = _stamps(fleet)
        self.methods = Methods(
            {
                b"/%s/Process" % messages.PROCESS_SERVICE.encode("ascii"): self._process,
                b"/%s/Check" % messages.HEALTH_SERVICE.encode("ascii"): self._check,
            }
        )
        #: Connections that are open.
        self.gateways: set[_GatewayConnection] = set()
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    def configure(self, table: ProxyTable) -> None:
        """Names and limits that hold from now on; the Gateway API names the header of a fair share."""
        if table.tenant_header is None:
            table = msgspec.structs.replace(table, tenant_header=FAIRNESS)
        self.router.configure(table)
        state = self.state
        state.largest = max(table.max_body_bytes, table.max_multipart_bytes) + _ENVELOPE
        #: Bytes that may wait for windows of one connection.
        self.most_pending = max(table.max_held_bytes, state.largest)

    def secure(self, access: Access) -> None:
        """Clients' keys that hold from now on; the certificate is read again when its files change."""
        self.router.tenants = access.tenants

    @property
    def connections(self) -> Collection[object]:
        """Streams that are open."""
        return self.state.streams

    @property
    def stopping(self) -> bool:
        """True if no further request is taken."""
        return self.state.stopping

    @property
    def descriptors(self) -> list[int]:
        """Of the listening sockets."""
        return [each.fileno() for server in self._servers for each in server.sockets]

    def leave(self) -> None:
        """Nothing to do: no other process takes over."""

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Accept gateways; returns the address in use. Raises `OSError` if it cannot be bound.

        With `sockets`, which are bound already, on those.
        """
        loop = self._driver.loop
        tls: dict[str, Any] = {}
        if self.tls is not None:
            show_newest(self.tls, lambda: self.tls)
            tls = {"ssl": self.tls, "ssl_handshake_timeout": _INCOMPLETE_S}
        addressed: dict[str, Any] = {"host": host, "port": port, "reuse_address": True}
        wheres: list[dict[str, Any]] = [{"sock": each} for each in sockets] or [addressed]
        for where in wheres:
            self._servers.append(
                await loop.create_server(lambda: _GatewayConnection(self), backlog=2048, **where, **tls)
            )
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        name = self._servers[0].sockets[0].getsockname()
        return name[0], name[1]

    def _process(self, connection: Http2Connection, number: int) -> GrpcCall:
        return ProcessCall(connection, number, self.state)

    def _check(self, connection: Http2Connection, number: int) -> GrpcCall:
        return CheckCall(connection, number, self._serves)

    def _serves(self, service: str) -> bool | None:
        """Answer to a health check, None where there is no such service."""
        if service in ("", "liveness"):
            return True
        if service not in ("readiness", messages.PROCESS_SERVICE):
            return None
        return self._ready() and not self.state.stopping

    def stop_accepting(self) -> None:
        """Take no further request; those that are open go on, and gateways are told to go elsewhere."""
        self.state.stopping = True
        for server in self._servers:
            server.close()
        for gateway in self.gateways:
            gateway.http2.go_away()

    async def close(self) -> None:
        """Drop every connection that is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for gateway in list(self.gateways):
            gateway.abort()
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
            await server.wait_closed()

    def _sweep(self) -> None:
        self._sweeper = self._driver.loop.call_later(_SWEEP_S, self._sweep)
        now = self._driver.loop.time()
        for gateway in list(self.gateways):
            gateway.sweep(now)
        for stream in list(self.state.streams):
            stream.sweep(_SWEEP_S)
        if self.tls is not None and (stamps := _stamps(self._fleet)) != self._files:
            self._files = stamps
            try:
                self.tls = gateway_context(self._fleet)
            except ConfigError as error:
                tell(logger, Event.RELOAD_REFUSED, "the certificate in use stays: %s", error)


def gateway_context(fleet: Fleet) -> ssl.SSLContext | None:
    """Certificate of the listener, and the authorities of its gateways; None without TLS.

    Raises `ConfigError`.
    """
    table, where, base = fleet.pick.tls, fleet.where, fleet.base
    if table is None:
        if fleet.pick.client_ca_file is not None:
            raise ConfigError(f"{where}pick.client_ca_file: expected pick.tls beside it, got none")
        return None
    context = server_context(table, f"{where}pick.tls", base)
    context.set_alpn_protocols(["h2"])
    if fleet.pick.client_ca_file is not None:
        authorities = base / fleet.pick.client_ca_file
        try:
            context.load_verify_locations(authorities)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{where}pick.client_ca_file: expected a file of certificates, got {str(authorities)!r}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _stamps(fleet: Fleet) -> list[tuple[int, int, int]]:
    """Times, sizes and numbers of the files of the listener's TLS: others once one is replaced."""
    table = fleet.pick.tls
    if table is None:
        return []
    stamps = []
    for name in (table.cert, table.key, fleet.pick.client_ca_file):
        if name is not None:
            try:
                found = os.stat(fleet.base / name)
            except OSError:
                continue  # being replaced
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return stamps
