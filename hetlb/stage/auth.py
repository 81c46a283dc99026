"""Mutual authentication of coordinator and stages by a shared key.

Both sides send a fresh nonce and prove with HMAC-SHA256 that they have the key, which itself never travels.
What follows on the connection is not encrypted: TLS does that. Without a key the proofs are those of an
empty one.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError

NONCE_BYTES: Final = 32
LEAST_KEY_BYTES: Final = 16


def new_nonce() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def stage_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes) -> bytes:
    """Proof of the side that accepts connections."""
    return _mac(key, b"hetlb stage accepts", client_nonce, stage_nonce)


def client_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes, session: int) -> bytes:
    """Proof of the side that connects; it covers the session."""
    return _mac(key, b"hetlb stage connects", client_nonce, stage_nonce, session.to_bytes(8, "big"))


def _mac(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)


def read_key(path: Path | None) -> bytes:
    """The shared key of a file, without white space around it; empty without a file. Raises `ConfigError`."""
    if path is None:
        return b""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable key file: {os.strerror(error.errno or 0)}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{path}: expected a key of at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
    return key
