"""States of an exchange and their transitions: the table that the exchange obeys and the docs show."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hetlb.balancer.core.state_transition import Transition


class Phase(StrEnum):
    """State towards the engine. The values are labels of metrics and spans."""

    QUEUED = "queue"
    PREFILLING = "prefill"
    CONNECTING = "connect"
    SENT = "wait"
    STREAMING = "answer"
    DONE = "done"


class Response(StrEnum):
    """State towards the client: nothing sent, a stream of heartbeats alone, the engine's answer."""

    NOTHING = "nothing"
    HEARTBEATS = "heartbeats"
    STARTED = "started"


DISPATCHED: Final = Transition("the scheduler chooses an instance", (Phase.QUEUED,), Phase.CONNECTING)
WRITTEN: Final = Transition("connected: the request is written", (Phase.CONNECTING,), Phase.SENT)
RECONNECTING: Final = Transition("a reused connection was closed: a new one", (Phase.SENT,), Phase.CONNECTING)
RETRIED: Final = Transition(
    "failed before anything of an answer came", (Phase.PREFILLING, Phase.CONNECTING, Phase.SENT), Phase.QUEUED
)
PREFILL_DISPATCHED: Final = Transition("a pair is chosen: one prefills", (Phase.QUEUED,), Phase.PREFILLING)
PREFILLED: Final = Transition("the prompt is prefilled", (Phase.PREFILLING,), Phase.QUEUED)
PREFILL_REFUSED: Final = Transition("the first of a pair refuses it", (Phase.PREFILLING,), Phase.SENT)
DECODE_UNDER_WAY: Final = Transition("both of a pair have it already", (Phase.QUEUED,), Phase.SENT)
TURNED_AWAY: Final = Transition(
    "refused, or nothing comes of its instance: another one gets it",
    (Phase.CONNECTING, Phase.SENT),
    Phase.QUEUED,
)
FIRST_BYTE: Final = Transition("the first byte of the answer's body", (Phase.SENT,), Phase.STREAMING)
RESUMED: Final = Transition(
    "the engine is lost: the answer goes on elsewhere", (Phase.SENT, Phase.STREAMING), Phase.QUEUED
)
ENDED: Final = Transition(
    "its one outcome",
    (Phase.QUEUED, Phase.PREFILLING, Phase.CONNECTING, Phase.SENT, Phase.STREAMING),
    Phase.DONE,
)
TRANSITIONS: Final = (
    DISPATCHED, WRITTEN, RECONNECTING, RETRIED, TURNED_AWAY, PREFILL_DISPATCHED, PREFILLED, PREFILL_REFUSED,
    DECODE_UNDER_WAY, FIRST_BYTE, RESUMED, ENDED,
)  # fmt: skip

HEARTBEAT: Final = Transition(
    "the first heartbeat: status 200 and a comment", (Response.NOTHING,), Response.HEARTBEATS
)
STREAM_FOLLOWS: Final = Transition("the engine's stream begins", (Response.HEARTBEATS,), Response.STARTED)
COMMITTED: Final = Transition(
    "the engine's head goes out with the first bytes", (Response.NOTHING,), Response.STARTED
)
RESPONSE_TRANSITIONS: Final = (HEARTBEAT, STREAM_FOLLOWS, COMMITTED)
