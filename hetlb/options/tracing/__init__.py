"""Spans of requests by OpenTelemetry."""
