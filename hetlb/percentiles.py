"""Percentiles of counted values, for the dashboard and for figures of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence


def weighted_percentile(pairs: Sequence[tuple[float, int]], percent: float) -> float:
    """Return the percentile of ascending (value, count) pairs; a pair stands for `count` equal values.

    Between two values it is on the line between them, as numpy has it.
    """
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
