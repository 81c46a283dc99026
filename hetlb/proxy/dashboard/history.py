"""The requests that ended lately, for the page's figures: a bounded ring of plain tuples.

Promise: one request costs an append of a few hundred nanoseconds, and memory has a bound (`ENDED_KEPT` rows,
about 30 MB when full). No text that a client sent is kept, but for names of models that the fleet serves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple

from hetlb.proxy.ended import Ended

_ended_at = itemgetter(0)
#: Rows kept: an hour at 28 requests/s.
ENDED_KEPT: Final = 100_000


class Row(NamedTuple):
    """One request that ended. Times in seconds on the proxy's clock, tokens of all its sequences together.

    `prompt_tokens` is of one sequence, `predicted_output` too; `expected_s` is what the latency model said
    at dispatch of the time from there to the end. A request that no instance had has the empty `instance`
    and `model`, and no `dispatched_at`.
    """

    ended_at: float
    arrived_at: float
    dispatched_at: float | None
    first_byte_at: float | None
    instance: str
    model: str
    prompt_tokens: int
    predicted_output: float
    expected_s: float
    output_tokens: int
    sequences: int
    outcome: str


class History:
    """A ring of ended requests, in the order in which they ended."""

    def __init__(self, size: int = ENDED_KEPT) -> None:
        # Plain tuples of plain values: the garbage collector stops looking at them, at named ones never.
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=size)
        #: Rows taken down so far, those that made way too.
        self.added = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether older rows have made way."""
        return len(self._rows) == self._rows.maxlen

    def add(self, exchange: Ended) -> None:
        """Take down an exchange that has its outcome."""
        lease, request, outcome = exchange.lease, exchange.request, exchange.outcome
        assert outcome is not None
        name: str = outcome._value_  # `value` is a function in Python
        self.added += 1
        prompt_tokens = request.prompt_tokens
        # What the engine counted is of all prompts together.
        if request.sequences == 1 and exchange.prompt_tokens_used:
            prompt_tokens = exchange.prompt_tokens_used
        if lease is None:
            self._rows.append(
                (
                    exchange.ended_at, exchange.arrived_at, None, None, "", "", request.prompt_tokens, 0.0,
                    0.0, 0, request.sequences, name,
                )
            )  # fmt: skip
        else:
            self._rows.append(
                (
                    exchange.ended_at, exchange.arrived_at, lease.dispatched_at, exchange.first_byte_at,
                    lease.instance, request.model, prompt_tokens,
                    lease.predicted_output, exchange.expected_s, lease.output_tokens, request.sequences,
                    name,
                )
            )  # fmt: skip

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Take down what other histories (`rows_since`) have, in the order in which they ended."""
        for row in rows:
            self._rows.append(row)
            self.added += 1

    def rows_since(self, added: int) -> list[tuple[Any, ...]]:
        """The rows, as they are kept, that came after the first `added`; those that are left of them."""
        new = min(self.added - added, len(self._rows))
        return list(islice(self._rows, len(self._rows) - new, None))

    def count(self, start: float, end: float) -> int:
        """How many rows ended from `start` on and before `end`."""
        return self._index(end) - self._index(start)

    def nth_before(self, end: float, number: int) -> float:
        """When the row ended that stands `number` rows before `end`."""
        ended_at: float = self._rows[self._index(end) - number][0]
        return ended_at

    def between(self, start: float, end: float) -> Iterator[Row]:
        """The rows that ended from `start` on and before `end`, the oldest first."""
        return map(Row._make, islice(self._rows, self._index(start), self._index(end)))

    def _index(self, when: float) -> int:
        return bisect_left(self._rows, when, key=_ended_at)

    def newest_first(self) -> Iterator[Row]:
        """Every row, the newest first. To be used up in one turn of the event loop."""
        return map(Row._make, reversed(self._rows))

    def copy(self) -> Iterator[Row]:
        """Every row there is now, the oldest first; for use in another thread."""
        return map(Row._make, tuple(self._rows))
