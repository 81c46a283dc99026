"""Fair shares of tenants: by keys of clients, or by `proxy.tenant_header`."""

from hetlb.options.tenants.fair_shares import FairShares as hook

__all__ = ["hook"]
