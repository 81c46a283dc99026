"""ZeroMQ's wire protocol (ZMTP 3.0, https://rfc.zeromq.org/spec/23) for a client of a publisher or a router.

Why not pyzmq: a message of frames without end takes all memory of libzmq 4.3.5 (15 MiB grew to 537 MiB in
8 s). ZMQ_MAXMSGSIZE bounds one frame, ZMQ_RCVHWM counts whole messages, and libzmq reads in a thread of its
own. Here the message is bounded, and TCP slows down a peer if its data is not read.
"""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Final

from hetlb.turns import Share

#: Maximum bytes of all frames of a message, and maximum number of its frames.
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_FRAMES: Final = 8
#: Bytes that may wait to be read.
_BUFFER_BYTES: Final = 64 << 10
#: Seconds to connect, with the handshake.
_CONNECT_S: Final = 5.0
#: Seconds of silence after which the kernel asks whether the peer's machine is there, and between questions;
#: questions without an answer until the connection is lost.
_QUIET_S: Final = 15
_ASK_S: Final = 5
_UNANSWERED: Final = 3

_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
#: Signature, version 3.0, the mechanism NULL, no server, filler.
_GREETING: Final = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_ADDRESS: Final = re.compile(r"(?:tcp://\[?(?P<host>[^\[\]]+)\]?:(?P<port>[0-9]+)|ipc://(?P<path>.+))")


class ZmtpError(Exception):
    """The peer broke the protocol, or a bound."""


def _keep_alive(used: socket.socket) -> None:
    """Make the kernel find out that a peer is gone: a subscriber sends nothing, and would wait for ever."""
    used.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _QUIET_S),
        (socket.TCP_KEEPINTVL, _ASK_S),
        (socket.TCP_KEEPCNT, _UNANSWERED),
    ):
        used.setsockopt(socket.IPPROTO_TCP, option, value)


class ZmtpConnection:
    """A connection of one socket. Its coroutines raise `OSError`, `EOFError` or `ZmtpError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._share = Share()

    @classmethod
    async def open(cls, address: str, kind: str) -> ZmtpConnection:
        """Connect a socket of a `kind` (`SUB`, `DEALER`) to `tcp://host:port` or `ipc:///path`."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise ZmtpError(f"expected tcp://host:port or ipc:///path, got {address!r}")
        async with asyncio.timeout(_CONNECT_S):
            if found["path"]:
                streams = await asyncio.open_unix_connection(found["path"], limit=_BUFFER_BYTES)
            else:
                streams = await asyncio.open_connection(
                    found["host"], int(found["port"]), limit=_BUFFER_BYTES
                )
                _keep_alive(streams[1].get_extra_info("socket"))
            connection = cls(*streams)
            try:
                await connection._shake_hands(kind.encode())
            except BaseException:
                connection.close()
                raise
        return connection

    def close(self) -> None:
        self._writer.transport.abort()

    def send(self, *frames: bytes) -> None:
        for number, frame in enumerate(frames, start=1):
            self._writer.write(bytes([_MORE if number < len(frames) else 0, len(frame)]) + frame)

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message. The event loop is shared: a peer has one turn at a time."""
        frames: list[bytes] = []
        left = MAX_MESSAGE_BYTES
        while True:
            flags, frame = await self._frame(left)
            if flags & _COMMAND:
                continue
            frames.append(frame)
            left -= len(frame)
            if not flags & _MORE:
                return frames
            if len(frames) == MAX_FRAMES:
                raise ZmtpError(f"expected at most {MAX_FRAMES} frames of a message, got more")

    async def _frame(self, most: int) -> tuple[int, bytes]:
        await self._share.spent()
        read = self._reader.readexactly
        flags, size = await read(2)
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError(f"expected the flags of a frame, got {flags:#04x}")
        if flags & _LONG:
            size = int.from_bytes(bytes([size]) + await read(7), "big")
        if size > most:
            raise ZmtpError(f"expected at most {MAX_MESSAGE_BYTES} bytes of a message, got more")
        return flags, await read(size)

    async def _shake_hands(self, kind: bytes) -> None:
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(len(_GREETING))
        if not greeting.startswith(b"\xff") or greeting[9] != 0x7F or greeting[10] < 3:
            raise ZmtpError("expected a peer that speaks ZMTP 3")
        if greeting[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("expected a peer without authentication")
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self._writer.write(bytes([_COMMAND, len(ready)]) + ready)
        flags, frame = await self._frame(MAX_MESSAGE_BYTES)
        if not flags & _COMMAND or not frame.startswith(b"\x05READY"):
            raise ZmtpError("expected a peer that is ready")
