"""Data of the page's charts, made from the ring of ended requests: series, predictions against results.

Columns of plain numbers, seconds and tokens, rounded for the eye; a stretch of time that is over is
summed up once, and an answer looked at once, however often it is read.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from hetlb.core.types import Outcome
from hetlb.proxy.dashboard.samples import BIN_S, BINS
from hetlb.proxy.telemetry.history import History, HistoryRow
from hetlb.workload.records import percentile

#: Answers shown as points, the newest.
POINTS = 400
#: Rows looked at in one turn of the event loop: a few milliseconds.
ROWS_AT_ONCE = 1000


@dataclass(slots=True)
class _Stretch:
    """Requests that ended in one interval."""

    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_instance: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)

    def add(self, row: HistoryRow) -> None:
        self.outcomes[row.outcome] += 1
        self.output_tokens += row.output_tokens
        if row.instance:
            self.by_instance[row.instance] += row.output_tokens
        if row.outcome == Outcome.OK:
            self.e2e_s.append(row.ended_at - row.arrived_at)
            if row.first_byte_at is not None:
                self.ttft_s.append(row.first_byte_at - row.arrived_at)

    def figures(self) -> tuple[float | None, ...]:
        """The columns of this stretch, in the order of `_COLUMNS`."""
        ok = self.outcomes[Outcome.OK]
        return (
            ok / BIN_S,
            (self.outcomes.total() - ok) / BIN_S,
            self.output_tokens / BIN_S,
            *(
                round(percentile(values, percent), 4) if values else None
                for values in (sorted(self.ttft_s), sorted(self.e2e_s))
                for percent in (50, 99)
            ),
        )


_COLUMNS = (
    "ok_per_s", "not_ok_per_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "e2e_p50_s", "e2e_p99_s",
)  # fmt: skip
#: Figures of a stretch, how requests ended in it, output tokens by instance.
_Summed: TypeAlias = tuple[tuple[float | None, ...], Counter[str], Counter[str]]
_UNKNOWN: _Summed = ((None,) * len(_COLUMNS), Counter(), Counter())


class Series:
    """Rates and latencies of the last five minutes. An answer counts, tokens and all, when it ends.

    One call looks at about `ROWS_AT_ONCE` rows: after a while without a look the older stretches come with
    the next ones, and are empty until then.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        #: Stretches that are summed up, by their number.
        self._done: dict[int, _Summed] = {}

    def document(self, now: float) -> dict[str, Any]:
        """The columns, oldest first, up to the last stretch that is over at `now`."""
        end = math.floor(now / BIN_S)
        first = end - BINS
        for index in [index for index in self._done if index < first]:
            del self._done[index]
        self._sum_up(first, end)
        done = [self._done.get(index, _UNKNOWN) for index in range(first, end)]
        outcomes: Counter[str] = Counter()
        names: dict[str, None] = {}
        for _, counts, by_instance in done:
            outcomes.update(counts)
            names.update(dict.fromkeys(by_instance))
        columns = zip(*(figures for figures, _, _ in done), strict=True)
        return {
            "bin_s": BIN_S,
            "end_s": end * BIN_S,
            "outcomes": dict(outcomes),
            "instances": {name: [by[name] / BIN_S for _, _, by in done] for name in names},
            **dict(zip(_COLUMNS, columns, strict=True)),
        }

    def _sum_up(self, first: int, end: int) -> None:
        """Sum up the newest stretches that are missing, whole ones, one at least."""
        last = next((index for index in range(end - 1, first - 1, -1) if index not in self._done), None)
        if last is None:
            return
        start = last
        while start > first and start - 1 not in self._done:
            start -= 1
        history = self._history
        if history.count(start * BIN_S, (last + 1) * BIN_S) > ROWS_AT_ONCE:
            reached = history.nth_before((last + 1) * BIN_S, ROWS_AT_ONCE)
            start = min(last, max(start, math.floor(reached / BIN_S) + 1))
        stretches = {index: _Stretch() for index in range(start, last + 1)}
        for row in history.between(start * BIN_S, (last + 1) * BIN_S):
            stretches[math.floor(row.ended_at / BIN_S)].add(row)
        for index, stretch in stretches.items():
            self._done[index] = stretch.figures(), stretch.outcomes, stretch.by_instance


class Accuracy:
    """The newest answers as points: predicted and actual output tokens, predicted and actual seconds.

    Tokens are of one sequence, on average; seconds count from dispatch to the end. A row is looked at once.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._seen = 0
        #: (instance, predicted tokens, actual tokens, predicted seconds, actual seconds), the oldest first.
        self._points: deque[tuple[str, float, float, float, float]] = deque(maxlen=POINTS)

    def document(self) -> dict[str, Any]:
        """The names of the instances, and the points with an index into them."""
        history = self._history
        new = list(islice(history.newest_first(), min(history.added - self._seen, ROWS_AT_ONCE)))
        self._seen = history.added
        for row in reversed(new):
            if row.outcome == Outcome.OK and row.output_tokens > 0 and row.dispatched_at is not None:
                self._points.append(
                    (
                        row.instance,
                        round(row.predicted_output, 1),
                        round(row.output_tokens / row.sequences, 1),
                        round(row.expected_s, 4),
                        round(row.ended_at - row.dispatched_at, 4),
                    )
                )
        names: dict[str, int] = {}
        points = [(names.setdefault(name, len(names)), *figures) for name, *figures in self._points]
        return {"instances": list(names), "points": points}
