"""Messages of a gateway, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import functools

from fuzz.costs import Make, Reader, many
from options.pick.door import ANSWER, BODY, HEADERS, Door, messages_of, written
from options.pick.gateway import body_of
from options.pick.http2_peer import Peers


@functools.cache
def door() -> Door:
    """A picker that is used again: making one costs more than most inputs."""
    return Door()


@functools.cache
def peers() -> Peers:
    """A port of gateways that is used again."""
    return Peers()


def http2(data: bytes) -> None:
    """Frames of HTTP/2 to the port of gateways."""
    peers().check(data)


def gateway(data: bytes) -> None:
    """Messages of a gateway: no error but a refusal, one lease at most, and nothing left of it."""
    door().check(messages_of(data))


def headers_of(unit: bytes) -> Make:
    """A request's headers with as many of these headers as fit, below what may stand beside a body."""

    def make(size: int) -> bytes:
        held = unit * (size // len(unit))
        found = b"\x0a" + varint(len(held)) + held
        return written([b"\x12" + varint(len(found)) + found])

    return make


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def pieces(part: str, size: int, *before: bytes) -> Make:
    """A body in messages of `size` bytes."""
    unit = written([body_of(part, b"x" * size, end=False).SerializeToString()])
    return many(unit, written(list(before)))


TARGETS = {"gateway": gateway, "http2": http2}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((gateway, b""), (gateway, written([HEADERS])))
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "a body in messages of a byte": (gateway, pieces("request_body", 1, HEADERS), 32 << 10),
    "a body in messages of 4 KiB": (gateway, pieces("request_body", 4096, HEADERS), 512 << 10),
    "an answer in messages of a byte": (
        gateway, pieces("response_body", 1, HEADERS, BODY, ANSWER), 32 << 10,
    ),
    "messages that change nothing": (
        gateway, many(written([HEADERS]), written([HEADERS, BODY])), 64 << 10,
    ),
    "empty headers of a gateway": (gateway, headers_of(b"\x0a\x00"), 16 << 10),
    "headers of a gateway": (gateway, headers_of(b"\x0a\x06\x0a\x01a\x12\x01b"), 16 << 10),
}  # fmt: skip
