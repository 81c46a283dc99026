"""Reader of the engines' metrics pages: without it hetlb knows only its own bookings.

The tools read such pages too: they import this option.
"""

from hetlb.options.engine_pages.engine_metrics import EnginePage as hook

__all__ = ["hook"]
