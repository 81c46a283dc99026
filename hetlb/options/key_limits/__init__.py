"""Limits of API keys."""

from hetlb.options.key_limits.limits import Limiters as hook

__all__ = ["hook"]
