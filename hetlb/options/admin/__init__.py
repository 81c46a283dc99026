"""The admin listener's pages: state of the fleet, metrics, decisions, and the operator's changes."""

from hetlb.options.admin.admin import make_app as hook

__all__ = ["hook"]
