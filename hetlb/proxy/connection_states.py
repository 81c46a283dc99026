"""States of connections and their transitions: the tables that connections obey.

Both kinds of connections have a state of their requests (`ClientState`, `EngineState`) and, beside it, one of
reading from the socket (`Reading`). Every change is one row; a connection that is not in a row's `before`
must not take it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from hetlb.core.transition import Transition


class Reading(Enum):
    """State of a connection's socket towards us: read as it comes, in turn with the others, or not at all."""

    OPEN = "open"
    TURN = "turn"
    HELD = "held"


TURN_TAKEN: Final = Transition(
    "more was read than one turn looks at", (Reading.OPEN, Reading.HELD), Reading.TURN
)
HELD_BACK: Final = Transition(
    "what was read can't go on yet: a slow client, an answer that comes first",
    (Reading.OPEN, Reading.TURN),
    Reading.HELD,
)
READ_ON: Final = Transition("what was read has gone on", (Reading.TURN, Reading.HELD), Reading.OPEN)
READING: Final = (TURN_TAKEN, HELD_BACK, READ_ON)


class ClientState(Enum):
    """State of a client's connection. `READ`: a large body is whole, and its turn has not come."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    READ = "read"
    ANSWERING = "answering"
    UPGRADED = "upgraded"
    CLOSING = "closing"
    CLOSED = "closed"


_REQUEST: Final = (ClientState.BODY, ClientState.READ)
_UNANSWERED: Final = (ClientState.IDLE, ClientState.HEAD, *_REQUEST)
HEAD_BEGUN: Final = Transition("part of a head, or an empty line", (ClientState.IDLE,), ClientState.HEAD)
HEAD_PASSED: Final = Transition(
    "a whole head passed the gate", (ClientState.IDLE, ClientState.HEAD), ClientState.BODY
)
BODY_READ: Final = Transition("a large body is whole", (ClientState.BODY,), ClientState.READ)
SUBMITTED: Final = Transition("a whole request goes to the scheduler", _REQUEST, ClientState.ANSWERING)
ANSWERED_HERE: Final = Transition(
    "answered or refused by the proxy itself, the client may go on", _REQUEST, ClientState.IDLE
)
REFUSED: Final = Transition("refused, what follows can't be trusted", _UNANSWERED, ClientState.CLOSING)
LAST_HERE: Final = Transition("answered by the proxy itself for the last time", _REQUEST, ClientState.CLOSING)
ANSWERED: Final = Transition(
    "the answer is out, and the client may go on", (ClientState.ANSWERING,), ClientState.IDLE
)
UPGRADED: Final = Transition(
    "the engine agrees to a WebSocket", (ClientState.ANSWERING,), ClientState.UPGRADED
)
LAST_ANSWERED: Final = Transition(
    "the last answer is out, or broken off",
    (ClientState.ANSWERING, ClientState.UPGRADED),
    ClientState.CLOSING,
)
UNUSED: Final = Transition("idle for too long, or the proxy stops", (ClientState.IDLE,), ClientState.CLOSING)
CLIENT_GONE: Final = Transition(
    "the connection is gone",
    tuple(state for state in ClientState if state is not ClientState.CLOSED),
    ClientState.CLOSED,
)
CLIENT: Final = (
    HEAD_BEGUN, HEAD_PASSED, BODY_READ, SUBMITTED, ANSWERED_HERE, ANSWERED, UPGRADED, REFUSED, LAST_HERE,
    LAST_ANSWERED, UNUSED, CLIENT_GONE,
)  # fmt: skip


class EngineState(Enum):
    """State of a connection to an engine.

    `SENDING`: the engine has yet to read much of the request. `RESENT`: a request on a connection that was
    idle, which the engine may have closed meanwhile. `HEAD`: something of an answer came, not its whole head.
    """

    FRESH = "fresh"
    SENT = "sent"
    SENDING = "sending"
    RESENT = "resent"
    HEAD = "head"
    BODY = "body"
    IDLE = "idle"
    CLOSED = "closed"


_UNHEADED: Final = (EngineState.SENT, EngineState.SENDING, EngineState.RESENT, EngineState.HEAD)
BEGUN: Final = Transition("the first request", (EngineState.FRESH,), EngineState.SENT)
UNREAD: Final = Transition(
    "the engine does not read all of the request", (EngineState.SENT,), EngineState.SENDING
)
READ: Final = Transition("the engine has read it", (EngineState.SENDING,), EngineState.SENT)
REUSED: Final = Transition("one more request", (EngineState.IDLE,), EngineState.RESENT)
ANSWER_BEGUN: Final = Transition(
    "part of a head, or an interim answer",
    (EngineState.SENT, EngineState.SENDING, EngineState.RESENT),
    EngineState.HEAD,
)
HEAD_READ: Final = Transition("the whole head of the answer", _UNHEADED, EngineState.BODY)
KEPT: Final = Transition("the answer is whole and cleanly framed", (EngineState.BODY,), EngineState.IDLE)
CLOSED: Final = Transition(
    "closed by either side, or badly framed",
    tuple(state for state in EngineState if state is not EngineState.CLOSED),
    EngineState.CLOSED,
)
ENGINE: Final = (BEGUN, UNREAD, READ, ANSWER_BEGUN, HEAD_READ, KEPT, REUSED, CLOSED)
