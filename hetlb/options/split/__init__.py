"""Prefill at one instance, decode at another: decided in `hand_overs.py`, done in `kv_transfers.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetlb.options.split.kv_tables import ConnectorName, KvTransferTable, mistakes

if TYPE_CHECKING:
    from hetlb.options.split.kv_transfers import KvTransfers

TABLES: dict[str, Any] = {"kv_transfer": ConnectorName | KvTransferTable | None}


def hook(*args: Any) -> KvTransfers:
    """Return the carrier of requests in two legs; a simulation decides alone."""
    from hetlb.options.split.kv_transfers import KvTransfers

    return KvTransfers(*args)


__all__ = ["TABLES", "hook", "mistakes"]
