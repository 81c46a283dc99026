"""Spans of requests by OpenTelemetry."""

from hetlb.options.tracing.tracing import Tracing as hook

__all__ = ["hook"]
