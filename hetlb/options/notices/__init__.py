"""Notices: the requests of an instance that leaves move away in time."""

from hetlb.options.notices.moves import move_away as hook

__all__ = ["hook"]
