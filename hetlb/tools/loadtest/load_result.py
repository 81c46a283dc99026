"""Result of a load test: its figures, the details of every request, and the verdict on the client.

A run is VALID, or SUSPECT with reasons: a slow client, or answers other than requested,
are named instead of being reported as the server's latency.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import hetlb
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import (
    METRICS,
    RequestResult,
    latencies_s,
    latency_figures,
    percentile,
    summarize,
)

VALID, SUSPECT = "VALID", "SUSPECT"
#: The latencies that a goodput may set a limit to.
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
#: Largest measurement error always accepted; above it, it must be small beside the measured
#: value.
ERROR_ALLOWED_MS = 5.0
ERROR_ALLOWED_SHARE_OF_TTFT = 0.01
#: A load due all at once waits in queues. Their order decides when an answer comes, not when its
#: request was sent: lateness only has to be short beside the whole.
ERROR_ALLOWED_SHARE_OF_DURATION = 0.1
RATE_ERROR_ALLOWED = 0.02
CPU_ALLOWED = 0.9
FAILED_ALLOWED = 0.01
MISMATCHED_ALLOWED = 0.01


@dataclass(slots=True)
class LoadResult:
    """Result of a run: a record per planned request in plan order, and the client's own lag in seconds.

    `cpu_share` is of one core; `examples` has a message of each kind of failure.
    `exact_output`: every answer was to be as long as planned, or at most as long; `exact_prompt`: the planned
    lengths of prompts are no estimates. `run` is its document, a member of `runs`.
    """

    plan: Sequence[PlannedRequest]
    records: list[RequestResult]
    cpu_share: float
    loop_lag_s: list[float]
    examples: dict[str, str] = field(default_factory=dict)
    exact_output: bool = True
    exact_prompt: bool = True
    #: Number of requests planned, of a run that was stopped before all had ended.
    interrupted: int | None = None
    run: dict[str, Any] = field(default_factory=dict)

    def keep_ended(self) -> None:
        """Leave out unfinished requests: the run was stopped."""
        self.interrupted = len(self.plan)
        ended = [(p, r) for p, r in zip(self.plan, self.records, strict=True) if r.end_s is not None]
        self.plan, self.records = [planned for planned, _ in ended], [record for _, record in ended]

    @property
    def errors(self) -> dict[str, int]:
        """Failures by kind, the most frequent first."""
        return dict(Counter(record.error for record in self.records if record.error).most_common())

    def summary(self, **options: Any) -> dict[str, Any]:
        """Return `summarize` of the records (`options` are its own), and the client's figures as `client`."""
        figures = summarize(self.records, **options)
        return {**figures, "client": self.client(figures)}

    def client(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verdict on the client, and its grounds. `figures` come from `summarize`."""
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
            "errors": self.errors,
        }
        for planned, record in zip(self.plan, self.records, strict=True):
            if record.ok:
                more = record.output_tokens - planned.sequences * planned.answer_tokens
                found["mismatched_lengths"] += more > 0 or (self.exact_output and more != 0)
                found["mismatched_prompts"] += (
                    self.exact_prompt and record.prompt_tokens != planned.input_tokens
                )
        reasons = list(_reasons(found, figures))
        if self.interrupted is not None:
            reasons.append(f"interrupted: {len(self.records)} of {self.interrupted} requests had ended")
        return {"verdict": SUSPECT if reasons else VALID, "reasons": reasons, **found}

    def figures(self, percentiles: Sequence[float] = (), **options: Any) -> dict[str, Any]:
        """Return `summary`, and more figures for `hetlb bench`; `from_sent` counts from a request's sending.

        `percentiles` are reported of every latency beside the usual ones. `slo_attainment` is the
        share of all planned requests that met every limit of `goodput_slo_s` (null without limits): one that
        failed met none.
        """
        figures, records = self.summary(**options), self.records
        met = round(figures["request_goodput"] * figures["duration"])
        late = (value for record in records if (value := record.lateness_s) is not None)
        done = [record for record in records if record.ok]
        sent = [replace(each, scheduled_s=each.sent_s) for each in done if each.sent_s is not None]
        for name in METRICS:
            ordered = sorted(latencies_s(done, name))
            for percent in percentiles:
                figures[f"p{percent:g}_{name}_ms"] = 1e3 * percentile(ordered, percent)
        return {
            **figures,
            "slo_attainment": met / len(records) if options.get("goodput_slo_s") and records else None,
            "max_concurrent_requests": peak_concurrency(records),
            "tokens_per_event": _tokens_per_event(done),
            **latency_figures("client_queue_time", late),
            "from_sent": {
                **latency_figures("ttft", latencies_s(sent, "ttft")),
                **latency_figures("e2el", latencies_s(sent, "e2el")),
            },
            "instances": [
                {**entry, **_instance_latencies(records, entry["name"])} for entry in figures["instances"]
            ],
        }

    def details(self) -> dict[str, Any]:
        """Return the details of every request, in plan order; names and units (seconds) as in vLLM.

        Times count from the start of the run. `session_ids` and `turns` are there if some requests have
        them, null for requests without.
        """
        records = self.records
        sessions = [planned.row.session or None for planned in self.plan]
        turns = [planned.row.turn or None for planned in self.plan]
        return {
            **({"session_ids": sessions} if any(sessions) else {}),
            **({"turns": turns} if any(turns) else {}),
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens for record in records],
            "ttfts": [record.ttft_s for record in records],
            "itls": [list(record.itl_s or ()) for record in records],
            "e2els": [record.e2el_s if record.ok else None for record in records],
            "scheduled_times": [record.scheduled_s for record in records],
            "start_times": [record.sent_s for record in records],
            "end_times": [record.end_s for record in records],
            "request_instances": [record.instance for record in records],
            "errors": [record.error for record in records],
        }


def _tokens_per_event(done: Iterable[RequestResult]) -> float | None:
    """Return output tokens per event with text; None if no answer came as events."""
    streamed = [each for each in done if each.itl_s is not None and each.first_token_s is not None]
    events = sum(len(each.itl_s or ()) + each.sequences for each in streamed)
    return sum(each.output_tokens for each in streamed) / events if events else None


def peak_concurrency(records: Iterable[RequestResult]) -> int:
    """Return the most requests in flight at once."""
    changes = [(record.sent_s, 1) for record in records if record.sent_s is not None]
    changes += [(each.end_s, -1) for each in records if each.sent_s is not None and each.end_s is not None]
    return max(accumulate(step for _, step in sorted(changes)), default=0)


def _instance_latencies(records: Iterable[RequestResult], name: str) -> dict[str, Any]:
    mine = [record for record in records if record.instance == name]
    done = [record for record in mine if record.ok]
    figures: dict[str, Any] = {"failed": len(mine) - len(done)}
    for metric in METRICS:
        figures |= latency_figures(metric, latencies_s(done, metric))
    return figures


def _reasons(found: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterable[str]:
    """Yield the reasons to doubt a run: a client behind its plan, or answers other than it asked for."""
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
    """Return requests per second, None if they are all at once."""
    span = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / span if span > 0 else None


def platform_document() -> dict[str, Any]:
    return {
        "hetlb": hetlb.__version__,
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "uvloop": version("uvloop"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def default_filename(model: str, rates: str, when: datetime) -> str:
    """Return `RATEqps-MODEL-DATE.json`, as `vllm bench serve` names its results."""
    name = f"{rates}qps-{model.rsplit('/', 1)[-1]}-{when:%Y%m%d-%H%M%S}.json"
    return re.sub(r"[^\w.,+-]", "_", name)


def csv_text(runs: Sequence[Mapping[str, Any]]) -> str:
    columns = dict.fromkeys(
        key for run in runs for key, value in run.items() if not isinstance(value, dict | list)
    )
    columns["verdict"] = None
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        writer.writerow({**run, "verdict": run["client"]["verdict"]})
    return text.getvalue()


def json_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)
