"""Frames of the WebSocket protocol (RFC 6455, 5.2), as tests write them."""

from __future__ import annotations


def frame(opcode: int, payload: bytes, mask: bytes = b"") -> bytes:
    """A whole message as one frame: a client's with a mask of 4 bytes, a server's without."""
    size, masked = len(payload), 0x80 if mask else 0
    if size < 126:
        head = bytes((0x80 | opcode, masked | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, masked | 126)) + size.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, masked | 127)) + size.to_bytes(8)
    return head + mask + (_xor(payload, mask) if mask else payload)


def _xor(payload: bytes, mask: bytes, at: int = 0) -> bytes:
    """The payload masked or unmasked; it begins `at` bytes behind the beginning of its frame's."""
    start = at % 4
    key = ((mask[start:] + mask[:start]) * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(len(payload))
