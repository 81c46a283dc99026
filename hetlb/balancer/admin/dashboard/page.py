"""Page of the dashboard: its public files, and one stream of snapshots for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from hetlb.balancer.admin.dashboard.pages import asset

#: Seconds between two snapshots.
INTERVAL_S = 1.0
#: Share of the event loop for making them.
_SHARE = 0.02
MAX_LISTENERS = 64
#: Seconds after which a listener that takes nothing is dropped.
_WRITE_TIMEOUT_S = 10.0
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}

_OWN, _SHARED = "hetlb.balancer.admin.dashboard", "hetlb.balancer.admin.dashboard.pages"
#: Path -> package of the file, its name, its type.
_FILES = {
    "/": (_OWN, "dashboard.html", "text/html"),
    "/dashboard.css": (_OWN, "dashboard.css", "text/css"),
    "/dashboard.js": (_OWN, "dashboard.js", "text/javascript"),
    "/theme.css": (_SHARED, "theme.css", "text/css"),
    "/charts.js": (_SHARED, "charts.js", "text/javascript"),
    "/dom.js": (_SHARED, "dom.js", "text/javascript"),
}
#: Nothing from elsewhere, nothing inline, no frame around it.
_FILE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_file(path: str) -> web.Response:
    package, name, content_type = _FILES[path]
    body = asset(name, package).encode()
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_FILE_HEADERS)


class EventStream:
    """Calls `snapshot` (a JSON document without line ends) once a second while there are listeners.

    A slow snapshot is made less often, so that it takes at most `_SHARE` of the time of the event loop.
    """

    def __init__(
        self,
        snapshot: Callable[[], bytes],
        interval_s: float = INTERVAL_S,
        listening: Callable[[], int] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._interval_s = interval_s
        #: Number of open streams.
        self.listeners = 0
        #: Number of listeners of all streams.
        self._listening = listening or (lambda: self.listeners)
        self._timer: asyncio.TimerHandle | None = None
        #: The last snapshot as an event, while it is not due to be made again.
        self._frame = b""
        #: Set, and replaced, when there is another one.
        self._news = asyncio.Event()
        self._closed = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/events` until the listener leaves or the server stops."""
        if self._closed or self._listening() >= MAX_LISTENERS:
            raise web.HTTPServiceUnavailable(text=f"{self._listening()} pages are open, no more are served")
        response, sent = web.StreamResponse(headers=_HEADERS), b""
        self.listeners += 1
        try:
            await response.prepare(request)
            if self._timer is None or not self._frame:
                self._publish()
            while not self._closed:
                if self._frame is sent:
                    await self._news.wait()
                    continue
                sent = self._frame
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(sent)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.listeners -= 1
        return response

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._news.set()

    def _publish(self) -> None:
        """Send a snapshot to all listeners, and the next one later; the timer ends with the last listener."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self.listeners or self._closed:
            self._frame = b""
            return
        # First, so that a snapshot that fails is not the last one.
        loop = asyncio.get_running_loop()
        self._timer, began_s = loop.call_later(self._interval_s, self._publish), time.thread_time()
        self._frame = b"event: snapshot\ndata: %b\n\n" % self._snapshot()
        pause_s = (time.thread_time() - began_s) / _SHARE
        if pause_s > self._interval_s:  # a large fleet
            self._timer.cancel()
            self._timer = loop.call_later(pause_s, self._publish)
        news, self._news = self._news, asyncio.Event()
        news.set()
