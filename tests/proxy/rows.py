"""Ended requests for the page's figures, made without a proxy."""

from __future__ import annotations

from typing import Any

from hetlb.balancer.core.types import Lease, Outcome, Request
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.telemetry.request_record import RequestRecord


def ended(at: float, *, placed: bool = True, outcome: Outcome = Outcome.OK, **more: Any) -> RequestRecord:
    """A request that ended at `at`, with the facts that are taken down."""
    took_s, ttft_s = more.get("took_s", 1.0), more.get("ttft_s", 0.25)
    request = Request(1, "m", 100, sequences=more.get("sequences", 1), client=more.get("client", ""))
    lease = Lease(
        1,
        request,
        more.get("instance", "a"),
        1,
        work_ns=0,
        kv_tokens=0,
        kv_prompt_tokens=0,
        promised_tokens=0,
        prompt_tokens=0,
        unread_tokens=0,
        predicted_output=more.get("predicted", 8.0),
        dispatched_at=at - took_s,
    )
    lease.output_tokens = more.get("tokens", 10)
    lease.forecast_end_s = more.get("expected_s", 0.5)
    over = RequestRecord(request, Kind.COMPLETION, b"POST", "/v1/completions", "r-1", None, at - took_s, 100)
    over.ended_at = at
    over.first_byte_at = at - took_s + ttft_s
    over.usage_prompt_tokens = more.get("used")
    over.lease = lease if placed else None
    over.outcome = outcome
    return over
