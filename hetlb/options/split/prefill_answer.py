"""Fields read from the answers of prefill instances and bootstrap servers.

This module stays interpreted: msgspec looks at annotations, and compiled classes keep none.
"""

from __future__ import annotations

import msgspec


class PrefillFields(msgspec.Struct):
    """Fields of a prefill instance's answer: its id, and the parameters to fetch the KV blocks."""

    id: str | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


class TransferFields(msgspec.Struct):
    """Fields of NIXL's parameters that a router reads."""

    transfer_mode: str | None = None


class BootstrapEntry(msgspec.Struct):
    """One engine at a Mooncake bootstrap server."""

    engine_id: str
