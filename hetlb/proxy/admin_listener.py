"""Admin listener of a service: its sockets and its certificate. Its handlers are in `admin.py`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from aiohttp import web

from hetlb.config.fleet_tables import Admin
from hetlb.errors import HetlbError
from hetlb.proxy.access import show_newest

#: Connections at most, and seconds that one may take for the head of a request or be idle. (Prometheus asks
#: at most every minute or so, and connects again.)
MOST_CONNECTIONS: Final = 256
IDLE_S: Final = 20.0
#: Seconds that a body may take.
_BODY_S: Final = 10.0
_SWEEP_S: Final = 1.0


class AdminListener:
    """Listener of one application. It listens from `open` until `close`."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        #: The certificate shown to operators who connect from now on, None without TLS.
        self.tls = tls
        self.address = ("", 0)
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        #: Connections without a request, and since when.
        self._idle: dict[asyncio.Transport, float] = {}
        #: Connections with a request that is being answered.
        self._busy: set[asyncio.Transport] = set()

    async def open(self, app: web.Application, table: Admin, listeners: Sequence[socket.socket] = ()) -> None:
        """Listen, on sockets that are bound already if there are any. Raises `HetlbError`."""
        if self.tls is not None:
            show_newest(self.tls, lambda: self.tls)
        app.middlewares.append(self._count)
        runner = self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        sites: list[web.BaseSite] = [web.SockSite(runner, each, ssl_context=self.tls) for each in listeners]
        with named("admin", table.host, table.port):
            for site in sites or [web.TCPSite(runner, table.host, table.port, ssl_context=self.tls)]:
                await site.start()
        self.address = runner.addresses[0][:2]
        self._sweep()

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of its sockets."""
        sites = () if self._runner is None else self._runner.sites
        servers = [getattr(site, "_server", None) for site in sites]
        return [each.fileno() for server in servers if server is not None for each in server.sockets]

    async def close(self) -> None:
        """Close it; harmless if it is closed."""
        runner, self._runner = self._runner, None
        if self._sweeper is not None:
            self._sweeper.cancel()
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Know which connections have a request, and have its body before it is looked at."""
        transport = request.transport
        if transport is None:
            return await handler(request)
        self._busy.add(transport)
        try:
            if request.can_read_body:
                async with asyncio.timeout(_BODY_S):
                    await request.read()
            return await handler(request)
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text="the request body took too long") from error
        finally:
            self._busy.discard(transport)
            self._idle[transport] = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        """Drop connections that have had no request for too long, and the oldest of too many such."""
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        server = None if self._runner is None else self._runner.server
        if server is None:
            return
        now, before = loop.time(), self._idle
        open_ = [each.transport for each in server.connections if each.transport is not None]
        self._idle = {each: before.get(each, now) for each in open_ if each not in self._busy}
        oldest = sorted(self._idle, key=self._idle.__getitem__)
        for number, transport in enumerate(oldest):
            if now - self._idle[transport] > IDLE_S or number < len(open_) - MOST_CONNECTIONS:
                transport.abort()


@contextlib.contextmanager
def named(what: str, host: str, port: int) -> Iterator[None]:
    """Turn a failed bind into one line that names the address."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HetlbError(f"{what}: {host}:{port} cannot be listened on: {reason}") from error
