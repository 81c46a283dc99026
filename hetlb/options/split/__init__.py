"""Prefill at one instance, decode at another: decided in `hand_overs.py`, done in `kv_transfers.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetlb.options.split.kv_transfers import KvTransfers


def hook(*args: Any) -> KvTransfers:
    """Return what carries requests out in two legs; a simulation decides alone."""
    from hetlb.options.split.kv_transfers import KvTransfers

    return KvTransfers(*args)
