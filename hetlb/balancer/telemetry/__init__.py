"""Telemetry of requests: their records, counters, metrics page, access log, spans and history."""
