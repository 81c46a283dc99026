"""Verdict on the client of a load test: a run is VALID, or SUSPECT with reasons.

Every limit is here, and every figure that a verdict rests on is in what it gives. A client that is
slow, or answers that are not what was asked for, are named instead of being reported as the server's
latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.records import RequestResult, percentile

VALID, SUSPECT = "VALID", "SUSPECT"
#: A measurement error below this is of no concern; above it, it must be small beside what is measured.
ERROR_ALLOWED_S = 0.005
ERROR_ALLOWED_SHARE_OF_TTFT = 0.01
#: A load that is due all at once waits in queues, whose order decides when an answer comes, not when its
#: request was sent: lateness only has to be short beside the whole.
ERROR_ALLOWED_SHARE_OF_DURATION = 0.1
RATE_ERROR_ALLOWED = 0.02
CPU_ALLOWED = 0.9
FAILED_ALLOWED = 0.01
MISMATCHED_ALLOWED = 0.01


def judge(
    plan: Sequence[PlannedRequest],
    records: Sequence[RequestResult],
    figures: Mapping[str, Any],
    *,
    cpu_share: float,
    loop_lag_s: Sequence[float],
    errors: Mapping[str, int],
    exact_output: bool = True,
    exact_prompt: bool = True,
) -> dict[str, Any]:
    """The verdict on the client of one run, and the figures it rests on.

    `figures` are those of `summarize`; `cpu_share` is of one core; `exact_output`: every answer was to be as
    long as planned, or at most as long; `exact_prompt`: the planned lengths of prompts are no estimates.
    """
    late = sorted(lateness for record in records if (lateness := record.lateness_s) is not None)
    late_s, lag_s = percentile(late, 99), percentile(sorted(loop_lag_s), 99)
    offered = _rate([planned.scheduled_s for planned in plan])
    achieved = _rate([record.sent_s for record in records if record.sent_s is not None])
    mismatched = sum(
        record.output_tokens > planned.sequences * planned.answer_tokens
        or (exact_output and record.output_tokens != planned.sequences * planned.answer_tokens)
        for planned, record in zip(plan, records, strict=True)
        if record.ok
    )
    other_prompts = sum(
        exact_prompt and record.prompt_tokens != planned.input_tokens
        for planned, record in zip(plan, records, strict=True)
        if record.ok
    )

    ttft_s = figures["median_ttft_ms"] / 1e3 or figures["median_e2el_ms"] / 1e3
    allowed_s = max(ERROR_ALLOWED_S, ERROR_ALLOWED_SHARE_OF_TTFT * ttft_s)
    if offered is None:
        allowed_s = max(ERROR_ALLOWED_S, ERROR_ALLOWED_SHARE_OF_DURATION * figures["duration"])
    shares = (mismatched, other_prompts)
    reasons = [
        *_timing_reasons(late_s, lag_s, allowed_s, offered, achieved, cpu_share),
        *_answer_reasons(len(records), figures, errors, shares),
    ]
    return {
        "verdict": SUSPECT if reasons else VALID,
        "reasons": reasons,
        "p99_lateness_ms": 1e3 * late_s,
        "max_lateness_ms": 1e3 * late[-1] if late else 0.0,
        "p99_loop_lag_ms": 1e3 * lag_s,
        "cpu_share": cpu_share,
        "offered_rate": offered,
        "achieved_rate": achieved,
        "mismatched_lengths": mismatched,
        "mismatched_prompts": other_prompts,
        "errors": dict(errors),
    }


def _timing_reasons(
    late_s: float,
    lag_s: float,
    allowed_s: float,
    offered: float | None,
    achieved: float | None,
    cpu_share: float,
) -> Iterable[str]:
    """Yield reasons to suspect a client that was behind its plan."""
    if late_s > allowed_s:
        yield (
            f"late: 1 % of the requests went out {1e3 * late_s:.1f} ms or more after they were due "
            f"({1e3 * allowed_s:.1f} ms allowed)"
        )
    if lag_s > allowed_s:
        yield (
            f"lag: the client's event loop was {1e3 * lag_s:.1f} ms behind (p99; "
            f"{1e3 * allowed_s:.1f} ms allowed)"
        )
    if offered is not None and (
        achieved is None or not math.isclose(offered, achieved, rel_tol=RATE_ERROR_ALLOWED)
    ):
        yield f"rate: sent at {achieved or 0.0:.4g} requests/s, but planned were {offered:.4g} requests/s"
    if cpu_share > CPU_ALLOWED:
        yield f"cpu: the client used {100 * cpu_share:.0f} % of a core"


def _answer_reasons(
    requests: int, figures: Mapping[str, Any], errors: Mapping[str, int], shares: tuple[int, int]
) -> Iterable[str]:
    """Yield reasons to suspect answers that differ from those requested."""
    completed, (mismatched, other_prompts) = figures["completed"], shares
    if figures["failed"] > FAILED_ALLOWED * requests:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in errors.items())
        yield f"failed: {figures['failed']} of {requests} requests ({kinds})"
    if mismatched > MISMATCHED_ALLOWED * completed:
        yield f"length: {mismatched} of {completed} answers were not as long as planned"
    if other_prompts > MISMATCHED_ALLOWED * completed:
        yield (
            f"prompt: by the server's count {other_prompts} of {completed} prompts were not as "
            f"long as planned"
        )


def verdict_of(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the combined verdict: SUSPECT if one run is."""
    return SUSPECT if any(run["client"]["verdict"] == SUSPECT for run in runs) else VALID


def _rate(times_s: Sequence[float]) -> float | None:
    """Requests per second, None where they are all at once."""
    span = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / span if span > 0 else None
