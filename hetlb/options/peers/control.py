"""Control channel between the supervisor and a child: rare, small messages, some with a descriptor.

A message is one packet of a Unix socket: a pickled tuple, its first item its kind. Large data (the state of
the fleet) goes as a memory file; the packet carries its descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hetlb.balancer.config.fleet import Fleet

Packet: TypeAlias = tuple[Any, ...]
_MAX_MESSAGE_BYTES = 60_000


@dataclass(frozen=True, slots=True)
class ChildState:
    """Initial state of a worker: the fleet file as it was read last, and the name in `Via` of all workers."""

    fleet: Fleet
    own: str


class ChildControl:
    """One end. Nothing here blocks: a packet for an end that does not read is dropped."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[ChildControl, ChildControl]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *packet: Any, fds: tuple[int, ...] = ()) -> bool:
        """Send a packet. Return False if the other end is gone or reads nothing."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(packet, pickle.HIGHEST_PROTOCOL)], fds)
        except OSError:
            return False
        return True

    def send_large(self, *packet: Any, content: bytes) -> bool:
        """Send a packet with `content`, of any size, behind its items."""
        fd = os.memfd_create("hetlb-state", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
            return self.send(*packet, fds=(fd,))
        finally:
            os.close(fd)

    def receive(self) -> tuple[Packet, list[int]] | None:
        """Return the next packet and its descriptors, if any. Raises `EOFError` at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 4)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return pickle.loads(data), fds

    def listen(self, hear: Callable[[Packet, list[int]], None], gone: Callable[[], None]) -> None:
        """Call `hear` with every packet that comes, and `gone` once the other end is gone."""
        loop, fd = asyncio.get_running_loop(), self.fileno()

        def ready() -> None:
            try:
                while (received := self.receive()) is not None:
                    hear(*received)
            except EOFError:
                loop.remove_reader(fd)
                gone()

        loop.add_reader(fd, ready)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def content_of(fd: int) -> bytes:
    """Return the content of a packet of `send_large`; closes the descriptor."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
