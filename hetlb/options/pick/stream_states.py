"""States of a request on its way through a gateway: the table that `HttpStream` obeys and the docs show.

A part of the request or of the answer that comes in a state that does not wait for it (a second end of the
body, pieces behind a refusal) changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hetlb.balancer.core.state_transition import Transition


class StreamState(StrEnum):
    """State of a stream of external processing."""

    OPENED = "opened"
    READING = "reading"
    WAITING = "waiting"
    SENT = "sent"
    HEAD_SEEN = "head seen"
    ANSWERING = "answering"
    PASSED = "passed"
    REFUSED = "refused"
    CLOSED = "closed"


HEADERS: Final = Transition("the request's headers", (StreamState.OPENED,), StreamState.READING)
WHOLE: Final = Transition("the request is whole", (StreamState.READING,), StreamState.WAITING)
TOLD: Final = Transition("the gateway gets the name of an instance", (StreamState.WAITING,), StreamState.SENT)
RESPONSE: Final = Transition(
    "the answer's headers, the gateway's own if no instance was chosen",
    (StreamState.READING, StreamState.WAITING, StreamState.SENT),
    StreamState.HEAD_SEEN,
)
BODY: Final = Transition(
    "the first bytes of the answer's body", (StreamState.HEAD_SEEN,), StreamState.ANSWERING
)
WHOLE_ANSWER: Final = Transition(
    "the end of the answer", (StreamState.HEAD_SEEN, StreamState.ANSWERING), StreamState.PASSED
)
OWN_ANSWER: Final = Transition(
    "the gateway is asked to answer in place of an instance",
    (
        StreamState.OPENED, StreamState.READING, StreamState.WAITING, StreamState.SENT,
        StreamState.HEAD_SEEN, StreamState.ANSWERING,
    ),
    StreamState.REFUSED,
)  # fmt: skip
CLOSING: Final = Transition(
    "the gateway's stream ends",
    tuple(each for each in StreamState if each is not StreamState.CLOSED),
    StreamState.CLOSED,
)
TRANSITIONS: Final = (HEADERS, WHOLE, TOLD, RESPONSE, BODY, WHOLE_ANSWER, OWN_ANSWER, CLOSING)
