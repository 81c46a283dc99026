"""The dashboard of the admin listener: one page, live over one event stream."""

from hetlb.options.dashboard.snapshot import Snapshots as hook

__all__ = ["hook"]
