"""Metrics pages of engines, read: without it nothing is known but what hetlb books itself.

The tools read such pages too: they import this option.
"""

from hetlb.options.engine_pages.engine_metrics import EnginePage as hook

__all__ = ["hook"]
