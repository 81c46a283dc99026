"""Service classes: those that clients name, what their targets cost, and room that is kept for them."""

from hetlb.options.classes.service_classes import ServiceClasses as hook

__all__ = ["hook"]
