"""States of connections and their transitions: the tables that connections obey.

A connection has a state of its requests (`ClientState`, `EngineState`) and one of its socket (`Reading`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from hetlb.balancer.core.state_transition import Transition


class Reading(Enum):
    """State of a connection's socket towards us: read as it comes, in turn with the others, or not at all."""

    OPEN = "open"
    TURN = "turn"
    HELD = "held"


TURN_TAKEN: Final = Transition("more came than a turn looks at", (Reading.OPEN, Reading.HELD), Reading.TURN)
HELD_BACK: Final = Transition("what was read can't go on yet", (Reading.OPEN, Reading.TURN), Reading.HELD)
READ_ON: Final = Transition("what was read has gone on", (Reading.TURN, Reading.HELD), Reading.OPEN)


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
REFUSED: Final = Transition("refused, what follows can't be trusted", _UNANSWERED, ClientState.CLOSING)
ANSWERED: Final = Transition(
    "the answer is out, an engine's or the proxy's own", (*_REQUEST, ClientState.ANSWERING), ClientState.IDLE
)
UPGRADED: Final = Transition("it is a WebSocket from now on", (ClientState.ANSWERING,), ClientState.UPGRADED)
LAST_ANSWERED: Final = Transition(
    "the last answer is out, or broken off",
    (*_REQUEST, ClientState.ANSWERING, ClientState.UPGRADED),
    ClientState.CLOSING,
)
UNUSED: Final = Transition("idle for too long, or the proxy stops", (ClientState.IDLE,), ClientState.CLOSING)
CLIENT_GONE: Final = Transition(
    "the connection is gone",
    tuple(state for state in ClientState if state is not ClientState.CLOSED),
    ClientState.CLOSED,
)


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
UNREAD: Final = Transition("not all of the request is read", (EngineState.SENT,), EngineState.SENDING)
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
