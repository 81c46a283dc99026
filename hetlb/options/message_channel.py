"""One end of a channel between two processes of this machine: batches of messages over a Unix socket.

A frame is a length of four bytes (big-endian) and a MessagePack array of messages
(`options/relays/protocol.py`, `offer.py`): what is sent in one turn of the event loop. A frame that is none
of the protocol closes the channel; a peer that does not read is dropped when `MAX_UNREAD_BYTES` wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from struct import Struct
from typing import Final, Generic, TypeVar, cast

import msgspec

from hetlb.balancer.telemetry.events import Event
from hetlb.balancer.telemetry.rarely import Rarely

logger = logging.getLogger("hetlb.proxy")

MAX_UNREAD_BYTES: Final = 256 << 20
#: Maximum seconds that a message waits for others, where nothing waits for it.
POST_S: Final = 0.001
#: Maximum bytes of a frame: a fleet with all its profiles takes a few megabytes.
MAX_FRAME_BYTES: Final = 64 << 20
#: Lines about channels that break the protocol: one in a while.
_broken: Final = Rarely()
_LENGTH = Struct("!I")
_encode = msgspec.msgpack.Encoder().encode

_In = TypeVar("_In")


def framed(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def each_frame(data: bytes, most: int, take: Callable[[memoryview], object]) -> int:
    """Call `take` with the message in each whole frame; return where these end.

    Raises `DecodeError` for a message of more than `most` bytes.
    """
    at, end = 0, len(data)
    while end - at >= 4:
        (length,) = _LENGTH.unpack_from(data, at)
        if length > most:
            raise msgspec.DecodeError(f"a frame of {length} bytes")
        after = at + 4 + length
        if after > end:
            break
        take(memoryview(data)[at + 4 : after])
        at = after
    return at


class MessageChannel(asyncio.Protocol, Generic[_In]):
    """`on_messages` gets each batch that the other end sent; `on_closed` is called once when it is gone."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[_In]],
        on_messages: Callable[[list[_In]], None],
        on_closed: Callable[[], None],
        most_frame: int = MAX_FRAME_BYTES,
    ) -> None:
        self._decode = decoder.decode
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._most_frame = most_frame
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        #: A frame that is not whole, and the bytes with which it is.
        self._received = bytearray()
        self._wanted = 0
        self._unsent: list[msgspec.Struct] = []
        #: True if a flush comes at the end of this turn, and by `POST_S` at the latest.
        self._flushes = self._flushes_later = False

    async def open(self, end: socket.socket) -> None:
        """Use a connected socket, and close it in the end."""
        await self._loop.create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        if self._received:
            self._received += data
            if len(self._received) < self._wanted:
                return
            data = bytes(self._received)
        try:
            at = each_frame(data, self._most_frame, self._frame)
        except msgspec.DecodeError as error:
            text = "a channel is closed, its other end does not keep to the protocol: %s"
            _broken.tell(logger, Event.WORKER_FAILED, text, error)
            self.close()
            at = len(data)
        self._received = bytearray(data[at:])
        self._wanted = 4 + _LENGTH.unpack_from(data, at)[0] if len(data) - at >= 4 else 4

    def _frame(self, data: memoryview) -> None:
        self._on_messages(self._decode(data))

    def send(self, message: msgspec.Struct) -> None:
        """Send a message with the others of this turn; dropped where the other end is gone."""
        self._unsent.append(message)
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)

    def post(self, message: msgspec.Struct) -> None:
        """Send a message with the next one, `POST_S` later at most: each frame wakes the other end."""
        self._unsent.append(message)
        if not self._flushes_later:
            self._flushes_later = True
            self._loop.call_later(POST_S, self._flush_later)

    def _flush_later(self) -> None:
        self._flushes_later = False
        self.flush()

    def flush(self) -> None:
        self._flushes = False
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if not unsent or transport is None or transport.is_closing():
            return
        transport.write(framed(_encode(unsent)))
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            transport.abort()

    def close(self) -> None:
        """Flush, then close this end."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
