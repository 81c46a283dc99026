"""Messages between the supervisor and a worker over a socket pair.

Promise: what is sent arrives whole, once and in order, or the channel is closed; a peer that does not read
is dropped when `MOST_UNREAD` bytes wait for it. Both ends are the same program, started by the same command,
with the same rights: a message is a pickled tuple, its first item its kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias, cast

Message: TypeAlias = tuple[Any, ...]

_LENGTH = Struct("!I")
#: Far more than a fleet's state takes.
MOST_UNREAD = 256 << 20


class Channel(asyncio.Protocol):
    """One end: `on_message` gets what the other sent, `on_closed` is called once when it is gone."""

    def __init__(self, on_message: Callable[[Message], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._closed = asyncio.Event()

    @classmethod
    async def over(
        cls, end: socket.socket, on_message: Callable[[Message], None], on_closed: Callable[[], None]
    ) -> Channel:
        """A channel over one end of a socket pair, which it closes."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_message, on_closed), sock=end)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pair is there from the beginning."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is gone."""
        self._transport = None
        self._closed.set()
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        """Give on every message that is whole."""
        unread = self._unread
        unread += data
        at = 0
        while len(unread) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, at)
            end = at + _LENGTH.size + length
            if len(unread) < end:
                break
            with memoryview(unread) as view:  # a view that is left would keep `unread` from growing
                message = pickle.loads(view[at + _LENGTH.size : end])
            at = end
            self._on_message(message)
        if at:
            del unread[:at]

    def send(self, *message: Any) -> None:
        """Send a message; to nobody where the other end is gone."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        transport.write(_LENGTH.pack(len(data)) + data)
        if transport.get_write_buffer_size() > MOST_UNREAD:
            transport.abort()

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Close this end; returns when the other has what was sent, after `timeout_s` at the latest."""
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()

    def close(self) -> None:
        """Close this end after what was sent."""
        if self._transport is not None:
            self._transport.close()
