"""Messages of peers over a hub on this machine: the first of them at a Unix socket is the hub."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import msgspec

from hetlb.options.message_channel import each_frame, framed
from hetlb.options.shared_view.peer_transport import Receive

#: Bytes that may wait for a peer of a hub that does not read, and bytes of one message.
_MAX_UNREAD_BYTES: Final = 64 << 20
_MAX_FRAME_BYTES: Final = 1 << 20


class _Frames(asyncio.Protocol):
    """Messages of a connection, framed like a `MessageChannel`'s."""

    def __init__(self, closed: Callable[[_Frames], None]) -> None:
        self._closed = closed
        self.transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        try:
            end = each_frame(data, _MAX_FRAME_BYTES, self.frame)
        except msgspec.DecodeError:
            assert self.transport is not None
            self.transport.abort()
            return
        self._rest = data[end:]
        self.whole(data, end)

    def frame(self, message: memoryview) -> None:
        """Take a message."""

    def whole(self, data: bytes, end: int) -> None:
        """Take the frames of one read, which end at `end`."""


class HubTransport(_Frames):
    """Messages over a hub of this machine. What is sent in one turn of the event loop leaves at its end.

    The first process at a path is the hub; when it is gone, another one is.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(self._lost_connection)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._receive: Receive = lambda _: None
        self._gone = asyncio.Event()
        self._hub: Hub | None = None
        self.lost = False

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        self._receive = receive
        self._rest = b""
        self._gone.clear()
        try:
            await self._loop.create_unix_connection(lambda: self, str(self._path))
        except (ConnectionRefusedError, FileNotFoundError):
            hub = Hub()
            await hub.start(self._path)
            self._hub = hub
            await self._loop.create_unix_connection(lambda: self, str(self._path))
        joined()
        await self._gone.wait()
        raise ConnectionError("the hub is gone")

    def _lost_connection(self, _: _Frames) -> None:
        self._gone.set()

    def frame(self, message: memoryview) -> None:
        self._receive(bytes(message))

    def send(self, message: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            self.lost = True
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(framed(message))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None:
            self.transport.write(b"".join(unsent))
            if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                self.transport.abort()

    def discard(self) -> None:
        self._unsent.clear()

    async def flush(self) -> None:
        self._flush()

    async def close(self) -> None:
        self._flush()
        if self.transport is not None:
            self.transport.close()
            await self._gone.wait()
        if self._hub is not None:
            await self._hub.close()


class Hub:
    """The hub of a machine's peers: each read of one goes to all. One that does not read is dropped."""

    def __init__(self) -> None:
        self._members: set[_Member] = set()
        self._server: asyncio.Server | None = None
        self._lock = -1

    async def start(self, path: Path) -> None:
        """Listen on a Unix socket that this user alone may use. Raises `OSError`, also beside another hub."""
        loop = asyncio.get_running_loop()
        self._lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._server = await loop.create_unix_server(lambda: _Member(self), sock=_bound(path))
        except OSError:
            os.close(self._lock)
            raise

    def joined(self, member: _Member) -> None:
        self._members.add(member)

    def left(self, member: _Frames) -> None:
        self._members.discard(cast(_Member, member))

    def spread(self, frames: bytes) -> None:
        """Pass whole frames on to all."""
        for member in list(self._members):
            transport = member.transport
            if transport is not None and not transport.is_closing():
                transport.write(frames)
                if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                    transport.abort()

    async def close(self) -> None:
        """Drop all members."""
        if self._server is not None:
            self._server.close()
        for member in list(self._members):
            if member.transport is not None:
                member.transport.abort()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class _Member(_Frames):
    """A peer at the hub."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub.left)
        self._hub = hub

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._hub.joined(self)

    def whole(self, data: bytes, end: int) -> None:
        if end:
            self._hub.spread(data[:end])


def _bound(path: Path) -> socket.socket:
    """Return a socket at a path, in place of a former one. Raises `OSError`, also beside another file."""
    if path.is_socket():
        path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound
