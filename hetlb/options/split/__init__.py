"""Prefill at one instance, decode at another."""

from hetlb.options.split.kv_transfers import KvTransfers as hook

__all__ = ["hook"]
