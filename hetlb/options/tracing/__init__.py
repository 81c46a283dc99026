"""Spans of requests by OpenTelemetry."""

from typing import Any

from hetlb.options.tracing.tracing_table import TracingTable, check_serving, mistakes

TABLES: dict[str, Any] = {"tracing": TracingTable | None}


def hook(table: TracingTable) -> Any:
    """Return the maker and sender of spans; they need the packages of an extra."""
    from hetlb.options.tracing.tracing import Tracing

    return Tracing(table)


__all__ = ["TABLES", "check_serving", "hook", "mistakes"]
