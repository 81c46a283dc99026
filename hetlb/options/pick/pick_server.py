"""The picker's gRPC listener (grpcio): Envoy's external processing, and the health checks of gateways."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from hetlb.addresses import is_loopback
from hetlb.balancer.clients.access import Access
from hetlb.balancer.clients.router import FleetView, Router
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.exchange.driver_timers import SWEEP_S
from hetlb.balancer.option_record import Options
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import ConfigError
from hetlb.files import content, readable_name
from hetlb.inputs.urls import bracketed
from hetlb.options.pick import messages
from hetlb.options.pick.calls import MAX_BESIDE_BODY_BYTES, ProcessCall
from hetlb.options.pick.envoy_fields import FAIRNESS
from hetlb.options.pick.pick_driver import PickDriver
from hetlb.options.pick.stream import PickerState
from hetlb.watched_files import FileStates

logger = logging.getLogger("hetlb.pick")

#: Connections, open calls of each connection, and open calls of all. They also bound a peer that opens and
#: cancels calls without end. Envoy connects again if it needs more.
MAX_CONNECTIONS: Final = 1024
MAX_CALLS_EACH: Final = 100
MAX_CALLS: Final = 16_384
#: Bytes of a call read ahead of the picker.
_READ_AHEAD_BYTES: Final = 64 << 10
_MS: Final = 1000
#: Seconds beyond any drain: `close` ends it.
_UNTIL_CLOSED_S: Final = 1e6
#: Options of grpcio's server (grpc_types.h), beside the size of a message.
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second picker on the port is a mistake
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_CALLS_EACH),
    ("grpc.http2.max_requests_per_read", 2),
    ("grpc.http2.lookahead_bytes", _READ_AHEAD_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would raise what is read ahead, and pings at every read
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: sent bytes are held bytes
    ("grpc.server_handshake_timeout_ms", 10 * _MS),
    # A connection without a call holds no place of `MAX_CONNECTIONS`.
    ("grpc.max_connection_idle_ms", 10 * _MS),
    # A gateway silent for so long is asked for a sign of life, and has as long to give it.
    ("grpc.keepalive_time_ms", 30 * _MS),
    ("grpc.keepalive_timeout_ms", 30 * _MS),
    # Envoy pings every few seconds, with calls and without.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
)


class _KnownMethods(cygrpc.AioServer):  # type: ignore[misc]
    """A server that takes calls of its registered methods; any other call is cancelled.

    grpcio's own server looks at the name of the other method, and ends if it is not UTF-8 (1.84, 1.85).
    """

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        if method is None:
            return asyncio.get_running_loop().create_task(self._cancel_others())
        future: asyncio.Future[Any] = super()._make_request_call_future(method)
        return future

    async def _cancel_others(self) -> None:
        while True:
            await self._request_call()  # a call that is not kept is cancelled


class PickServer:
    """The listener of gateways, in the place of the proxy's `ProxyServer`."""

    def __init__(self, driver: PickDriver, view: FleetView, fleet: Fleet, options: Options) -> None:
        """Read the certificates of the file. Raises `ConfigError`."""
        self._driver = driver
        self._view = view
        self.router = Router(driver, view, options)
        self.state = PickerState(driver, self.router, fleet.file.pick, driver.access)
        self._fleet = fleet
        #: Certificates for gateways that connect from now on, None without TLS.
        self.tls = gateway_certificates(fleet)
        self._states = FileStates()
        self._files = self._states.of(_tls_files(fleet))
        self._grpc: grpc.aio.Server | None = None
        driver.on_swept = self._sweep
        self._stopping: asyncio.Task[None] | None = None

    def configure(self, table: ProxyTable, access: Access) -> None:
        """Take over names, limits and keys. The Gateway API names the header of a fair share.

        The certificate is read again when its files change.
        """
        if table.tenant_header is None:
            table = msgspec.structs.replace(table, tenant_header=FAIRNESS)
        self.router.configure(table)
        self.router.keys = access.keys
        self.state.tenants.configure(table.tenant_header or FAIRNESS)

    @property
    def connections(self) -> Collection[object]:
        """Return the open calls."""
        return self.state.streams

    @property
    def certificates(self) -> list[object | None]:
        """The certificates shown to gateways, None without TLS."""
        return [self.tls]

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of listening sockets: none that another process could take over."""
        return []

    def leave(self) -> None:
        """Do nothing: no other process takes over."""

    async def start(
        self, host: str, port: int, sockets: Sequence[socket.socket] = (), number: int = 0
    ) -> tuple[str, int]:
        """Accept gateways; returns the address in use. Raises `OSError` if it cannot be bound."""
        assert not sockets, "expected an address: grpcio takes no listening sockets"
        largest = self.state.table.buffer_bytes + MAX_BESIDE_BODY_BYTES
        server: Any = grpc.aio.server()
        self._grpc = server
        options = (*_OPTIONS, ("grpc.max_receive_message_length", largest))
        server._server = _KnownMethods(self._driver.loop, None, (), (), options, MAX_CALLS)
        server.add_registered_method_handlers(
            messages.PROCESS_SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        )
        server.add_registered_method_handlers(
            messages.HEALTH_SERVICE, {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
        )
        _check_free(host, port)
        where = f"{bracketed(host)}:{port}"
        try:
            if self.tls is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, self._credentials(self.tls))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        return host, port

    def _credentials(self, tls: GatewayCertificates) -> grpc.ServerCredentials:
        """Return credentials of the listener; one that was read again is shown from the next handshake on."""
        shown = tls

        def newest() -> Any:
            nonlocal shown
            if self.tls is None or self.tls is shown:
                return None
            shown = self.tls
            return shown.configuration()

        return grpc.dynamic_ssl_server_credentials(
            tls.configuration(), newest, require_client_authentication=tls.authorities is not None
        )

    async def _process(self, _: Any, context: Any) -> None:
        await ProcessCall(self.state, context).run()

    async def _check(self, data: bytes, context: Any) -> bytes:
        """Answer a health check."""
        try:
            service = messages.HealthCheckRequest.FromString(data).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a HealthCheckRequest")
        serving = self._serves(service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        status = messages.SERVING if serving else messages.NOT_SERVING
        return bytes(messages.HealthCheckResponse(status=status).SerializeToString())

    def _serves(self, service: str) -> bool | None:
        """Return the answer to a health check, None for an unknown service."""
        if service in ("", "liveness"):
            return True
        if service not in ("readiness", messages.PROCESS_SERVICE):
            return None
        return self._view.routable() and not self.state.stopping

    def stop_accepting(self) -> None:
        """Take no further request; open ones go on, and gateways are told to go elsewhere."""
        if self._grpc is not None and not self.state.stopping:
            self._stopping = asyncio.create_task(self._grpc.stop(_UNTIL_CLOSED_S))
        self.state.stopping = True

    async def close(self) -> None:
        """Drop every remaining connection."""
        if self._grpc is not None:
            await self._grpc.stop(None)
            self._grpc = None
        if self._stopping is not None:
            await self._stopping

    def _sweep(self, now: float) -> None:
        for stream in list(self.state.streams):
            stream.sweep(SWEEP_S)
        if self.tls is not None and (files := self._states.of(_tls_files(self._fleet))) != self._files:
            self._files = files
            try:
                self.tls = gateway_certificates(self._fleet)
            except ConfigError as error:
                tell(logger, Event.RELOAD_REFUSED, "the certificate in use stays: %s", error)


@dataclass(frozen=True)
class GatewayCertificates:
    """PEM files of the listener: its certificates and their key, and the authorities of gateways or None."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the same for grpcio."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.authorities)


