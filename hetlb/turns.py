"""Turns of readers on the event loop: no peer has more than a few milliseconds of it at a time.

Every reader of a peer's bytes (client, engine, WebSocket, gRPC, ZeroMQ, Redis, stage) stops when its turn
is over and goes on in a later one; meanwhile timers, other peers and new connections are served. All readers
of a loop share one queue, so that many busy peers together take no more of each iteration than one.

A protocol's callback asks `over` between two messages and hands the rest to `later`, with its transport
paused; a coroutine awaits `Share.spent` between two messages.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

#: Seconds of one turn.
TURN_S: Final = 0.002

_now: Final = time.monotonic
_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = weakref.WeakKeyDictionary()


def turns(loop: asyncio.AbstractEventLoop | None = None) -> Turns:
    """Return the queue of a loop, the running one by default."""
    loop = loop or asyncio.get_running_loop()
    found = _queues.get(loop)
    if found is None:
        found = _queues[loop] = Turns(loop)
    return found


class Turns:
    """Readers with more to read than one turn takes, in the order of their requests for another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._create_future = loop.create_future
        self.waiting: deque[Callable[[], None] | asyncio.Future[None]] = deque()
        self._running = False

    def begin(self) -> float:
        """Begin a turn; return its end for `over`."""
        return _now() + TURN_S

    def over(self, end: float) -> bool:
        """Return True if the turn that ends then is over."""
        return _now() >= end

    def later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the readers before it have had their turn. It may find that its peer left."""
        self._add(go_on)

    async def next(self) -> None:
        """Return when the readers before this one have had their turn."""
        future = self._create_future()
        self._add(future)
        await future

    def _add(self, reader: Callable[[], None] | asyncio.Future[None]) -> None:
        self.waiting.append(reader)
        if len(self.waiting) == 1 and not self._running:
            self._call_soon(self._run)

    def _run(self) -> None:
        """Run readers until one turn is over: all of them together in this iteration of the loop."""
        waiting, end = self.waiting, self.begin()
        self._running = True
        try:
            for _ in range(len(waiting)):
                reader = waiting.popleft()
                if not isinstance(reader, asyncio.Future):
                    reader()
                elif not reader.done():
                    reader.set_result(None)
                    break  # a coroutine has its turn after this call
                if self.over(end):
                    break
        finally:  # an error in one of them holds up no other
            self._running = False
            if waiting:
                self._call_soon(self._run)


class Share:
    """Share that one coroutine has of the event loop: `TURN_S` at a time."""

    def __init__(self) -> None:
        self._turns = turns()
        self._end = self._turns.begin()

    async def spent(self) -> None:
        """Return at once during a turn; after it, when the next one begins."""
        if self._turns.over(self._end):
            await self._turns.next()
            self._end = self._turns.begin()
