"""The two ways in which peers' messages travel: a hub on this machine, and a server of Valkey or Redis.

Either passes each message on to all peers, the sender included, in order, or the connection is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeAlias, cast

import msgspec

from hetlb.options.message_channel import each_frame, framed
from hetlb.turns import Share

#: Start of the URL of a hub: the path of its Unix socket follows.
HUB: Final = "hub:"
#: Messages that wait to be published, at most.
_MAX_WAITING_MESSAGES: Final = 1000
_RETRY_S: Final = 0.25
#: Multiple of `silent_s` without a message after which a connection is dead, as own messages come back.
_DEAF_FACTOR: Final = 2.0
#: Bytes that may wait for a peer of a hub that does not read, and bytes of one message.
_MAX_UNREAD_BYTES: Final = 64 << 20
_MAX_FRAME_BYTES: Final = 1 << 20

Receive: TypeAlias = Callable[[bytes], None]


class PeerTransport(Protocol):
    """Carrier of messages; `lost` is set when one was not carried."""

    lost: bool

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        """Hear messages until the connection is lost, which raises; `joined` is called once it is made."""

    def send(self, message: bytes) -> None:
        """Send a message to all peers."""

    def discard(self) -> None:
        """Drop the messages that wait to be sent."""

    async def flush(self) -> None:
        """Wait until all messages have left."""

    async def close(self) -> None:
        """End the connection."""


class RedisTransport:
    """Messages over publish and subscribe of a Valkey or Redis server."""

    def __init__(self, url: str, channel: str, silent_s: float) -> None:
        import redis.asyncio

        limit_s = max(0.2, silent_s)
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=limit_s, socket_timeout=limit_s, protocol=2
        )
        self._channel, self._silent_s = channel, silent_s
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING_MESSAGES)
        self._publisher: asyncio.Task[None] | None = None
        self.lost = False

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        if self._publisher is None:
            self._publisher = asyncio.create_task(self._publish())
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            joined()
            loop = asyncio.get_running_loop()
            heard_at, share = loop.time(), Share()
            while True:
                await share.spent()
                message = await subscription.get_message(
                    ignore_subscribe_messages=True, timeout=self._silent_s
                )
                if message is not None:
                    heard_at = loop.time()
                    receive(message["data"])
                elif loop.time() - heard_at > _DEAF_FACTOR * self._silent_s:
                    raise ConnectionError("not even own messages come back")

    def send(self, message: bytes) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.lost = True

    def discard(self) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
            self._outbox.task_done()

    async def flush(self) -> None:
        await self._outbox.join()

    async def close(self) -> None:
        while self._publisher is not None and not self._publisher.done():
            self._publisher.cancel()
            # redis-py takes a cancellation for a timeout now and then: it is said again.
            await asyncio.wait([self._publisher], timeout=_RETRY_S)
        await self._redis.aclose()

    async def _publish(self) -> None:
        from redis.exceptions import RedisError

        while True:
            message = await self._outbox.get()
            try:
                await self._redis.publish(self._channel, message)
            except (RedisError, OSError, TimeoutError):
                self.lost = True
                await asyncio.sleep(_RETRY_S)
            finally:
                self._outbox.task_done()


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
    """Return a socket at a path, in place of a former one. Raises `OSError`."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def transport_of(url: str, group: str, silent_s: float) -> PeerTransport:
    """Return the carrier that a URL names."""
    if url.startswith(HUB):
        return HubTransport(Path(url.removeprefix(HUB)))
    return RedisTransport(url, f"{group}:leases", silent_s)
