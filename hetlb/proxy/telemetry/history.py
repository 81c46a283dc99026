"""Ring of the requests that ended last, for the dashboard: plain tuples, bounded.

Adding one costs a few hundred nanoseconds; `ENDED_KEPT` rows are about 30 MB. No text of a client is kept but
names of models that the fleet serves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple

from hetlb.proxy.telemetry.request_record import RequestRecord

_ended_at = itemgetter(0)
#: Rows kept: an hour at 28 requests/s.
ENDED_KEPT: Final = 100_000


class HistoryRow(NamedTuple):
    """One ended request. Times in seconds on the proxy's clock.

    `prompt_tokens_total` and `output_tokens` are of the whole request, `prompt_tokens_per_sequence` and
    `predicted_output` of one sequence. `expected_s` is the predicted time from dispatch to the end. A request
    that was never dispatched has an empty `instance` and `model` and no `dispatched_at`.
    """

    ended_at: float
    arrived_at: float
    dispatched_at: float | None
    first_byte_at: float | None
    instance: str
    model: str
    prompt_tokens_total: int
    prompt_tokens_per_sequence: int
    predicted_output: float
    expected_s: float
    output_tokens: int
    sequences: int
    outcome: str


class History:
    """A ring of ended requests, in the order in which they ended.

    `look` is called before every read: it may `extend` the ring with rows kept elsewhere.
    """

    __slots__ = ("_look", "_ring", "added")

    def __init__(self, size: int = ENDED_KEPT, look: Callable[[], None] | None = None) -> None:
        self._look = look
        # Plain tuples of plain values: the garbage collector stops looking at them, at named ones never.
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=size)
        #: Rows added so far, overwritten ones included.
        self.added = 0

    @property
    def _rows(self) -> deque[tuple[Any, ...]]:
        """The ring, to be read."""
        if self._look is not None:
            self._look()
        return self._ring

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """True if older rows have been overwritten."""
        rows = self._rows
        return len(rows) == rows.maxlen

    def add(self, record: RequestRecord) -> None:
        """Add a request that has ended."""
        lease, outcome = record.lease, record.outcome
        assert outcome is not None
        name: str = outcome._value_  # `value` is a function in Python
        self.added += 1
        total, each = record.prompt_tokens_total, record.prompt_tokens_per_sequence
        if lease is None:
            self._ring.append(
                (
                    record.ended_at, record.arrived_at, None, None, "", "", total, each, 0.0, 0.0, 0,
                    record.sequences, name,
                )
            )  # fmt: skip
        else:
            self._ring.append(
                (
                    record.ended_at, record.arrived_at, lease.dispatched_at, record.first_byte_at,
                    lease.instance, record.request.model, total, each, lease.predicted_output,
                    record.expected_s, lease.output_tokens, record.sequences, name,
                )
            )  # fmt: skip

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows of other histories (`rows_since`), in the order in which they ended."""
        for row in rows:
            self._ring.append(row)
            self.added += 1

    def rows_since(self, added: int) -> list[tuple[Any, ...]]:
        """The rows, as they are kept, that came after the first `added`; those that are left of them."""
        rows = self._rows
        new = min(self.added - added, len(rows))
        return list(islice(rows, len(rows) - new, None))

    def count(self, start: float, end: float) -> int:
        """Number of rows that ended from `start` on and before `end`."""
        rows = self._rows
        return _index(rows, end) - _index(rows, start)

    def nth_before(self, end: float, number: int) -> float:
        """End time of the row that stands `number` rows before `end`."""
        ended_at: float = self._rows[_index(self._rows, end) - number][0]
        return ended_at

    def between(self, start: float, end: float) -> Iterator[HistoryRow]:
        """The rows that ended from `start` on and before `end`, the oldest first."""
        rows = self._rows
        return map(HistoryRow._make, islice(rows, _index(rows, start), _index(rows, end)))

    def newest_first(self) -> Iterator[HistoryRow]:
        """Every row, the newest first. To be used up in one turn of the event loop."""
        return map(HistoryRow._make, reversed(self._rows))

    def copy(self) -> Iterator[HistoryRow]:
        """Every row there is now, the oldest first; for use in another thread."""
        return map(HistoryRow._make, tuple(self._rows))


def _index(rows: deque[tuple[Any, ...]], when: float) -> int:
    return bisect_left(rows, when, key=_ended_at)
