"""Frames between two processes of this machine, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fuzz.costs import Make, Reader, framed, many, pieces

from hetlb.options.message_channel import MessageChannel


class _End:
    """A transport that takes nothing."""

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _channel() -> MessageChannel[Any]:
    async def make() -> MessageChannel[Any]:
        decoder = msgspec.msgpack.Decoder(list[Any])
        return MessageChannel(decoder, lambda messages: None, lambda: None)

    return asyncio.new_event_loop().run_until_complete(make())


_CHANNEL = _channel()


def frames(data: bytes, size: int = 4096) -> None:
    """Frames as they come from a socket."""
    channel = _CHANNEL
    end: Any = _End()
    channel.connection_made(end)
    for piece in pieces(data, size):
        channel.data_received(piece)
    channel.data_received(framed(b"\xc1"))  # no MessagePack: what is left is dropped
    channel._received.clear()


TARGETS = {"frames": frames}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((frames, b""), (frames, b"\x00\x10\x00\x00"))
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "frames of a peer": (frames, many(framed(b"\x91\x01")), 64 << 10),
    "a frame in reads of 4 KiB": (frames, lambda size: framed(b"\xdc\x00\x01\xda" + bytes(size)), 1 << 20),
    "a frame without end": (frames, lambda size: (size * 2).to_bytes(4, "big") + bytes(size), 1 << 20),
}  # fmt: skip
