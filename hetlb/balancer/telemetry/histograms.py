"""Histograms that cost the hot path next to nothing: counts in a list, sums when they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import add, mul
from typing import Any, Final

from hetlb.balancer.core.binary_search import first_at_least

#: Gaps below this many milliseconds are counted by the millisecond.
FINE_MS: Final = 2048


class Histogram:
    """Counts of values at or below each bound, in Prometheus' sense."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        #: By the first bound that is not below the value; the last one for values above all.
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        counts, at = self._counts, first_at_least(self._bounds, value)
        counts[at] = counts[at] + 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            at = first_at_least(bounds, value)
            counts[at] = counts[at] + 1
        self._sum += sum(values)

    def add(self, other: Histogram) -> None:
        self._counts = list(map(add, self._counts, other._counts))
        self._sum += other._sum

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        """Return the bounds, counts up to each (and, last, of all), and the sum."""
        return self._bounds, list(accumulate(self._counts)), self._sum

    def __reduce__(self) -> tuple[Any, ...]:
        return _histogram, (self._bounds, self._counts, self._sum)


def _histogram(bounds: list[float], counts: list[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    histogram._counts = counts
    histogram._sum = total
    return histogram


class GapHistogram:
    """Times between the tokens of streams, to the millisecond.

    The owner of a stream adds one to `fine[milliseconds]` itself; `FINE_MS` or longer is given to `long`.
    """

    __slots__ = ("_bounds", "_long", "fine")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._long = Histogram(bounds)
        self.fine = [0] * FINE_MS

    def long(self, gap_s: float) -> None:
        """Count a gap of `FINE_MS` milliseconds or more."""
        self._long.observe(gap_s)

    def add(self, other: GapHistogram) -> None:
        self.fine = list(map(add, self.fine, other.fine))
        self._long.add(other._long)

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        _, counts, total_s = self._long.figures()
        sums = list(accumulate(self.fine))
        for index, bound in enumerate(self._bounds):
            counts[index] += sums[min(FINE_MS - 1, round(bound * 1e3))]
        counts[-1] += sums[-1]
        return self._bounds, counts, total_s + sum(map(mul, self.fine, range(FINE_MS))) / 1e3

    def __reduce__(self) -> tuple[Any, ...]:
        return _gaps, (self._bounds, self._long, self.fine)


def _gaps(bounds: tuple[float, ...], long: Histogram, fine: list[int]) -> GapHistogram:
    gaps = GapHistogram(bounds)
    gaps._long = long
    gaps.fine = fine
    return gaps


def weighted_percentile(pairs: Sequence[tuple[float, int]], percent: float) -> float:
    """Return the percentile of ascending (value, count) pairs, each value standing there `count` times.

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
