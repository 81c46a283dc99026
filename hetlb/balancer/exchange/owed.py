"""Debts of engines, and the watches that ask for them: one table, which the code obeys.

A WebSocket that says nothing is no stalled stream. So each attempt says what it is owed (`Attempt.owes`), and
each watch asks that. The scheduler sees the same by the sequences of a request: without any, no engine
computes for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Owed:
    """One kind of debt. `computed`: the engine computes for it. `timed`: something must come in time."""

    name: str
    of: str
    computed: bool
    timed: bool


TOKENS: Final = Owed("tokens", "a stream of tokens, of one sequence or several", True, True)
ANSWER: Final = Owed("an answer", "a whole answer, embeddings, ranks, a transcription", True, True)
REPLY: Final = Owed("a reply", "`/tokenize`, `proxy.extra_paths`, a WebSocket's handshake", False, True)
NOTHING: Final = Owed("nothing", "a WebSocket after its handshake, a request that waits", False, False)
OWED: Final = (TOKENS, ANSWER, REPLY, NOTHING)
#: Each watch, with the field of a debt that it asks.
WATCHES: Final = (
    ("takes a slot, and waits for one", "computed"),
    ("can be a trial", "computed"),
    ("its silence can be a stall", "computed"),
    ("its answer shows that the engine works", "computed"),
    ("counts in forecasts, limits, the budget of retries", "computed"),
    ("first byte and idle timeouts", "timed"),
)
