"""Service classes: named by clients, with the cost of missed targets and room that is kept for them."""

from hetlb.options.classes.service_classes import ServiceClasses as hook

__all__ = ["hook"]
