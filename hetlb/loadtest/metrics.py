"""The result of one run: vLLM's figures, what hetlb adds to them, and the details of every request.

Headline latency counts from the time a request was due (`hetlb.workload.records` says why); the same
figures from the time it was sent stand beside it under `from_sent`, so that no reader has to guess which is
which. Nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hetlb.loadtest.verdict import LoadResult
from hetlb.workload.records import METRICS, RequestResult, latencies_s, latency_figures, percentile
from hetlb.workload.traces import Row

#: The latencies that a goodput may set a limit to.
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def run_figures(result: LoadResult, *, percentiles: Sequence[float] = (), **options: Any) -> dict[str, Any]:
    """The figures of one run; `options` are those of `summarize`.

    `percentiles` are reported of every latency beside those that always are. `slo_attainment` is the share of
    all planned requests that met every limit of `goodput_slo_s` (null without limits): one that failed met
    none.
    """
    figures = result.summary(**options)
    records = result.records
    done = [record for record in records if record.ok]
    met = round(figures["request_goodput"] * figures["duration"])
    for name in METRICS:
        ordered = sorted(latencies_s(done, name))
        for percent in percentiles:
            figures[f"p{percent:g}_{name}_ms"] = 1e3 * percentile(ordered, percent)
    return {
        **figures,
        "slo_attainment": met / len(records) if options.get("goodput_slo_s") and records else None,
        "max_concurrent_requests": peak_concurrency(records),
        **latency_figures("client_queue_time", _lateness_s(records)),
        "from_sent": {
            **latency_figures("ttft", _from_sent_s(done, "ttft")),
            **latency_figures("e2el", _from_sent_s(done, "e2el")),
        },
        "instances": [
            {**entry, **_instance_latencies(records, entry["name"])} for entry in figures["instances"]
        ],
    }


def details(result: LoadResult, rows: Sequence[Row]) -> dict[str, Any]:
    """Details of every request, in plan order; names and units (seconds) are those of vLLM.

    `start_times`, `scheduled_times` and `end_times` count from the start of the run. `rows` are what was
    asked: `session_ids` and `turns` are there where some have them, null for those that have none.
    """
    records = result.records
    sessions = [row.session or None for row in rows]
    turns = [row.turn or None for row in rows]
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


def peak_concurrency(records: Iterable[RequestResult]) -> int:
    """The most requests that were in flight at once."""
    changes = [
        change
        for record in records
        if record.sent_s is not None
        for change in ((record.sent_s, 1), (math.inf if record.end_s is None else record.end_s, -1))
    ]
    peak = now = 0
    for _, step in sorted(changes):
        now += step
        peak = max(peak, now)
    return peak


def _lateness_s(records: Iterable[RequestResult]) -> Iterable[float]:
    return (value for record in records if (value := record.lateness_s) is not None)


def _from_sent_s(done: Iterable[RequestResult], name: str) -> Iterable[float]:
    """TTFT or E2EL as a client sees it that forgets how late it was."""
    for record in done:
        end = record.first_token_s if name == "ttft" else record.last_token_s
        if end is not None and record.sent_s is not None:
            yield end - record.sent_s


def _instance_latencies(records: Iterable[RequestResult], name: str) -> dict[str, Any]:
    mine = [record for record in records if record.instance == name]
    done = [record for record in mine if record.ok]
    figures: dict[str, Any] = {"failed": len(mine) - len(done)}
    for metric in METRICS:
        figures |= latency_figures(metric, latencies_s(done, metric))
    return figures
