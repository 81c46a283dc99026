"""Addresses of clients behind other proxies (`proxy.trusted_proxies`)."""

from hetlb.options.client_addresses.forwarded import ForwardedAddresses as hook
from hetlb.options.client_addresses.forwarded import mistakes

__all__ = ["hook", "mistakes"]
