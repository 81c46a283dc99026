"""The main listener: its sockets, its certificate, its connections, when it begins and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Sequence
from typing import Any, Final

from hetlb.addresses import listening_place
from hetlb.balancer.clients.access import Access
from hetlb.balancer.clients.connection import LINGER_S, ClientConnection
from hetlb.balancer.clients.router import FleetView, Router
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.http1 import KnownHeads, parse_request_head
from hetlb.balancer.option_record import Options
from hetlb.balancer.telemetry.events import Event, Rarely
from hetlb.turns import turns

logger = logging.getLogger("hetlb.proxy")

#: Seconds for clients of WebSocket sessions to close their side when the process ends.
_PART_S: Final = 1.0
#: Most clients that wait to be accepted.
_BACKLOG: Final = 2048
_TOO_MANY: Final = Refusal(error_responses.TOO_MANY_CONNECTIONS, "Too many connections are open.")
_NO_DESCRIPTORS: Final = Refusal(
    error_responses.LOCAL_FAULT, "The proxy has no descriptors for more connections.", 1.0
)


class ProxyServer:
    """The listener of clients, and the state that its connections share."""

    def __init__(self, driver: Driver, view: FleetView, options: Options) -> None:
        self.driver = driver
        self.router = Router(driver, view, options)
        self.table: ProxyTable = driver.table
        self.heads = KnownHeads(parse_request_head)
        #: Connections, the oldest first (the values are unused).
        self.connections: dict[ClientConnection, None] = {}
        #: Bytes of bodies that have not come whole yet, over all connections.
        self.held_bytes = 0
        #: Connections that were a WebSocket and wait for the client's side to close; told when there is none.
        self.parting: set[ClientConnection] = set()
        self._all_parted: asyncio.Future[None] | None = None
        self.crowded = False
        #: Answer to a client without room. Descriptors that are open for neither clients nor engines, and
        #: descriptors for clients that are accepted only to be refused.
        self.refusal = _TOO_MANY
        self._others = self._spare = 0
        self._refusals = Rarely()
        #: True if each connection ends with its current answer: no further request is taken.
        self.stopping = False
        #: True if connections are still served, each with one more answer that announces the end.
        self.leaving = False
        #: Connections with more to read than one turn takes wait here for another.
        self.turns = turns(driver.loop)
        #: For each address the certificate shown to clients that connect from now on, None without TLS.
        self.certificates: list[ssl.SSLContext | None] = [None]
        #: uvloop gives a list of sockets where asyncio gives a tuple: compiled, neither type is asserted.
        self._servers: list[Any] = []
        driver.on_swept = self.sweep

    # --- its connections ---

    def admit(self, connection: ClientConnection) -> bool:
        """Return True if there is room for a new connection; else the oldest idle one makes it."""
        limit = self.table.max_connections or self._by_descriptors()
        more = limit // 8 if self.table.max_connections else self._spare // 2
        full = len(self.connections) >= limit
        idle = next((each for each in self.connections if each.makes_room()), None) if full else None
        self.connections[connection] = None
        if idle is not None:
            idle.abort()
        elif full:
            text = "%d connections are open: a client is refused (proxy.max_connections, ulimit -n)"
            self.refusal = _TOO_MANY if self.table.max_connections else _NO_DESCRIPTORS
            bound = "proxy.max_connections" if self.table.max_connections else "ulimit -n"
            recent = self.driver.counted.recent
            recent.own["clients_refused"] = self.driver.now(), f"{limit} connections, {bound}"
            self._refusals.tell(logger, Event.TOO_MANY_CONNECTIONS, text, limit)
        #: Too many refused clients keep their connections: the next ones are not waited for.
        self.crowded = len(self.connections) > limit + max(8, more)
        return not full or idle is not None

    def _by_descriptors(self) -> int:
        """Return the clients for which there are descriptors: each may need another one to an engine."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return sys.maxsize
        return max(1, (soft - self._others - self._spare) // 2)

    def left(self, connection: ClientConnection) -> None:
        self.connections.pop(connection, None)
        if connection in self.parting:
            self.parting.remove(connection)
            waiter = self._all_parted
            if not self.parting and waiter is not None and not waiter.done():
                waiter.set_result(None)

    def sweep(self, now: float) -> None:
        guard = self.driver.guard
        for connection in list(self.connections):
            try:
                connection.sweep(now)
            except Exception as error:
                guard.log(error, "sweeping a client's connection")
                connection.abort()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    # --- its listener ---

    def configure(self, table: ProxyTable, access: Access) -> None:
        """Take limits, names, keys and certificate that hold from now on; a listener with TLS stays one."""
        self.table = table
        self.router.configure(table)
        self.router.keys = access.keys
        before = dict(enumerate(self.certificates))
        self.certificates = [new or before.get(number) for number, new in enumerate(access.tls)]

    async def start(
        self, host: str, port: int, sockets: Sequence[socket.socket] = (), number: int = 0
    ) -> tuple[str, int]:
        """Accept connections at one more address; return the address in use. Raises `OSError` if it is taken.

        `sockets` are bound already; then the connections come from these. `number` counts the addresses.
        """
        loop = self.driver.loop
        tls: dict[str, Any] = {}
        shown = self.certificates[number]
        if shown is not None:
            from hetlb.balancer.clients.certificates import show_newest

            show_newest(shown, lambda: self.certificates[number])
            tls = {
                "ssl": shown,
                "ssl_handshake_timeout": self.table.head_timeout_s,
                "ssl_shutdown_timeout": LINGER_S,
            }
        wheres: list[dict[str, Any]] = [{"sock": each} for each in sockets] or [listening_place(host, port)]
        first = len(self._servers)
        self._others = len(os.listdir("/proc/self/fd"))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._spare = 2 * _BACKLOG if soft < 0 else min(2 * _BACKLOG, max(16, soft // 4))
        for where in wheres:
            self._servers.append(
                await loop.create_server(
                    lambda: ClientConnection(self), backlog=self._spare // 2, **where, **tls
                )
            )
        name = self._servers[first].sockets[0].getsockname()
        return name[0], name[1]

    def leave(self) -> None:
        """Close the listener here; it lives on in another process. Connections get one more answer each."""
        for server in self._servers:
            server.close()
        self.leaving = True

    @property
    def descriptors(self) -> list[int]:
        return [each.fileno() for server in self._servers for each in server.sockets]

    def stop_accepting(self) -> None:
        """Close the listener; open connections end with their current answer."""
        for server in self._servers:
            server.close()
        self.leaving = False
        self.stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()

    async def close(self) -> None:
        """Drop all connections, once clients of sessions have the reason for their end."""
        if self.parting:
            waiter = self._all_parted = self.driver.loop.create_future()
            await asyncio.wait([waiter], timeout=_PART_S)
        self.abort()
        for server in self._servers:
            server.close()
            await server.wait_closed()
