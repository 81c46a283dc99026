"""Result of a load test and the verdict on its client: a run is VALID, or SUSPECT with reasons.

Every limit is here, and every figure that a verdict rests on is in what it gives. A client that is
slow, or answers that are not what was asked for, are named instead of being reported as the server's
latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.records import RequestResult, percentile, summarize

VALID, SUSPECT = "VALID", "SUSPECT"
#: A measurement error below this is of no concern; above it, it must be small beside what is measured.
ERROR_ALLOWED_MS = 5.0
ERROR_ALLOWED_SHARE_OF_TTFT = 0.01
#: A load that is due all at once waits in queues, whose order decides when an answer comes, not when its
#: request was sent: lateness only has to be short beside the whole.
ERROR_ALLOWED_SHARE_OF_DURATION = 0.1
RATE_ERROR_ALLOWED = 0.02
CPU_ALLOWED = 0.9
FAILED_ALLOWED = 0.01
MISMATCHED_ALLOWED = 0.01


@dataclass(slots=True)
class LoadResult:
    """Result of a run: a record per planned request in plan order, and the client's own lag in seconds.

    `cpu_share` is of one core; `errors` counts failures by kind, `examples` has a message of each.
    `exact_output`: every answer was to be as long as planned, or at most as long; `exact_prompt`: the planned
    lengths of prompts are no estimates.
    """

    plan: Sequence[PlannedRequest]
    records: list[RequestResult]
    cpu_share: float
    loop_lag_s: list[float]
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    exact_output: bool = True
    exact_prompt: bool = True

    def summary(self, **options: Any) -> dict[str, Any]:
        """`summarize` of the records (`options` are its own), and how the client fared as `client`."""
        figures = summarize(self.records, **options)
        return {**figures, "client": self.client(figures)}

    def client(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The verdict on the client, and what it rests on. `figures` are those of `summarize`."""
        late = sorted(lateness for record in self.records if (lateness := record.lateness_s) is not None)
        found: dict[str, Any] = {
            "p99_lateness_ms": 1e3 * percentile(late, 99),
            "max_lateness_ms": 1e3 * late[-1] if late else 0.0,
            "p99_loop_lag_ms": 1e3 * percentile(sorted(self.loop_lag_s), 99),
            "cpu_share": self.cpu_share,
            "offered_rate": _rate([planned.scheduled_s for planned in self.plan]),
            "achieved_rate": _rate([record.sent_s for record in self.records if record.sent_s is not None]),
            "mismatched_lengths": 0,
            "mismatched_prompts": 0,
            "errors": dict(self.errors),
        }
        for planned, record in zip(self.plan, self.records, strict=True):
            if record.ok:
                more = record.output_tokens - planned.sequences * planned.answer_tokens
                found["mismatched_lengths"] += more > 0 or (self.exact_output and more != 0)
                found["mismatched_prompts"] += (
                    self.exact_prompt and record.prompt_tokens != planned.input_tokens
                )
        reasons = [*_timing_reasons(found, figures), *_answer_reasons(found, figures)]
        return {"verdict": SUSPECT if reasons else VALID, "reasons": reasons, **found}


def _timing_reasons(found: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterable[str]:
    """Yield reasons to suspect a client that was behind its plan."""
    late_ms, lag_ms, cpu_share = found["p99_lateness_ms"], found["p99_loop_lag_ms"], found["cpu_share"]
    offered, achieved = found["offered_rate"], found["achieved_rate"]
    allowed_ms = ERROR_ALLOWED_SHARE_OF_TTFT * (figures["median_ttft_ms"] or figures["median_e2el_ms"])
    if offered is None:
        allowed_ms = ERROR_ALLOWED_SHARE_OF_DURATION * 1e3 * figures["duration"]
    allowed_ms = max(ERROR_ALLOWED_MS, allowed_ms)
    if late_ms > allowed_ms:
        yield (
            f"late: 1 % of the requests went out {late_ms:.1f} ms or more after they were due "
            f"({allowed_ms:.1f} ms allowed)"
        )
    if lag_ms > allowed_ms:
        yield f"lag: the client's event loop was {lag_ms:.1f} ms behind (p99; {allowed_ms:.1f} ms allowed)"
    if offered is not None and (
        achieved is None or not math.isclose(offered, achieved, rel_tol=RATE_ERROR_ALLOWED)
    ):
        yield f"rate: sent at {achieved or 0.0:.4g} requests/s, but planned were {offered:.4g} requests/s"
    if cpu_share > CPU_ALLOWED:
        yield f"cpu: the client used {100 * cpu_share:.0f} % of a core"


def _answer_reasons(found: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterable[str]:
    """Yield reasons to suspect answers that differ from those requested."""
    completed, failed = figures["completed"], figures["failed"]
    mismatched, other_prompts = found["mismatched_lengths"], found["mismatched_prompts"]
    if failed > FAILED_ALLOWED * (completed + failed):
        kinds = ", ".join(f"{count} x {kind}" for kind, count in found["errors"].items())
        yield f"failed: {failed} of {completed + failed} requests ({kinds})"
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
