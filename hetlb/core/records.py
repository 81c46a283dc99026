"""What happened to each request, and the figures made from it: one definition for simulator and bench.

Promise: keys and meanings are those of `vllm bench serve`, in milliseconds and unrounded; latency counts
from the time a request was due, not from when it was sent (otherwise a client or server that stalls hides
its own delay); failed requests are in no percentile but in goodput's denominator.

- TTFT: due time to first token. E2EL: due time to last token.
- TPOT: (E2EL - TTFT) / (output_tokens - 1), for requests of two tokens or more.
- ITL: every gap between two tokens of one request.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (90, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request: times in seconds on one clock, None for what did not happen."""

    scheduled_s: float
    prompt_tokens: int
    output_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    instance: str = ""
    ok: bool = False

    @property
    def ttft_s(self) -> float:
        """Due time to first token."""
        assert self.first_token_s is not None, "expected a request that produced a token"
        return self.first_token_s - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        """Due time to last token."""
        assert self.last_token_s is not None, "expected a request that ended"
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


class Gaps:
    """Times between tokens, run-length coded: `steps` gaps from `first_s` on, growing, each `count` times.

    An iteration of a batch gives every decoding sequence the same gap, so a simulated stretch is four
    numbers; a measured gap is a stretch of one.
    """

    __slots__ = ("counts", "firsts_s", "increments_s", "steps")

    def __init__(self) -> None:
        self.firsts_s = array("d")
        self.increments_s = array("d")
        self.steps = array("q")
        self.counts = array("q")

    def add(self, first_s: float, increment_s: float = 0.0, steps: int = 1, count: int = 1) -> None:
        """Count one stretch."""
        self.firsts_s.append(first_s)
        self.increments_s.append(increment_s)
        self.steps.append(steps)
        self.counts.append(count)

    def weighted(self) -> list[tuple[float, int]]:
        """Every distinct gap with how often it occurred, ascending."""
        pairs = [
            (first + step * increment, count)
            for first, increment, steps, count in zip(
                self.firsts_s, self.increments_s, self.steps, self.counts, strict=True
            )
            for step in range(steps)
        ]
        pairs.sort()
        return pairs


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of ascending values by linear interpolation, as NumPy's default; 0 of none."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100.0
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def weighted_percentile(pairs: Sequence[tuple[float, int]], percent: float) -> float:
    """`percentile` of ascending (value, count) pairs, each value standing there `count` times."""
    total = sum(count for _, count in pairs)
    if not total:
        return 0.0
    position = (total - 1) * percent / 100.0
    below, seen = math.floor(position), 0
    for index, (value, count) in enumerate(pairs):
        seen += count
        if seen > below:
            if seen > below + 1 or index + 1 == len(pairs):
                return value
            return value + (pairs[index + 1][0] - value) * (position - below)
    return pairs[-1][0]


def _latency_figures(name: str, values: list[float]) -> dict[str, float]:
    values.sort()
    figures = {
        f"mean_{name}_ms": 1e3 * math.fsum(values) / len(values) if values else 0.0,
        f"median_{name}_ms": 1e3 * percentile(values, 50),
    }
    return figures | {f"p{p}_{name}_ms": 1e3 * percentile(values, p) for p in PERCENTILES}


def summarize(
    records: Sequence[RequestRecord],
    gaps: Gaps,
    *,
    instances: Iterable[str] = (),
    preemptions: Mapping[str, int] | None = None,
    kv_peak: Mapping[str, float] | None = None,
    goodput_slo_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of one run.

    `goodput_slo_s` maps "ttft", "tpot", "e2el" to limits in seconds; without it all that completed count.
    """
    done = [record for record in records if record.ok]
    start = min((record.scheduled_s for record in records), default=0.0)
    end = max((record.last_token_s or 0.0 for record in done), default=start)
    duration = end - start
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    per_second = 1.0 / duration if duration > 0 else 0.0
    pairs = gaps.weighted()
    gap_count = sum(count for _, count in pairs)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) * per_second,
        "output_throughput": output_tokens * per_second,
        "total_token_throughput": (prompt_tokens + output_tokens) * per_second,
        "request_goodput": sum(_meets(record, goodput_slo_s or {}) for record in done) * per_second,
        **_latency_figures("ttft", [record.ttft_s for record in done]),
        **_latency_figures("tpot", [t for record in done if (t := record.tpot_s) is not None]),
        "mean_itl_ms": 1e3 * math.fsum(gap * count for gap, count in pairs) / gap_count if gap_count else 0.0,
        "median_itl_ms": 1e3 * weighted_percentile(pairs, 50),
        **{f"p{p}_itl_ms": 1e3 * weighted_percentile(pairs, p) for p in PERCENTILES},
        **_latency_figures("e2el", [record.e2el_s for record in done]),
    }
    figures["instances"] = [
        {
            "name": name,
            "completed": len(mine),
            "total_output_tokens": sum(record.output_tokens for record in mine),
            "last_finish_s": max((record.last_token_s or 0.0 for record in mine), default=start) - start,
            "preemptions": (preemptions or {}).get(name),
            "kv_peak": (kv_peak or {}).get(name),
        }
        for name in instances
        for mine in [[record for record in done if record.instance == name]]
    ]
    return figures


def _meets(record: RequestRecord, slo_s: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(measured[name] <= limit for name, limit in slo_s.items())
