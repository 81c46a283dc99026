"""The picker's gRPC listener: Envoy's external processing, and the health checks of gateways."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from hetlb.config.fleet import Fleet, ProxyTable
from hetlb.errors import ConfigError
from hetlb.pick import messages
from hetlb.pick.driver import PickDriver
from hetlb.pick.stream import FAIRNESS, HttpStream, PickerState
from hetlb.proxy.access import Access, server_context
from hetlb.proxy.router import FleetView, Router

logger = logging.getLogger("hetlb.pick")

#: A message may be so much larger than the largest body that it holds.
_ENVELOPE: Final = 1 << 20


class _Pump:
    """Messages of one stream: read in the handler, written as they come, one at a time."""

    __slots__ = ("_context", "_outbox", "_writing", "stream")

    def __init__(self, state: PickerState, context: Any) -> None:
        self._context = context
        self._outbox: deque[bytes] = deque()
        self._writing: object = None
        self.stream = HttpStream(state, self._send)

    def _send(self, data: bytes) -> None:
        self._outbox.append(data)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._drain_quietly())

    async def _drain(self) -> None:
        outbox, write = self._outbox, self._context.write
        try:
            while outbox:
                await write(outbox.popleft())
        finally:
            self._writing = None

    async def _drain_quietly(self) -> None:
        try:
            await self._drain()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self._outbox.clear()  # the stream is gone, and its handler knows

    async def run(self) -> None:
        """Serve until Envoy, or an answer of our own, ends the stream."""
        read, stream = self._context.read, self.stream
        while not stream.ended:
            message = await read()
            if message is grpc.aio.EOF:
                return
            idle = self._writing is None
            if idle:
                self._writing = self
            stream.receive(message)
            if idle:
                await self._drain()


class PickServer:
    """The listener of gateways, in the place of the proxy's `ProxyServer`."""

    def __init__(self, driver: PickDriver, view: FleetView, fleet: Fleet, ready: Callable[[], bool]) -> None:
        """`ready`: whether gateways should send requests to this picker. Raises `ConfigError`."""
        self._driver = driver
        self._ready = ready
        self.router = Router(driver, view)
        self.state = PickerState(driver, self.router, fleet.pick, driver.access)
        self.configure(driver.table)
        self._credentials = read_credentials(fleet)
        #: None without TLS, as the line of a listener that is ready shows it.
        self.tls: object | None = self._credentials
        self._server: grpc.aio.Server | None = None
        self._streams: set[HttpStream] = set()

    def configure(self, table: ProxyTable) -> None:
        """Names and limits that hold from now on; the Gateway API names the header of a fair share."""
        if table.tenant_header is None:
            table = msgspec.structs.replace(table, tenant_header=FAIRNESS)
        self.router.configure(table)

    def secure(self, access: Access) -> None:
        """Clients' keys that hold from now on; the certificate is read for each connection."""
        self.router.tenants = access.tenants

    @property
    def connections(self) -> Collection[object]:
        """Streams that are open."""
        return self._streams

    @property
    def stopping(self) -> bool:
        """True if no further request is taken."""
        return self.state.stopping

    @property
    def descriptors(self) -> list[int]:
        """None: gRPC owns its sockets."""
        return []

    def leave(self) -> None:
        """Nothing to do: no other process takes over."""

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Accept gateways; returns the address in use. Raises `OSError` if it cannot be bound."""
        if sockets:
            raise OSError("gRPC listens on sockets of its own")
        table = self._driver.table
        largest = max(table.max_body_bytes, table.max_multipart_bytes) + _ENVELOPE
        server = self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", largest),
                ("grpc.max_send_message_length", largest),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        server.add_generic_rpc_handlers((self._process_handler(), self._health_handler()))
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(shown)
            else:
                bound = server.add_secure_port(shown, self._credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        return host, bound

    def _process_handler(self) -> grpc.GenericRpcHandler:
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=messages.ProcessingRequest.FromString
        )
        return grpc.method_handlers_generic_handler(messages.PROCESS_SERVICE, {"Process": handler})

    def _health_handler(self) -> grpc.GenericRpcHandler:
        handler: Any = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=messages.HealthCheckRequest.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )
        return grpc.method_handlers_generic_handler(messages.HEALTH_SERVICE, {"Check": handler})

    async def _process(self, _: Any, context: Any) -> None:
        pump = _Pump(self.state, context)
        self._streams.add(pump.stream)
        try:
            await pump.run()
        except (grpc.RpcError, grpc.aio.UsageError):
            pass  # the gateway is gone
        finally:
            self._streams.discard(pump.stream)
            pump.stream.closed()

    async def _check(self, request: Any, context: Any) -> Any:
        alive = request.service in ("", "liveness")
        if not alive and request.service not in ("readiness", messages.PROCESS_SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        serving = alive or (self._ready() and not self.state.stopping)
        status = messages.SERVING if serving else messages.NOT_SERVING
        return messages.HealthCheckResponse(status=status)

    def stop_accepting(self) -> None:
        """Take no further request; those that are open go on."""
        self.state.stopping = True

    async def close(self) -> None:
        """Drop every stream that is left."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0.0)


def read_credentials(fleet: Fleet) -> grpc.ServerCredentials | None:
    """Certificate of the listener, None without TLS; it is read again for each connection.

    Raises `ConfigError`.
    """
    table, where, base = fleet.pick.tls, fleet.where, fleet.base
    if table is None:
        if fleet.pick.client_ca_file is not None:
            raise ConfigError(f"{where}pick.client_ca_file: expected pick.tls beside it, got none")
        return None
    server_context(table, f"{where}pick.tls", base)  # checks both files, with errors that name the keys
    cert, key = base / table.cert, base / table.key
    authorities = None if fleet.pick.client_ca_file is None else base / fleet.pick.client_ca_file
    if authorities is not None and not authorities.is_file():
        raise ConfigError(f"{where}pick.client_ca_file: expected a readable file, got {str(authorities)!r}")

    def read() -> Any:
        return _certificate(cert, key, authorities)

    first = _certificate(cert, key, authorities)
    return grpc.dynamic_ssl_server_credentials(first, read, authorities is not None)


def _certificate(cert: Path, key: Path, authorities: Path | None) -> Any:
    try:
        roots = None if authorities is None else authorities.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())], roots)
    except OSError as error:
        logger.warning("pick.tls: the certificate in use stays: %s", error)
        return None
