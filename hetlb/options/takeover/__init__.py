"""Takeover: a process takes the place of another."""

from hetlb.options.takeover.offer import Offer as hook

__all__ = ["hook"]
