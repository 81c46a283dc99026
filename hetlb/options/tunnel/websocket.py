"""Handshake of the WebSocket protocol (RFC 6455, 4.2), without sockets."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

#: The only version there is.
VERSION: Final = b"13"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")


def is_key(value: bytes) -> bool:
    """Return True for a Sec-WebSocket-Key: 16 bytes in base64."""
    return _KEY.fullmatch(value) is not None


def accept_of(key: bytes) -> bytes:
    """Return the Sec-WebSocket-Accept that answers a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
