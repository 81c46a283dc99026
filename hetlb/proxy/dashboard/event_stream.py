"""One event stream for all viewers: server-sent events over the admin listener.

Nothing is computed without listeners, and at most one snapshot a second for all together;
a listener that is slow misses snapshots, one that reads nothing or left is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

#: Seconds between two snapshots.
INTERVAL_S = 1.0
LISTENERS_MAX = 64
#: A listener that takes nothing for this long is dropped.
_WRITE_TIMEOUT_S = 10.0


class _Listener:
    """One open stream: the newest snapshot that it has not got yet."""

    def __init__(self) -> None:
        self._latest: bytes | None = None
        self._news = asyncio.Event()

    def put(self, frame: bytes | None) -> None:
        """The newest snapshot; None ends the stream."""
        self._latest = frame
        self._news.set()

    async def get(self) -> bytes | None:
        """Wait for something new."""
        await self._news.wait()
        self._news.clear()
        return self._latest


class EventStream:
    """Calls `snapshot` (a JSON document without line ends) once a second while there are listeners."""

    def __init__(self, snapshot: Callable[[], bytes], interval_s: float = INTERVAL_S) -> None:
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._listeners: set[_Listener] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._frame = b""
        self._due = 0.0
        self._closed = False

    @property
    def listeners(self) -> int:
        """Number of open streams."""
        return len(self._listeners)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/events` until the listener leaves or the server stops."""
        if self._closed or len(self._listeners) >= LISTENERS_MAX:
            raise web.HTTPServiceUnavailable(
                text=f"{len(self._listeners)} pages are open, no more are served"
            )
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "X-Content-Type-Options": "nosniff",
            }
        )
        listener = _Listener()
        self._listeners.add(listener)
        try:
            await response.prepare(request)
            self._welcome(listener)
            while (frame := await listener.get()) is not None:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(frame)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._listeners.discard(listener)
        return response

    def close(self) -> None:
        """End every stream; no more are served."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for listener in self._listeners:
            listener.put(None)

    def _welcome(self, listener: _Listener) -> None:
        """Give a new listener a snapshot at once: the last one while the next is not due."""
        loop = asyncio.get_running_loop()
        if self._closed:
            listener.put(None)
        elif self._frame and loop.time() < self._due:
            listener.put(self._frame)
            if self._timer is None:
                self._timer = loop.call_at(self._due, self._publish)
        else:
            if self._timer is not None:
                self._timer.cancel()
            self._publish()

    def _publish(self) -> None:
        self._timer = None
        if not self._listeners:
            # What is kept of the last one is old by the time a viewer comes.
            self._frame = b""
            return
        loop = asyncio.get_running_loop()
        # First, so that a snapshot that fails is not the last one.
        self._due = loop.time() + self._interval_s
        self._timer = loop.call_at(self._due, self._publish)
        self._frame = b"event: snapshot\ndata: %b\n\n" % self._snapshot()
        for listener in self._listeners:
            listener.put(self._frame)
