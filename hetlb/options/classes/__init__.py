"""Service classes that clients name."""

from hetlb.options.classes.service_classes import ServiceClasses as hook

__all__ = ["hook"]
