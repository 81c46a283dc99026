"""States of an exchange and their transitions: the table that the exchange obeys and the docs show.

An exchange has two states. `Phase` is its side towards the engine, `Response` its side towards the client.
Every change is one row of `TRANSITIONS`; an exchange that is not in a row's `before` must not take it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hetlb.core.transition import Transition, edges


class Phase(StrEnum):
    """State towards the engine. The values are labels of metrics and spans."""

    QUEUED = "queue"
    PREFILLING = "prefill"
    CONNECTING = "connect"
    SENT = "wait"
    STREAMING = "stream"
    DONE = "done"


class Response(StrEnum):
    """State towards the client: nothing sent, a stream of heartbeats alone, the engine's answer."""

    NOTHING = "nothing"
    HEARTBEATS = "heartbeats"
    STARTED = "started"


DISPATCHED: Final = Transition("the scheduler chooses an instance", (Phase.QUEUED,), Phase.CONNECTING)
WRITTEN: Final = Transition("connected: the request is written", (Phase.CONNECTING,), Phase.SENT)
RECONNECTING: Final = Transition(
    "a reused connection closed before it answered: once more on a new one", (Phase.SENT,), Phase.CONNECTING
)
RETRIED: Final = Transition(
    "failed before anything of an answer came",
    (Phase.PREFILLING, Phase.CONNECTING, Phase.SENT),
    Phase.QUEUED,
)
PREFILL_DISPATCHED: Final = Transition(
    "the scheduler chooses a pair: one prefills", (Phase.QUEUED,), Phase.PREFILLING
)
PREFILLED: Final = Transition("the prompt is prefilled", (Phase.PREFILLING,), Phase.QUEUED)
PREFILL_REFUSED: Final = Transition(
    "the first of a pair refuses the request", (Phase.PREFILLING,), Phase.SENT
)
DECODE_UNDER_WAY: Final = Transition(
    "both of a pair were sent the request at once", (Phase.QUEUED,), Phase.SENT
)
TURNED_AWAY: Final = Transition(
    "429 or 503 with `Retry-After`, and room elsewhere", (Phase.SENT,), Phase.QUEUED
)
FIRST_BYTE: Final = Transition("the first byte of the answer's body", (Phase.SENT,), Phase.STREAMING)
RESUMED: Final = Transition(
    "the engine is lost in the middle of its answer, which goes on elsewhere",
    (Phase.SENT, Phase.STREAMING),
    Phase.QUEUED,
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
    "the engine's status and headers go out with the first bytes", (Response.NOTHING,), Response.STARTED
)
RESPONSE_TRANSITIONS: Final = (HEARTBEAT, STREAM_FOLLOWS, COMMITTED)


def diagram() -> str:
    """Both tables as one Mermaid state diagram, as docs/reference/states.md has it."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> QUEUED: a whole request"]
    lines += [f"    {each}" for each in edges(TRANSITIONS)]
    lines += ["    DONE --> [*]", "    state response {", f"        [*] --> {Response.NOTHING.name}"]
    lines += [f"        {each}" for each in edges(RESPONSE_TRANSITIONS)]
    return "\n".join([*lines, "    }", "```"])
