"""One attempt: what is done for a request between a lease and the next one, or its end.

An exchange has one attempt at a time, made by the `Maker` of its request. There are three: `Plain`, whose
`Handling` says what a kind of request does otherwise (`plain_attempt.py`), `Split` for two legs, `Tunnel`.
The verbs:

- `begin`: the lease is there, the request is sent; `engine_*`: what its engine says (`Carried`);
- `takes`: another lease came while this one is at work; `move`: ask for one, since the instance leaves;
- `pause`: the client does not read, or reads again; `sweep`: the clock;
- `head`, `cut`: the first bytes of the client's answer, and the last ones if it breaks off;
- `leave`: nothing more is done, the engine stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.types import Lease
from hetlb.balancer.engines.upstream import Carried


class Attempt(Carried):
    """Base of all attempts. The base itself stands for a request that waits for an instance."""

    __slots__ = ()

    def begin(self) -> None:
        """Send the request to the instance of the lease."""

    def takes(self, lease: Lease) -> bool:
        """Return True if this attempt continues with another lease, or has ended the exchange for it."""
        return False

    def move(self) -> bool:
        """Ask for another lease, which comes at once or later; False if that cannot be."""
        return False

    def pause(self, paused: bool) -> None:
        """Stop reading the engine while the client does not read (`paused`)."""

    def sweep(self, now: float, table: ProxyTable) -> None:
        """End waits beyond their limits. Called about twice a second."""

    def head(self) -> bytes:
        """Return the client's response head; afterwards the answer cannot be another one."""
        raise NotImplementedError

    def cut(self) -> bytes:
        """Return the bytes that end the client's part of an answer; held ones are dropped."""
        return b""

    def leave(self) -> None:
        """Stop the engine, if it works for this request. May be called again."""

    @property
    def owes(self) -> Owed:
        """Debt of the engine now, such as tokens or a reply."""
        return NOTHING

    @property
    def may_be_taken(self) -> bool:
        """True if the scheduler may take the request from a silent engine."""
        return True

    def token_at(self, heard_at: float) -> float:
        """Return the time of its newest token; `heard_at` is the time of the newest bytes."""
        return heard_at

    @property
    def tokens_so_far(self) -> int:
        """Output tokens until now, 0 of an answer that is no stream."""
        return 0


WAITING: Final = Attempt(b"")


# --- what engines owe, and the watches that ask for it: one table, which the code obeys ---
#
# A WebSocket that says nothing is no stalled stream. So each attempt says what it is owed (`Attempt.owes`),
# and each watch asks that. The scheduler sees the same by the sequences of a request: without any, no engine
# computes for it.


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
