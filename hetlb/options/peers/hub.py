"""Messages of peers on this machine: the first peer to bind the Unix socket relays them to the others.

Both ends check the user of the other process. A hub or a member of another user is not trusted, nor is a
socket in a folder open to files of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from hetlb.options.peers.peer_messages import Receive, each_frame, farewell, framed
from hetlb.turns import turns

#: Start of the URL of a hub: the path of its Unix socket follows.
HUB: Final = "hub:"
#: Bytes that may wait for a peer of a hub that does not read.
_MAX_UNREAD_BYTES: Final = 64 << 20
#: Seconds between two messages of a member that come back to it, at least.
_ECHO_S: Final = 0.25
#: Seconds that the last messages may take to leave.
_LAST_WORDS_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")


def view_folder() -> Path:
    """Make a folder for the sockets of one proxy's processes, for this user alone."""
    return Path(tempfile.mkdtemp(prefix="hetlb-"))


def hub_in(folder: Path) -> Path:
    """Return the path of the hub of their view."""
    return folder / "hub.sock"


def remove_folder(folder: Path) -> None:
    """Remove a folder of `view_folder`, with what is left in it."""
    shutil.rmtree(folder, ignore_errors=True)


class HubError(OSError):
    """An untrusted hub, or an unsafe folder for one."""


def user_of(end: Any) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def is_trusted(user: int) -> bool:
    """Return True for this process's own user and for root."""
    return user in (0, os.geteuid())


def check_place(path: Path) -> None:
    """Raise `HubError` unless this user or root alone can have made, or can replace, the socket at a path."""
    folder = os.stat(path.parent)
    open_to_all = bool(folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not folder.st_mode & stat.S_ISVTX
    if open_to_all or not is_trusted(folder.st_uid):
        raise HubError(f"{path.parent}: expected a folder that only this user or root can write to")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not is_trusted(found.st_uid):
        raise HubError(f"{path}: not believed, it belongs to another user (uid {found.st_uid})")
    if not stat.S_ISSOCK(found.st_mode):
        raise HubError(f"{path}: expected a socket or nothing there, got another file")


def locked(path: Path) -> int:
    """Return a descriptor with the lock of a file, for one process at a time. Raises `OSError`."""
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not is_trusted(found.st_uid):
            raise HubError(f"{path}: expected a file of this user's or nothing there")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


class _Frames(asyncio.Protocol):
    """Messages of a connection, each after its length in four bytes."""

    def __init__(self, closed: Callable[[_Frames], None]) -> None:
        self._closed = closed
        self.transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._turns = turns()
        self._turn_end = 0.0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._rest = bytearray()
        self._closed(self)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        self._take()

    def _take(self) -> None:
        """Take whole frames, as many as one turn of the event loop has room for."""
        transport, rest = self.transport, self._rest
        if transport is None:
            return
        self._turn_end = self._turns.begin()
        try:
            end = each_frame(rest, self.frame, self._in_time)
        except msgspec.DecodeError:
            transport.abort()
            return
        if end:
            self.whole(rest, end)
            del rest[:end]
        if not self._in_time():
            self._paused = True
            transport.pause_reading()
            self._turns.later(self._take)
        elif self._paused:
            self._paused = False
            transport.resume_reading()

    def _in_time(self) -> bool:
        return not self._turns.over(self._turn_end)

    def frame(self, message: bytes) -> None:
        """Take a message."""

    def whole(self, data: bytearray, end: int) -> None:
        """Take the frames that end at `end`."""


class HubTransport(_Frames):
    """Messages over a hub of this machine. What is sent in one turn of the event loop leaves at its end.

    The first process at a path is the hub; when it is gone, another one is.
    """

    by_peer = True

    def __init__(self, path: Path) -> None:
        super().__init__(self._lost_connection)
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._receive: Receive = lambda _: None
        self._gone = asyncio.Event()
        self._hub: Hub | None = None
        self.lost = False

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        self._receive = receive
        self._gone.clear()
        try:
            await self._connect()
        except (ConnectionRefusedError, FileNotFoundError):
            hub = Hub()
            await hub.start(self.path)
            self._hub = hub
            await self._connect()
        joined()
        await self._gone.wait()
        raise ConnectionError("the hub is gone")

    async def _connect(self) -> None:
        """Connect to the hub. Raises `OSError`, or `HubError` if it is not trusted."""
        check_place(self.path)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            end.connect(str(self.path))  # at once, or refused: no loop is needed
            if not is_trusted(user := user_of(end)):
                raise HubError(f"{self.path}: not believed, its process is of another user (uid {user})")
            await self._loop.create_connection(lambda: self, sock=end)
        except BaseException:
            end.close()
            raise

    def _lost_connection(self, _: _Frames) -> None:
        self._gone.set()

    def frame(self, message: bytes) -> None:
        self._receive(message)

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

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    async def close(self) -> None:
        self._flush()
        if self.transport is not None:
            self.transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._gone.wait()
            self.drop()
        if self._hub is not None:
            await self._hub.close()


class Hub:
    """The hub of a machine's peers: what one sends goes to the others. One that does not read is dropped.

    When the connection of a member ends the others are told so at once, in its name.
    """

    def __init__(self) -> None:
        self._members: set[_Member] = set()
        self._server: asyncio.Server | None = None
        self._lock = -1

    async def start(self, path: Path) -> None:
        """Listen on a Unix socket that this user alone may use. Raises `OSError`, also if a hub is there."""
        check_place(path)
        loop = asyncio.get_running_loop()
        self._lock = locked(Path(f"{path}.lock"))
        try:
            self._server = await loop.create_unix_server(lambda: _Member(self), sock=_bound(path))
        except OSError:
            os.close(self._lock)
            self._lock = -1
            raise

    def joined(self, member: _Member) -> None:
        self._members.add(member)

    def left(self, member: _Frames) -> None:
        left = cast(_Member, member)
        self._members.discard(left)
        if left.farewell:
            self.spread(left.farewell)

    def spread(self, frames: bytes, but: _Member | None = None) -> None:
        """Pass whole frames on to all, `but` one."""
        for member in list(self._members):
            transport = member.transport
            if transport is not None and member is not but and not transport.is_closing():
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
        self._trusted = False
        self._echoed_at = -math.inf
        #: Farewell in its name, as a frame: it goes to the others when the connection has ended.
        self.farewell = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._trusted = is_trusted(user_of(transport.get_extra_info("socket")))
        if self._trusted:
            self._hub.joined(self)
        else:
            assert self.transport is not None
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._trusted:
            super().data_received(data)

    def frame(self, message: bytes) -> None:
        if not self.farewell:
            self.farewell = framed(farewell(message))

    def whole(self, data: bytearray, end: int) -> None:
        # A member needs an echo now and then, to know how old news is; each one wakes it.
        now = asyncio.get_running_loop().time()
        echoes = now - self._echoed_at >= _ECHO_S
        self._echoed_at = now if echoes else self._echoed_at
        self._hub.spread(bytes(memoryview(data)[:end]), None if echoes else self)


def _bound(path: Path) -> socket.socket:
    """Return a socket at a path, in place of a former one. Raises `OSError`, also if a file is there."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound
