"""Histograms that cost the hot path next to nothing: counts in a list, sums when they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add, mul
from typing import Any, Final

#: Milliseconds of a gap below which gaps are counted by the millisecond.
FINE_MS: Final = 2048
#: Values of a histogram counted at once.
_BATCH_VALUES: Final = 64


class Histogram:
    """Counts of values at or below each bound, in Prometheus' sense. Values are counted in batches."""

    __slots__ = ("_bounds", "_counts", "_total", "_values")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        #: Values at or below each bound; the last one is of all.
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        #: Values that are not counted yet.
        self._values: list[float] = []

    def observe(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= _BATCH_VALUES:
            self._count()

    def observe_all(self, values: Sequence[float]) -> None:
        self._values += values
        if len(self._values) >= _BATCH_VALUES:
            self._count()

    def _count(self) -> None:
        """Count the values that wait."""
        values = self._values
        if values:
            values.sort()
            below = [*map(bisect_right, repeat(values), self._bounds), len(values)]
            self._counts = list(map(add, self._counts, below))
            self._total += sum(values)
            values.clear()

    def add(self, other: Histogram) -> None:
        """Count the values of another histogram of the same bounds too."""
        self._counts = list(map(add, self._counts, other._counts))
        self._total += other._total
        self._values += other._values

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        """Return the bounds, counts up to each (and, last, of all), and the sum."""
        self._count()
        return self._bounds, self._counts.copy(), self._total

    def __reduce__(self) -> tuple[Any, ...]:
        return _histogram, (self._bounds, self._counts, self._total, self._values)


def _histogram(bounds: list[float], counts: list[int], total: float, values: list[float]) -> Histogram:
    histogram = Histogram(bounds)
    histogram._counts, histogram._total, histogram._values = counts, total, values
    return histogram


class GapHistogram:
    """Times between the tokens of streams, to the millisecond.

    The owner of a stream adds one to `fine[milliseconds]` itself; `FINE_MS` or longer is given to `long`.
    """

    __slots__ = ("_bounds", "fine", "longer")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.longer = Histogram(bounds)
        self.fine = [0] * FINE_MS

    def long(self, gap_s: float) -> None:
        """Count a gap of `FINE_MS` milliseconds or more."""
        self.longer.observe(gap_s)

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        _, counts, total_s = self.longer.figures()
        sums = list(accumulate(self.fine))
        for index, bound in enumerate(self._bounds):
            counts[index] += sums[min(FINE_MS - 1, round(bound * 1e3))]
        counts[-1] += sums[-1]
        return self._bounds, counts, total_s + sum(map(mul, self.fine, range(FINE_MS))) / 1e3

    def __reduce__(self) -> tuple[Any, ...]:
        return _gaps, (self._bounds, self.longer, self.fine)


def _gaps(bounds: tuple[float, ...], long: Histogram, fine: list[int]) -> GapHistogram:
    gaps = GapHistogram(bounds)
    gaps.longer = long
    gaps.fine = fine
    return gaps
