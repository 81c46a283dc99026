"""One way of listening off the hot path: admin, emulated engines, stages and their coordinators.

It serves an application of aiohttp. With `most_idle`, a connection without a request is dropped after
`idle_s`, and the oldest where more than `most_idle` have none: silent clients keep no other out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from hetlb.addresses import listening_place

_logger = logging.getLogger("aiohttp.server")
#: Seconds between two looks at idle connections.
_SWEEP_S: Final = 0.5
#: Maximum seconds of a TLS handshake.
_HANDSHAKE_S: Final = 10.0
#: Maximum number of connections that wait to be accepted.
_BACKLOG_CONNECTIONS: Final = 2048


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Log of aiohttp's server, with no traceback for bytes that are no request."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError) and exc_info.code < 500:
            self.debug(msg, *args)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)


class AppListener:
    """Listener of one application, from `open` to `close`."""

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        most_idle: int = 0,
        idle_s: float = math.inf,
        body_s: float | None = None,
        **options: Any,
    ) -> None:
        """`body_s`: seconds that a body may take. `options` go to aiohttp's `AppRunner`."""
        #: The certificate shown at the first handshakes, None without TLS.
        self.tls = tls
        self.address = ("", 0)
        self.most_idle = most_idle
        self.idle_s = idle_s
        self._body_s = body_s
        self._options = options
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None
        #: Connections without a request, and since when; connections with a request that is being answered.
        self._idle: dict[asyncio.Transport, float] = {}
        self._busy: set[asyncio.Transport] = set()

    async def open(
        self, app: web.Application, host: str, port: int, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Listen, on sockets that are bound already if there are any. Raises `OSError`."""
        if self.most_idle:
            app.middlewares.append(self._count)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, logger=_ServerLog(_logger), **self._options
        )
        await self._runner.setup()
        protocol = self._runner.server
        assert protocol is not None, "expected a server after setup"
        tls: dict[str, Any] = {}
        if self.tls is not None:
            tls = {"ssl": self.tls, "ssl_handshake_timeout": _HANDSHAKE_S}
        loop = asyncio.get_running_loop()
        places: list[dict[str, Any]] = [{"sock": each} for each in listeners]
        for place in places or [listening_place(host, port)]:
            self._servers.append(
                await loop.create_server(self._accepted, backlog=_BACKLOG_CONNECTIONS, **place, **tls)
            )
        self.address = self._servers[0].sockets[0].getsockname()[:2]
        if self.most_idle:
            self._sweep()

    def _accepted(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection; the oldest idle ones make room for it."""
        server = None if self._runner is None else self._runner.server
        assert server is not None, "expected an open listener"
        if self.most_idle and len(server.connections) - len(self._busy) > self.most_idle:
            self._drop_idle()
        return server()

    @property
    def connections(self) -> list[asyncio.Transport]:
        """Connections that clients hold open."""
        server = None if self._runner is None else self._runner.server
        open_ = () if server is None else server.connections
        return [each.transport for each in open_ if each.transport is not None]

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of its sockets."""
        return [each.fileno() for server in self._servers for each in server.sockets]

    async def close(self, *, at_once: bool = False) -> None:
        """Stop listening, if not done before; `at_once`: connections break, as of a killed process."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        if at_once:
            for transport in self.connections:
                transport.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Track the connections with a request. A body is whole before its handler runs."""
        transport = request.transport
        if transport is None:
            return await handler(request)
        self._busy.add(transport)
        try:
            if request.can_read_body:
                try:
                    async with asyncio.timeout(self._body_s):
                        await request.read()
                except TimeoutError as error:
                    raise web.HTTPRequestTimeout(text="the request body took too long") from error
            return await handler(request)
        finally:
            self._busy.discard(transport)
            self._idle[transport] = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Drop connections that have had no request for too long, and the oldest of too many such."""
        now, before = asyncio.get_running_loop().time(), self._idle
        self._idle = {each: before.get(each, now) for each in self.connections if each not in self._busy}
        oldest = sorted(self._idle, key=self._idle.__getitem__)
        too_many = len(oldest) - self.most_idle
        for number, transport in enumerate(oldest):
            if now - self._idle[transport] > self.idle_s or number < too_many:
                transport.abort()
