"""Certificate of a listener, as the fleet file states it."""

from __future__ import annotations

import msgspec


class TlsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A PEM certificate (with its chain) and its private key, as paths."""

    cert: str
    key: str
