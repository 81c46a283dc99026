"""Data of the page's charts: columns of plain numbers, seconds and tokens, rounded for the eye."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hetlb.core.types import Outcome
from hetlb.proxy.telemetry.recent import BIN_S, BINS, POINTS, Recent, Stretch, latencies
from hetlb.workload.records import weighted_percentile


def series(recent: Recent, now: float) -> dict[str, Any]:
    """Rates and latencies of the last five minutes, up to the last stretch that is over at `now`.

    An answer counts, tokens and all, when it ends.
    """
    end = math.floor(now / BIN_S)
    stretches = [recent.stretches.get(number) or Stretch() for number in range(end - BINS, end)]
    outcomes: Counter[str] = Counter()
    for each in stretches:
        outcomes.update(each.outcomes)
    ok = [each.outcomes.get(Outcome.OK.value, 0) for each in stretches]
    ended = [sum(each.outcomes.values()) for each in stretches]
    tokens = [{name: share.output_tokens for name, share in each.shares.items()} for each in stretches]
    names = dict.fromkeys(name for each in tokens for name in each)
    latency_columns = {
        f"{name}_p{percent}_s": [_percentile(getattr(each, name), percent) for each in stretches]
        for name in ("ttft", "e2e")
        for percent in (50, 99)
    }
    return {
        "bin_s": BIN_S,
        "end_s": end * BIN_S,
        "outcomes": dict(outcomes),
        "instances": {name: [each.get(name, 0) / BIN_S for each in tokens] for name in names},
        "ok_per_s": [count / BIN_S for count in ok],
        "not_ok_per_s": [(whole - count) / BIN_S for whole, count in zip(ended, ok, strict=True)],
        "output_tokens_per_s": [sum(each.values()) / BIN_S for each in tokens],
        **latency_columns,
    }


def _percentile(counts: dict[int, int], percent: int) -> float | None:
    return round(weighted_percentile(latencies(counts), percent), 4) if counts else None


def accuracy(recent: Recent) -> dict[str, Any]:
    """The newest answers as points: predicted and actual output tokens, predicted and actual seconds.

    The names of the instances, and the points with an index into them.
    """
    names: dict[str, int] = {}
    points = [
        (
            names.setdefault(name, len(names)),
            round(predicted, 1),
            round(tokens, 1),
            round(expected_s, 4),
            round(took_s, 4),
        )
        for _, name, predicted, tokens, expected_s, took_s in recent.points[-POINTS:]
    ]
    return {"instances": list(names), "points": points}
