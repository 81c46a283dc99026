"""The listener of the admin pages (`options/admin`), and errors of a listener that cannot be opened."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Final

from aiohttp import web

from hetlb.app_listener import AppListener
from hetlb.balancer.config.fleet_tables import Admin
from hetlb.errors import HetlbError

#: Maximum number of connections without a request.
MOST_CONNECTIONS: Final = 256
#: Seconds that a connection may take for a head. (Prometheus asks about every minute, and connects again.)
IDLE_S: Final = 20.0
#: Seconds that a body may take.
_BODY_S: Final = 10.0


class AdminListener(AppListener):
    """Listener of the admin application. `tls` may be replaced: later connections get the new certificate."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(tls, most_idle=MOST_CONNECTIONS, idle_s=IDLE_S, body_s=_BODY_S)

    async def listen(
        self, app: web.Application, table: Admin, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Listen, on sockets that are bound already if there are any. Raises `HetlbError`."""
        if self.tls is not None:
            from hetlb.balancer.clients.certificates import show_newest

            show_newest(self.tls, lambda: self.tls)
        with named("admin", table.host, table.port):
            await self.open(app, table.host, table.port, listeners)


@contextlib.contextmanager
def named(what: str, host: str, port: int) -> Iterator[None]:
    """Turn a failed bind into one line that names the address."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.EADDRINUSE:
            reason += " (a running hetlb: stop it, or take its place with --replace)"
        raise HetlbError(f"{what}: {host}:{port} cannot be listened on: {reason}") from error
