"""Mutual authentication of coordinator and stages by a shared key, before anything else is accepted.

Two HTTP requests: the connecting side names its session and a fresh nonce, and gets 401 with the stage's
nonce and its proof; then it asks for the WebSocket with its own proof. A proof is an HMAC-SHA256 over both
nonces; the key itself never travels, and a nonce is good for one connection. What follows is not encrypted:
TLS does that. Without a key the proofs are made with an empty one. A web page can send none of these headers
with a WebSocket, and one that names its origin is refused.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError
from hetlb.files import content

NONCE_BYTES: Final = 32
LEAST_KEY_BYTES: Final = 16
#: Maximum number of open challenges of a stage; beyond it the oldest is void.
_MAX_CHALLENGES: Final = 1024

_SESSION: Final = "x-hetlb-session"
_NONCE: Final = "x-hetlb-nonce"
_STAGE_NONCE: Final = "x-hetlb-stage-nonce"
_PROOF: Final = "x-hetlb-proof"

Headers = Mapping[str, str]


class NotProven(Exception):
    """A request without a proof of the key."""


def new_nonce() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def stage_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes) -> bytes:
    """Return the proof of the side that accepts connections."""
    return _mac(key, b"hetlb stage 2 accepts", client_nonce, stage_nonce)


def client_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes, session: int) -> bytes:
    """Return the proof of the side that connects; it covers the session."""
    return _mac(key, b"hetlb stage 2 connects", client_nonce, stage_nonce, session.to_bytes(8, "big"))


def _mac(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, "sha256")


# --- the side that connects ---


def hello(session: int, nonce: bytes) -> dict[str, str]:
    """Return the headers of the first request."""
    return {_SESSION: str(session), _NONCE: nonce.hex()}


def challenge(headers: Headers) -> tuple[bytes, bytes] | None:
    """Return the stage's nonce and proof; None if the answer is no challenge."""
    nonce, proof = _bytes(headers, _STAGE_NONCE), _bytes(headers, _PROOF)
    return (nonce, proof) if nonce and proof else None


def proof(stage_nonce: bytes, proof: bytes) -> dict[str, str]:
    """Return the headers of the second request, besides the first one's."""
    return {_STAGE_NONCE: stage_nonce.hex(), _PROOF: proof.hex()}


def _bytes(headers: Headers, name: str) -> bytes:
    """Return a header of 32 bytes in hexadecimal; b"" if it is not that."""
    try:
        value = bytes.fromhex(headers.get(name, ""))
    except ValueError:
        return b""
    return value if len(value) == NONCE_BYTES else b""


# --- the side that accepts ---


class Challenges:
    """Challenges of a stage that wait for their proof."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._open: OrderedDict[bytes, None] = OrderedDict()

    def issue(self, headers: Headers) -> dict[str, str]:
        """Return the headers of the answer to a first request. Raises `NotProven` if it is none."""
        if not (client_nonce := _bytes(headers, _NONCE)):
            raise NotProven("expected a greeting of this version")
        nonce = new_nonce()
        self._open[nonce] = None
        if len(self._open) > _MAX_CHALLENGES:
            self._open.popitem(last=False)
        return proof(nonce, stage_proof(self._key, client_nonce, nonce))

    def session(self, headers: Headers) -> int | None:
        """Return the session of a second request, None if it has no proof yet. Raises `NotProven`."""
        if "origin" in headers:
            raise NotProven("expected no web page")
        if _PROOF not in headers:
            return None
        text, nonce = headers.get(_SESSION, ""), _bytes(headers, _STAGE_NONCE)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 32):
            raise NotProven("expected a session")
        issued = self._open.pop(nonce, self) is None
        expected = client_proof(self._key, _bytes(headers, _NONCE), nonce, int(text))
        if not issued or not hmac.compare_digest(_bytes(headers, _PROOF), expected):
            raise NotProven("expected a proof of the key")
        return int(text)


def read_key(path: Path | None) -> bytes:
    """Return the shared key of a file, stripped; empty without a file. Raises `ConfigError`."""
    if path is None:
        return b""
    try:
        key = content(path).strip()
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable key file: {error.strerror}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{path}: expected a key of at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
    return key
