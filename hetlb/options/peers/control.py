"""Links between the supervisor and a worker: a channel for small, rare messages, and memory for counts.

A message is one packet of a Unix socket: a pickled tuple, its first item its kind. Large data (the state of
the fleet) goes as a memory file; the packet carries its descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, TypeAlias

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


#: Bytes of each of the two halves of the memory: one is written while the other one holds.
_HALF_BYTES: Final = 32 << 20
#: Number of a report, its length, and its checksum.
_HEAD: Final = Struct("!QII")


class Tally:
    """Place for the newest report of one worker; made by the parent, inherited by all workers.

    A report that its writer could not finish does not count: the one before it holds.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("hetlb-tally", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 2 * _HALF_BYTES)
        self._memory = mmap.mmap(self._fd, 2 * _HALF_BYTES)

    def write(self, report: bytes) -> None:
        """Replace the last report. Ignore a report above the maximum size."""
        if len(report) > _HALF_BYTES - _HEAD.size:
            return
        number, half = self._newest()
        at = 0 if half else _HALF_BYTES
        self._memory[at + _HEAD.size : at + _HEAD.size + len(report)] = report
        self._memory[at : at + _HEAD.size] = _HEAD.pack(number + 1, len(report), zlib.crc32(report))

    def read(self) -> tuple[int, bytes]:
        """Return the newest whole report and its number, 0 before the first."""
        for half in sorted((0, _HALF_BYTES), key=self._number, reverse=True):
            number, length, checksum = _HEAD.unpack_from(self._memory, half)
            report = self._memory[half + _HEAD.size : half + _HEAD.size + length]
            if number and len(report) == length and zlib.crc32(report) == checksum:
                return number, report
        return 0, b""

    def _number(self, half: int) -> int:
        return int(_HEAD.unpack_from(self._memory, half)[0])

    def _newest(self) -> tuple[int, int]:
        half = max((0, _HALF_BYTES), key=self._number)
        return self._number(half), half

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
