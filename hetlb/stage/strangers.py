"""Connections to a stage that have proved nothing yet: bounded in number and in time.

Each may send a short request. Where there are too many the oldest one is closed: silent connections do not
keep others out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

from aiohttp import web

#: Connections at once, and seconds of each.
MOST_STRANGERS: Final = 64
STRANGER_S: Final = 5.0
#: Limits of a request's head: some 20 KiB in all.
HEAD_LIMITS: Final[dict[str, Any]] = {"max_line_size": 1024, "max_field_size": 1024, "max_headers": 20}


class Strangers:
    """Makes the protocol of each connection, and closes those that are not admitted in time."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[web.RequestHandler, asyncio.TimerHandle] = OrderedDict()

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        handler = self._server()
        # A TLS handshake has as long again, and has no transport before it is over.
        timer = self._loop.call_later(2 * STRANGER_S, self._close, handler)
        self._waiting[handler] = timer
        if len(self._waiting) > MOST_STRANGERS:
            self._close(next(iter(self._waiting)))
        return handler

    def admit(self, request: web.Request) -> None:
        """Exempt a connection that has proved the key."""
        handler = request.protocol
        if (timer := self._waiting.pop(handler, None)) is not None:
            timer.cancel()

    def _close(self, handler: web.RequestHandler) -> None:
        if (timer := self._waiting.pop(handler, None)) is not None:
            timer.cancel()
        if handler.transport is not None:
            handler.transport.abort()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
