"""Ends of a lease: the request's outcome, and the instance that the end counts against.

Ends by a client, the operator or this machine reach the scheduler as an outcome that counts against no
instance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetlb.balancer.core.types import Outcome

#: Least seconds in all for which a client did not read, if its answer broke off for this reason.
HELD_UP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """One way to end. `outcome` is the request's, `lease` the scheduler's, None for the same."""

    name: str
    happened: str
    outcome: Outcome
    lease: Outcome | None = None

    @property
    def told(self) -> Outcome:
        return self.outcome if self.lease is None else self.lease


ANSWERED: Final = End("answered", "the whole answer, below 400", Outcome.OK)
UNSEEN: Final = End(
    "unseen", "a gateway showed no body of an answer (`hetlb pick`)", Outcome.OK, Outcome.CLIENT_GONE
)
REFUSED: Final = End("refused", "the whole answer, 4xx", Outcome.UPSTREAM_REFUSED)
BUSY: Final = End("busy", "429, or 503 with `Retry-After`, no room elsewhere", Outcome.UPSTREAM_BUSY)
SERVER_ERROR: Final = End("server-error", "the whole answer, 5xx", Outcome.UPSTREAM_ERROR)
NO_ANSWER: Final = End(
    "no-answer", "200 without an answer: empty, a page, cut JSON, an error, no token", Outcome.UPSTREAM_ERROR
)
NOT_ACCEPTED: Final = End(
    "not-accepted", "no connection: refused, not in time, or the name has no address", Outcome.CONNECT_FAILED
)
LOOP: Final = End("loop", "the instance is this proxy: the request came back", Outcome.CONNECT_FAILED)
MOVED: Final = End("moved", "after a reconnect its engine has not the model", Outcome.CONNECT_FAILED)
DROPPED: Final = End("dropped", "the engine closed the connection without an answer", Outcome.NO_RESPONSE)
UNREAD: Final = End("unread", "closed before it read the request", Outcome.NO_RESPONSE, Outcome.CLIENT_GONE)
NOT_HANDED_OVER: Final = End(
    "not-handed-over",
    "its KV blocks did not reach the decode instance, or not in time",
    Outcome.NO_RESPONSE,
    Outcome.CLIENT_GONE,
)
JUNK: Final = End("junk", "no valid HTTP, a redirect, another protocol", Outcome.NO_RESPONSE)
HEAD_CUT: Final = End("head-cut", "it closed within the head of its answer", Outcome.NO_RESPONSE)
SILENT: Final = End("silent", "no first byte within `proxy.first_byte_timeout_s`", Outcome.NO_RESPONSE)
BROKEN: Final = End("broken", "the answer broke off, or ended without `[DONE]`", Outcome.BROKEN_STREAM)
STALLED: Final = End("stalled", "nothing came for `proxy.idle_timeout_s`", Outcome.BROKEN_STREAM)
ERROR_EVENT: Final = End("error-event", "an error event in a stream", Outcome.BROKEN_STREAM)
REFUSED_IN_STREAM: Final = End("refused-in-stream", "an error event, code 4xx", Outcome.UPSTREAM_REFUSED)
LAST_MISSING: Final = End(
    "last-missing", "it broke off after its last token: hetlb ended it", Outcome.OK, Outcome.BROKEN_STREAM
)
OTHERWISE: Final = End(
    "otherwise",
    "the answer that went on elsewhere differs from the part already sent",
    Outcome.BROKEN_STREAM,
    Outcome.CLIENT_GONE,
)
NOTICE: Final = End(
    "notice", "its instance leaves: the answer goes on elsewhere", Outcome.BROKEN_STREAM, Outcome.CLIENT_GONE
)
SHORT_OF_ROOM: Final = End(
    "short-of-room",
    "the instance where it went on holds no answer as long as the first one does",
    Outcome.BROKEN_STREAM,
    Outcome.CLIENT_GONE,
)
HELD_UP: Final = End(
    "held-up",
    f"it broke off while its client did not read, or after {HELD_UP_S:g} s of that",
    Outcome.BROKEN_STREAM,
    Outcome.CLIENT_GONE,
)
IDLE: Final = End("idle", "nothing in a session for `proxy.idle_timeout_s`", Outcome.CLIENT_GONE)
LEFT: Final = End("left", "the client left, in any phase", Outcome.CLIENT_GONE)
LOCAL: Final = End("local", "this machine has no descriptors, ports or memory", Outcome.LOCAL_FAULT)
FAULT: Final = End("fault", "hetlb itself raised an error", Outcome.LOCAL_FAULT)
STOPPED: Final = End("stopped", "the proxy shuts down", Outcome.SHUTDOWN)

#: All of them, in the order of the table.
ENDS: tuple[End, ...] = (
    ANSWERED, UNSEEN, REFUSED, BUSY, SERVER_ERROR, NO_ANSWER, NOT_ACCEPTED, LOOP, MOVED, DROPPED, UNREAD,
    NOT_HANDED_OVER, JUNK, HEAD_CUT, SILENT, BROKEN, STALLED, ERROR_EVENT, REFUSED_IN_STREAM, LAST_MISSING,
    OTHERWISE, NOTICE, SHORT_OF_ROOM, HELD_UP, IDLE, LEFT, LOCAL, FAULT, STOPPED,
)  # fmt: skip

#: Ends before a request was sent: another instance gets it.
NOTHING_SENT: Final = (NOT_ACCEPTED, LOOP, MOVED)
