"""Admin listener of a service: its sockets and its certificate. Its handlers are in `admin.py`."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

from aiohttp import web

from hetlb.config.fleet import Admin
from hetlb.errors import HetlbError
from hetlb.proxy.access import show_newest


class AdminListener:
    """Listener of one application. It listens from `open` until `close`."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        #: The certificate shown to operators who connect from now on, None without TLS.
        self.tls = tls
        self.address = ("", 0)
        self._runner: web.AppRunner | None = None

    async def open(self, app: web.Application, table: Admin, listeners: Sequence[socket.socket] = ()) -> None:
        """Listen, on sockets that are bound already if there are any. Raises `HetlbError`."""
        if self.tls is not None:
            show_newest(self.tls, lambda: self.tls)
        runner = self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        sites: list[web.BaseSite] = [web.SockSite(runner, each, ssl_context=self.tls) for each in listeners]
        with named("admin", table.host, table.port):
            for site in sites or [web.TCPSite(runner, table.host, table.port, ssl_context=self.tls)]:
                await site.start()
        self.address = runner.addresses[0][:2]

    @property
    def descriptors(self) -> list[int]:
        """Of its sockets."""
        sites = () if self._runner is None else self._runner.sites
        servers = [getattr(site, "_server", None) for site in sites]
        return [each.fileno() for server in servers if server is not None for each in server.sockets]

    async def close(self) -> None:
        """Close it; harmless if it is closed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


@contextlib.contextmanager
def named(what: str, host: str, port: int) -> Iterator[None]:
    """Turn a failed bind into one line that names the address."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HetlbError(f"{what}: {host}:{port} cannot be listened on: {reason}") from error
