"""Frames of the WebSocket protocol (RFC 6455), without sockets and without extensions."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Final

TEXT: Final = 0x1
CLOSE: Final = 0x8
PING: Final = 0x9
PONG: Final = 0xA
_CONTINUATION: Final = 0x0
_OPCODES: Final = frozenset({_CONTINUATION, TEXT, 0x2, CLOSE, PING, PONG})
#: Close codes (RFC 6455, 7.4.1, and the registry of IANA).
NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
BAD_DATA: Final = 1007
POLICY: Final = 1008
TOO_BIG: Final = 1009
INTERNAL_ERROR: Final = 1011
SERVICE_RESTART: Final = 1012
TRY_AGAIN_LATER: Final = 1013
BAD_GATEWAY: Final = 1014
NO_CODE: Final = 1005
#: Bytes of the longest head of a frame.
_MOST_HEAD: Final = 14
#: The only version there is.
VERSION: Final = b"13"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")


class ProtocolError(Exception):
    """Bytes that are no frames of the expected side; `code` is that of the Close frame to answer with."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def is_key(value: bytes) -> bool:
    """True for a Sec-WebSocket-Key: 16 bytes in base64."""
    return _KEY.fullmatch(value) is not None


def accept_of(key: bytes) -> bytes:
    """The Sec-WebSocket-Accept that answers a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


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


def close_frame(code: int, reason: str) -> bytes:
    """A Close frame of a server; the reason is cut to what fits a control frame."""
    return frame(CLOSE, code.to_bytes(2) + reason.encode()[:123])


def close_code(payload: bytes) -> int:
    """The code of a Close frame, `NO_CODE` where it has none."""
    return int.from_bytes(payload[:2]) if len(payload) >= 2 else NO_CODE


class FrameReader:
    """Reads the frames of one side as they come.

    `masked` says that they are a client's. Of a message the last `most_kept` bytes are kept; with `strict` a
    longer one raises.
    """

    __slots__ = (
        "_control", "_data_opcode", "_head", "_left", "_mask", "_masked", "_message", "_most_kept", "_opcode",
        "_strict", "_unmasked",
    )  # fmt: skip

    def __init__(self, *, masked: bool, most_kept: int, strict: bool = False) -> None:
        self._masked = masked
        self._most_kept = most_kept
        self._strict = strict
        #: The beginning of a frame's head; `_left` is what is missing of a payload, None outside one.
        self._head = b""
        self._left: int | None = None
        #: The first byte of the frame's head; its mask, and how much of its payload was unmasked.
        self._opcode = 0
        self._mask = b""
        self._unmasked = 0
        #: The message so far, and its opcode, 0 without one; and the payload of a control frame within it.
        self._message = bytearray()
        self._data_opcode = 0
        self._control = bytearray()

    @property
    def between(self) -> bool:
        """True if what was fed ended with a frame: another one may follow."""
        return self._left is None and not self._head

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The messages that end within `data`, one by one: opcode and payload. Raises `ProtocolError`."""
        at = 0
        while at < len(data) or self._left == 0:
            if self._left is None:
                at = self._read_head(data, at)
                if self._left is None:
                    break
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if piece:
                self._keep(piece)
            if not self._left:
                self._left = None
                if (ended := self._end_frame()) is not None:
                    yield ended

    def _read_head(self, data: bytes, at: int) -> int:
        """Take what `data` has of a frame's head from `at` on; the position behind it."""
        had = len(self._head)
        head = self._head + data[at : at + _MOST_HEAD - had]
        wanted, size = 2, 0
        if len(head) >= 2:
            size = head[1] & 0x7F
            wanted = (2 if size < 126 else 4 if size == 126 else 10) + (4 if head[1] & 0x80 else 0)
        if len(head) < wanted:
            self._head = head
            return at + len(head) - had
        self._head = b""
        rest = wanted - 4 if head[1] & 0x80 else wanted
        if size >= 126:
            size = int.from_bytes(head[2:rest])
        self._check(head, size)
        self._opcode = head[0]
        self._mask = head[rest:wanted]
        self._unmasked = 0
        self._left = size
        return at + wanted - had

    def _check(self, head: bytes, size: int) -> None:
        opcode = head[0] & 0x0F
        if head[0] & 0x70:
            raise ProtocolError("a frame has reserved bits, and no extension was agreed on")
        if opcode not in _OPCODES:
            raise ProtocolError(f"a frame has the opcode {opcode}")
        if bool(head[1] & 0x80) is not self._masked:
            raise ProtocolError("a frame is not masked" if self._masked else "a frame is masked")
        if opcode >= CLOSE:
            if not head[0] & 0x80 or size > 125:
                raise ProtocolError("a control frame is too long or in parts")
        elif (opcode == _CONTINUATION) is not bool(self._data_opcode):
            raise ProtocolError("a message in parts is not continued, or none was begun")
        elif self._strict and len(self._message) + size > self._most_kept:
            raise ProtocolError("a message is too long", TOO_BIG)

    def _keep(self, piece: bytes) -> None:
        if self._mask:
            size = len(piece)
            piece = _xor(piece, self._mask, self._unmasked)
            self._unmasked += size
        kept = self._control if self._opcode & 0x0F >= CLOSE else self._message
        kept += piece
        if len(kept) > 2 * self._most_kept:
            del kept[: -self._most_kept]

    def _end_frame(self) -> tuple[int, bytes] | None:
        """The message that ends with a frame, None if it goes on."""
        opcode = self._opcode & 0x0F
        kept = self._message
        if opcode >= CLOSE:
            kept = self._control
        elif opcode:
            self._data_opcode = opcode
        if not self._opcode & 0x80:
            return None
        if opcode < CLOSE:
            opcode, self._data_opcode = self._data_opcode, 0
        message = bytes(kept[-self._most_kept :])
        kept.clear()
        return opcode, message
