"""Service classes: named by clients, with the cost of missed targets and room that is kept for them."""

from typing import Any

from hetlb.options.classes.class_tables import ClassTable, mistakes
from hetlb.options.classes.service_classes import ServiceClasses as hook

TABLES: dict[str, Any] = {"classes": dict[str, ClassTable]}

__all__ = ["TABLES", "hook", "mistakes"]
