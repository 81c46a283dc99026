"""The main listener: its sockets, its certificate, when it begins and ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Collection, Sequence
from typing import Any

from hetlb.config.fleet_tables import ProxyTable
from hetlb.proxy.access import Access, show_newest
from hetlb.proxy.connection import LINGER_S, ClientConnection, Clients
from hetlb.proxy.driver import Driver
from hetlb.proxy.router import FleetView, Router

_SWEEP_S = 0.5
#: Seconds in which clients of WebSocket sessions close their side when the process ends.
_PART_S = 1.0


class ProxyServer:
    """Accepts connections of clients."""

    def __init__(self, driver: Driver, view: FleetView) -> None:
        self._driver = driver
        self.router = Router(driver, view)
        self.clients = Clients(driver, self.router)
        #: The certificate shown to clients that connect from now on; set before `start`, or None for no TLS.
        self.tls: ssl.SSLContext | None = None
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    def configure(self, table: ProxyTable) -> None:
        """Limits and names that hold from now on."""
        self.clients.table = table
        self.router.configure(table)

    def secure(self, access: Access) -> None:
        """Clients' keys and the certificate that hold from now on; a listener with TLS stays one."""
        self.router.tenants = access.tenants
        if access.tls is not None:
            self.tls = access.tls

    @property
    def connections(self) -> Collection[ClientConnection]:
        """Those that are open."""
        return self.clients.open

    @property
    def stopping(self) -> bool:
        """True if no further request is taken."""
        return self.clients.stopping

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Accept connections; returns the address in use. Raises `OSError` if it cannot be bound.

        With `sockets`, which are bound already, on those.
        """
        loop = self._driver.loop
        tls: dict[str, Any] = {}
        if self.tls is not None:
            show_newest(self.tls, lambda: self.tls)
            tls = {
                "ssl": self.tls,
                "ssl_handshake_timeout": self.clients.table.head_timeout_s,
                "ssl_shutdown_timeout": LINGER_S,
            }
        addressed: dict[str, Any] = {"host": host, "port": port, "reuse_address": True}
        wheres: list[dict[str, Any]] = [{"sock": each} for each in sockets] or [addressed]
        for where in wheres:
            self._servers.append(
                await loop.create_server(lambda: ClientConnection(self.clients), backlog=2048, **where, **tls)
            )
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        name = self._servers[0].sockets[0].getsockname()
        return name[0], name[1]

    def leave(self) -> None:
        """Close the listener here; it lives on in another process. Connections get one more answer each."""
        for server in self._servers:
            server.close()
        self.clients.leaving = True

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the listening sockets."""
        return [each.fileno() for server in self._servers for each in server.sockets]

    def stop_accepting(self) -> None:
        """Close the listener; open connections end with the answer they are at."""
        for server in self._servers:
            server.close()
        self.clients.leaving = False
        self.clients.stop()

    async def close(self) -> None:
        """Drop whatever connection is left, once clients of sessions have seen why they ended."""
        if self.clients.parting:
            waiter = self.clients.all_parted = self._driver.loop.create_future()
            await asyncio.wait([waiter], timeout=_PART_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.clients.abort()
        for server in self._servers:
            server.close()
            await server.wait_closed()

    def _sweep(self) -> None:
        self._sweeper = self._driver.loop.call_later(_SWEEP_S, self._sweep)
        self.clients.sweep(self._driver.now())
