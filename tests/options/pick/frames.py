"""Frames of HTTP/2 written by hand, for peers of a picker that grpcio would not play."""

from __future__ import annotations

import asyncio
import functools

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
#: Codes of RST_STREAM and GOAWAY (RFC 9113, 7), and a setting (6.5.2).
REFUSED_STREAM, ENHANCE_YOUR_CALM = 7, 11
MAX_CONCURRENT_STREAMS = 3
MAX_FRAME = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, number: int = 0, payload: bytes = b"") -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number.to_bytes(4, "big"), payload)


#: How a client begins.
HELLO = PREFACE + frame(SETTINGS)


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """(type, flags, stream, payload) of the next frame."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4], int.from_bytes(head[5:], "big"), payload


@functools.cache
def block(path: bytes) -> bytes:
    """A header block of a call: literals of HPACK, each shorter than 127 bytes."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"picker",
        b"content-type": b"application/grpc", b"te": b"trailers",
    }  # fmt: skip
    return b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields.items())


def message(data: bytes) -> bytes:
    """A message of gRPC."""
    return b"\0" + len(data).to_bytes(4, "big") + data