def gateway_certificates(fleet: Fleet) -> GatewayCertificates | None:
    """Return the certificate of the listener, and the authorities of its gateways; None without TLS.

    Raises `ConfigError`, also if any peer could be a gateway and the file does not allow this.
    """
    pick, where, base = fleet.file.pick, fleet.where, fleet.base
    if not (is_loopback(pick.host) or pick.any_gateway or (pick.tls and pick.client_ca_file)):
        raise ConfigError(
            f"{where}pick.host: expected a loopback address, or pick.tls and pick.client_ca_file beside it,"
            f" or pick.any_gateway: true (every peer that reaches the port is a gateway), got {pick.host!r}"
        )
    if pick.tls is None:
        if pick.client_ca_file is not None:
            raise ConfigError(f"{where}pick.client_ca_file: expected pick.tls beside it, got none")
        return None
    from hetlb.balancer.clients.certificates import server_context

    context = server_context(pick.tls, f"{where}pick.tls", base)
    authorities = None
    if pick.client_ca_file is not None:
        path = base / pick.client_ca_file
        try:
            authorities = content(path)
            with readable_name(path) as name:
                context.load_verify_locations(name)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{where}pick.client_ca_file: expected a file of certificates, got {str(path)!r}"
            ) from error
    try:
        chain, key = content(base / pick.tls.cert), content(base / pick.tls.key)
    except OSError as error:  # replaced since they were looked at
        raise ConfigError(f"{where}pick.tls: expected readable files, got {error.strerror}") from error
    return GatewayCertificates(chain, key, authorities)


def _check_free(host: str, port: int) -> None:
    """Raise `OSError` if an address cannot be listened on: grpcio does not say why."""
    family, kind, number, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, number) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _tls_files(fleet: Fleet) -> list[Path]:
    """Return the files of the listener's TLS."""
    table = fleet.file.pick
    if table.tls is None:
        return []
    names = (table.tls.cert, table.tls.key, table.client_ca_file)
    return [fleet.base / name for name in names if name is not None]
